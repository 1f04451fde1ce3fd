"""Runs that nobody has trained: ranks that work as long as is said, in lockstep."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.view.step_parts import Run, Spent


@dataclass(frozen=True)
class Rank:
    """Seconds of a step."""

    data: float = 0.001
    forward: float = 0.01
    backward: float = 0.02
    optimizer: float = 0.002
    between: float = 0.0001
    jitter: float = 0.0  # each of them is longer by up to this part, at random


def lockstep(
    ranks: Sequence[Rank], *, exchange: float = 0.0, in_backward: bool = False, steps: int = 60, seed: int = 0,
    hidden: float = 0.0,
) -> Run:  # fmt: skip
    """A run in which everybody waits for the slowest, and then `exchange` seconds for the sums.

    Args:
        ranks: how long each works.
        exchange: seconds that every rank needs for it.
        in_backward: whether they wait within backward, as DDP does, or after it.
        steps: how many.
        seed: of the jitter.
        hidden: seconds of a step that no phase accounts for.
    """
    chance = random.Random(seed)
    found: list[Mapping[int, Spent]] = []
    for _ in range(steps):
        own = [_drawn(rank, chance) for rank in ranks]
        end = max(sum(each.values()) for each in own) + exchange
        step: dict[int, Spent] = {}
        for rank, each in enumerate(own):
            waits = end - sum(each.values())
            backward = each["backward"] + (waits if in_backward else 0.0)
            sync = 0.0 if in_backward else waits
            step[rank] = Spent(
                each["data"], each["forward"], backward, sync, each["optimizer"], end + hidden, each["between"]
            )
        found.append(step)
    return Run(found, 64.0 * len(ranks), dict.fromkeys(range(len(ranks)), "here"))


def _drawn(rank: Rank, chance: random.Random) -> dict[str, float]:
    def some(seconds: float) -> float:
        return seconds * (1 + rank.jitter * chance.random())

    return {
        "data": some(rank.data), "forward": some(rank.forward), "backward": some(rank.backward),
        "optimizer": some(rank.optimizer), "between": rank.between,
    }  # fmt: skip
