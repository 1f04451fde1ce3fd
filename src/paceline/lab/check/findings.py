"""The findings of `launch --check` about a script, and the comparisons of data that several rules share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from paceline.protocol.facts import LoaderPass, ScriptFacts, SeenLoader

MISSING_DIGEST = "-"  # in place of a digest, if the batch of a different rank has more tensors
Level = Literal["wrong", "costs", "note", "right"]
LEVELS: tuple[Level, ...] = ("wrong", "costs", "note", "right")


class Finding(msgspec.Struct, frozen=True):
    """One finding of a rule.

    `wrong`: the result is not the intended one. `costs`: the script is slower than necessary. Only these two levels
    affect the exit code.
    """

    rule: str
    level: Level
    words: str  # the condition
    site: str = ""
    type_instead: str = ""  # the fix
    seen: str = ""  # the observed facts


Loaders = dict[int, SeenLoader]  # by rank


def group_corresponding_loaders(ranks: Sequence[ScriptFacts]) -> list[Loaders]:
    """The corresponding loaders of all ranks: the first, second, ... that each rank iterates over at a line."""
    groups: dict[tuple[str, int], Loaders] = {}
    for facts in ranks:
        count: defaultdict[str, int] = defaultdict(int)
        for loader in facts.loaders:
            groups.setdefault((loader.site, count[loader.site]), {})[facts.rank] = loader
            count[loader.site] += 1
    return [*groups.values()]


def are_samples_mostly_equal(digests_by_rank: Iterable[Sequence[Sequence[str]]]) -> bool:
    return _mostly_same([*filter(_known, batch)] for batch in zip(*_columns(digests_by_rank), strict=True))


def do_all_tensors_differ(digests_by_rank: Iterable[Sequence[Sequence[str]]]) -> bool:
    """Whether the ranks' samples differ in every tensor. Some labels are equal by chance. Inputs are not."""
    columns = [[*filter(_known, column)] for column in _columns(digests_by_rank)]
    return bool(columns) and not any(map(_same_tensor, columns))


def _same_tensor(column: Sequence[tuple[str, ...]]) -> bool:
    floats = any(digest.startswith("f:") for digests in column for digest in digests)
    return _mostly_same([digests] for digests in column) if floats else not any(map(differs, column))


def _columns(batches_by_rank: Iterable[Sequence[Sequence[str]]]) -> list[list[tuple[str, ...]]]:
    """For each tensor that distinguishes samples: the digests of all ranks, batch by batch.

    A tensor that is the same in each batch (a mask, positions) distinguishes nothing, unless it is floating-point.
    """
    batches = [*zip(*batches_by_rank, strict=False)]
    width = max((len(leaves) for batch in batches for leaves in batch), default=0)
    padding = [MISSING_DIGEST] * width
    columns = [[tuple([*leaves, *padding][n] for leaves in batch) for batch in batches] for n in range(width)]
    return [
        column for column in columns
        if any(differs(digests) or digests[0].startswith("f:") for digests in zip(*filter(_known, column), strict=True))
    ]  # fmt: skip


def _known(digests: Sequence[str]) -> bool:
    return all(digests) and {*digests} != {MISSING_DIGEST}


def _mostly_same(batches: Iterable[Sequence[Sequence[str]]]) -> bool:
    are_same = [not any(map(differs, batch)) for batch in batches if batch]
    return 2 * sum(are_same) > len(are_same)


def largest_overlap_fraction(passes: Sequence[LoaderPass]) -> float:
    sets = [set(p.indices) for p in passes]
    return max((len(a & b) / max(1, min(len(a), len(b))) for n, a in enumerate(sets) for b in sets[:n]), default=0.0)


def is_same_dataset(loaders: Loaders) -> bool:
    """Whether an index means the same sample on all ranks."""
    return are_samples_mostly_equal(loader.probes for loader in loaders.values())


def differs(values: Iterable[object]) -> bool:
    return len({*values}) > 1
