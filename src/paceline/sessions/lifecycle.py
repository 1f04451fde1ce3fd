"""The run of a session on this rank: its start, and the ends of the process that end a session."""

import os
import sys
import threading
from contextlib import ExitStack, nullcontext, suppress
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from paceline.collectives.communicator import make_communicator
from paceline.collectives.control import check_equal, error_on_one_rank, raise_on_all_ranks
from paceline.compute.flops import Utilization
from paceline.config.choices import CheckpointIntervals, parse_checkpoint_interval, untested_torch_notices
from paceline.config.definition import check_definition_changes
from paceline.config.strategies import check_can_audit, check_can_balance
from paceline.data.workers import explain_lost_workers
from paceline.errors import PacelineError, UsageError
from paceline.protocol.balance import AUTO
from paceline.protocol.control import WorkerSpec, restart_count
from paceline.protocol.evidence import Phase
from paceline.rank.attach import bind_to_agent, exit_worker, report_error
from paceline.rank.guard import HangGuard
from paceline.rank.world import World, process_group
from paceline.sessions.arguments import SessionConfig, format_argument, name_arguments_in_error
from paceline.sessions.observer import current_observer
from paceline.train.compute_settings import resolve_session_precision, set_threads
from paceline.train.determinism import DEFAULT_THREADS, use_deterministic_kernels
from paceline.train.preemption import record_stop_signals
from paceline.train.progress import TrainingProgress

MIN_RANDOM_SEED = 2**32  # torch seeds itself with a random number of 53 bits; users choose smaller ones


class SessionRun:
    """The run of a session on this rank: the process group, the run folder, the resumed checkpoint, and the records."""

    def __init__(self, config: SessionConfig) -> None:
        self.observer = current_observer()
        bind_to_agent()
        self.pid = os.getpid()
        self.guard = HangGuard.of_process()
        self.guard.detach_probes()
        self.guard.page.enter(Phase.INIT)
        self._stack = ExitStack()
        try:
            self._join(config)
        except BaseException as error:
            name_arguments_in_error(error)
            self.close(error)
            raise

    def _join(self, config: SessionConfig) -> None:
        enter = self._stack.enter_context
        world = World.from_env(device=config.device, backend=config.backend)
        self.world = world = enter(process_group(world, timeout_seconds=config.timeout))
        enter(explain_lost_workers(self.guard.page, world.rank))
        place = None
        if config.run_dir is not None:
            from paceline.checkpoint.resume import lock_run_folder  # many sessions have no run folder

            folder = Path(config.run_dir)
            place = enter(lock_run_folder(world, folder, config.program_name, resume=config.resume, trust=config.trust))
        make_communicator()
        enter(use_deterministic_kernels() if config.is_exact else nullcontext())
        num_threads = config.threads or (DEFAULT_THREADS if config.is_exact else None)
        notices = [] if WorkerSpec.from_environment() else untested_torch_notices()
        notices += set_threads(num_threads, world, write=format_argument)
        self.precision, precision_notices = resolve_session_precision(config.precision, world)
        """The precision of the models; None: as the script sets it."""
        notices += precision_notices
        origin = self.observer.resume_point(world) if self.observer is not None else None
        if place is not None:
            from paceline.checkpoint.resume import find_resume_point

            origin = find_resume_point(place, world, resume=config.resume, trust=config.trust)
        self.loop_state: dict[str, Any] = origin.trainer_state.loop if origin else {}
        """The values that `TrainingLoop` has saved in the checkpoint of a resume."""
        saved = origin.trainer_state.definition if origin else {}
        with raise_on_all_ranks(world):
            check_definition_changes(saved, {"task": config.program_name}, (), origin.location_text if origin else "")
        saved_ranks = saved.get("virtual_ranks")
        self.virtual_ranks = virtual_ranks = config.virtual_ranks or saved_ranks or world.size
        if virtual_ranks < world.size:
            code = "too-few-virtual-ranks" if config.virtual_ranks else "more-ranks-than-at-the-start"
            raise error_on_one_rank(UsageError(code=code, value=virtual_ranks, ranks=world.size), world)
        if (spec := WorkerSpec.from_environment()) is not None and spec.balance:
            with raise_on_all_ranks(world):
                check_balance(spec.balance, config, virtual_ranks, world)
        if self.observer is None and not restart_count():  # later one rank may be left
            with raise_on_all_ranks(world):
                check_can_audit(
                    config.audit_every, config.on_audit, config.strategy, world.size, has_agent=spec is not None,
                    fixed_nodes=spec.fixed_nodes if spec is not None else 0,
                )  # fmt: skip
        self.share = world.share(virtual_ranks)  # the virtual ranks that this rank computes
        own = {"virtual_ranks": virtual_ranks, "seed": config.seed or 0, "strategy": config.strategy}
        self.definition: dict[str, Any] = own | config.strategy_arguments  # the arguments that define the result
        others = {"resume": config.resume, "threads": config.threads, "precision": config.precision}
        check_equal("session settings", self.definition | others, world)
        every = parse_checkpoint_interval(config.checkpoint_every)
        intervals = CheckpointIntervals(config.check_replicas_every, 10**9, *every, keep=config.keep_checkpoints)
        policy, show = config.not_finite, lambda line: self.print(line)
        self.progress = TrainingProgress(place, origin, world, intervals, policy, show)
        self.progress.use = Utilization(world, config.peak_tflops)
        self.max_steps = self.progress.step + (self.observer or self.guard).max_steps
        """The step after which the training ends. An observer or `launch --check` limits it."""
        if place is not None:
            self.progress.request = enter(record_stop_signals(announce=world.rank == 0))
        self._stack.callback(self.progress.close)
        for line in notices:
            self.progress.say(line)

    def print(self, *words: Any) -> None:
        """Print on rank 0 only. If there is an observer, it gets the words of every rank instead."""
        if self.observer is not None:
            self.observer.on_print(words)
        elif self.world.rank == 0:
            print(*words, flush=True)

    def close(self, error: BaseException | None) -> None:
        self._stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def check_balance(balance: str, config: SessionConfig, virtual_ranks: int, world: World) -> None:
    if not restart_count():  # later, so many nodes may have joined that each rank has one virtual rank
        check_can_balance(balance, config.strategy, virtual_ranks, world.size)
    for setting in ("local_steps", "compress"):
        if getattr(config, setting) is not None:
            raise UsageError(code="balance-changes-result", value=balance, setting=setting)
    if balance == AUTO and not config.resume:
        raise UsageError(code="balance-needs-resume", value=balance)
    if balance == AUTO and world.device.type != "cpu":  # a session takes its phases from the host, which only launches
        raise UsageError(code="balance-of-device", value=balance, device=world.device.type)


