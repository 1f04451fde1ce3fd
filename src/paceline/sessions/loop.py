"""The loops of a session over data: training with the work between steps and the end of the run, and evaluation."""

import math
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paceline.collectives.control import all_gather_object, check_equal, error_on_one_rank, raise_on_all_ranks
from paceline.config.choices import current_setting_name
from paceline.config.definition import EXACT_ONLY_SETTINGS, check_definition_changes
from paceline.data.fingerprint import UNSTABLE_DATASET_TEXT
from paceline.data.loader import MicroBatch
from paceline.data.plan import BatchPlan, plan_rank_micro_batches
from paceline.errors import ExitCode, PacelineError, UsageError, plural
from paceline.protocol.evidence import Phase
from paceline.rank.attach import record_failure
from paceline.rank.world import World, device_name
from paceline.runs import folder as run_folder
from paceline.runs.progress import ProgressRecord, ProgressWriter
from paceline.seeding import GeneratorStates, preserve_generator_states
from paceline.sessions.arguments import SessionConfig, name_arguments_in_error
from paceline.sessions.checks import LoopChecks, check_no_grad_scaler
from paceline.sessions.lifecycle import SessionRun
from paceline.sessions.loader import Loader
from paceline.sessions.order import global_random_states, restore_global_random_states
from paceline.sessions.session_step import POSITION_KEYS, LoopPosition, SessionStep
from paceline.sessions.state import SessionState, copy_json_values
from paceline.stepping.totals import ControlFlags
from paceline.stepping.trained_model import make_loss_scale
from paceline.train.determinism import hardware_facts
from paceline.train.step_record import PhaseClock, StepRecord, make_phase_events
from paceline.train.wording import batch_line, describe_audits, report_hint

if TYPE_CHECKING:
    from paceline.runs.summary import Summary
    from paceline.train.memory import MicroBatchSearch

TRACK_EVERY = 50  # steps between two reports of the loss
CHANGED_DATA_ADVICE = (
    "If the loop draws or changes its data, the data must be the same after a resume. Draw them from the number of the "
    "epoch, random.Random(epoch), or at the start of the epoch from torch's, Python's or numpy's global generator"
)


