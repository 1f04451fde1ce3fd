"""What `launch --check` says of a script: findings, and what was right. Plain data; the rules are beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from paceline.protocol.facts import Pass, ScriptFacts, SeenLoader

MISSING = "-"  # in place of a digest: a batch of another rank has more tensors
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
    """Whether most samples or batches are the same on all ranks: all of their tensors, as far as they are known."""
    return _mostly_same([*filter(_known, batch)] for batch in zip(*_columns(of_ranks), strict=True))


def unlike(of_ranks: Iterable[Sequence[Sequence[str]]]) -> bool:
    """Whether the ranks' samples differ in every tensor. Some labels are equal by chance; inputs are not."""
    columns = [[*filter(_known, column)] for column in _columns(of_ranks)]
    return bool(columns) and not any(map(_same_tensor, columns))


def _same_tensor(column: Sequence[tuple[str, ...]]) -> bool:
    floats = any(digest.startswith("f:") for digests in column for digest in digests)
    return _mostly_same([digests] for digests in column) if floats else not any(map(differs, column))


def _columns(of_ranks: Iterable[Sequence[Sequence[str]]]) -> list[list[tuple[str, ...]]]:
    """Of each tensor that tells samples apart: for each batch its digests on all ranks.

    One that is the same in each batch (a mask, positions) tells nothing, unless it is of floating point.
    """
    batches = [*zip(*of_ranks, strict=False)]
    width = max((len(leaves) for batch in batches for leaves in batch), default=0)
    missing = [MISSING] * width
    columns = [[tuple([*leaves, *missing][n] for leaves in batch) for batch in batches] for n in range(width)]
    return [column for column in columns if _tells(column)]


def _tells(column: Sequence[tuple[str, ...]]) -> bool:
    of_ranks = zip(*filter(_known, column), strict=True)
    return any(differs(of_rank) or of_rank[0].startswith("f:") for of_rank in of_ranks)


def _known(digests: Sequence[str]) -> bool:
    return all(digests) and {*digests} != {MISSING}


def _mostly_same(batches: Iterable[Sequence[Sequence[str]]]) -> bool:
    """Of those batches of which something is known."""
    same = [not any(map(differs, batch)) for batch in batches if batch]
    return 2 * sum(same) > len(same)


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
