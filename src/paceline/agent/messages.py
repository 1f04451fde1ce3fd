"""What the agents of one job say to each other; see channel.py for how, head.py and follower.py for when.

Times are ages in seconds, never clock readings: no two hosts' clocks can be compared. Only the signs of life carry
readings, for finding out by how much the clocks differ: see clocks.py.
"""

import signal

import msgspec

from paceline.contract.evidence import Evidence, Sample
from paceline.host.facts import Facts

BEAT_SECONDS = 2.0  # between two signs of life, in both directions
SILENCE_SECONDS = 15.0  # then the other side is lost: a few lost packets are not, TCP sends them again well within it
PROOF = ".shared"  # the file in the attempt's folder that all nodes must see


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Node to head, first: who comes, with how many workers, and where others can try to reach it."""

    node: int  # -1: whichever is free, of a run that is on its way
    nodes: int
    nproc: int
    probe_port: int
    facts: Facts
    ranks: tuple[int, ...] = ()  # where another launcher has given them out: see attach.py


class ToStore(msgspec.Struct, frozen=True, tag=True):
    """Node to head, first, on a link of its own: after an `Alive` the rest is a worker's, and for the store."""


class PeerAddress(msgspec.Struct, frozen=True):
    """Where a node can be tried to be reached: a socket that listens and says nothing."""

    host: str
    address: str
    port: int


class Reach(msgspec.Struct, frozen=True, tag=True):
    """Head to node: try to connect to all of these."""

    peers: tuple[PeerAddress, ...]


class Reached(msgspec.Struct, frozen=True, tag=True):
    """Node to head: whom it cannot reach, and why, in words."""

    unreachable: tuple[str, ...]


class StartOrder(msgspec.Struct, frozen=True, tag=True):
    """Head to node: start these workers."""

    generation: int
    first_rank: int
    world_size: int
    master_port: int
    attempt_dir: str
    proof: str  # what the attempt folder's file `.shared` holds, where all nodes must see one folder; else empty
    group_rank: int = 0  # the node's place among those that take part
    groups: int = 1
    restarts: int = 0  # after a failure


class Enter(msgspec.Struct, frozen=True, tag=True):
    """Head to a node that has come while the run is on its way: be this one, from the next generation on.

    It looks for the attempt's folder (see `StartOrder.proof`), and answers with a `StartReply` of generation -1.
    """

    node: int
    attempt_dir: str
    proof: str


class StartReply(msgspec.Struct, frozen=True, tag=True):
    """Node to head: they run; or why they cannot."""

    generation: int
    refusal: str = ""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Node to head, as often as the guard looks and whenever a worker has ended: how they are. A sign of life, too."""

    generation: int
    workers: tuple[Sample, ...] = ()  # with ages in the place of times
    oom_kills: int = 0
    stopped: bool = False  # the generation is ended, and nothing of it runs any more
    left: tuple[int, ...] = ()  # but for these pids, which not even SIGKILL has ended
    unix_time: float | None = None  # when it was sent, by the node's clock
    alive_took_seconds: float | None = None  # of an `Alive` since the last beat: sent by head's, come by node's clock


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Head to node: what exactly does each of your workers do? Wait for their answers no longer than this."""

    question: int
    patience_seconds: float


class Shown(msgspec.Struct, frozen=True, tag=True):
    """Node to head: one worker, exactly, or the end of the answer. One by one, for each can be large."""

    question: int
    evidence: Evidence | None


class Release(msgspec.Struct, frozen=True, tag=True):
    """Head to node: have these ranks leave the collective in which they wait, with this word (see guarding.py)."""

    ranks: tuple[int, ...]
    word: str


class Ordered(msgspec.Struct, frozen=True, tag=True):
    """Node to head: it was ordered from outside to stop: by this signal, or 0: its launcher is gone."""

    signal: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Head to node: end the generation; the workers are asked, and given so much time. A later one can shorten it."""

    grace_seconds: float
    signal: int = signal.SIGTERM  # by which they are asked; each reaches a worker once


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Head to node, first and then every two seconds."""

    unix_time: float | None = None  # when it was sent, by the head's clock


class RunOver(msgspec.Struct, frozen=True, tag=True):
    """Head to node: the run is over, for this node at least; exit with this code, and say why where there are words."""

    code: int
    words: str = ""


Message = (
    Hello
    | ToStore
    | Enter
    | Reach
    | Reached
    | StartOrder
    | StartReply
    | Beat
    | Ask
    | Shown
    | Release
    | Ordered
    | Stop
    | Alive
    | RunOver
)
