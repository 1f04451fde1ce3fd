"""The start and end of a session: it joins the ranks, finds the checkpoint of a resume, and closes the run."""

import math
import os
import random
import sys
import threading
import traceback
from contextlib import ExitStack, nullcontext, suppress
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import numpy
import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.checkpoint.resume import find_resume_point, run_location
from paceline.collectives.communicator import make_communicator
from paceline.collectives.control import check_equal, raise_on_all_ranks, report_on_one_rank
from paceline.compute.flops import Utilization
from paceline.compute.phase_events import phase_events
from paceline.config.choices import steps_or_seconds, untested_torch
from paceline.config.definition import check_same
from paceline.config.strategies import EXACT, STRATEGY_INFO, options_of_others
from paceline.data.plan import ranks_share
from paceline.data.workers import naming_lost_processes
from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.protocol.control import WorkerSpec
from paceline.protocol.evidence import Phase
from paceline.rank.attach import attach, exit_worker, record_failure, report_error
from paceline.rank.guard import Guard
from paceline.rank.world import World, joined
from paceline.runs.summary import Summary
from paceline.runs.trackers import tracker_names
from paceline.sessions.foreign_tensors import ForeignTensors
from paceline.sessions.loop import SessionLoop
from paceline.sessions.observer import current_observer
from paceline.sessions.registered import RegisteredObjects
from paceline.sessions.session_step import Notes, SessionStep
from paceline.sessions.wording import keyword, reword, script_name
from paceline.stepping.hooks import TensorHooks
from paceline.stepping.trained_model import loss_scale
from paceline.train.checkpointing import CheckpointPolicy
from paceline.train.computing import choose_precision, set_threads
from paceline.train.determinism import DEFAULT_THREADS, deterministic
from paceline.train.fit import PhaseClock
from paceline.train.preemption import stop_signals
from paceline.train.progress import TrainingProgress
from paceline.train.wording import report_hint

NO_GRADIENT = (AttributeError, TypeError, RuntimeError)  # errors of code that reads None from .grad
CLIPPING = "torch/nn/utils/clip_grad.py"  # its error for a None gradient does not contain "NoneType"
UNSEEDED = 2**32  # torch seeds itself with a random number of 53 bits; users choose smaller ones


