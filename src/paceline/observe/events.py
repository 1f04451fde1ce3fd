"""What a run writes down as it goes: typed records, one JSON line each, one file per rank (no torch here).

The only thing that observation and analysis share with training. Readers skip kinds they do not know, so that a newer
run can be read by an older paceline.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="kind"):
    """The base of all records. Durations are in seconds, on this rank's monotonic clock."""


class Started(Event, frozen=True, tag="started"):
    """A rank begins an attempt."""

    attempt: int
    rank: int
    world_size: int
    host: str
    pid: int
    device: str
    unix_time: float


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
    "samples": Samples,
    "evaluated": Evaluated,
    "notice": Notice,
    "ended": Ended,
}


class EventWriter:
    """Appends records to one rank's file; each is whole on disk's side of the process before `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("ab", buffering=0)  # unbuffered: a killed rank's last record counts most
        self._encode = msgspec.json.Encoder().encode

    def write(self, event: Event) -> None:
        """Append `event`.

        Raises:
            OSError: if the disk is full, say.
        """
        self._file.write(self._encode(event) + b"\n")

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
        except msgspec.DecodeError:
            continue
