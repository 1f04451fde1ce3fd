"""Formats a diagnosis for the terminal (a stall, a failure, or the warning before a stall), and saves it in a folder.

runs/mnist-cnn-20260131-093000/attempt-1/diagnosis-1/
    diagnosis.json  format, version, the diagnosis, and the evidence on each rank
    rank-<r>.txt    for people: the location of the rank, its last collectives, the stacks of all its threads

The folder keeps at most 256 ranks: those in the diagnosis, and at least one of each distinct state.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Literal

import msgspec
from msgspec.structs import replace

from paceline.errors import ExitCode, UsageError, first_few
from paceline.guard import sentences
from paceline.guard.collect import limit_evidence_size
from paceline.guard.deaths import RankEndKind, classify_rank_end
from paceline.protocol.evidence import Diagnosis, DiagnosisKind, Evidence, Op, Phase, RankSample, Stack
from paceline.runs import writing
from paceline.runs.console import remove_control_characters
from paceline.runs.reading import read_file

DIAGNOSIS_FILE = "diagnosis.json"
# names in old files
FORMER_NAMES = {"verdict": "diagnosis", "guilty": "causes", "paceline-verdict": "paceline-diagnosis"}
MAX_LINES, MAX_COLUMNS = 15, 160
MAX_PARTIES = 6
MAX_NAMED_RANKS = 3  # ranks with host and pid; the folder lists all of them
TAIL_LINES = 15
MAX_TRACEBACK_LINES = 80  # also of a message, so that the headline of a deep recursion stays on the screen
EXIT_CODES = {  # of runs that paceline stopped; for other kinds 3
    DiagnosisKind.LEFT: ExitCode.FAILED,
    DiagnosisKind.MISMATCH: ExitCode.MISMATCH,
    DiagnosisKind.DEADLOCK: ExitCode.MISMATCH,
    DiagnosisKind.NOT_FINITE: ExitCode.NOT_FINITE,
    DiagnosisKind.DIVERGED: ExitCode.DIVERGED,
    DiagnosisKind.SWALLOWED: ExitCode.MISMATCH,
}
HEADLINE_KINDS = (
    DiagnosisKind.DIED, DiagnosisKind.LEFT, DiagnosisKind.MISMATCH, DiagnosisKind.DEADLOCK, DiagnosisKind.NETWORK,
    DiagnosisKind.DIVERGED, DiagnosisKind.NOT_FINITE, DiagnosisKind.SWALLOWED,
)  # fmt: skip


def format_report(
    diagnosis: Diagnosis, evidence: Sequence[Evidence], *, waited_seconds: float, folder: Path | str, run: str
) -> str:
    """The diagnosis on ranks that block others: at most 15 lines of 160 characters. The first line lists the cause.

    `folder` is that of the diagnosis, `run` the argument with which `paceline hang` finds the run; either may be empty.
    """
    lines = [_line(_headline(diagnosis, evidence, waited_seconds))]
    gpus = (f"rank {sample.rank}'s {sample.gpu}" for sample in evidence if sample.gpu)
    lines += (line for sentence in (*diagnosis.sentences, *gpus) for line in _wrapped(sentence))
    pointers = [f"all stacks: {folder}/"] if folder else []
    pointers += [f"details: paceline hang {run}"] if run else []
    pointer = _line("    ".join(pointers), max_chars=10**6)  # never shortened: a truncated path is useless
    if len(lines) >= MAX_LINES:
        omitted = len(lines) - (MAX_LINES - 2)
        lines = [*lines[: MAX_LINES - 2], f"  ... {omitted} more lines: {DIAGNOSIS_FILE}"]
    return "\n".join([*lines, f"  {pointer}"] if pointer else lines)


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _line(text: str, max_chars: int = MAX_COLUMNS) -> str:
    text = printable(remove_control_characters(text))
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def _wrapped(sentence: str) -> list[str]:
    lines = wrap(_line(sentence, 2 * MAX_COLUMNS - 8), MAX_COLUMNS, initial_indent="  ", subsequent_indent="    ")
    return [_line(line) for line in lines]


def _headline(diagnosis: Diagnosis, evidence: Sequence[Evidence], waited_seconds: float) -> str:
    waited = f" after {waited_seconds:.1f} s" if waited_seconds > 0 else ""
    step = f" at step {diagnosis.step}" if diagnosis.step else ""
    when = f"{waited}{step} (world {len(evidence)})"
    if diagnosis.tie:
        parties = first_few([sentences.format_ranks(party) for party in diagnosis.tie], MAX_PARTIES, " against ")
        return f"RANKS DISAGREE: {parties}{when}; one of them is wrong"
    label = diagnosis.kind.name.replace("_", " ") if diagnosis.kind in HEADLINE_KINDS else "STALL"
    cause = f"CAUSE: {_format_causes(diagnosis, evidence)}" if diagnosis.causes else "No rank identified as the cause"
    return f"{label}{when}. {cause}"


def _format_causes(diagnosis: Diagnosis, evidence: Sequence[Evidence]) -> str:
    by_rank = {sample.rank: sample for sample in evidence}
    causes = [by_rank[rank] for rank in diagnosis.causes if rank in by_rank]
    if not causes:
        return sentences.format_ranks(diagnosis.causes)
    hosts = sorted({sample.host for sample in causes})
    location = ", ".join(hosts[:MAX_NAMED_RANKS]) + (", ..." if len(hosts) > MAX_NAMED_RANKS else "")
    if len(causes) <= MAX_NAMED_RANKS:
        location += f", pid{'s' if len(causes) > 1 else ''} {', '.join(str(sample.pid) for sample in causes)}"
    return f"{sentences.format_ranks(diagnosis.causes)} ({location})"


def format_warning(ranks: Sequence[RankSample], *, still_seconds: float, window_seconds: float) -> str:
    """The warning at half of the window, in one line: the ranks for which the others may wait."""
    suspects = [sample for sample in ranks if not sample.waiting and sample.phase is not Phase.SYNC] or list(ranks)
    phases = sorted({sample.phase for sample in suspects} - {Phase.USER})
    doing = f", in {' or '.join(phase.word for phase in phases)}" if phases else ""
    step = max((sample.step for sample in ranks), default=0)
    at = f" at step {step}" if step else ""
    if len(suspects) < len(ranks):
        doing = f", the others wait for {sentences.format_ranks(sample.rank for sample in suspects)}{doing}"
    return _line(f"no progress for {still_seconds:.1f} s{at}{doing}; reported as a stall after {window_seconds:.1f} s")


def summarize_diagnosis(diagnosis: Diagnosis, evidence: Sequence[Evidence], waited_seconds: float) -> str:
    """The diagnosis in one line: the failed rank and the first line of its error, or the headline of a stall."""
    first = next((sample for sample in evidence if sample.rank == diagnosis.failed), None)
    if first is None:
        return _line(_headline(diagnosis, evidence, waited_seconds))
    if classify_rank_end(first) is RankEndKind.LOST:
        return _line(first.lost_reason)
    if first.failure is None:
        return _line(f"rank {first.rank} ({first.host}): {_how(first, 0)}")
    message = (first.failure.message.strip().splitlines() or [""])[0]
    return _line(f"rank {first.rank} ({first.host}): {first.failure.type}: {message}")


def format_failure(diagnosis: Diagnosis, evidence: Sequence[Evidence], *, oom_kills: int, attempt_dir: str) -> str:
    """The diagnosis of a failed run (with `diagnosis.failed`): the rank, how and why it failed, the path of the logs.

    `oom_kills` is the number of processes that the kernel killed for memory; `attempt_dir` has the logs.
    """
    first = next(sample for sample in evidence if sample.rank == diagnosis.failed)
    end = classify_rank_end(first)
    if end is RankEndKind.LOST:
        ranks = [str(sample.rank) for sample in evidence if sample.lost_reason == first.lost_reason]
        logs = f"output of the ranks: {attempt_dir}/rank-<rank>.log" if attempt_dir else "or only its agent"
        which = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        return f"{remove_control_characters(first.lost_reason)}\nit ran {which}; {logs}"
    alike = [sample for sample in evidence if _same_failure(sample, first)]
    lines = [f"{_name_ranks(alike, len(evidence))} failed: {_how(first, oom_kills)}", *_why(first)]
    ended_early = sorted((sample for sample in evidence if sample.code == 0), key=lambda sample: sample.ended_seconds)
    if end is RankEndKind.VICTIM and ended_early:  # the rank that ended early is the cause, not the ranks that lost it
        names = [_name_ranks([s], len(evidence)) for s in ended_early]
        causes = [f"{name} had already ended, with code 0, while others ran" for name in names]
        lines = [*causes, "other ranks then lost the connection to it:", *lines]
    elif end is RankEndKind.VICTIM:
        lines.append("it lost its peers, but no rank reported a failure of another kind")
    if first.ops and end is not RankEndKind.EXCEPTION:  # the traceback of an exception is more precise
        op = first.ops[-1]
        call = f"{sentences.format_op(op)}{sentences.format_caller(op)}"
        lines.append(remove_control_characters(f"its last collective: {call}"))
    if len(evidence) > 1 and attempt_dir:
        lines.append(f"output of the ranks: {attempt_dir}/rank-<rank>.log")
    return "\n".join(lines)


def _same_failure(sample: RankSample, other: RankSample) -> bool:
    if sample.failure is None or other.failure is None:
        return sample is other
    return (sample.failure.type, sample.failure.message) == (other.failure.type, other.failure.message)


def _name_ranks(samples: Sequence[RankSample], total: int) -> str:
    if len(samples) == 1:
        return f"rank {samples[0].rank} ({samples[0].host}, pid {samples[0].pid})"
    hosts = ", ".join(sorted({sample.host for sample in samples}))
    if len(samples) == total:
        return f"all {total} ranks ({hosts})"
    return f"ranks {', '.join(str(sample.rank) for sample in samples)} ({hosts})"


def _how(first: RankSample, oom_kills: int) -> str:
    if first.failure or (first.code or 0) >= 0:
        return f"exit code {first.shell_exit_code}"
    number = -(first.code or 0)
    killed = f"killed by {sentences.signal_name(number)}"
    if number != signal.SIGKILL:
        return killed
    if oom_kills > 0:
        kills = "1 kill" if oom_kills == 1 else f"{oom_kills} kills"
        return f"{killed} (the kernel's OOM killer: cgroup counted {kills})"
    return f"{killed} (if no user sent it, the kernel's OOM killer may have: see dmesg)"


def _why(first: RankSample) -> list[str]:
    if first.failure:
        text = first.failure.traceback or first.failure.message
        return _clipped(remove_control_characters(text).rstrip("\n").split("\n"), MAX_TRACEBACK_LINES)
    tail = remove_control_characters(first.error_text).rstrip("\n").split("\n")[-TAIL_LINES:]
    return ["its last output:", *(f"  {line}" for line in tail)] if any(tail) else []


def _clipped(lines: list[str], limit: int) -> list[str]:
    if len(lines) <= limit:
        return lines
    omitted = len(lines) - limit
    return [*lines[: limit // 4], f"  ... {omitted} lines ...", *lines[limit // 4 + omitted :]]


DIAGNOSIS_FORMAT_VERSION = 1
MAX_DIAGNOSIS_BYTES = 16 << 20
MAX_RANK_FILES = 256  # ranks with a file, because a thousand nodes may share the disk


class DiagnosisRecord(msgspec.Struct, frozen=True):
    format: Literal["paceline-diagnosis"]
    version: int
    diagnosis: Diagnosis
    waited_seconds: float  # time without progress
    unix_time: float
    evidence: tuple[Evidence, ...]


def same_diagnosis(diagnosis: Diagnosis, other: Diagnosis) -> bool:
    return _essence(diagnosis) == _essence(other)


def _essence(diagnosis: Diagnosis) -> tuple[object, ...]:
    op = diagnosis.op
    signature = (op.kind, op.name, op.shape, op.dtype, op.site) if op is not None else None
    return diagnosis.kind, diagnosis.causes, diagnosis.tie, diagnosis.site, diagnosis.step, signature


class RunEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of a run, as the command of `--on-event` reads it: one line of JSON. Empty fields are absent."""

    kind: Literal["diagnosis", "restart", "requeue", "end"]
    """diagnosis: a hang or a failure was diagnosed. restart: the workers start again. The last event is either requeue
    (Slurm starts the saved run again) or end"""
    unix_time: float
    name: str  # of the job
    run_dir: str
    attempt_dir: str
    host: str  # of node 0
    generation: int = 0  # number of starts of the workers in this attempt before the present one
    words: str = ""  # the cause of a failure in one line, as in ended.json; of a restart: its message
    exit: int | None = None  # the exit code of the attempt, in requeue and end
    report: str = ""  # the diagnosis as on the screen
    diagnosis: Diagnosis | None = None  # as in diagnosis.json


