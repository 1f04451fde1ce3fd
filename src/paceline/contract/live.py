"""How every rank gets on now: what the head agent writes down for `paceline watch`, while somebody watches."""

import msgspec

from paceline.contract.evidence import Phase, Sample

LIVE = "live.json"  # in the attempt's folder: all ranks, each second
WATCHED = "watched"  # beside it: whoever watches touches it, again and again
CHECKPOINT_ASK = "ask-checkpoint-"  # and what follows is the asker's own: save after this step
MAX_LIVE_BYTES = 4 << 20


class LiveRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank at this moment."""

    rank: int
    host: str
    pid: int
    node: int = 0
    code: int | None = None  # its exit code; None while it runs
    lost: bool = False  # with its whole node
    step: int = 0
    phase: str = Phase.USER.word
    phase_seconds: tuple[float, ...] = ()  # spent in each phase so far
    still_seconds: float = 0.0  # since anything of it has moved
    waiting: bool = False  # for other ranks

    @classmethod
    def of(cls, one: Sample) -> "LiveRank":
        """What a watcher needs of a sample."""
        return cls(
            one.rank, one.host, one.pid, one.node, one.code, bool(one.lost), one.step, one.phase.word,
            tuple(round(seconds, 6) for seconds in one.phase_seconds), round(one.still_seconds, 1), one.waiting,
        )  # fmt: skip


class Live(msgspec.Struct, frozen=True):
    """All ranks of a generation."""

    unix_time: float
    generation: int
    ranks: tuple[LiveRank, ...]
