"""Keeps a verdict in a folder, with all that is known of each rank.

runs/mnist-cnn-20260131-093000/attempt-1/verdict-1/
    verdict.json    format, version, the verdict, and what was known of each rank
    rank-<r>.txt    for people: where the rank stands, its last collectives, the stacks of all its threads

Of thousands of ranks it keeps 256: those that are blamed, and at least one of each kind of the others.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from paceline.contract.evidence import Evidence, Op, Stack, Verdict
from paceline.disk import writing
from paceline.disk.reading import read
from paceline.errors import UsageError
from paceline.guard.collect import bounded_evidence
from paceline.guard.verdict import VERDICT
from paceline.guard.wording import loader_words, op_words, printable, where
from paceline.observe.terminal import clean

VERSION = 1
MAX_BYTES = 16 << 20
MAX_KEPT = 256  # ranks: a file each, on a disk that a thousand nodes share


class Told(msgspec.Struct, frozen=True):
    """A verdict and all that it was made from: the content of verdict.json."""

    format: Literal["paceline-verdict"]
    version: int
    verdict: Verdict
    waited_seconds: float  # how long nothing had moved
    unix_time: float
    evidence: tuple[Evidence, ...]


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
    chosen = telling(verdict, evidence)
    for one in chosen:
        writing.replace(folder / f"rank-{one.rank}.txt", description(one).encode())
    # a record has its own file, and a clock's reading means nothing to a reader
    kept = tuple(
        replace(bounded_evidence(one), failure=None, ended_seconds=0.0, marks=b"", orders=b"") for one in chosen
    )
    content = Told("paceline-verdict", VERSION, verdict, waited_seconds, time.time(), kept)
    writing.replace(folder / VERDICT, msgspec.json.encode(content))


def telling(verdict: Verdict, evidence: Sequence[Evidence]) -> list[Evidence]:
    """What is worth a file each: all, of thousands the blamed, one of each kind, and the first of the others."""
    if len(evidence) <= MAX_KEPT:
        return list(evidence)
    blamed = {*verdict.guilty, *(party[0] for party in verdict.tie), verdict.failed}
    kinds = {(one.phase, one.state, one.code, one.ops[-1:], one.stacks[:1]): one.rank for one in reversed(evidence)}
    rare = {*kinds.values()}
    ordered = sorted(evidence, key=lambda one: (one.rank not in blamed, one.rank not in rare, one.rank))
    return sorted(ordered[:MAX_KEPT], key=lambda one: one.rank)


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


def description(one: Evidence, *, most_ops: int | None = None, most_stacks: int | None = None) -> str:
    """All that is known of a rank, for people; or only its last operations and first stacks."""
    ops = one.ops if most_ops is None else one.ops[-most_ops:]
    lines = (line for text in _described(one, ops, one.stacks[:most_stacks]) for line in clean(text).split("\n"))
    return "".join(f"{printable(line)}\n" for line in lines)


def _described(one: Evidence, ops: Sequence[Op], stacks: Sequence[Stack]) -> Iterator[str]:
    yield f"rank {one.rank} ({one.host}, pid {one.pid})" + (f", {one.step} steps done" if one.step else "")
    if one.lost:
        yield "lost with its node"
    elif one.code is not None:
        yield f"ended: {'exit code' if one.code >= 0 else 'signal'} {abs(one.code)}"
    else:
        yield f"it has not moved for {one.still_seconds:.1f} s: {where(one)}; cpu {one.cpu_seconds:.2f} s a second"
    yield "last collectives and messages, the newest last:"
    yield from (
        f"  {'done     ' if op.done else 'in flight'}  group {op.group}  {op_words(op)}  {op.site}" for op in ops
    )
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
