"""What a session is when it starts: what defines it, its settings, its arithmetic and its name."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import CheckpointConfig, DataConfig, RunConfig, TrainConfig, dump
from paceline.data.plan import BatchPlan
from paceline.definition import BITS_ONLY, check_same
from paceline.errors import UsageError, plural
from paceline.observe import folder as run_folder
from paceline.sums import check_equal, together
from paceline.train.keeping import Place
from paceline.train.resume import Origin
from paceline.train.wording import shares_line
from paceline.worker.device import device_words
from paceline.worker.world import World


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


def opening(plan: BatchPlan, world: World, strategy: str, name: str) -> str:
    """The arithmetic of a session's first loop."""
    on = f"{plural(world.size, 'process', 'processes')} on {device_words(world.device)}"
    return f"{name}: {on}, strategy {strategy}; {plan.size_words}; {shares_line(plan, world.size)}"


def write_settings(place: Place | None, name: str, plan: BatchPlan, strategy: str, *, seed: int, epochs: int) -> None:
    """As config.toml, what a task would be given for such a training; on rank 0."""
    if place is None or place.attempt_dir is None:
        return
    shape = DataConfig(
        global_batch=plan.global_batch, accumulation=plan.accumulation, virtual_ranks=plan.virtual_ranks, tail=plan.tail
    )
    run = RunConfig(seed=seed, epochs=epochs)
    settings = TrainConfig(task=name, data=shape, run=run, checkpoint=CheckpointConfig(), strategy=strategy)
    run_folder.shelve_summary(place.folder, place.attempt)
    run_folder.write_settings(place.folder, dump(settings))


def script_name() -> str:
    """Of the program that runs: its file's name, or "session" in an interpreter."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    return Path(path).name if path else "session"