open_sessions: list[Any] = []  # of class Session, which imports this module


def close_all_sessions(error: BaseException | None = None) -> None:
    while open_sessions:
        open_sessions.pop().close(error)


def install_exit_hooks() -> None:
    """Close sessions at every end of the process, and let a PacelineError end it with the error's exit code."""
    if getattr(sys.excepthook, "of_paceline", False):
        return
    previous_hook = sys.excepthook

    @wraps(previous_hook)  # copies also the module, which shows whose hook prints the error
    def hook(exc_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(Exception):
            explanations = (session.explain_error(error) for session in open_sessions)
            error = next(filter(None, explanations), error)
            close_all_sessions(error)
        name_arguments_in_error(error)
        if isinstance(error, PacelineError):
            sys.stderr = sys.__stderr__
            exit_worker(report_error(error))
        previous_hook(exc_type, error, trace)

    if not getattr(sys.exit, "of_paceline", False):
        plain_exit = sys.exit

        def noted_exit(code: Any = None) -> NoReturn:
            for session in open_sessions:
                session.record_exit_code(code)
            plain_exit(code)

        noted_exit.of_paceline = True  # pyright: ignore[reportFunctionMemberAccess]
        sys.exit = noted_exit
    hook.of_paceline = True  # pyright: ignore[reportAttributeAccessIssue]
    sys.excepthook = hook
    if not getattr(close_all_sessions, "is_registered", False):
        close_all_sessions.is_registered = True  # pyright: ignore[reportFunctionMemberAccess]
        # before Python waits for threads: later no thread can start, and the end of a checkpoint starts one
        threading._register_atexit(close_all_sessions)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
