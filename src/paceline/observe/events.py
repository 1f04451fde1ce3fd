"""What a run writes down as it goes: typed records, one JSON line each, one file per rank (no torch here).

The only thing that observation and analysis share with training. Readers skip kinds they do not know, so that a newer
run can be read by an older paceline.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="kind"):
    """The base of all records. Durations are in seconds, on this rank's monotonic clock."""


class Started(Event, frozen=True, tag="started"):
    """A rank begins an attempt, or a generation of it, with the state after `start_step` steps."""

    attempt: int
    rank: int
    world_size: int
    host: str
    pid: int
    device: str
    unix_time: float
    generation: int = 0
    start_step: int = 0
    num_samples: int = 0  # 0: written by an older paceline
    steps_per_epoch: int = 0


class Step(Event, frozen=True, tag="step"):
    """An optimizer step, 1-based, over at `unix_time`. Loss and grad_norm are global; the seconds are this rank's."""

    step: int
    epoch: int
    loss: float
    samples: int
    lr: float
    seconds: float
    data_seconds: float
    unix_time: float
    grad_norm: float | None = None
    share: tuple[int, int] | None = None  # the virtual ranks [a, b) that this rank computed
    consumed: int = 0  # samples this rank used; stand-ins are not counted
    fingerprint: str = ""  # hex of data.consumed.fingerprint of their indices
    skipped: bool = False  # it did not change the parameters (see Skipped); a loss that is not finite stands as 0
    phase_seconds: dict[str, float] = {}  # data, forward, backward, sync, optimizer; empty: by an older paceline


class Skipped(Event, frozen=True, tag="skipped"):
    """Step `step` did not change the parameters, on any rank: something in it was not finite. Before its Step."""

    step: int
    reason: str
    samples: list[int]  # that made it so, of all ranks, as far as they are known


class RolledBack(Event, frozen=True, tag="rolled-back"):
    """The state is again that after step `to`; later steps of this start are taken once more."""

    step: int  # the last one before that
    to: int


class Samples(Event, frozen=True, tag="samples"):
    """Which samples a virtual rank's micro-batch held (written with --record-samples)."""

    step: int
    epoch: int
    virtual_rank: int
    part: int
    indices: list[int]


class Evaluated(Event, frozen=True, tag="evaluated"):
    """The test split's results, over all ranks, after `step`."""

    step: int
    metrics: dict[str, float]
    seconds: float


class Checkpointed(Event, frozen=True, tag="checkpointed"):
    """A checkpoint of the state after `step` is on disk, or why not (rank 0 only)."""

    step: int
    failure: str
    stall_seconds: float  # that training stood still
    write_seconds: float  # until it was published, while training went on
    size_bytes: int


class Snapshotted(Event, frozen=True, tag="snapshotted"):
    """All snapshots in memory that this rank took."""

    count: int
    seconds: float  # all together
    size_bytes: int  # of each, this rank's part


class Notice(Event, frozen=True, tag="notice"):
    """Something a person was told."""

    text: str


class Ended(Event, frozen=True, tag="ended"):
    """A rank ends in good order."""

    step: int
    unix_time: float


KINDS: dict[str, type[Event]] = {
    "started": Started,
    "step": Step,
    "skipped": Skipped,
    "rolled-back": RolledBack,
    "samples": Samples,
    "evaluated": Evaluated,
    "checkpointed": Checkpointed,
    "snapshotted": Snapshotted,
    "notice": Notice,
    "ended": Ended,
}


class EventWriter:
    """Appends records to one rank's file; each is whole on disk's side of the process before `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("a+b", buffering=0)  # unbuffered: a killed rank's last record counts most
        self._encode = msgspec.json.Encoder().encode
        end = self._file.tell()
        if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
            self._file.write(b"\n")  # a line torn by a kill must not swallow the first record of its successor

    def write(self, event: Event) -> None:
        """Append `event`.

        Raises:
            OSError: if the disk is full, say.
        """
        self._file.write(self._encode(event) + b"\n")

    def flush(self) -> None:
        """Return when all records are on the disk itself: a checkpoint must never be newer than they are.

        Raises:
            OSError: if the disk fails.
        """
        os.fsync(self._file.fileno())

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class _Kind(msgspec.Struct):
    kind: str = ""


def read_events(path: Path) -> Iterator[Event]:
    """The records of a file, in order; unknown kinds and a torn last line are skipped."""
    decoders = {name: msgspec.json.Decoder(kind) for name, kind in KINDS.items()}
    for line in path.read_bytes().splitlines():
        try:
            kind = msgspec.json.decode(line, type=_Kind).kind
            if kind in decoders:
                yield decoders[kind].decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
