"""What `launch --check` says of a script: findings, and what was right. Plain data; the rules are beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from paceline.contract.facts import Pass, ScriptFacts, SeenLoader

Level = Literal["wrong", "costs", "note", "right"]
LEVELS: tuple[Level, ...] = ("wrong", "costs", "note", "right")


class Remark(msgspec.Struct, frozen=True):
    """One thing. `wrong`: the result is not what was meant. `costs`: slower than need be. Only these two count."""

    rule: str
    level: Level
    words: str
    site: str = ""
    type_instead: str = ""
    seen: str = ""


Loaders = dict[int, SeenLoader]  # by rank


def loaders_of(ranks: Sequence[ScriptFacts]) -> list[Loaders]:
    """The loaders that belong together: the first, second, ... that each rank goes through at one line."""
    found: dict[tuple[str, int], Loaders] = {}
    for facts in ranks:
        count: defaultdict[str, int] = defaultdict(int)
        for loader in facts.loaders:
            found.setdefault((loader.site, count[loader.site]), {})[facts.rank] = loader
            count[loader.site] += 1
    return [*found.values()]


def same_leaf(of_ranks: Iterable[Sequence[Sequence[str]]]) -> bool:
    """Whether a tensor that tells samples apart is the same on all ranks.

    One that is the same in each batch (a mask, positions) tells nothing, unless it is of floating point.
    """
    columns = [[*zip(*rows, strict=False)] for rows in of_ranks]
    return any(
        all(column == many[0] for column in many[1:])
        and all(many[0])
        and (len(set(many[0])) > 1 or many[0][0].startswith("f:"))
        for many in zip(*columns, strict=False)
    )


def shared_part(passes: Sequence[Pass]) -> float:
    """Which part of a rank's indices other ranks have drawn, too."""
    sets = [set(one.indices) for one in passes]
    return max((len(a & b) / max(1, min(len(a), len(b))) for n, a in enumerate(sets) for b in sets[:n]), default=0.0)


def same_data(loaders: Loaders) -> bool:
    """Whether a sample with one index is the same on all ranks."""
    return same_leaf(loader.probes for loader in loaders.values())


def differs(values: Iterable[object]) -> bool:
    """Whether not all are equal."""
    return len({*values}) > 1


def ranks_named(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0, 2"."""
    told = [str(rank) for rank in ranks]
    return ("rank " if len(told) == 1 else "ranks ") + ", ".join(told)
