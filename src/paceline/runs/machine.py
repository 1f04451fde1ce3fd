"""What a machine does, once a second: machine-<node>.jsonl in a run's folder (no torch here).

One file a node, written by its agent, or by local rank 0 where no agent of ours is. Bounded: see `runs.writers`.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.runs.events import Count, Few, Seconds
from paceline.runs.reading import numbered_files, read_lines

_FILE = re.compile(r"machine-([0-9]{1,9})\.jsonl")


class GpuUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """One GPU, as its driver sees it; None: the driver does not say."""

    index: Few
    name: str = ""
    busy: float | None = None  # 0..1
    memory_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    watts: float | None = None
    degrees: float | None = None  # Celsius
    mhz: float | None = None
    most_mhz: float | None = None
    held_back: str = ""  # by heat, by power, in words


class RankUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank's process uses."""

    cores: float  # of processor time, all its threads together; 1.0: one core wholly
    memory_bytes: Count  # resident


class MachineUse(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="machine"):
    """A machine at `unix_time`; what is a rate, is one since the record before."""

    unix_time: Seconds
    host: str
    cores: Few
    cores_busy: float  # 0..cores, whoever uses them
    memory_bytes: Count  # in use, as the kernel counts what is not available
    memory_total_bytes: Count
    sent_bytes: float = 0.0  # a second, over all interfaces but the loopback
    received_bytes: float = 0.0
    ranks: dict[Few, RankUse] = {}
    gpus: tuple[GpuUse, ...] = ()


class ClockAhead(msgspec.Struct, frozen=True, tag_field="kind", tag="clock"):
    """By how much a node's clock is ahead of node 0's, and how wrong that may be; written by node 0."""

    unix_time: Seconds
    node: Few
    ahead_seconds: Seconds
    error_seconds: Seconds


Record = MachineUse | ClockAhead
_decode = msgspec.json.Decoder(Record).decode


def file_name(node: int) -> str:
    """What a node's file is called."""
    return f"machine-{node}.jsonl"


def machine_files(run_dir: Path) -> dict[int, Path]:
    """The files in a run folder, by node.

    Raises:
        OSError: the folder cannot be read.
    """
    return numbered_files(run_dir, _FILE)


def read_machine(path: Path) -> Iterator[Record]:
    """The records of a file, in order; what cannot be read is skipped.

    Raises:
        OSError: it is not there, or is no such file.
    """
    return (record for line in read_lines(path) if (record := decode_record(line)) is not None)


def decode_record(line: bytes) -> Record | None:
    """The record in a line; None if it is torn, or of a kind that is not known."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode(line)
    return None
