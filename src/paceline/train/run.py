"""A whole training on this rank: from the configuration to the weights on disk."""

import os
import platform
import socket
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline import __version__
from paceline.checkpoint.resume import ResumePoint, RunLocation, find_resume_point, run_location
from paceline.collectives.communicator import communicator, make_communicator
from paceline.collectives.control import check_equal, together, told_once
from paceline.config.definition import BITS_ONLY, allowed_changes, check_same, settings
from paceline.config.mesh import mesh_of
from paceline.config.settings import TrainConfig, dump, load, repeatable, with_defaults
from paceline.config.strategies import EXACT
from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.protocol.control import WorkerBirth
from paceline.protocol.evidence import Phase
from paceline.rank.guard import Guard
from paceline.rank.world import World, device_words, joined, on_mesh
from paceline.runs import folder as run_folder
from paceline.runs import writing
from paceline.runs.summary import Summary, write_summary
from paceline.train.alike import check_code
from paceline.train.computing import take_threads
from paceline.train.determinism import deterministic, holds_for
from paceline.train.prepare import Parts, prepare
from paceline.train.training import Training
from paceline.train.weights import begin_with


@dataclass(frozen=True)
class Outcome:
    """The run folder, and DONE or SAVED: trained to the end, or stopped in good order."""

    folder: Path
    code: ExitCode


def train(config: TrainConfig) -> Outcome:
    """Train as `config` says, as the rank that the environment names.

    Raises:
        UsageError: before the first step, on one rank; ReportedByPeer on the others.
        TrainingError: while training, on every rank that notices; StallError where the guard has broken up a
            collective.
    """
    guard = Guard.of_process()
    guard.detach_probes()
    guard.box.enter(Phase.INIT)
    prepared = config.run.run_dir if WorkerBirth.here() is not None else None  # the launcher has made and locked it
    world = World.from_env(device=config.launch.device, backend=config.launch.backend)
    with joined(world, timeout_seconds=config.launch.timeout), run_location(
        world, config.run.run_dir, str(config.task), prepared=prepared, resume=config.checkpoint.resume == "auto",
        fresh=config.checkpoint.fresh, trust=config.run.trust,
    ) as place:  # fmt: skip
        asked, config = config.data, with_defaults(config, world.size)
        if asked.batch_size and world.size > 1 and not (asked.global_batch or asked.virtual_ranks):
            place.notices.append(
                f"--batch-size {asked.batch_size} is per rank: the global batch changes with the number of ranks. "
                f"To keep it: --global-batch {config.data.global_batch}"
            )
        world = on_mesh(world, mesh_of(config.launch.mesh, world.size), timeout_seconds=config.launch.timeout)
        try:
            make_communicator(config.launch.collectives)
            check_equal("settings", settings(config), world)
            rehearsed = config.checkpoint.rehearse_preemption
            with deterministic() if config.strategy in EXACT else nullcontext():
                place.notices.extend(take_threads(config.launch.threads_per_rank, world))
                config = sticky(config, place)
                parts = prepare(config, world)
                config = parts.config
                check_code(world)
                if rehearsed is not None and 0 < parts.total_steps <= rehearsed:
                    error = UsageError(code="rehearsal-too-late", value=rehearsed, steps=parts.total_steps)
                    raise told_once(error, world)
                facts = {**parts.own, "data": parts.data, "hardware": holds_for(world.device)}
                place = replace(place, definition={**settings(config), **facts})
                if config.strategy in EXACT:
                    check_equal("processors and libraries", facts["hardware"], world)
                    check_equal("threads per rank", torch.get_num_threads(), world)
                origin = _origin(config, place, world)
                if origin is not None:
                    with together(world):
                        parts.take_over(origin)
                    begun = origin.content.definition.get("init_sha256")
                elif (begun := config.model.init_from) is not None:
                    trust, report = config.run.trust, place.notices.append
                    begun = begin_with(parts.replica, begun, trust=trust, report=report)
                    if parts.average is not None:
                        parts.average.begin()
                facts = {"unbroken": _unbroken(config, place, origin), "init_sha256": begun}
                place = replace(place, definition={**place.definition, **facts})
                if place.attempt_dir is not None:  # rank 0; not earlier: a refused run must overwrite nothing
                    _write_down(config, place, parts)
                code = Training(parts, place, origin).run()
        except BaseException as error:
            refused = isinstance(error, PacelineError) and error.exit_code == ExitCode.USAGE and place.attempt > 1
            if prepared is None and world.rank == 0 and not refused:  # a launcher of ours knows the exit code itself
                _summarise_failure(config, place.folder, world, error)
            stalled = None if isinstance(error, PacelineError) else guard.stall_error(error)
            if stalled is not None:
                raise stalled from error
            raise
    return Outcome(place.folder, code)


