"""Files of JSON lines of bounded size: the events of a rank and the use of a machine (no torch here)."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Self

import msgspec
from msgspec.structs import replace

from paceline.runs import writing
from paceline.runs.console import print_to_stderr
from paceline.runs.events import MAX_MERGED_STEPS, RolledBack, Step, decode_event
from paceline.runs.reading import read_lines

LIMIT_BYTES = 32 << 20  # of a file; above it, pairs of steps in the older half are merged
SLOW_FACTOR, MOST_SLOW = 2.0, 1 / 16  # times the median step; the largest fraction of all steps
_STEP = b'{"kind":"step"'
_STARTED, _BACK = b'{"kind":"started"', b'{"kind":"rolled-back"'
MAX_MACHINE_BYTES = 1 << 20
ThinFunction = Callable[[list[bytes], list[bytes]], list[bytes]]
"""(older half of the lines, newer half) -> the lines that remain of the older half"""


class JsonLinesFile:
    """Appends JSON lines to a file, each in one write. At the size limit, `thinned` reduces the older half."""

    def __init__(self, path: Path, limit_bytes: int, thinned: ThinFunction, *, sync: bool) -> None:
        self._path, self._limit_bytes, self._thinned, self._sync = path, limit_bytes, thinned, sync
        self._encode = msgspec.json.Encoder().encode
        self._descriptor, self._size_bytes = -1, 0

    def write(self, record: msgspec.Struct) -> None:
        if self._descriptor < 0:
            self._open()
        line = self._encode(record) + b"\n"
        if self._size_bytes + len(line) > self._limit_bytes:
            self._thin()
        self._size_bytes += os.write(self._descriptor, line)  # on a full disk it may be incomplete: readers skip it

    def _open(self) -> None:
        self._descriptor = writing.open_or_create(self._path, append=True)
        self._size_bytes = os.fstat(self._descriptor).st_size
        if self._size_bytes and os.pread(self._descriptor, 1, self._size_bytes - 1) != b"\n":
            self._size_bytes += os.write(self._descriptor, b"\n")  # an incomplete line, after a kill

    def _thin(self) -> None:
        lines = [line for line in read_lines(self._path) if line]
        half = len(lines) // 2
        kept = [*self._thinned(lines[:half], lines[half:]), *lines[half:]]
        writing.replace_file(self._path, b"".join(line + b"\n" for line in kept), sync=self._sync)
        self._close()
        self._open()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class EventWriter(JsonLinesFile):
    def __init__(self, path: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
        super().__init__(path, limit_bytes, merge_consecutive_steps, sync=True)
        self._open()

    def _thin(self) -> None:
        try:
            super()._thin()
        except OSError:  # no space for a second file: this one keeps growing
            self._limit_bytes *= 2
        else:  # many records may not be steps, and stay
            self._limit_bytes = max(self._limit_bytes, self._size_bytes + self._limit_bytes // 8)

    def flush(self) -> None:
        """Sync the file, because a checkpoint must not be newer than the events on disk."""
        os.fsync(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


class SizeLimitedWriter(JsonLinesFile):
    """Appends records from any thread. After an error it prints a warning once, and stops writing.

    Thinning drops every second record of the older half. After days, the file has all records of the last minutes, and
    one for every few minutes of the first hours.
    """

    def __init__(
        self, path: Path, *, limit_bytes: int = MAX_MACHINE_BYTES, warn: Callable[[str], object] = print_to_stderr
    ) -> None:
        super().__init__(path, limit_bytes, lambda old, _: old[::2], sync=False)
        self._warn, self._lock = warn, threading.Lock()
        self.failed = False  # whether an error has ended the writing

    def write(self, record: msgspec.Struct) -> None:
        with self._lock:
            if self.failed:
                return
            try:
                super().write(record)
            except Exception as error:  # a full disk or a deleted folder must not end training
                self.failed = True
                self._close()
                self._warn(f"warning: {self._path.name} is no longer written: {error}")

    def close(self) -> None:
        """Close the file. A later record opens it again."""
        with self._lock:
            self._close()


def merge_consecutive_steps(old: Sequence[bytes], new: Sequence[bytes] = ()) -> list[bytes]:
    """Merge pairs of consecutive steps in the lines `old` of a file of events; `new` are the lines after them.

    A merged step has the sums that `paceline ledger` needs: the number of samples and their fingerprint. Skipped steps,
    the slowest steps, and steps of earlier starts are not merged, because a later start repeats some of them.
    """
    events = [decode_event(line) if line.startswith(_STEP) else None for line in old]
    steps = [event for event in events if isinstance(event, Step)]
    lines = [*old, *new]
    rollbacks = (decode_event(line) for line in lines if line.startswith(_BACK))
    slow, undone = _slow_step_threshold(steps), {event.to for event in rollbacks if isinstance(event, RolledBack)}
    starts = [number for number, line in enumerate(lines) if line.startswith(_STARTED)]
    earlier = min(starts[-1] if starts else 0, len(old))
    encode = msgspec.json.encode
    kept: list[bytes] = [*old[:earlier]]
    previous: Step | None = None  # the last line of `kept`, if it can be merged with the next one
    for line, event in zip(old[earlier:], events[earlier:], strict=True):
        step = event if isinstance(event, Step) and not event.skipped and _mean_seconds(event) < slow else None
        if previous is not None and step is not None and previous.step not in undone and _can_merge(previous, step):
            kept[-1], previous = encode(_merged(previous, step)), None
        else:
            kept.append(line)
            previous = step
    return kept


def _mean_seconds(step: Step) -> float:
    return step.seconds / step.steps


def _slow_step_threshold(steps: Sequence[Step]) -> float:
    if not steps:
        return 0.0
    means = sorted(map(_mean_seconds, steps))
    return max(SLOW_FACTOR * median(means), means[int((1 - MOST_SLOW) * (len(means) - 1))] * (1 + 1e-9))


def _can_merge(a: Step, b: Step) -> bool:
    next_first = b.step - b.steps + 1
    return (a.step + 1, a.epoch, a.share) == (next_first, b.epoch, b.share) and a.steps + b.steps <= MAX_MERGED_STEPS


def _merged(a: Step, b: Step) -> Step:
    count = a.steps + b.steps
    has_norms = a.grad_norm is not None and b.grad_norm is not None
    return replace(
        b,
        loss=(a.loss * a.steps + b.loss * b.steps) / count,
        grad_norm=((a.grad_norm or 0.0) * a.steps + (b.grad_norm or 0.0) * b.steps) / count if has_norms else None,
        **{
            name: getattr(a, name) + getattr(b, name)
            for name in ("samples", "seconds", "data_seconds", "consumed", "tokens")
        },
        fingerprint=_add_fingerprints(a.fingerprint, b.fingerprint),
        phase_seconds={
            phase: round(a.phase_seconds.get(phase, 0.0) + spent, 7) for phase, spent in b.phase_seconds.items()
        },
        steps=count,
    )


def _add_fingerprints(a: str, b: str) -> str:
    """As data.plan.add, which needs torch; empty if one of them is not a fingerprint."""
    try:
        return f"{(int(a, 16) + int(b, 16)) % 2**64:016x}"
    except ValueError:
        return ""