class TrainingLoop:
    """The training loops of a session. The first batch opens the run, and `close` ends it.

    An iteration over a loader begins a micro-batch before it yields, and ends it when the loop continues. After the
    last micro-batch of a step it does the work between two steps: records, checkpoint, stop.
    """

    def __init__(self, config: SessionConfig, run: SessionRun, state: SessionState) -> None:
        """Continue at the checkpoint from which `run` resumes, or begin."""
        self._config, self._run, self._state = config, run, state
        page, progress, saved = run.guard.page, run.progress, run.loop_state
        page.on_device = on_device = make_phase_events(run.world.device)
        self._clock, self._page = PhaseClock(page, on_device), page
        self.step = SessionStep(
            run.world, run.virtual_ranks, page.enter, votes=progress.votes, order=progress.order,
            way_out='session(not_finite="skip")', may_skip=config.not_finite != "stop", exact=config.is_exact,
        )  # fmt: skip
        self.step.notes, self.step.saves, self.step.observer = state.notes, state.saves, run.observer
        self.step.loss_scale = make_loss_scale(run.precision)
        if config.audit_every is not None and run.observer is None and run.world.size > 1:
            from paceline.stepping.audit import StepAuditor

            save = partial(progress.save_before_stop, partial(self._checkpoint_values, run.world))
            self.step.audits = StepAuditor(
                config.audit_every, run.world, run.virtual_ranks, config.on_audit, save, run.print
            )
        self.position = LoopPosition(*(saved.get("where", {}).get(name, 0) for name in POSITION_KEYS))
        self._begins_check = self._ends_check = False  # whether losses are checked over this step and the next, or last
        self._resumed = replace(self.position) if progress.origin else None  # until the loop reaches this position
        self._resumed_streams: dict[str, Any] | None = saved.get("streams")
        self._epoch_streams: dict[str, str] | None = saved.get("epoch_streams")  # at the start of the current epoch
        self._saved_data: dict[str, Any] | None = saved.get("data")  # of the loop in which the run was saved
        self._data: dict[str, Any] = {}  # the part of the run's definition that describes the current data
        self._loader: Loader | None = None  # of the current or last loop
        self.checks = LoopChecks(run.world, state, self.step, self.position, progress.order)
        self._phases = self._epochs = 0  # calls of s.epochs so far; the argument of the current call
        self._skipped = 0  # loops over data in the resumed epoch that had ended before the checkpoint
        self._at_end = False  # whether the last step was the last of its loop, so that its state is already saved
        self._was_left = False  # whether the last loop was left before its end
        self._stopped = False
        self._exit: tuple[Any, int] | None = None  # (exit code, step) of a call of sys.exit
        self._iterators = 0  # that are open
        self.search: MicroBatchSearch | None = None  # the last search for the largest micro-batch
        self.in_trial = False  # whether the loop body runs on a dummy batch of this search
        self.in_epochs = False  # whether the script is in a loop over `epochs`
        self.is_open = self.is_complete = self.is_closed = False
        """Whether the first batch has begun; whether the script has ended its training; whether the run has ended."""
        self.failure: Exception | None = None  # an error in a loop that was left early. The next call raises it
        self._page.enter(Phase.USER)

    @property
    def common_position(self) -> tuple[int, ...]:
        """The position of the loop, which is equal on all ranks that call a collective."""
        return self._run.progress.step, self.position.epoch, int(self.in_epochs)

    def check_usable(self) -> None:
        """Raise an error if the session has ended, if a loop was left within a step, or if the run must stop."""
        if self.is_closed:
            raise UsageError(code="session-has-ended")
        if self.failure is not None:
            raise self.failure
        if self._stopped:
            raise SystemExit(int(ExitCode.SAVED))
        if self._was_left:
            self._was_left = False
            self._next_loop()

    def check_collective_allowed(self) -> None:
        """Raise UsageError in a loop body that ranks run different numbers of times."""
        micro_step, loader, size = self.step.micro_step, self._loader, self._run.world.size
        if size == 1 or micro_step is None or micro_step.is_last or loader is None:
            return
        plan, work = loader.dealt, micro_step.work
        shares = self._run.world.shares(self._run.virtual_ranks)
        if self.step.audits is not None or (
            plan is not None
            and len({len(plan_rank_micro_batches(plan, work.epoch, work.step, share)) for share in shares}) > 1
        ):
            raise UsageError(code="collective-in-body")

    def epochs(self, count: int) -> Generator[int]:
        if count < 1:
            raise UsageError(code="no-epochs", value=count)
        position, phase, self._phases = self.position, self._phases, self._phases + 1
        if self._resumed is not None and phase < self._resumed.epochs_call:
            return
        self._epochs = count
        if self._resumed is None:
            position.epochs_call, position.epoch = phase, 0
        self.in_epochs = True
        try:
            for epoch in range(position.epoch, count):
                self.check_usable()
                if self._iterators:
                    raise UsageError(code="loader-still-open")
                if self._resumed is None:
                    position.epoch, position.loop_in_epoch, position.batch = epoch, 0, 0
                    self._epoch_streams = global_random_states() if self._state.saves else None
                elif self._epoch_streams is not None:
                    restore_global_random_states(self._epoch_streams)
                yield epoch
                self._resumed = None
                if self._run.progress.step >= self._run.max_steps:
                    return
        finally:
            self.is_complete, self.in_epochs = True, False

    def batches(self, loader: Loader) -> Generator[Any]:
        """The micro-batches of this rank in the next epoch of a loader."""
        run, step, position, observer = self._run, self.step, self.position, self._run.observer
        if run.progress.step >= run.max_steps:
            raise SystemExit(0)
        step.check_no_nested_loop()
        if self._resumed is not None and not self.in_epochs:  # for example to inspect a batch: s.backward raises here
            for micro_batches in loader.training_batches(
                loader.draw_epoch_plan(run.world, None), run.share, position.loop_in_run, 0
            ):
                yield from (batch.inputs for batch in micro_batches)
            return
        if loader.is_unsplit:
            yield from self._split(loader)
        if (plan := self._begin_loop(loader)) is None:
            return
        self._iterators += 1
        step.keeps_stream = observer is None and loader.uses_no_random_numbers
        one_each = plan.virtual_ranks == run.world.size and plan.accumulation == 1
        try:
            for part in self._state.models:
                part.check_parameters()
            self._clock.start()
            for micro_batches in loader.training_batches(plan, run.share, position.loop_in_run, position.batch):
                number = run.progress.step + 1
                # in steps 1, 2, 4, 8, ... and in those that follow them
                self._begins_check, self._ends_check = number & (number - 1) == 0, (number - 1) & (number - 2) == 0
                step.checks_losses = self._begins_check or self._ends_check
                if run.world.size > 1:
                    self.checks.set_compared_values(loader)
                run.progress.micro_batches = micro_batches
                numbers, proves = list[dict[str, float]](), False
                for batch in step.run_micro_batches(position, micro_batches, one_each=one_each):
                    if step.audits is not None and step.audits.is_proving:
                        proves = True
                        numbers += [_counters()] if batch.work.is_repeated or numbers else []
                    try:
                        yield batch.inputs if observer is None else observer.on_batch(batch.inputs, batch.work)
                    except GeneratorExit:
                        self._leave(loader, micro_batches, plan)
                        raise
                    if observer is not None:
                        observer.on_batch_end()
                    if len(micro_batches) > 1 and step.checks_losses and step.is_after_backward:
                        _check_micro_batches_not_counted()
                self._end_step(loader, micro_batches, plan)
                if proves:
                    self._check_not_counted(*numbers, _counters())
                if run.progress.step >= run.max_steps:
                    break
                if self._stopped:
                    raise SystemExit(int(ExitCode.SAVED))
                self._clock.start()
            if not self._at_end and position.batch:  # the end of the epoch was not known before
                values = partial(self._checkpoint_values, run.world)
                run.progress.save_if_due(ControlFlags(), values, save=True, wait=True)
            self._next_loop()
        finally:
            self._iterators -= 1
            self._restore_random_streams()
            step.keeps_stream = False

    def _check_not_counted(self, *numbers: dict[str, float]) -> None:
        """Raise a UsageError if the loop counts the body of an audit (a collective).

        `numbers`: before the repeated body, after it, after the body that counts; fewer if no body was repeated.
        """
        from paceline.sessions.unsaved import find_counted_numbers

        with raise_on_all_ranks(self._run.world):
            if len(numbers) > 2 and (names := find_counted_numbers(*numbers[:3])):
                raise UsageError(code="audit-counted", names=names)

    def _split(self, loader: Loader) -> Generator[Any]:
        """Run the loop body on dummy batches, to find the largest micro-batch that fits (a collective)."""
        from paceline.sessions.unsaved import find_counted_numbers, find_wrapping_iterators
        from paceline.train.memory import MicroBatchSearch

        run, state, plan = self._run, self._state, loader.plan
        if run.observer is not None:
            raise UsageError(code="micro-batch-observed")
        if loader.is_stream:
            raise UsageError(code="micro-batch-of-stream-loader")
        if not state.models:
            raise UsageError(code="loop-without-model")
        portion = math.ceil(plan.global_batch / plan.virtual_ranks)
        gather = partial(all_gather_object, world=run.world)
        self.search = search = MicroBatchSearch([part.replica for part in state.models], run.world, portion, gather)
        load, self.in_trial = loader.make_dummy_batch_function(run.share), True
        if iterators := find_wrapping_iterators(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
            with raise_on_all_ranks(run.world):
                raise UsageError(code="micro-batch-in-iterator", names=", ".join(iterators))
        numbers = [_counters()]
        try:
            while size := search.next_size():
                with search.trial():
                    yield from self._try(load(size))
                if len(numbers) == 1:  # the same again, to find what the loop counts
                    numbers.append(_counters())
                    yield from self._try(load(size))
                    numbers.append(_counters())
        finally:
            self.in_trial = False
            self._page.enter(Phase.USER)
        with raise_on_all_ranks(run.world):
            if names := find_counted_numbers(*numbers):  # the loop would train with them
                found = search.accumulation
                raise UsageError(code="micro-batch-trial-counted", names=", ".join(names), accumulation=found)
        loader.set_accumulation(search.accumulation)
        run.print(search.describe("micro_batch='auto'", "accumulation="))

    def _try(self, batch: MicroBatch) -> Generator[Any]:
        for trial_batch in self.step.run_trial(batch):
            try:
                yield trial_batch.inputs
            except GeneratorExit:  # the loop would not train in this epoch
                self.failure = UsageError(code="micro-batch-trial-left")
                raise

    def explain_error(self, error: BaseException | None) -> PacelineError | None:
        if error is None:
            return None
        from paceline.compute.memory import is_out_of_memory
        from paceline.train.memory import out_of_memory_error

        micro_step, search = self.step.micro_step or self.step.left, self.search
        in_trial = search is not None and not search.is_found  # the generator of the loop may be closed already
        if not is_out_of_memory(error) or not (in_trial or micro_step):
            return self.step.explain_gradient_error(error)
        samples = len(micro_step.work.indices) if micro_step else 0
        if search is not None:
            search.meter.remove_limit()  # or the generator may not be closed yet
            samples = search.size if in_trial else samples
        where, replicas = "a trial" if in_trial else str(self.position), [part.replica for part in self._state.models]
        compute = self.step.make_forward_retry(micro_step, error) if micro_step and search is None else None
        return out_of_memory_error(replicas, self._run.world, where, samples, compute, search)

    def _begin_loop(self, loader: Loader) -> BatchPlan | None:
        """Draw the epoch of the loop that begins. None: the loop had ended before the checkpoint of a resume."""
        resumed, streams, start = self._resumed, None, 0
        if resumed is not None:
            if self._skipped < resumed.loop_in_epoch:
                self._skipped += 1
                return None
            streams, start = self._resumed_streams, resumed.batch
        plan = loader.draw_epoch_plan(self._run.world, streams, start, is_training=True)
        with preserve_generator_states():
            self._open(loader, plan)
        if self.step.audits is not None:
            if loader.is_stream or len(self._state.models) > 1:
                code = "audit-of-stream" if loader.is_stream else "audit-of-several-models"
                raise error_on_one_rank(UsageError(code=code), self._run.world)
            if loader.loading.worker_init_fn is not None:
                raise error_on_one_rank(UsageError(code="audit-with-worker-init"), self._run.world)
            self.step.audits.set_batch_source(loader.reload_micro_batch, plan)
        self._resumed, self.position.batch, self._loader, self._at_end = None, start, loader, False
        self.step.left = None
        stream: Any = loader if loader.is_stream else None
        self._run.progress.stream = stream
        return plan

    def _leave(self, loader: Loader, micro_batches: Sequence[MicroBatch], plan: BatchPlan) -> None:
        """The loop is left by break or return in a body. An error here is raised at the next call."""
        self.step.left = self.step.micro_step
        try:
            if self.step.is_untouched:
                self.step.abort_step()
            elif self.step.is_complete_after_body:
                self.step.end_body()  # after its last backward the step is complete
                self._end_step(loader, micro_batches, plan, was_left=True)
                self._page.enter(Phase.USER)
            else:
                self.failure = UsageError(code="loop-left-in-step", place=str(self.position))
        except Exception as error:
            self.failure = error
        # not yet `_next_loop`: if an error has ended this one, the run resumes here
        self._was_left = True

    def _next_loop(self) -> None:
        position = self.position
        position.loop_in_epoch, position.loop_in_run = position.loop_in_epoch + 1, position.loop_in_run + 1
        position.batch = 0
        self._page.enter(Phase.USER)

    def _restore_random_streams(self) -> None:
        """Let random numbers come from the streams outside of micro-batches, if they do not yet."""
        if self.step.micro_step is None and not self.is_closed:
            self.step.stream.leave()

    def _open(self, loader: Loader, plan: BatchPlan) -> None:
        """Before the first batch of a loop. The first loop checks the definition of the run, and opens its records."""
        config, run, state, progress = self._config, self._run, self._state, self._run.progress
        if not state.models:
            raise UsageError(code="loop-without-model")
        batch = {"global_batch": plan.global_batch, "last_batch": plan.last_batch, "accumulation": plan.accumulation}
        fingerprint = self.checks.fingerprint_data(loader)
        if UNSTABLE_DATASET_TEXT in fingerprint.values():
            error = UsageError(code="samples-change", kind=type(loader.dataset).__name__)
            if config.is_exact:
                raise error
            state.notes.once(str(error))
        self._data = {**batch, "data": {"training data": fingerprint}}
        if self.is_open:
            return
        self.is_open = True
        definition = self._definition()
        processes = f"{plural(run.world.size, 'process', 'processes')} on {device_name(run.world.device)}"
        words = f"strategy {config.strategy}; {plan.epoch_size_text}; {batch_line(plan, run.world.size)}"
        run.print(f"{config.program_name}: {processes}, {words}")
        if config.audit_every is not None and run.observer is None:
            for line in describe_audits(config.audit_every, config.on_audit, run.world):
                run.print(line)
        models = [model for part in state.models for model in (part.replica.model, part.replica.module)]
        if run.observer is None and progress.use.given and not config.is_exact:
            from paceline.compute.flops import can_count_flops

            self.step.flop_counter = progress.use.count if can_count_flops(models) else None
        state.check_saveable()
        is_sharded = any(part.replica.sharded for part in state.models)
        if run.precision == "fp16":
            check_no_grad_scaler("loss-scaled-twice")
        elif plan.virtual_ranks > run.world.size or plan.accumulation > 1 or is_sharded:
            check_no_grad_scaler("grad-scaler")  # it needs whole gradients after each backward
        if (place := progress.place) is not None:
            progress.place = replace(place, definition=definition)
            if place.attempt_dir is not None:
                settings = {"task": config.program_name, **run.definition, **batch, "epochs": self._epochs or 1}
                run_folder.move_summary_to_attempt(place.folder, place.attempt)
                from paceline.config.settings import settings_to_toml  # most sessions have no folder

                text = settings_to_toml(settings | config.operational_settings)
                run_folder.write_settings(place.folder, text)
        progress.open_run(
            state.models, plan, run.share, self._facts,
            listed=plan.own_order, report_to=config.report_to, others=state.registered_tensors,
        )  # fmt: skip

    def _definition(self) -> dict[str, Any]:
        """The definition of the run, after a comparison over ranks, and with the checkpoint of a resume (a collective).

        Raises:
            UsageError: on one rank, if it differs. ReportedByPeer on the others.
        """
        config, world, models, origin = self._config, self._run.world, self._state.models, self._run.progress.origin
        definition: dict[str, Any] = {
            **self._run.definition, "task": config.program_name, **self._data, "batchnorm": "local",
            "optimizer": [type(part.optimizer).__name__ for part in models], "hardware": hardware_facts(world.device),
            "threads_per_rank": torch.get_num_threads() if config.is_exact else None,
            "precision": self._run.precision or "fp32",
        }  # fmt: skip
        if origin is not None and self._saved_data is not None:
            # the definition is that of the first loop; the interrupted loop may be a different one
            try:
                check_definition_changes(self._saved_data, self._data, (), origin.location_text)
            except UsageError as error:
                raise UsageError.from_error(error, after=f" {CHANGED_DATA_ADVICE}") from None
            saved = {current_setting_name(name): value for name, value in origin.trainer_state.definition.items()}
            definition |= {name: saved[name] for name in self._data}
        if config.is_exact:
            exact_only = {name: definition[name] for name in EXACT_ONLY_SETTINGS}
            check_equal("processors, libraries and threads", exact_only, world)
        others = {k: v for k, v in definition.items() if k not in EXACT_ONLY_SETTINGS}
        check_equal("data, optimizers and batches", others, world)
        if origin is not None:
            with raise_on_all_ranks(world):
                ignored = EXACT_ONLY_SETTINGS if self._run.observer else ()
                check_definition_changes(origin.trainer_state.definition, definition, ignored, origin.location_text)
                if (num_saved := len(self._state.saved_models)) != len(models):
                    raise UsageError(
                        code="models-differ", where=origin.location_text, saved=num_saved, prepared=len(models)
                    )
        return definition

    def _facts(self) -> dict[str, Any]:
        metrics = self._run.progress.metrics
        own = {"task": self._config.program_name, "strategy": self._config.strategy}
        return {**own, "test_metrics": metrics or None, "test_accuracy": metrics.get("accuracy")}

    def _end_step(
        self, loader: Loader, micro_batches: Sequence[MicroBatch], plan: BatchPlan, *, was_left: bool = False
    ) -> None:
        state, position, progress = self._state, self.position, self._run.progress
        if self.step.checks_losses:
            self.checks.check_loss_inputs(begins=self._begins_check, follows=self._ends_check)
        done = self.step.end()
        batch = position.batch
        stream = progress.stream
        samples = micro_batches[0].work.global_samples if stream is None else stream.global_batch_samples()
        position.batch += 1
        lr = float(state.models[0].replica.optimizer.param_groups[0]["lr"])
        record = StepRecord(progress.step + 1, done, lr, micro_batches, self._clock.take(), self._clock.starts)
        progress.record_step(record, samples, tracked=record.step % TRACK_EVERY == 0)
        if done.skip_cause is not None:
            progress.rollback_point(record)
        if self._run.observer is not None:
            self._run.observer.on_step(record)
        if ProgressWriter.of_process is not None:
            report = partial(self._report, plan, done.loss)
            ProgressWriter.of_process.write_step(position.batch, plan.known_steps_per_epoch, report)
        self._stopped = done.votes.stop > 0
        self._at_end = is_end = loader.is_last_batch(batch, done.votes.next_batch_samples) and not was_left
        if progress.step == progress.start + 1:
            for part in state.models:
                part.check_state_after_first_step()
        if state.saves:
            if state.must_search_again():
                self._restore_random_streams()
                state.search_unsaved_state(only_known_containers=True)
            if state.values:
                copy_json_values(state.values, strict=True)
        if progress.is_open:
            progress.save_if_due(
                done.votes, partial(self._checkpoint_values, self._run.world), save=self._stopped or is_end, wait=is_end
            )

    def _report(self, plan: BatchPlan, loss: float) -> ProgressRecord:
        step, steps = self.position.batch, plan.known_steps_per_epoch
        epoch = self.position.epoch if self._epochs else self.position.loop_in_run
        remaining = max(0, steps - step) * plan.global_batch
        rate, finite_loss = self._run.progress.throughput.recent_rate(), loss if math.isfinite(loss) else None
        return ProgressRecord(epoch, self._epochs, step, steps, finite_loss, rate, remaining)

    def _checkpoint_values(self, world: World | None = None) -> dict[str, Any]:
        """The values of a checkpoint. With a `world` a collective; without, as far as this rank knows."""
        self._restore_random_streams()
        if world is not None:
            self._state.search_unsaved_state()
        where, loader = self.position.state_dict(), self._loader
        numbers = {"where": where, "epoch_streams": self._epoch_streams, "data": self._data}
        numbers |= self._state.json_state(loader, world)
        streams = None if loader is None else loader.checkpoint_position(where, world)
        return numbers if streams is None else numbers | {"streams": streams}

    # the end

    def record_exit_code(self, code: Any) -> None:
        """Record a call of sys.exit(code), because the code is not available at the end of the process."""
        if self._iterators:
            self._exit = code, self._run.progress.step

    def close(self, error: BaseException | None) -> None:
        """End the run, with an error if there is one."""
        run, progress, self.is_closed = self._run, self._run.progress, True
        self.checks.close()
        name_arguments_in_error(error)
        if error is None and self._exit is not None and self._exit[1] == progress.step:
            error = SystemExit(self._exit[0])
        in_loop = isinstance(error, SystemExit) and (self._iterators > 0 or self._exit is not None)
        if isinstance(error, SystemExit) and (self._stopped or not error.code):
            error = None  # a regular end
        error = error or self.failure
        try:
            if error is not None:
                self._fail(error)
            elif self._stopped or self.is_complete:
                if self.is_complete and not self._stopped and not in_loop:  # otherwise other ranks may still train
                    if (resumed := self._resumed) is not None and self._state.models:
                        epoch, phase = resumed.epoch + 1, resumed.epochs_call + 1
                        raise UsageError(code="resume-place-not-reached", epoch=epoch, phase=phase)
                    self._state.compare_replicas(progress.step)
                run.guard.page.enter(Phase.CLOSE)
                if progress.is_open:
                    progress.finish(self._stopped, self._result_lines)
        except BaseException as close_error:
            name_arguments_in_error(close_error)
            error = error or close_error
            record_failure(close_error, _exit_code(close_error), traceback=not isinstance(close_error, PacelineError))
            raise
        finally:
            run.close(error)

    def _result_lines(self, summary: "Summary") -> list[str]:
        if summary.exit == ExitCode.SAVED:
            return [f"stopped on request: saved after step {summary.steps}. Start the script again to resume"]
        assert self._run.progress.place is not None
        folder = self._run.progress.place.folder
        return [f"weights {str(summary.weights_sha256)[:16]}...", f"run folder {folder}", report_hint(folder)]

    def _fail(self, error: BaseException) -> None:
        progress, world, instead = self._run.progress, self._run.world, None
        is_whole = not self.step.updating and self.is_open and not self._state.is_damaged
        with suppress(Exception):
            if is_whole and self.step.in_step:
                self.step.abort_step()
        with suppress(Exception):
            instead = progress.save_after_failure(error, self._checkpoint_values, is_state_consistent=is_whole)
            if isinstance(error, OSError) and instead is not None:
                print(instead, file=sys.stderr, flush=True)
            code, place = _exit_code(error), progress.place
            is_refused = code == ExitCode.USAGE and place is not None and place.attempt > 1
            if progress.is_open and world.rank == 0 and not is_refused:
                progress.summarise(code, failure=f"{type(error).__name__}: {error}"[:2000])
        # before any teardown, so that the first failing rank is known
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            cause = instead or error
            record_failure(cause, _exit_code(cause), traceback=not isinstance(error, PacelineError))


class EvaluationLoop:
    """The evaluation loops of a session. Each rank has whole models with merged buffers, and a part of each batch."""

    def __init__(self, run: SessionRun, state: SessionState, step: SessionStep, checks: LoopChecks) -> None:
        self._run, self._state, self._step, self._checks = run, state, step, checks
        self.is_running = False  # whether the current loop body is that of an evaluation
        self.samples = 0  # the number of samples of the current batch on all ranks; 0 outside of an evaluation

    def batches(self, loader: Loader) -> Generator[Any]:
        """This rank's part of each batch of a loader (a collective)."""
        world, page, step, observer = self._run.world, self._run.guard.page, self._step, self._run.observer
        if not step.is_final_micro_batch:
            raise UsageError(code="evaluation-inside-step")
        in_body = step.micro_step is not None
        outside = step.stream.outside if in_body else None
        restore = GeneratorStates().restore if in_body else lambda: None
        self.is_running, step.left = True, None
        try:
            self._checks.fingerprint_data(loader)
            with nullcontext() if outside is None else outside.use_states():  # as a loop without a session draws
                plan = loader.draw_epoch_plan(world, None)
                loader.draw_first_evaluation_batches(plan)
            with (
                self.use_merged_buffers(),
                self._run.guard.enter_phase(Phase.EVALUATE),
                self._checks.forbid_unprepared_batch_norm(),
            ):
                for batch, self.samples in loader.evaluation_batches(plan, world):
                    step.check_enough_evaluation_samples(self.samples, world.size)
                    yield batch if observer is None else observer.on_batch(batch, None)
                    page.tick()
        finally:
            self.is_running, self.samples = False, 0
            restore()

    @contextmanager
    def use_merged_buffers(self) -> Generator[None]:
        """Inside, the models have the buffers of all virtual ranks (a collective)."""
        was_merged, self._step.merged = self._step.merged, True
        try:
            with ExitStack() as stack:
                for part in () if was_merged else self._state.models:
                    stack.enter_context(part.replica.use_merged_buffers())
                yield
        finally:
            self._step.merged = was_merged


def _counters() -> dict[str, float]:
    """The numbers of the user's loop around the generator that calls this function."""
    from paceline.sessions.unsaved import find_user_numbers

    return find_user_numbers(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]


def _check_micro_batches_not_counted() -> None:
    """Raise an error if the loop around the generator that calls this function takes a number of micro-batches."""
    from paceline.sessions.unsaved import find_next_call, find_wrapping_iterators

    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    if counting := find_next_call(frame) or {*find_wrapping_iterators(frame)} & {"islice", "zip"}:
        raise UsageError(code="micro-batches-counted", how=", ".join(sorted(counting)))


def _exit_code(error: BaseException) -> int:
    return int(error.exit_code) if isinstance(error, PacelineError) else int(ExitCode.FAILED)
