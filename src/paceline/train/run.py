"""A complete training on this rank: from the configuration to the weights on disk."""

import os
import platform
import socket
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline import __version__
from paceline.checkpoint.resume import find_resume_point, lock_run_folder
from paceline.checkpoint.state import LockedRun, ResumePoint
from paceline.collectives.communicator import get_communicator, make_communicator
from paceline.collectives.control import check_equal, error_on_one_rank, raise_on_all_ranks
from paceline.config import definition
from paceline.config.mesh import resolve_mesh
from paceline.config.settings import TrainConfig, config_to_toml, drop_start_only_settings, load, resolve_defaults
from paceline.config.strategies import EXACT_STRATEGIES, check_can_audit
from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.protocol.control import WorkerSpec, restart_count
from paceline.protocol.evidence import Phase
from paceline.rank.guard import HangGuard
from paceline.rank.world import World, create_mesh_groups, device_name, process_group
from paceline.runs import folder as run_folder
from paceline.runs import writing
from paceline.runs.summary import Summary, write_summary
from paceline.train.compute_settings import set_threads
from paceline.train.consistency import check_user_code
from paceline.train.determinism import hardware_facts, use_deterministic_kernels
from paceline.train.prepare import TrainingComponents, prepare
from paceline.train.training import TaskTrainer
from paceline.train.weights import load_initial_weights


def train(config: TrainConfig) -> tuple[Path, ExitCode]:
    """Train with `config`, as the rank that the environment variables specify.

    Returns the run folder and the exit code: DONE (trained to the end) or SAVED (stopped on request).
    """
    guard = HangGuard.of_process()
    guard.detach_probes()
    guard.page.enter(Phase.INIT)
    # the launcher has created and locked it
    locked_dir = config.run.run_dir if WorkerSpec.from_environment() is not None else None
    world = World.from_env(device=config.launch.device, backend=config.launch.backend)
    with process_group(world, timeout_seconds=config.launch.timeout), lock_run_folder(
        world, config.run.run_dir, str(config.task), prepared=locked_dir, resume=config.checkpoint.resume == "auto",
        restart=config.checkpoint.restart, trust=config.run.trust,
    ) as location:  # fmt: skip
        unresolved, config = config.data, resolve_defaults(config, world.size)
        if unresolved.batch_size and world.size > 1 and not (unresolved.global_batch or unresolved.virtual_ranks):
            location.notices.append(
                f"--batch-size {unresolved.batch_size} is per rank: the global batch changes with the number of ranks. "
                f"To keep it: --global-batch {config.data.global_batch}"
            )
        mesh, seconds = resolve_mesh(config.launch.mesh, world.size), config.launch.timeout
        world = create_mesh_groups(world, mesh, timeout_seconds=seconds)
        try:
            make_communicator(config.launch.collectives)
            check_equal("settings", definition.make_run_definition(config), world)
            if not restart_count():  # later one rank may be left
                every, on_audit, strategy = config.guard.audit_every, config.guard.on_audit, str(config.strategy)
                with raise_on_all_ranks(world):
                    check_can_audit(every, on_audit, strategy, world.size, has_agent=bool(locked_dir))
            rehearsed_step = config.checkpoint.rehearse_preemption
            with use_deterministic_kernels() if config.strategy in EXACT_STRATEGIES else nullcontext():
                location.notices.extend(set_threads(config.launch.threads_per_rank, world))
                config = restore_auto_settings(config, location)
                parts = prepare(config, world)
                config = parts.config
                check_user_code(world)
                if rehearsed_step is not None and 0 < parts.total_steps <= rehearsed_step:
                    error = UsageError(code="rehearsal-too-late", value=rehearsed_step, steps=parts.total_steps)
                    raise error_on_one_rank(error, world)
                location = replace(location, definition=parts.definition)
                if config.strategy in EXACT_STRATEGIES:
                    check_equal("processors and libraries", location.definition["hardware"], world)
                    check_equal("threads per rank", torch.get_num_threads(), world)
                origin, init_sha256 = _find_resume_point(config, location, world), None
                if origin is not None:
                    with raise_on_all_ranks(world):
                        parts.load(origin)
                    init_sha256 = origin.trainer_state.definition.get("init_sha256")
                elif (init_from := config.model.init_from) is not None:
                    trust, report = config.run.trust, location.notices.append
                    init_sha256 = load_initial_weights(parts.replica, init_from, trust=trust, report=report)
                    if parts.weight_average is not None:
                        parts.weight_average.reset()
                facts = {"unbroken": _is_exact_so_far(config, location, origin), "init_sha256": init_sha256}
                location = replace(location, definition={**location.definition, **facts})
                if location.attempt_dir is not None:  # rank 0, after all checks: a usage error must not overwrite files
                    _write_settings(config, location, parts)
                code = TaskTrainer(parts, location, origin).run()
        except BaseException as error:
            refused = isinstance(error, PacelineError) and error.exit_code == ExitCode.USAGE and location.attempt > 1
            if locked_dir is None and world.rank == 0 and not refused:  # the launcher of paceline writes it itself
                _summarise_failure(config, location.folder, world, error)
            stall_error = None if isinstance(error, PacelineError) else guard.stall_error(error)
            if stall_error is not None:
                raise stall_error from error
            raise
    return location.folder, code


