"""What doctor may ask of a host, and what it answers: one JSON line each, over the host program's stdin and stdout.

A request names no program and no code: a host does these few things and nothing else.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.host.facts import Facts as Facts

MAX_LINE_BYTES = 1 << 20

Reason = Literal["ok", "refused", "filtered", "no route", "name unknown", "stranger", "failed"]
"""how an attempt to connect ended; filtered: no answer in time; stranger: somebody answered, but not the one meant"""


class AskFacts(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answer: Facts."""


class AskTime(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answer: Time."""


class Resolve(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What are these names to you? Answer: Resolved."""

    names: tuple[str, ...]


class Listen(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Listen on a free port, at all addresses, until the end, for whoever knows `token`. Answer: Listening."""

    token: str


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where another host listens: its name or address, port and token."""

    address: str
    port: int
    token: str


class Connect(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Connect to all of these at once. Answer: Connected."""

    targets: tuple[Target, ...]
    seconds: float


class Measure(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Round trips to a target, then as many bytes as go through in `seconds`. Answer: Measured."""

    target: Target
    seconds: float


class WriteProbe(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Write a small file, named after the token, into the folder or its nearest parent. Answer: Done."""

    folder: str
    token: str


class ReadProbe(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Is that file to be seen here? Answer: Done."""

    folder: str
    token: str


class RemoveProbe(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Remove that file. Answer: Done."""

    folder: str
    token: str


class AskDisk(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Room where the folder is, or will be. Answer: Disk."""

    folder: str


class Fingerprint(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Sizes and hashes of the IDX files in a folder; empty: the packaged ones. Answer: Files."""

    folder: str


class Rehearse(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Start ranks that train a few steps of a task and add up its gradients. Answer: Rehearsed, from rank 0's host."""

    first_rank: int
    workers: int
    world_size: int
    address: str
    port: int
    interface: str
    threads: int
    task: str
    options: dict[str, str]
    batch_size: int
    cwd: str
    seconds: float


class FreePort(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A port that is free now. Answer: Listening."""


Request = (
    AskFacts | AskTime | Resolve | Listen | Connect | Measure | WriteProbe | ReadProbe | RemoveProbe | AskDisk
    | Fingerprint | Rehearse | FreePort
)  # fmt: skip


class Time(msgspec.Struct, frozen=True):
    """The clock on the wall."""

    wall_seconds: float


class Resolved(msgspec.Struct, frozen=True):
    """The addresses of each name; none: unknown."""

    names: dict[str, tuple[str, ...]]


class Listening(msgspec.Struct, frozen=True):
    """The port."""

    port: int


class Connected(msgspec.Struct, frozen=True):
    """How each attempt ended, in the order of the targets."""

    reasons: tuple[Reason, ...]


class Measured(msgspec.Struct, frozen=True):
    """Shortest round trip, and what went through."""

    reason: Reason
    round_trip_seconds: float = 0.0
    bytes_per_second: float = 0.0


class Done(msgspec.Struct, frozen=True):
    """Whether it went well, else why not."""

    ok: bool
    why: str = ""


class Disk(msgspec.Struct, frozen=True):
    """Free and total bytes at `path`, which exists; `why` there is no answer otherwise."""

    path: str
    free: int
    total: int
    why: str = ""


class File(msgspec.Struct, frozen=True):
    """One data file."""

    name: str
    size: int
    sha256: str


class Files(msgspec.Struct, frozen=True):
    """The data files of a folder; `why` they could not be read otherwise."""

    files: tuple[File, ...]
    why: str = ""


class Rehearsed(msgspec.Struct, frozen=True):
    """What rank 0 measured; `why` there is nothing otherwise."""

    parameters: int = 0
    gradient_bytes: int = 0
    step_seconds: float = 0.0
    reduce_seconds: float = 0.0
    bytes_per_second: float = 0.0  # gradient_bytes / reduce_seconds
    why: str = ""


class Refused(msgspec.Struct, frozen=True):
    """The answer to what could not be understood or done."""

    refused: str


def bounded(line: bytes) -> bytes:
    """The line, if a peer may send one as long as that.

    Raises:
        ValueError: if not.
    """
    if len(line) > MAX_LINE_BYTES or not line.endswith(b"\n"):
        raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes, or cut off: {line[:60]!r}")
    return line
