"""What does a user read of a stall? The page on the screen, and the folder with all that is known.

runs/mnist-cnn-20260131-093000/attempt-1/verdict-1/
    verdict.json    format, version, the verdict, and what was known of each rank
    rank-<r>.txt    for people: where the rank stands, its last collectives, the stacks of all its threads
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Literal

import msgspec

from paceline.contract.evidence import Evidence, Op, Phase, Stack, Verdict, VerdictKind
from paceline.disk import writing
from paceline.disk.reading import read
from paceline.errors import UsageError
from paceline.guard.pace import RankPace
from paceline.guard.wording import loader_words, named, told, where
from paceline.observe.terminal import clean

VERSION = 1
VERDICT = "verdict.json"
MAX_LINES, MAX_COLUMNS = 15, 160
MAX_BYTES = 16 << 20
MAX_PARTIES = 6
MAX_NAMED = 3  # hosts and pids of more ranks are in the folder
OWN_WORDS = (
    VerdictKind.DIED, VerdictKind.LEFT, VerdictKind.MISMATCH, VerdictKind.DEADLOCK, VerdictKind.NETWORK,
)  # fmt: skip


class Told(msgspec.Struct, frozen=True):
    """A verdict and all that it was made from: the content of verdict.json."""

    format: Literal["paceline-verdict"]
    version: int
    verdict: Verdict
    waited_seconds: float  # how long nothing had moved
    unix_time: float
    evidence: tuple[Evidence, ...]


def page(verdict: Verdict, evidence: Sequence[Evidence], *, waited_seconds: float, folder: Path | str, run: str) -> str:
    """The verdict for the screen: at most 15 lines of 160 characters, the guilty in the first.

    Args:
        verdict: what `judge` made of the evidence.
        evidence: of all ranks.
        waited_seconds: how long nothing had moved; 0 where nobody waited.
        folder: the verdict's, "" for none.
        run: how `paceline hang` finds the run, "" if it cannot.
    """
    lines = [_line(_headline(verdict, evidence, waited_seconds))]
    lines += (line for sentence in verdict.sentences for line in _wrapped(sentence))
    shown = [f"all stacks: {folder}/"] if folder else []
    shown += [f"details: paceline hang {run}"] if run else []
    pointer = _line("    ".join(shown), most=10**6)  # never shortened: a path that is cut is of no use
    if len(lines) >= MAX_LINES:
        left_out = len(lines) - (MAX_LINES - 2)
        lines = [*lines[: MAX_LINES - 2], f"  ... {left_out} more lines: {VERDICT}"]
    if pointer:
        joined = f"{lines[-1]}          {pointer}"
        if len(lines) > 1 and len(joined) <= MAX_COLUMNS:
            lines[-1] = joined
        else:
            lines.append(f"  {pointer}")
    return "\n".join(lines)


def _line(text: str, most: int = MAX_COLUMNS) -> str:
    text = _printable(clean(text))
    return text if len(text) <= most else text[: most - 3] + "..."


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)  # also what turns the direction of writing


def _wrapped(sentence: str) -> list[str]:
    lines = wrap(_line(sentence, 2 * MAX_COLUMNS - 8), MAX_COLUMNS, initial_indent="  ", subsequent_indent="    ")
    return [_line(line) for line in lines]


def _headline(verdict: Verdict, evidence: Sequence[Evidence], waited_seconds: float) -> str:
    waited = f" after {waited_seconds:.1f} s" if waited_seconds > 0 else ""
    step = f" at step {verdict.step}" if verdict.step else ""
    when = f"{waited}{step} (world {len(evidence)})"
    if verdict.tie:
        more = f" and {len(verdict.tie) - MAX_PARTIES} more" if len(verdict.tie) > MAX_PARTIES else ""
        parties = " against ".join(named(party) for party in verdict.tie[:MAX_PARTIES]) + more
        return f"RANKS DISAGREE: {parties}{when}; one of them is wrong"
    word = verdict.kind.name if verdict.kind in OWN_WORDS else "STALL"
    return f"{word}{when}. " + (f"GUILTY: {_who(verdict, evidence)}" if verdict.guilty else "Nobody can be blamed")


def _who(verdict: Verdict, evidence: Sequence[Evidence]) -> str:
    known = {one.rank: one for one in evidence}
    found = [known[rank] for rank in verdict.guilty if rank in known]
    if not found:
        return named(verdict.guilty)
    hosts = sorted({one.host for one in found})
    places = ", ".join(hosts[:MAX_NAMED]) + (", ..." if len(hosts) > MAX_NAMED else "")
    pids = ", ".join(str(one.pid) for one in found)
    words = f"{places}, pid{'s' if len(found) > 1 else ''} {pids}" if len(found) <= MAX_NAMED else places
    return f"{named(verdict.guilty)} ({words})"


def warning(ranks: Sequence[RankPace], *, still_seconds: float, window_seconds: float) -> str:
    """One line at half of the window: who keeps the others waiting, perhaps."""
    suspects = [one for one in ranks if not one.waiting and one.phase is not Phase.SYNC] or list(ranks)
    phases = sorted({one.phase for one in suspects} - {Phase.USER})
    doing = f", in {' or '.join(phase.word for phase in phases)}" if phases else ""
    step = max((one.step for one in ranks), default=0)
    at = f" at step {step}" if step else ""
    rest = (
        f", the others wait for {named(one.rank for one in suspects)}{doing}" if len(suspects) < len(ranks) else doing
    )
    return _line(f"nothing has moved for {still_seconds:.1f} s{at}{rest}; a stall after {window_seconds:.1f} s")


def same_verdict(one: Verdict, other: Verdict) -> bool:
    """Whether a run was stopped twice by the same thing at the same step; numbers of collectives may differ."""
    return _essence(one) == _essence(other)


def _essence(verdict: Verdict) -> tuple[object, ...]:
    op = verdict.op
    what = (op.kind, op.name, op.shape, op.dtype, op.site) if op is not None else None
    return verdict.kind, verdict.guilty, verdict.tie, verdict.site, verdict.step, what


def write_verdict(folder: Path, verdict: Verdict, evidence: Sequence[Evidence], *, waited_seconds: float) -> None:
    """Make the folder of a verdict, for its owner's eyes only; verdict.json is whole as soon as it is there.

    Raises:
        OSError: if it exists, or cannot be written.
    """
    writing.make_folder(folder)
    for one in evidence:
        writing.replace(folder / f"rank-{one.rank}.txt", describe(one).encode())
    content = Told("paceline-verdict", VERSION, verdict, waited_seconds, time.time(), tuple(evidence))
    writing.replace(folder / VERDICT, msgspec.json.encode(content))


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def read_verdict(folder: Path) -> Told:
    """The verdict of a folder that `write_verdict` made.

    Raises:
        UsageError: if there is none, if another version wrote it, or if it is something else.
    """
    path = folder / VERDICT
    try:
        content = read(path, limit_bytes=MAX_BYTES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        head = msgspec.json.decode(content, type=_Head)
        if head.format == "paceline-verdict" and head.version != VERSION:
            raise UsageError(f"{path} is of version {head.version}; this paceline reads version {VERSION}")
        return msgspec.json.decode(content, type=Told)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{path} is no verdict of paceline's, or damaged: {error}") from error


def describe(one: Evidence, *, most_ops: int | None = None, most_stacks: int | None = None) -> str:
    """All that is known of a rank, for people; or only its last operations and first stacks."""
    ops = one.ops if most_ops is None else one.ops[-most_ops:]
    lines = (line for text in _description(one, ops, one.stacks[:most_stacks]) for line in clean(text).split("\n"))
    return "".join(f"{_printable(line)}\n" for line in lines)


def _description(one: Evidence, ops: Sequence[Op], stacks: Sequence[Stack]) -> Iterator[str]:
    yield f"rank {one.rank} ({one.host}, pid {one.pid})" + (f", {one.step} steps done" if one.step else "")
    if one.lost:
        yield "lost with its node"
    elif one.code is not None:
        yield f"ended: {'exit code' if one.code >= 0 else 'signal'} {abs(one.code)}"
    else:
        yield f"it has not moved for {one.still_seconds:.1f} s: {where(one)}; cpu {one.cpu_seconds:.2f} s a second"
    yield "last collectives and messages, the newest last:"
    yield from (f"  {'done     ' if op.done else 'in flight'}  group {op.group}  {told(op)}  {op.site}" for op in ops)
    if not ops:
        yield "  none"
    for stack in stacks:
        yield f"thread {stack.thread}, innermost first:"
        yield from (f"  {frame.file}:{frame.line} in {frame.function}" for frame in stack.frames)
    if one.native:
        yield f"by faulthandler, innermost first:\n{one.native}"
    yield from (loader_words(loader) for loader in one.loaders)
    if one.words:
        yield f"its last words:\n{one.words}"