def write_diagnosis(folder: Path, diagnosis: Diagnosis, evidence: Sequence[Evidence], *, waited_seconds: float) -> None:
    """Write a diagnosis into a new, private folder. diagnosis.json appears only when it is complete."""
    writing.make_folder(folder)
    chosen = select_ranks_to_record(diagnosis, evidence)
    for sample in chosen:
        writing.replace_file(folder / f"rank-{sample.rank}.txt", format_evidence(sample).encode())
    # a failure record has a separate file, and monotonic times are meaningless to a reader
    omitted = {"failure": None, "ended_seconds": 0.0, "fingerprints": b"", "orders": b""}
    kept = tuple(replace(limit_evidence_size(sample), **omitted) for sample in chosen)
    version, now = DIAGNOSIS_FORMAT_VERSION, time.time()
    content = DiagnosisRecord("paceline-diagnosis", version, diagnosis, waited_seconds, now, kept)
    writing.replace_file(folder / DIAGNOSIS_FILE, msgspec.json.encode(content))


def select_ranks_to_record(diagnosis: Diagnosis, evidence: Sequence[Evidence]) -> list[Evidence]:
    """At most 256 ranks that get a file: those of the diagnosis, one of each distinct state, and the first others."""
    if len(evidence) <= MAX_RANK_FILES:
        return list(evidence)
    involved = {*diagnosis.causes, *(party[0] for party in diagnosis.tie), diagnosis.failed}
    states = {(s.phase, s.state, s.code, s.ops[-1:], s.stacks[:1]): s.rank for s in reversed(evidence)}
    distinct = {*states.values()}
    ordered = sorted(evidence, key=lambda s: (s.rank not in involved, s.rank not in distinct, s.rank))
    return sorted(ordered[:MAX_RANK_FILES], key=lambda s: s.rank)