def restore_auto_settings(config: TrainConfig, place: LockedRun) -> TrainConfig:
    """Replace `--precision auto` and `--micro-batch auto` of a resumed run with what it found at its first start.

    With `--allow-change accumulation` a micro-batch is found again.
    """
    path = place.folder / run_folder.CONFIG
    resumes = place.generation or config.checkpoint.resume == "auto"
    if not resumes or config.checkpoint.restart or not path.is_file():
        return config
    if config.compute.precision == "auto":
        chosen = load(path, must_own=not config.run.trust)
        config = replace(config, compute=replace(config.compute, precision=chosen.compute.precision))
    if config.data.micro_batch is not None and "accumulation" not in definition.parse_allowed_changes(
        config.checkpoint.allow_change
    ):
        chosen = load(path, must_own=not config.run.trust)
        found = replace(config.data, accumulation=chosen.data.accumulation, micro_batch=None)
        config = replace(config, data=found)
    return config


def _write_settings(config: TrainConfig, location: LockedRun, parts: TrainingComponents) -> None:
    assert location.attempt_dir is not None
    run_folder.move_summary_to_attempt(location.folder, location.attempt)
    run_folder.write_settings(location.folder, config_to_toml(drop_start_only_settings(config)))
    run_folder.write_settings(location.attempt_dir, config_to_toml(config))  # restarted workers read this file
    environment = msgspec.json.encode(_environment(parts.replica.world))
    writing.replace_file(location.folder / "environment.json", msgspec.json.format(environment, indent=2))


def _find_resume_point(config: TrainConfig, location: LockedRun, world: World) -> ResumePoint | None:
    c = config.checkpoint
    origin = find_resume_point(location, world, resume=c.resume == "auto", trust=config.run.trust, restart=c.restart)
    if origin is not None:
        with raise_on_all_ranks(world):
            allowed = definition.parse_allowed_changes(c.allow_change)
            changes = definition.check_definition_changes(
                origin.trainer_state.definition, location.definition, allowed, origin.location_text
            )
        location.notices.extend(f"changed with --allow-change: {change}" for change in changes)
    return origin


def _is_exact_so_far(config: TrainConfig, location: LockedRun, origin: ResumePoint | None) -> bool:
    if config.strategy not in EXACT_STRATEGIES:
        return False
    if origin is None:
        return True
    saved = origin.trainer_state.definition
    return bool(saved.get("unbroken")) and all(
        saved.get(name) == location.definition.get(name) for name in definition.EXACT_ONLY_SETTINGS
    )


def _summarise_failure(config: TrainConfig, folder: Path, world: World, error: BaseException) -> None:
    code = error.exit_code if isinstance(error, PacelineError) else ExitCode.FAILED
    code = 130 if isinstance(error, KeyboardInterrupt) else int(code)
    failure = f"{type(error).__name__}: {error}"
    with suppress(OSError):  # a full disk may be the error itself
        write_summary(folder, Summary(str(config.task), code, config.strategy, world.size, failure=failure))


def _environment(world: World) -> Mapping[str, Any]:
    by_torchrun = WorkerSpec.from_environment() is None and "TORCHELASTIC_RUN_ID" in os.environ
    return {
        "paceline": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "device": str(world.device),
        "gpu": None if world.device.type == "cpu" else device_name(world.device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": world.backend,
        "collectives": get_communicator().kind,
        "world_size": world.size,
        "threads_per_rank": torch.get_num_threads(),
        "bits_hold_for": hardware_facts(world.device),
        "started_by": "torchrun" if by_torchrun else "paceline",
    }
