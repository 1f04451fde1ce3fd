"""What a run writes down as it goes: typed records, one JSON line each, one file per rank (no torch here).

The only thing that observation and analysis share with training. Readers skip kinds they do not know, so that a newer
run can be read by an older paceline.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from paceline.disk.reading import names, read_lines

MOST_FOLDED = 1 << 20
LAST_BYTES = 4 << 20  # of a file of events: enough to know how a run is now
_FILE = re.compile(r"events-([0-9]{1,9})\.jsonl")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Few = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]  # ranks
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]  # sums and differences of them stay finite


class Event(msgspec.Struct, frozen=True, tag_field="kind"):
    """The base of all records. Durations are in seconds, on this rank's monotonic clock."""


class Started(Event, frozen=True, tag="started"):
    """A rank begins an attempt, or a generation of it, with the state after `start_step` steps."""

    attempt: Count
    rank: Few
    world_size: Few
    host: str
    pid: int
    device: str
    unix_time: Seconds
    generation: Count = 0
    start_step: Count = 0
    num_samples: Count = 0  # 0: written by an older paceline
    steps_per_epoch: Count = 0
    own_order: bool = False  # of a DataLoader that was taken over: which samples are in which step, no plan says
    stream_parts: Few = 0  # of a stream, in so many parts: it has neither num_samples nor steps_per_epoch


class Step(Event, frozen=True, tag="step"):
    """An optimizer step, 1-based, over at `unix_time`. Loss and grad_norm are global; the seconds are this rank's."""

    step: Count
    epoch: Count
    loss: float
    samples: Count
    lr: float
    seconds: Seconds
    data_seconds: Seconds
    unix_time: Seconds
    grad_norm: float | None = None
    share: tuple[Few, Few] | None = None  # the virtual ranks [a, b) that this rank computed
    consumed: Count = 0  # samples this rank used; stand-ins are not counted
    fingerprint: str = ""  # hex of data.consumed.fingerprint of their indices
    skipped: bool = False  # it did not change the parameters (see Skipped); a loss that is not finite is written as 0
    phase_seconds: dict[str, Seconds] = {}  # data, forward, backward, sync, optimizer; empty: by an older paceline
    tokens: Count = 0  # of the samples that this rank used; 0: they have no tokens
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_FOLDED)] = 1
    """how many steps it stands for, those up to `step`: of a long run old ones are put together (`folding`). Then loss
    and grad_norm are means, samples, consumed, fingerprint and all seconds sums"""


class Skipped(Event, frozen=True, tag="skipped"):
    """Step `step` did not change the parameters, on any rank: something in it was not finite. Before its Step."""

    step: Count
    reason: str
    samples: list[Count]  # that made it so, of all ranks, as far as they are known


class Vouched(Event, frozen=True, tag="vouched"):
    """This rank saves the state after `step` alone: `ranks` took part in it, and have not lived to write it down."""

    step: Count
    ranks: list[Few]


class RolledBack(Event, frozen=True, tag="rolled-back"):
    """The state is again that after step `to`; later steps of this start are taken once more."""

    step: Count  # the last one before that
    to: Count


class Samples(Event, frozen=True, tag="samples"):
    """Which samples a virtual rank's micro-batch held (written with --record-samples)."""

    step: Count
    epoch: Count
    virtual_rank: Few
    part: Count
    indices: list[Count]


class Evaluated(Event, frozen=True, tag="evaluated"):
    """The results of a split, over all ranks, after `step`; those that are no finite number are left out."""

    step: Count
    metrics: dict[str, float]
    seconds: Seconds
    split: str = "test"


class Checkpointed(Event, frozen=True, tag="checkpointed"):
    """A checkpoint of the state after `step` is on disk, or why not (rank 0 only)."""

    step: Count
    failure: str
    stall_seconds: Seconds  # that training stood still
    write_seconds: Seconds  # until it was published, while training went on
    size_bytes: Count


class Snapshotted(Event, frozen=True, tag="snapshotted"):
    """All snapshots in memory that this rank took."""

    count: Count
    seconds: Seconds  # all together
    size_bytes: Count  # of each, this rank's part


class Anatomy(Event, frozen=True, tag="anatomy"):
    """What this rank holds; once in each start, after its first step."""

    parameters: list[tuple[str, list[Count], Count]]  # name, shape, bytes; in the model's order
    weight_bytes: Count
    gradient_bytes: Count
    optimizer_bytes: Count
    buffer_bytes: Count


class Counted(Event, frozen=True, tag="counted"):
    """FLOPs of forward and backward of one sample; once in each start, after its first step (rank 0 only)."""

    flops_per_sample: float
    devices: Few  # of the whole run
    peak_tflops: float = 0.0  # of one device; 0: not known yet


class Traced(Event, frozen=True, tag="traced"):
    """A step of this rank in detail. Of many steps fewer and fewer are; the last ones always."""

    step: Count
    unix_time: Seconds  # when it began
    phases: list[tuple[str, Seconds, Seconds]]  # name, from when, for how long: seconds since it began
    calls: list[tuple[str, Seconds, Seconds, Count]] = []
    """collectives, likewise, until they were seen to be over (-1: not yet); and bytes of their tensors, 0: unknown"""


class Notice(Event, frozen=True, tag="notice"):
    """Something that people were shown."""

    text: str


class Ended(Event, frozen=True, tag="ended"):
    """A rank ends in good order."""

    step: Count
    unix_time: Seconds


_Known = (
    Started | Step | Skipped | RolledBack | Vouched | Samples | Evaluated | Checkpointed | Snapshotted | Anatomy
    | Counted | Traced | Notice | Ended
)  # fmt: skip
_decode = msgspec.json.Decoder(_Known).decode


def event_files(run_dir: Path) -> dict[int, Path]:
    """The files of events in a run folder, by rank.

    Raises:
        OSError: the folder cannot be read.
    """
    matches = (_FILE.fullmatch(name) for name in names(run_dir))
    return dict(sorted((int(match[1]), run_dir / match[0]) for match in matches if match))


def read_events(path: Path) -> Iterator[Event]:
    """The records of a file, in order; unknown kinds and a torn last line are skipped.

    Raises:
        OSError: it is not there; as Unreadable, in words: it is no file of events.
    """
    return _decoded(read_lines(path))


def last_events(path: Path) -> Iterator[Event]:
    """The last records of a file, the newest first, whatever its size; decoded as they are asked for.

    Raises:
        OSError: as `read_events`.
    """
    return _decoded(reversed([*read_lines(path, from_end_bytes=LAST_BYTES)]))


def decode_event(line: bytes) -> Event | None:
    """The record in a line; None if its kind is not known, or it is torn."""
    try:  # not `suppress`: there may be a million
        return _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _decoded(found: Iterable[bytes]) -> Iterator[Event]:
    return (event for line in found if (event := decode_event(line)) is not None)
