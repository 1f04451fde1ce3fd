"""What a session is when it starts: its models as one state, the state to go on from, its arithmetic and its name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.state import Held
from paceline.data.plan import BatchPlan
from paceline.definition import BITS_ONLY, check_same
from paceline.errors import UsageError, plural
from paceline.observe import folder as run_folder
from paceline.sessions.prepared import Prepared
from paceline.store.store import Checkpoints
from paceline.sums import check_equal, together
from paceline.train.keeping import Place
from paceline.train.resume import Origin, from_disk, from_memory
from paceline.worker.world import World


@dataclass(frozen=True)
class Holders:
    """All models of a session, as one state to be saved."""

    parts: Sequence[Prepared]
    world: World
    virtual_ranks: int

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a share only of any of them."""
        return any(part.replica.sharded for part in self.parts)

    def state(self) -> list[Held]:
        """All tensors of all models."""
        return [held for part in self.parts for held in part.state()]


def origin_of(place: Place, world: World, *, resume: bool, trust: bool) -> Origin | None:
    """The state to go on from, if any (a collective).

    Raises:
        UsageError: on one rank: no state that is there can be trusted, or the run is finished.
    """
    if not resume and not place.generation:
        return None
    origin = from_memory(world) if place.generation else None
    checkpoints = Checkpoints(place.folder / run_folder.CHECKPOINTS, trust=trust)
    origin = from_disk(checkpoints, world, place.notices.append, after=origin) or origin
    if origin is None:
        with together(world):
            run_folder.check_not_finished(place.folder)
        if place.attempt > 1:
            place.notices.append("there is no checkpoint: it begins again at step 0")
    return origin


def compare(
    definition: Mapping[str, Any], origin: Origin | None, models: int, saved: int, world: World, *, exact: bool
) -> None:
    """Compare what defines the run over ranks, and with the state that is gone on with (a collective).

    Raises:
        UsageError: on one rank, naming what differs; ToldElsewhere on the others.
    """
    if exact:
        check_equal("processors, libraries and threads", {name: definition[name] for name in BITS_ONLY}, world)
    check_equal("data, optimizers and batches", {k: v for k, v in definition.items() if k not in BITS_ONLY}, world)
    if origin is not None:
        with together(world):
            check_same(origin.content.definition, definition, (), origin.where)
            if models != saved:
                raise UsageError(f"{origin.where} holds {saved} models, prepared were {models}")


def opening(plan: BatchPlan, world: World, strategy: str, name: str) -> list[str]:
    """The arithmetic of a session's first loop."""
    micro = -(-plan.global_batch // (plan.virtual_ranks * plan.accumulation))
    ranks = plural(plan.virtual_ranks, "rank" if plan.virtual_ranks == world.size else "virtual rank")
    exact = micro * plan.virtual_ranks * plan.accumulation == plan.global_batch
    return [
        f"{name}: {plural(world.size, 'process', 'processes')} on {world.device.type}, strategy {strategy}; "
        f"{plan.size_words}; global batch {plan.global_batch} = {ranks} x "
        f"{plural(plan.accumulation, 'micro-batch', 'micro-batches')} x {'' if exact else 'at most '}{micro}"
    ]


def script_name() -> str:
    """Of the program that runs: its file's name, or "session" in an interpreter."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    return Path(path).name if path else "session"
