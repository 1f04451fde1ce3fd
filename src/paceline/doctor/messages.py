"""The requests and answers between doctor and a host: one JSON line each, over the host program's stdin and stdout.

A request names no program and no code: a host does these few things and nothing else.
"""

from typing import Literal

import msgspec

MAX_LINE_BYTES = 1 << 20

Reason = Literal["ok", "refused", "filtered", "no route", "name unknown", "stranger", "failed"]
"""how an attempt to connect ended; filtered: no answer in time; stranger: somebody answered, but not the one meant"""


class _Request(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The base of what may be asked."""


class AskFacts(_Request, frozen=True):
    """Answer: Facts."""


class AskTime(_Request, frozen=True):
    """Answer: Time."""


class Resolve(_Request, frozen=True):
    """Look these names up. Answer: Resolved."""

    names: tuple[str, ...]


class Listen(_Request, frozen=True):
    """Listen on a free port, at all addresses, until the end, for whoever knows `token`. Answer: Listening."""

    token: str


class FreePort(_Request, frozen=True):
    """Find a port that is free now. Answer: Listening."""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where another host listens: its name or address, port and token."""

    address: str
    port: int
    token: str


class Connect(_Request, frozen=True):
    """Connect to all of these at once. Answer: Connected."""

    targets: tuple[Target, ...]
    seconds: float


class MeasureLink(_Request, frozen=True):
    """Round trips to a target, then as many bytes as go through in `seconds`. Answer: LinkSpeed."""

    target: Target
    seconds: float


class Probe(_Request, frozen=True):
    """Write, look for or remove a small file named after the token, in the folder or nearest parent. Answer: Done."""

    act: Literal["write", "read", "remove"]
    folder: str
    token: str


class AskDisk(_Request, frozen=True):
    """Room where the folder is, or will be. Answer: Disk."""

    folder: str


class HashData(_Request, frozen=True):
    """Sizes and hashes of the IDX files in a folder; empty: the packaged ones. Answer: Files."""

    folder: str


class Rehearse(_Request, frozen=True):
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
    device: str = "cpu"
    backend: str = "auto"
    along_tensor: int = 1  # ranks that are to share each layer


Request = (
    AskFacts | AskTime | Resolve | Listen | FreePort | Connect | MeasureLink | Probe | AskDisk | HashData | Rehearse
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


class LinkSpeed(msgspec.Struct, frozen=True):
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
    device: str = "cpu"  # of rank 0, with its name
    step_seconds_of: tuple[float, ...] = ()  # each rank
    tensor_bytes: int = 0  # of a step, that layers shared along tensor would hand to sums over ranks
    why: str = ""


class Refused(msgspec.Struct, frozen=True):
    """The answer to what could not be understood or done."""

    refused: str
