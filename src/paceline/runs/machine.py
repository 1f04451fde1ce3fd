"""The use of each machine, once a second: machine-<node>.jsonl in a run's folder (no torch here).

The agent of a node writes its file, or local rank 0 if the node has no agent. Its size is bounded (`runs.writers`).
"""

import re
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.runs.events import Count, RankCount, Seconds
from paceline.runs.reading import numbered_files

_FILE = re.compile(r"machine-([0-9]{1,9})\.jsonl")


class GpuUtilization(msgspec.Struct, frozen=True, omit_defaults=True):
    """One GPU, as its driver reports it. None: the driver does not report this value."""

    index: RankCount
    name: str = ""
    busy: float | None = None  # 0..1
    memory_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    watts: float | None = None
    degrees: float | None = None  # Celsius
    mhz: float | None = None
    most_mhz: float | None = None
    held_back: str = ""  # the reason why its clock is reduced: heat, power


class RankUtilization(msgspec.Struct, frozen=True, omit_defaults=True):
    """The use of a rank's process."""

    cores: float  # processor time of all its threads, in cores
    memory_bytes: Count  # resident


class NodeUtilization(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="machine"):
    """The use of a node at `unix_time`. Rates are means since the previous record."""

    unix_time: Seconds
    host: str
    cores: RankCount
    cores_busy: float  # 0..cores, of all processes
    memory_bytes: Count  # in use: the total minus the kernel's "available" memory
    memory_total_bytes: Count
    sent_bytes: float = 0.0  # per second, over all interfaces except the loopback
    received_bytes: float = 0.0
    ranks: dict[RankCount, RankUtilization] = {}
    gpus: tuple[GpuUtilization, ...] = ()


class ClockOffset(msgspec.Struct, frozen=True, tag_field="kind", tag="clock"):
    """The offset of a node's clock from that of node 0, and the error of this number. Written by node 0."""

    unix_time: Seconds
    node: RankCount
    ahead_seconds: Seconds
    error_seconds: Seconds


MachineRecord = NodeUtilization | ClockOffset
_decode = msgspec.json.Decoder(MachineRecord).decode


def node_log_name(node: int) -> str:
    return f"machine-{node}.jsonl"


def node_log_files(run_dir: Path) -> dict[int, Path]:
    return numbered_files(run_dir, _FILE)


def decode_record(line: bytes) -> MachineRecord | None:
    """The record in a line; None if it is incomplete or of an unknown kind."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode(line)
    return None