def sticky(config: TrainConfig, place: RunLocation) -> TrainConfig:
    """`config`; where a run goes on that chooses its precision by itself, with the one that it has chosen before."""
    path = place.folder / run_folder.CONFIG
    goes_on = place.generation or config.checkpoint.resume == "auto"
    if config.compute.precision != "auto" or not goes_on or config.checkpoint.fresh or not path.is_file():
        return config
    chosen = load(path, ours=not config.run.trust).compute.precision
    return replace(config, compute=replace(config.compute, precision=chosen))


def _write_down(config: TrainConfig, place: RunLocation, parts: Parts) -> None:
    assert place.attempt_dir is not None
    run_folder.shelve_summary(place.folder, place.attempt)
    run_folder.write_settings(place.folder, dump(repeatable(config)))
    run_folder.write_settings(place.attempt_dir, dump(config))  # what restarted workers read: this very start
    environment = msgspec.json.encode(_environment(parts.replica.world))
    writing.replace(place.folder / "environment.json", msgspec.json.format(environment, indent=2))


def _origin(config: TrainConfig, place: RunLocation, world: World) -> ResumePoint | None:
    """The state to go on from, if any (a collective).

    Raises:
        UsageError: on one rank: no state that is there can be trusted, or it is of another run.
    """
    c = config.checkpoint
    origin = find_resume_point(place, world, resume=c.resume == "auto", trust=config.run.trust, fresh=c.fresh)
    if origin is not None:
        with together(world):
            allowed = allowed_changes(c.allow_change)
            changes = check_same(origin.content.definition, place.definition, allowed, origin.where)
        place.notices.extend(f"changed, as allowed: {change}" for change in changes)
    return origin


def _unbroken(config: TrainConfig, place: RunLocation, origin: ResumePoint | None) -> bool:
    """Whether all steps so far, before a resume too, were taken under the promise of bits."""
    if config.strategy not in EXACT:
        return False
    if origin is None:
        return True
    saved = origin.content.definition
    return bool(saved.get("unbroken")) and all(saved.get(name) == place.definition.get(name) for name in BITS_ONLY)


def _summarise_failure(config: TrainConfig, folder: Path, world: World, error: BaseException) -> None:
    code = error.exit_code if isinstance(error, PacelineError) else ExitCode.FAILED
    code = 130 if isinstance(error, KeyboardInterrupt) else int(code)
    failure = f"{type(error).__name__}: {error}"
    with suppress(OSError):  # a full disk may be the error itself
        write_summary(folder, Summary(str(config.task), code, config.strategy, world.size, failure=failure))


def _environment(world: World) -> Mapping[str, Any]:
    return {
        "paceline": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "device": str(world.device),
        "gpu": None if world.device.type == "cpu" else device_words(world.device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": world.backend,
        "collectives": communicator().kind,
        "world_size": world.size,
        "threads_per_rank": torch.get_num_threads(),
        "bits_hold_for": holds_for(world.device),
        "started_by": "torchrun" if WorkerBirth.here() is None and "TORCHELASTIC_RUN_ID" in os.environ else "paceline",
    }
