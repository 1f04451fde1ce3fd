"""The requests of doctor and the answers of a host: one JSON line each, over the host program's stdin and stdout.

A request names no program and no code. A host executes only these requests.
"""

from typing import Literal

import msgspec

from paceline.host.facts import Facts

MAX_LINE_BYTES = 1 << 20


class _Request(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Examine(_Request, frozen=True):
    """Gather the facts, and listen for peers with `token`. Answer: Examined."""

    token: str
    folder: str


class AskTime(_Request, frozen=True):
    """Answer: Time."""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address, port and token of a host that listens."""

    address: str
    port: int
    token: str


class Connect(_Request, frozen=True):
    """Connect to all targets in parallel, each for `seconds` at most. Answer: Connected.

    Then send to each for `measure_seconds`, to measure its throughput.
    """

    targets: tuple[Target, ...]
    seconds: float
    measure_seconds: float = 0.0


class Probe(_Request, frozen=True):
    """Write, read or remove a small file named after the token, in the folder or its nearest parent. Answer: Done."""

    act: Literal["write", "read", "remove"]
    folder: str
    token: str


Request = Examine | AskTime | Connect | Probe


class ExamineAnswer(msgspec.Struct, frozen=True):
    """The facts, the port at which the host listens, and the disk of the run folder or its nearest parent."""

    facts: Facts
    port: int
    disk_path: str
    disk_free: int  # bytes
    disk_size: int  # bytes


class Time(msgspec.Struct, frozen=True):
    """The wall clock."""

    wall_seconds: float


class Link(msgspec.Struct, frozen=True):
    """The reason why a connection failed, or the shortest round trip and the measured throughput."""

    error: str = ""
    round_trip_seconds: float = 0.0
    bytes_per_second: float = 0.0


class ConnectAnswer(msgspec.Struct, frozen=True):
    """A link for each target, in their order."""

    links: tuple[Link, ...]


class FolderProbeAnswer(msgspec.Struct, frozen=True):
    """The error; empty if there was none."""

    error: str = ""


class RequestRefusal(msgspec.Struct, frozen=True):
    """The answer to a request that is invalid or failed."""

    refused: str