def diagnosis_file(folder: Path) -> Path:
    """The path of the file in the folder `diagnosis-N`, or `verdict-N` of an earlier version."""
    return folder / ("verdict.json" if folder.name.startswith("verdict-") else DIAGNOSIS_FILE)


class _Header(msgspec.Struct):
    format: str = ""
    version: int = 0


def read_diagnosis(folder: Path) -> DiagnosisRecord:
    path = diagnosis_file(folder)
    try:
        content = read_file(path, limit_bytes=MAX_DIAGNOSIS_BYTES)
    except OSError as error:
        raise UsageError(code="diagnosis-not-readable", path=path, strerror=error.strerror) from error
    if path.name != DIAGNOSIS_FILE:
        for former, current in FORMER_NAMES.items():
            content = content.replace(f'"{former}"'.encode(), f'"{current}"'.encode())
    try:
        header = msgspec.json.decode(content, type=_Header)
        if header.format == "paceline-diagnosis" and header.version != DIAGNOSIS_FORMAT_VERSION:
            version, readable = header.version, DIAGNOSIS_FORMAT_VERSION
            raise UsageError(code="diagnosis-of-other-version", path=path, version=version, readable=readable)
        return msgspec.json.decode(content, type=DiagnosisRecord)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(code="diagnosis-damaged", path=path, error=error) from error


