"""Operations that do not fit together: what ranks have entered under one number of one stream."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.contract.evidence import Op
from paceline.guard.waits import Rank, Stream, parties_by, stream

OWN_SHAPES = frozenset({"all_gather", "gather", "scatter", "all_to_all", "all_to_all_single", "reduce_scatter"})
"""collectives for which ranks may rightly pass different shapes"""


@dataclass(frozen=True)
class Odds:
    """One number of one stream, and what has been entered under it."""

    stream: Stream
    seq: int
    parties: tuple[Mapping[int, Op], ...]  # rank -> what it has entered; the largest party first


def find_odds(ranks: Mapping[int, Rank]) -> list[Odds]:
    """The collectives and messages that do not fit together and did not get done, the earliest first.

    What all have got done is no matter, however different it looks: it has passed.
    """
    entered: dict[tuple[Stream, int], dict[int, Op]] = {}
    for number, one in ranks.items():
        for op in one.evidence.ops:
            entered.setdefault((stream(op, number), op.seq), {})[number] = op
    found: list[Odds] = []
    for (its, seq), ops in entered.items():
        if len(ops) < 2 or all(op.done for op in ops.values()):
            continue
        parties = split(ops)
        if len(parties) > 1:
            found.append(Odds(its, seq, parties))
    return sorted(found, key=lambda odds: (odds.seq, str(odds.stream)))


def split(ops: Mapping[int, Op], *, by_name: bool = True) -> tuple[Mapping[int, Op], ...]:
    """Split by what all must agree on; what one of them does not know is left out for all."""
    message = any(op.is_message for op in ops.values())
    kinds = {"" if message else op.kind for op in ops.values()}
    fields = ["name"] if message else ["kind", "name", "peer"]
    if len(kinds) == 1 and not kinds & OWN_SHAPES:
        fields += ["shape", "dtype"]
    if not by_name:
        fields.remove("name")
    known = [field for field in fields if all(getattr(op, field) not in ("", None) for op in ops.values())]
    return parties_by(ops, lambda op: tuple(getattr(op, field) for field in known))
