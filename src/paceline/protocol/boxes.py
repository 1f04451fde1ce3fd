"""Boxes as their readers see them: the agent above all, which makes them, asks in them and frees ranks through them.

Whatever is in a box was written by a worker, perhaps a broken one: readers take nothing in it for granted.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.protocol import box
from paceline.protocol.evidence import LoaderWorker, Op, Phase


@dataclass(frozen=True)
class Counters:
    """What a box shows at one moment. `moved` changes whenever the worker has made any progress."""

    step: int
    phase: Phase
    ready: int
    answered: int
    beat_ns: int
    met: bool  # it has called a collective
    moved: tuple[int, ...]
    phase_seconds: tuple[float, ...]  # spent in each phase, up to its last change
    waiting: bool  # for other ranks, in a collective or message, when its watcher last woke
    script: bool = False  # seen from outside
    notes_stops: bool = False  # it acts on signals that ask to stop between two steps
    uneven: bool = False  # ranks may rightly take different numbers of steps
    alone: int = 0  # of the steps: the rank's own
    marks: int = 0
    findings: int = 0


def read_counters(descriptor: int) -> Counters:
    """Read a box's counters. Never fails for what a worker has written there."""
    data = os.pread(descriptor, box.SLOTS_AT, 0).ljust(box.SLOTS_AT, b"\0")
    value = {name: box.WORD.unpack_from(data, at)[0] for name, at in box.COUNTERS_AT.items()}
    phase = Phase(value["phase"]) if value["phase"] in {*Phase} else Phase.USER
    spent = tuple(box.WORD.unpack_from(data, box.PHASES_AT + p * box.WORD.size)[0] / 1e9 for p in Phase)
    moved = tuple(value[name] for name in ("step", "phase", "changes", "ops", "enqueued"))
    return Counters(
        step=value["step"],
        phase=phase,
        ready=value["ready"],
        answered=value["answered"],
        beat_ns=value["beat_ns"],
        met=value["ops"] > 0 or value["enqueued"] > 0,
        moved=moved,
        phase_seconds=spent,
        waiting=bool(value["waiting"]),
        script=bool(value["script"]),
        notes_stops=bool(value["notes_stops"]),
        uneven=bool(value["uneven"]),
        alone=value["alone"],
        marks=value["marks"],
        findings=value["findings"],
    )


def put_question(descriptor: int, question: int) -> None:
    """Ask the worker for its stacks and collectives; its watcher answers within a fraction of a second, if it can."""
    os.pwrite(descriptor, box.WORD.pack(question), box.COUNTERS_AT["asked"])


def ask_to_save(descriptor: int, times: int) -> None:
    """Say how many times this worker has been asked for a checkpoint."""
    os.pwrite(descriptor, box.WORD.pack(times), box.COUNTERS_AT["saves_asked"])


def ask_to_regroup(descriptor: int) -> None:
    """Have this worker vote for the end after its next step: the next generation has other hosts."""
    os.pwrite(descriptor, box.WORD.pack(1), box.COUNTERS_AT["regroups"])


def release(descriptor: int, why: bytes) -> None:
    """Have the worker leave the collective that it is in, with `why` (JSON) as the reason."""
    why = why[: box.WORD_MAX]
    os.pwrite(descriptor, why, box.WORD_AT)
    os.pwrite(descriptor, box.WORD.pack(len(why)), box.COUNTERS_AT["word_bytes"])
    os.pwrite(descriptor, box.WORD.pack(1), box.COUNTERS_AT["released"])


def read_answer(descriptor: int) -> bytes:
    """The worker's last answer, as it wrote it."""
    size = os.pread(descriptor, box.WORD.size, box.COUNTERS_AT["answer_bytes"]).ljust(box.WORD.size, b"\0")
    return os.pread(descriptor, min(box.WORD.unpack(size)[0], box.ANSWER_MAX), box.ANSWER_AT)


def has_box(pid: int) -> bool:
    """Whether the process still has its box; not so when it has become another program (`os.execv`)."""
    try:
        if f"/memfd:{box.NAME}" in Path(f"/proc/{pid}/maps").read_text():
            return True
        links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())  # noqa: PTH115 - no file behind it
        return any(link.startswith(f"/memfd:{box.NAME}") for link in links)
    except OSError:
        return True  # it is just ending, or closes files: nobody can say


def takes_signal(pid: int, number: int = box.SIGNAL, *, ignoring: bool = False) -> bool:
    """Whether the process catches this signal at this moment, or is `ignoring` it: else it may be its end.

    One that has become another program does not catch SIGNAL.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        names = ("SigCgt:", "SigIgn:") if ignoring else ("SigCgt:",)
        masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(names)]
        return any(mask >> (number - 1) & 1 for mask in masks)
    except (OSError, ValueError, IndexError):
        return False


def forget_native(descriptor: int) -> None:
    """Throw away what faulthandler has written so far, before SIGNAL is sent again."""
    os.ftruncate(descriptor, box.BOX_BYTES)


def read_native(descriptor: int) -> str:
    """What faulthandler has written on SIGNAL so far; of much, the end, where the main thread is."""
    size = os.fstat(descriptor).st_size
    start = max(box.BOX_BYTES, size - box.NATIVE_MAX)
    return os.pread(descriptor, box.NATIVE_MAX, start).decode(errors="replace") if size > start else ""


def read_ring(descriptor: int) -> list[Op]:
    """The worker's last collectives, the oldest first, as far as they are whole."""
    return [op for _, op in of_this_life(box.records(os.pread(descriptor, box.RECORDS * box.RECORD.size, box.RING_AT)))]


def of_this_life(operations: Iterable[tuple[int, Op]]) -> list[tuple[int, Op]]:
    """Without what an earlier group of the same name has called: numbers that restart make the old ones void."""
    kept: list[tuple[int, Op]] = []
    last: dict[str, int] = {}
    for at, op in operations:
        if not op.is_message and op.seq < last.get(op.group, 0):
            kept = [one for one in kept if one[1].group != op.group]
        if not op.is_message:
            last[op.group] = op.seq
        kept.append((at, op))
    return kept


def read_loaders(descriptor: int) -> list[LoaderWorker]:
    """The processes that load data for this worker, as far as they have said what they do."""
    data = os.pread(descriptor, box.SLOTS * box.SLOT.size, box.SLOTS_AT)
    slots = [box.SLOT.unpack_from(data, at) for at in range(0, len(data) - box.SLOT.size + 1, box.SLOT.size)]
    return [
        LoaderWorker(number, pid, item, epoch, busy=bool(busy))
        for number, (pid, epoch, item, busy) in enumerate(slots)
        if pid
    ]
