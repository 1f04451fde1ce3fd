"""A whole training on this rank: from the configuration to the weights on disk."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline import __version__
from paceline.checkpoint.store import Checkpoints
from paceline.collectives import check_equal, gather_words, together
from paceline.config import EXACT, TrainConfig, default_strategy, dump, repeatable, resolved
from paceline.errors import ExitCode, PacelineError
from paceline.observe.folder import (
    CHECKPOINTS,
    attempt_number,
    create_attempt_dir,
    lock_run_dir,
    open_run_dir,
    write_settings,
)
from paceline.observe.summary import Summary, write_summary
from paceline.train.definition import allowed_changes, check_same, settings
from paceline.train.determinism import deterministic, holds_for
from paceline.train.keeping import Place
from paceline.train.prepare import Parts, prepare
from paceline.train.resume import Origin, from_disk, from_memory
from paceline.train.training import Training
from paceline.world import World, joined


@dataclass(frozen=True)
class Ended:
    """Where everything lies, and DONE or SAVED: trained to the end, or stopped in good order."""

    folder: Path
    code: ExitCode


def train(config: TrainConfig, *, run_dir: Path | None = None) -> Ended:
    """Train as `config` says, as the rank that the environment says.

    Args:
        config: all settings.
        run_dir: the run folder, if a launcher has made it already.

    Raises:
        UsageError: before the first step, told by one rank.
        TrainingError: while training, on every rank that notices.
    """
    world = World.from_env(device=config.launch.device, backend=config.launch.backend)
    with joined(world, timeout_seconds=config.launch.timeout), _place(config, world, run_dir) as place:
        config = resolved(config, world.size)
        try:
            check_equal("settings", settings(config), world)
            with deterministic() if config.strategy in EXACT else nullcontext():
                parts = prepare(config, world)
                if place.attempt_dir is not None:  # rank 0
                    _write_down(config, place, parts)
                place = replace(place, definition={**settings(config), **_facts(parts)})
                if config.strategy in EXACT:
                    check_equal("processors and libraries", place.definition["hardware"], world)
                    check_equal("threads per rank", torch.get_num_threads(), world)
                origin = _origin(config, place, world)
                if origin is not None:
                    with together(world):
                        parts.replica.load(origin.source)
                code = Training(parts, place, origin).run()
        except BaseException as error:
            if run_dir is None and world.rank == 0:  # with a launcher of ours, that one knows the exit code
                _summarise_failure(config, place.folder, world, error)
            raise
    return Ended(place.folder, code)


@contextmanager
def _place(config: TrainConfig, world: World, prepared: Path | None) -> Generator[Place]:
    """The run folder, taken for us, and which attempt and generation of the run this is; the same on all ranks."""
    c, lock = config.checkpoint, None
    mine: dict[str, Any] = {"folder": "", "attempt": 0}
    attempt_dir: Path | None = None
    try:
        with together(world):
            if world.rank == 0:
                folder = prepared or open_run_dir(
                    config.run.run_dir, str(config.task), resume=c.resume == "auto", fresh=c.fresh
                )
                if prepared is None:
                    lock = lock_run_dir(folder)
                    attempt_dir = create_attempt_dir(folder)[1]
                else:
                    attempt_dir = Path(os.environ["PACELINE_ATTEMPT_DIR"])
                mine = {"folder": str(folder), "attempt": attempt_number(attempt_dir)}
        told: dict[str, Any] = gather_words(mine, world)[0]
        generation = int(os.environ.get("PACELINE_GENERATION", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        yield Place(Path(told["folder"]), told["attempt"], generation, attempt_dir)
    finally:
        if lock is not None:
            os.close(lock)


def _write_down(config: TrainConfig, place: Place, parts: Parts) -> None:
    assert place.attempt_dir is not None
    write_settings(place.folder, dump(repeatable(config)))
    write_settings(place.attempt_dir, dump(config))  # what restarted workers read: this very start
    environment = msgspec.json.encode(_environment(parts.replica.world))
    (place.folder / "environment.json").write_bytes(msgspec.json.format(environment, indent=2))


def _facts(parts: Parts) -> dict[str, Any]:
    """The part of the run's definition that is found out, not set."""
    return {"data": parts.data, "hardware": holds_for(parts.replica.world.device)}


def _origin(config: TrainConfig, place: Place, world: World) -> Origin | None:
    """What to go on from, if anything (a collective).

    Raises:
        UsageError: told by one rank: nothing that is there can be trusted, or it is of another run.
    """
    if config.checkpoint.resume != "auto" and not place.generation:
        return None
    origin = from_memory(world) if place.generation else None
    checkpoints = Checkpoints(place.folder / CHECKPOINTS)
    origin = from_disk(checkpoints, world, place.notices.append, after=origin) or origin
    if origin is not None:
        with together(world):
            allowed = allowed_changes(config.checkpoint.allow_change)
            changes = check_same(origin.content.definition, place.definition, allowed, origin.where)
        place.notices.extend(f"changed, as allowed: {change}" for change in changes)
    return origin


def _summarise_failure(config: TrainConfig, folder: Path, world: World, error: BaseException) -> None:
    code = error.exit_code if isinstance(error, PacelineError) else ExitCode.FAILED
    code = 130 if isinstance(error, KeyboardInterrupt) else int(code)
    name = default_strategy(config, world.size)
    with suppress(OSError):  # the full disk is the error itself
        write_summary(
            folder, Summary(str(config.task), code, name, world.size, failure=f"{type(error).__name__}: {error}")
        )


def _environment(world: World) -> Mapping[str, Any]:
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return {
        "paceline": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "device": str(world.device),
        "gpu": gpu,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": world.backend,
        "world_size": world.size,
        "threads_per_rank": torch.get_num_threads(),
        "bits_hold_for": holds_for(world.device),
        "started_by": "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "paceline",
    }