class SessionLifecycle(SessionLoop):
    """The methods of a session that start and end it."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None,
        *,
        resume: bool,
        strategy: str,
        virtual_ranks: int | None,
        seed: int | None,
        threads: int | None,
        precision: str | None,
        checkpoint_every: int | str | None,
        keep_checkpoints: int,
        check_replicas_every: int,
        not_finite: Literal["stop", "skip"],
        device: str,
        backend: str,
        timeout: float,
        trust: bool,
        report_to: str | None,
        peak_tflops: float | None,
        **of_strategy: Any,
    ) -> None:
        """See `session`, which has the defaults. `of_strategy`: arguments of a single strategy."""
        owners = options_of_others(strategy)
        for name, value in of_strategy.items():
            if name in owners and value is not None:
                raise UsageError(
                    code="argument-of-another-strategy", name=name, value=value, owner=owners[name], strategy=strategy
                )
        self._observer = current_observer()
        self._own = {name: value for name, value in of_strategy.items() if value is not None}
        keywords = {STRATEGY_INFO[strategy].factory_kwargs[name]: value for name, value in self._own.items()}
        self._options: dict[str, Any] = {**STRATEGY_INFO[strategy].in_sessions, **keywords}
        if resume and run_dir is None:
            raise UsageError(code="session-resume-without-folder")
        if peak_tflops is not None and not 0 <= peak_tflops < math.inf:
            raise UsageError(code="negative", setting="peak_tflops", value=peak_tflops)
        self._report_to = report_to
        self._others = {
            "checkpoint_every": checkpoint_every, "keep_checkpoints": keep_checkpoints, "not_finite": not_finite,
            "check_replicas_every": check_replicas_every, "threads_per_rank": threads, "device": device,
            "backend": backend, "timeout": timeout, "report_to": report_to, "peak_tflops": peak_tflops,
            "precision": precision,
        }  # fmt: skip
        if tracker_names(report_to) and run_dir is None:
            raise UsageError(code="report-to-without-folder", value=report_to)
        self._is_seeded = seed is not None
        seed = seed or 0
        attach()
        self._pid = os.getpid()
        self._guard = Guard.of_process()
        self._guard.detach_probes()
        self._guard.page.enter(Phase.INIT)
        self._stack, self._complete = ExitStack(), False
        self._name, self._seed, self._strategy, self._exact = script_name(), seed, strategy, strategy in EXACT
        try:
            world = World.from_env(device=device, backend=backend)
            self.world = self._stack.enter_context(joined(world, timeout_seconds=timeout))
            self._stack.enter_context(naming_lost_processes(self._guard.page, world.rank))
            folder = None if run_dir is None else Path(run_dir)
            place = None
            if folder is not None:
                place = self._stack.enter_context(run_location(world, folder, self._name, resume=resume, trust=trust))
            make_communicator()
            self._stack.enter_context(deterministic() if self._exact else nullcontext())
            num_threads = threads or (DEFAULT_THREADS if self._exact else None)
            notices = [] if WorkerSpec.here() else untested_torch()
            notices += set_threads(num_threads, world, write=keyword)
            self._precision, precision_notices = choose_precision(precision, world)
            notices += precision_notices
            origin = find_resume_point(place, world, resume=resume, trust=trust) if place is not None else None
            with raise_on_all_ranks(world):
                saved = origin.content.definition if origin else {}
                check_same(saved, {"task": self._name}, (), origin.where if origin else "")
            saved_ranks = saved.get("virtual_ranks")
            self._virtual_ranks = virtual_ranks or saved_ranks or world.size
            self._says_virtual_ranks = virtual_ranks is not None
            if self._virtual_ranks < world.size:
                code = "too-few-virtual-ranks" if virtual_ranks else "more-ranks-than-at-the-start"
                raise report_on_one_rank(UsageError(code=code, value=self._virtual_ranks, ranks=world.size), world)
            self._share = ranks_share(self._virtual_ranks, world.rank, world.size)
            self._settings = {"virtual_ranks": self._virtual_ranks, "seed": seed, "strategy": strategy, **self._own}
            others = {"resume": resume, "threads": threads, "precision": precision}
            check_equal("session settings", {**self._settings, **others}, world)
            every = steps_or_seconds(checkpoint_every)
            policy = CheckpointPolicy(check_replicas_every, 10**9, *every, keep=keep_checkpoints)
            self._progress = TrainingProgress(place, origin, world, policy, not_finite, lambda line: self.print(line))
            self._progress.use = Utilization(world, peak_tflops)
            self._max_steps = self._progress.step + (self._observer or self._guard).max_steps
            self._guard.page.on_device = on_device = phase_events(world.device)
            self._clock = PhaseClock(self._guard.page.enter, on_device=on_device)
            self._steps = SessionStep(
                world, self._virtual_ranks, self._clock, votes=self._votes,
                order=self._progress.order, way_out='session(not_finite="skip")',
                may_skip=not_finite != "stop", exact=self._exact,
            )  # fmt: skip
            self._steps.notes, self._steps.observer = Notes(self._progress.say), self._observer
            self._steps.scale = loss_scale(self._precision)
            if place is not None:
                self._progress.request = self._stack.enter_context(stop_signals(announce=world.rank == 0))
            for line in notices:
                self._progress.say(line)
        except BaseException as error:
            reword(error)
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise
        loop_state = origin.content.loop if origin else {}
        start_position = {"phase": 0, "epoch": 0, "pass": 0, "passes": 0, "batch": 0}
        self._where: dict[str, int] = {**start_position, **loop_state.get("where", {})}
        self._resumed: dict[str, int] | None = dict(self._where) if origin else None
        self._streams: dict[str, Any] | None = loop_state.get("streams")
        self._epoch_streams = loop_state.get("epoch_streams")
        self.saved = dict(loop_state.get("saved", {}))
        self._numbers: list[dict[str, Any]] = list(loop_state.get("parts", []))
        self._parts, self._loaders, self._fingerprints, self._data = [], [], {}, {}
        self._saved_data, self._loader_states = loop_state.get("data"), dict(loop_state.get("loaders", {}))
        self._foreign_tensors = ForeignTensors()
        self._registered = RegisteredObjects(loop_state.get("registered", {}))
        self._steps.saves, self._resumes = place is not None, resume
        self._steps.tensor_hooks = tensor_hooks = TensorHooks()
        self._hooks = [
            tensor_hooks,
            register_module_module_registration_hook(self._note_added),
            register_module_parameter_registration_hook(self._note_added),
            register_optimizer_step_pre_hook(self._check_optimizer),
        ]
        self._clock(Phase.USER)
        open_sessions.append(self)

    def seed_streams(self) -> None:
        """Seed torch, numpy and `random`, so that the script draws the same numbers in each run and on each rank."""
        torch.manual_seed(self._seed)
        random.seed(self._seed)
        numpy.random.seed(self._seed % 2**32)

    def _check_seed(self) -> None:
        if self._exact and not self._is_seeded and torch.initial_seed() >= UNSEEDED and self._progress.origin is None:
            self._steps.notes.once(
                "the session has no seed, and torch was not seeded: the initial weights, and so the digest, differ "
                "between runs. Set session(seed=...), or call torch.manual_seed before the model is created"
            )

    def _note_added(self, module: Any, *_: Any) -> None:
        for part in self._parts:
            part.note_added(module)

    def _can_split(self, split: bool) -> bool:
        if split and not self._says_virtual_ranks:
            raise UsageError(code="split-without-virtual-ranks")
        return split

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._complete = True
        explained = self.explained(error)
        self.close(explained or error)
        if explained is not None:
            raise explained from error
        if error is None and self._broken is not None:
            raise self._broken

    def explained(self, error: BaseException | None) -> UsageError | None:
        """An explanation of an error that comes from sharded gradients, or from .grad before the last micro-batch."""
        micro_step = self._steps.micro_step
        if not isinstance(error, NO_GRADIENT) or isinstance(error, PacelineError):
            return None
        text, trace = f"{type(error).__name__}: {error}.", error.__traceback__
        if "mixed torch.Tensor and DTensor" in str(error):
            return UsageError(code="sharded-weights-used", error=text).with_traceback(trace)
        if (
            micro_step is None
            or micro_step.is_last
            or not micro_step.weights
            or any(part.has_gradients for part in self._parts)
        ):
            return None
        files = [frame.filename for frame in traceback.extract_tb(trace)]
        if "NoneType" not in str(error) and not any(file.endswith(CLIPPING) for file in files):
            return None
        return UsageError(code="gradient-not-complete", error=text).with_traceback(trace)

    exited: tuple[Any, int] | None = None
    """(exit code, step) of a call of sys.exit in a training loop"""

    def note_exit(self, code: Any) -> None:
        """Record a call of sys.exit(code), because the code is not available at the end of the process."""
        if self._live:
            self.exited = code, self._progress.step

    def close(self, error: BaseException | None = None) -> None:
        """End the session, with an error if there is one. Also called at the end of the process."""
        if self._closed or os.getpid() != self._pid:  # a worker process of a loader also calls this
            return
        if self._observer is not None and self._opened and isinstance(error or SystemExit(), SystemExit):
            self._observer.on_end()
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        reword(error)
        if error is None and self.exited is not None and self.exited[1] == self._progress.step:
            error = SystemExit(self.exited[0])
        in_loop = isinstance(error, SystemExit) and (self._live > 0 or self.exited is not None)
        if isinstance(error, SystemExit) and (self._stopped or not error.code):
            error = None  # a regular end
        error = error or self._broken
        try:
            if error is not None:
                self._fail(error)
            elif self._stopped or self._complete:
                if self._complete and not self._stopped and not in_loop:  # otherwise other ranks may still train
                    self._check_reached()
                    self._compare_replicas()
                self._guard.page.enter(Phase.CLOSE)
                if self._progress.is_open:
                    self._progress.finish(self._stopped, self._closing)
        except BaseException as close_error:
            reword(close_error)
            error = error or close_error
            record_failure(close_error, _code_of(close_error), traceback=not isinstance(close_error, PacelineError))
            raise
        finally:
            with suppress(ValueError):
                open_sessions.remove(self)
            self._progress.close()
            self._stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _check_reached(self) -> None:
        if self._resumed is not None and self._parts:
            epoch, phase = self._resumed["epoch"] + 1, self._resumed["phase"] + 1
            raise UsageError(code="resume-place-not-reached", epoch=epoch, phase=phase)

    def _closing(self, summary: Summary) -> list[str]:
        if summary.exit == ExitCode.SAVED:
            return [f"stopped on request: saved after step {summary.steps}. Start the script again to resume"]
        assert self._progress.place is not None
        folder = self._progress.place.folder
        return [f"weights {str(summary.weights_sha256)[:16]}...", f"run folder {folder}", report_hint(folder)]

    def _log(self, metrics: dict[str, float]) -> None:
        progress = self._progress
        progress.metrics, progress.evaluated = progress.metrics | metrics, progress.step
        progress.log_evaluation(progress.step, metrics)

    def _fail(self, error: BaseException) -> None:
        is_whole, instead = not self._steps.updating and self._opened and not self._is_damaged, None
        with suppress(Exception):
            if is_whole and self._steps.in_step:
                self._steps.give_up()
        with suppress(Exception):
            instead = self._progress.fail(error, self._loop_state, whole=is_whole)
            if isinstance(error, OSError) and instead is not None:
                print(instead, file=sys.stderr, flush=True)
            code, place = _code_of(error), self._progress.place
            is_refused = code == ExitCode.USAGE and place is not None and place.attempt > 1
            if self._progress.is_open and self.rank == 0 and not is_refused:
                self._progress.summarise(code, failure=f"{type(error).__name__}: {error}"[:2000])
        # before any teardown, so that the first failing rank is known
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            record_failure(instead or error, _code_of(instead or error), traceback=not isinstance(error, PacelineError))


open_sessions: list[SessionLifecycle] = []


def close_all(error: BaseException | None = None) -> None:
    """Close all sessions of this process."""
    while open_sessions:
        open_sessions.pop().close(error)


def install() -> None:
    """Close sessions at every end of the process, and let a PacelineError end it with the error's exit code."""
    if getattr(sys.excepthook, "of_paceline", False):
        return
    previous_hook = sys.excepthook

    @wraps(previous_hook)  # copies also the module, which shows whose hook prints the error
    def hook(exc_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(Exception):
            error = next((explanation for session in open_sessions if (explanation := session.explained(error))), error)
            close_all(error)
        reword(error)
        if isinstance(error, PacelineError):
            sys.stderr = sys.__stderr__
            exit_worker(report_error(error))
        previous_hook(exc_type, error, trace)

    if not getattr(sys.exit, "of_paceline", False):
        plain_exit = sys.exit

        def noted_exit(code: Any = None) -> NoReturn:
            for session in open_sessions:
                session.note_exit(code)
            plain_exit(code)

        noted_exit.of_paceline = True  # pyright: ignore[reportFunctionMemberAccess]
        sys.exit = noted_exit
    hook.of_paceline = True  # pyright: ignore[reportAttributeAccessIssue]
    sys.excepthook = hook
    if not getattr(close_all, "is_registered", False):
        close_all.is_registered = True  # pyright: ignore[reportFunctionMemberAccess]
        # before Python waits for threads: later no thread can start, and the end of a checkpoint starts one
        threading._register_atexit(close_all)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def _code_of(error: BaseException) -> int:
    return int(error.exit_code) if isinstance(error, PacelineError) else int(ExitCode.FAILED)
