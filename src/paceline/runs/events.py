"""The events of a run: typed records, one JSON line for each, one file for each rank (no torch here).

They are the only interface between training and analysis. Readers skip unknown kinds: an older paceline can read the
files of a newer one.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from paceline.runs.reading import numbered_files, read_lines

MAX_MERGED_STEPS = 1 << 20
TAIL_BYTES = 4 << 20  # of a file of events: enough for the current state of a run
_FILE = re.compile(r"events-([0-9]{1,9})\.jsonl")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
RankCount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]  # ranks
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]  # sums and differences of them stay finite


class Event(msgspec.Struct, frozen=True, tag_field="kind"):
    """The base of all records. Durations are in seconds, on this rank's monotonic clock."""


class Started(Event, frozen=True, tag="started"):
    """A rank starts an attempt, or a generation of it, with the state after `start_step` steps."""

    attempt: Count
    rank: RankCount
    world_size: RankCount
    host: str
    pid: int
    device: str
    unix_time: Seconds
    generation: Count = 0
    start_step: Count = 0
    num_samples: Count = 0  # 0: an older paceline wrote it
    steps_per_epoch: Count = 0
    own_order: bool = False  # the script's DataLoader defines the order of samples, not a plan
    stream_parts: RankCount = 0  # the number of parts of a stream, which has neither num_samples nor steps_per_epoch


class Step(Event, frozen=True, tag="step"):
    """An optimizer step, counted from 1, that ended at `unix_time`. loss and grad_norm are global, seconds local."""

    step: Count
    epoch: Count
    loss: float
    samples: Count
    lr: float
    seconds: Seconds
    data_seconds: Seconds
    unix_time: Seconds
    grad_norm: float | None = None
    share: tuple[RankCount, RankCount] | None = None  # the virtual ranks [a, b) that this rank computed
    consumed: Count = 0  # samples that this rank used, without padding
    fingerprint: str = ""  # of their indices, in hex
    skipped: bool = False  # it changed no parameters; 0 replaces a loss that is not finite
    phase_seconds: dict[str, Seconds] = {}  # data, forward, backward, sync, optimizer; empty in old runs
    tokens: Count = 0  # of the samples that this rank used; 0: they have no tokens
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_MERGED_STEPS)] = 1
    """The number of steps, up to `step`, in this record. Old steps of a long run are merged: loss and grad_norm are
    then means; samples, consumed, fingerprint and all seconds are sums."""


class Skipped(Event, frozen=True, tag="skipped"):
    """Step `step` changed no parameters on any rank, because a value was not finite. Written before the step."""

    step: Count
    reason: str
    samples: list[Count]  # the cause, on all ranks, if known


class UnloggedRanks(Event, frozen=True, tag="vouched"):
    """This rank alone saves the state after `step`. `ranks` took part in it, but ended before they logged it."""

    step: Count
    ranks: list[RankCount]


class RolledBack(Event, frozen=True, tag="rolled-back"):
    """Training has returned to the state after step `to`, and repeats the later steps of this start."""

    step: Count  # the last one before the rollback
    to: Count


class SampleIndices(Event, frozen=True, tag="samples"):
    """The samples of a virtual rank's micro-batch (written with --record-samples)."""

    step: Count
    epoch: Count
    virtual_rank: RankCount
    part: Count
    indices: list[Count]


class Evaluated(Event, frozen=True, tag="evaluated"):
    """The finite results of a split, over all ranks, after `step`."""

    step: Count
    metrics: dict[str, float]
    seconds: Seconds
    split: str = "test"


class Checkpointed(Event, frozen=True, tag="checkpointed"):
    """A checkpoint of the state after `step` was published, or failed (rank 0 only)."""

    step: Count
    failure: str  # empty: it was published
    stall_seconds: Seconds  # during which training was stopped
    write_seconds: Seconds  # until publication, while training continued
    size_bytes: Count


class SnapshotTotals(Event, frozen=True, tag="snapshotted"):
    """All snapshots in memory of this rank."""

    count: Count
    seconds: Seconds  # total
    size_bytes: Count  # of this rank's part of one


class MemoryBreakdown(Event, frozen=True, tag="anatomy"):
    """The tensors in this rank's memory; once in each start, after its first step."""

    parameters: list[tuple[str, list[Count], Count]]  # name, shape, bytes, in the model's order
    weight_bytes: Count
    gradient_bytes: Count
    optimizer_bytes: Count
    buffer_bytes: Count


class FlopsCounted(Event, frozen=True, tag="counted"):
    """FLOPs of forward and backward of one sample; once in each start, after its first step (rank 0 only)."""

    flops_per_sample: float
    devices: RankCount  # of the whole run
    peak_tflops: float = 0.0  # of one device; 0: not known yet


class TracedStep(Event, frozen=True, tag="traced"):
    """A step of this rank in detail. A long run has details of a few steps, including the last ones."""

    step: Count
    unix_time: Seconds  # at which it began
    phases: list[tuple[str, Seconds, Seconds]]  # name, begin (since unix_time), duration
    calls: list[tuple[str, Seconds, Seconds, Count]] = []
    """collectives: name, begin, duration until the observed end (-1: none was), bytes of tensors (0: unknown)"""


class Notice(Event, frozen=True, tag="notice"):
    """A line that the rank printed."""

    text: str


class Ended(Event, frozen=True, tag="ended"):
    """A rank ended without an error."""

    step: Count
    unix_time: Seconds


_KnownEvent = (
    Started | Step | Skipped | RolledBack | UnloggedRanks | SampleIndices | Evaluated | Checkpointed | SnapshotTotals
    | MemoryBreakdown | FlopsCounted | TracedStep | Notice | Ended
)  # fmt: skip
_decode = msgspec.json.Decoder(_KnownEvent).decode


def event_files(run_dir: Path) -> dict[int, Path]:
    return numbered_files(run_dir, _FILE)


def read_events(path: Path) -> Iterator[Event]:
    return _decode_lines(read_lines(path))


def last_events(path: Path) -> Iterator[Event]:
    """The last records of a file of any size, the newest first, decoded lazily."""
    return _decode_lines(reversed([*read_lines(path, from_end_bytes=TAIL_BYTES)]))


def decode_event(line: bytes) -> Event | None:
    """The record in a line; None if its kind is unknown, or it is incomplete."""
    try:  # faster than `suppress`: there may be a million lines
        return _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _decode_lines(lines: Iterable[bytes]) -> Iterator[Event]:
    return (event for line in lines if (event := decode_event(line)) is not None)
