"""What was reported while a script ran, as findings of `--check`: diverged replicas, swallowed exceptions, NaN, ..."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from paceline.runs.attempt import Noted
from paceline.verify.finding import Level, Remark


class Kind(NamedTuple):
    """How a report of one kind counts."""

    level: Level
    type_instead: str = ""
    explained_by: frozenset[str] = frozenset()  # rules: a finding of one of these is the cause, and is enough


KINDS = {
    "diverged": Kind(
        "wrong",
        "the same number of steps on all ranks; weights and optimizer settings that no rank changes alone",
        frozenset({"gradients", "different start", "replicas", "uneven steps"}),
    ),
    "mismatch": Kind(
        "wrong", "the same collectives in the same order on all ranks", frozenset({"uneven steps", "swallowed"})
    ),
    "not finite": Kind("wrong", "if not torch.isfinite(loss): raise; then correct the batch or the rate that is named"),
    "swallowed": Kind("wrong", "raise, or correct the cause: a batch must be left out on all ranks or on none"),
    "thread": Kind("wrong", "correct the error that ends this thread"),
    "stale": Kind("wrong", "the same steps on all ranks, each with a batch and a backward() of its own"),
    "few steps": Kind(
        "wrong", "the same number of batches on each rank: DistributedSampler", frozenset({"uneven steps"})
    ),
    "shadowed": Kind("note"),  # epochs are cut, and Join is meant for ranks with fewer batches
    "slow": Kind("note"),  # depends on what else the machine does
    "left": Kind("note"),
    "round-off": Kind("note"),
}
OTHER = Kind("wrong")


def run_findings(noted: Sequence[Noted], wrong: AbstractSet[str]) -> Iterator[Remark]:
    """One finding for each report on the script; `wrong` are the rules that found a mistake."""
    reported = wrong | {one.kind for one in noted}
    for one in noted:
        if not one.kind:
            continue
        kind = KINDS.get(one.kind, OTHER)
        level = "note" if kind.explained_by & reported else kind.level
        yield Remark(one.kind, level, one.words, "", kind.type_instead if level == "wrong" else "")