def format_evidence(rank: Evidence, *, most_ops: int | None = None, most_stacks: int | None = None) -> str:
    """The evidence on a rank as text, with its last `most_ops` operations and first `most_stacks` stacks."""
    ops = rank.ops if most_ops is None else rank.ops[-most_ops:]
    # each text on its own: an unfinished control sequence must not hide the next one
    texts = map(remove_control_characters, _rank_texts(rank, ops, rank.stacks[:most_stacks]))
    return "".join(f"{printable(line)}\n" for text in texts for line in text.split("\n"))


def _rank_texts(rank: Evidence, ops: Sequence[Op], stacks: Sequence[Stack]) -> Iterator[str]:
    yield f"rank {rank.rank} ({rank.host}, pid {rank.pid})" + (f", {rank.step} steps done" if rank.step else "")
    if rank.lost_reason:
        yield "lost with its node"
    elif rank.code is not None:
        yield f"ended: {'exit code' if rank.code >= 0 else 'signal'} {abs(rank.code)}"
    else:
        yield f"no progress for {rank.still_seconds:.1f} s; it is {sentences.format_rank_state(rank)}"
        yield f"CPU use: {rank.cpu_seconds:.2f} s per second"
    yield "last collectives and messages, the newest last:"
    yield from (
        f"  {'done     ' if op.done else 'in flight'}  group {op.group}  {sentences.format_op(op)}  {op.site}"
        for op in ops
    )
    if not ops:
        yield "  none"
    for stack in stacks:
        yield f"thread {stack.thread}, innermost first:"
        yield from (f"  {frame.file}:{frame.line} in {frame.function}" for frame in stack.frames)
    if rank.native:
        yield f"stack from faulthandler, innermost first:\n{rank.native}"
    yield from (sentences.format_loader_worker(loader) for loader in rank.loaders)
    if rank.error_text:
        yield f"its last output:\n{rank.error_text}"
