"""The training loop of `paceline train` on one rank: all steps, and the evaluations between them."""

import os
import signal
from contextlib import closing
from functools import partial
from typing import Any

from paceline.checkpoint.state import LockedRun, ResumePoint
from paceline.collectives.control import is_async_device
from paceline.compute.flops import Utilization
from paceline.config.choices import CheckpointIntervals, parse_checkpoint_interval
from paceline.config.strategies import EXACT_STRATEGIES
from paceline.data.workers import explain_lost_workers
from paceline.errors import ExitCode, plural
from paceline.protocol.evidence import Phase
from paceline.rank.guard import HangGuard
from paceline.rank.world import World
from paceline.runs.progress import ProgressDisplay
from paceline.runs.summary import Summary
from paceline.stepping.audit import StepAuditor
from paceline.stepping.trained_model import ModelInTraining, make_loss_scale
from paceline.train.data_progress import DataProgress, StreamProgress
from paceline.train.evaluations import Evaluator
from paceline.train.optimizer import Schedule
from paceline.train.parallelism import stage_wait_line
from paceline.train.preemption import record_stop_signals
from paceline.train.prepare import TrainingComponents
from paceline.train.progress import TrainingProgress
from paceline.train.step import fit
from paceline.train.step_record import StepRecord, make_phase_events
from paceline.train.wording import closing_lines, data_wait_lines, opening_lines, stopped_line, summary_values


class TaskTrainer:
    def __init__(self, parts: TrainingComponents, place: LockedRun, origin: ResumePoint | None) -> None:
        self._parts, self._place = parts, place
        self._world, self._config = parts.replica.world, parts.config
        self._page = HangGuard.of_process().page
        self._page.on_device = self._on_device = make_phase_events(self._world.device)
        interval, is_shown = self._config.run.log_interval, self._world.rank == 0
        self._display = ProgressDisplay(total_steps=parts.total_steps, interval=interval, shown=is_shown)
        c, not_finite = self._config.checkpoint, self._config.guard.not_finite
        every = parse_checkpoint_interval(c.checkpoint_every)
        intervals = CheckpointIntervals(c.check_replicas_every, c.snapshot_every, *every, keep=c.keep_checkpoints)
        self._progress = TrainingProgress(place, origin, self._world, intervals, not_finite, self._display.say)
        compute = self._config.compute
        self._progress.use = Utilization(self._world, compute.peak_tflops, parts.flop_count, compute.precision)
        self._progress.stream = stream = parts.stream
        if stream is None:
            self._data = DataProgress(parts, self._page)
        else:
            self._data = StreamProgress(parts, stream, self._page, self._progress)
        self._scale = make_loss_scale(self._config.compute.precision)
        self._waited_seconds = [0.0, 0.0]  # waiting for other ranks; in total
        self._stage_lines = list[str]()
        if origin is not None:
            self._load(origin)
        self._evaluator = Evaluator(parts, self._progress, self._data)
        # nobody needs the last loss, or the last votes to know whether a stream continues
        is_fixed = isinstance(parts.schedule, Schedule) and parts.task.on_step is None and stream is None
        is_fixed = is_fixed and self._scale is None and not compute.cuda_graphs
        self._audits: StepAuditor | None = None
        if (every := self._config.guard.audit_every) is not None and self._world.size > 1:
            save = partial(self._progress.save_before_stop, partial(self._numbers, self._world))
            on_audit = self._config.guard.on_audit
            self._audits = StepAuditor(every, self._world, parts.plan.virtual_ranks, on_audit, save, self._display.say)
            self._audits.set_batch_source(self._data.reload_micro_batch, parts.plan)
        self._can_defer_read = is_async_device(self._world.device) and is_fixed and self._audits is None

    def run(self) -> ExitCode:
        parts, progress, run = self._parts, self._progress, self._config.run
        with record_stop_signals(announce=self._world.rank == 0) as progress.request, closing(progress), self._display:
            try:
                progress.open_run(
                    [ModelInTraining(parts.replica)], parts.plan, parts.local_virtual_ranks,
                    lambda: summary_values(parts, self._place) | self._evaluator.summary_fields(), opening_lines(parts),
                    of=f" of {parts.total_steps}" if parts.total_steps else "", report_to=run.report_to,
                    listed=run.record_samples or parts.plan.own_order,
                )  # fmt: skip
                with explain_lost_workers(self._page, self._world.rank):
                    stopped = self._loop()
                    if not stopped:
                        self._evaluator.evaluate_at_end()
                    if parts.replica.pipeline is not None:
                        self._stage_lines = [stage_wait_line(self._waited_seconds, self._world)]
                return progress.finish(stopped, self._closing, self._evaluator.end)
            except Exception as error:
                is_whole = self._page.get("phase") != Phase.OPTIMIZER
                if (
                    instead := progress.save_after_failure(
                        error, partial(self._numbers, None), is_state_consistent=is_whole
                    )
                ) is not None:
                    raise instead from error
                raise

    def _closing(self, summary: Summary) -> list[str]:
        progress, parts, folder = self._progress, self._parts, self._place.folder
        if summary.exit == ExitCode.SAVED:
            return [stopped_line(progress.step, parts.total_steps, folder)]
        scale_lines = [f"fp16: {plural(self._scale.skipped, 'step')} skipped after overflows"] if self._scale else []
        costs = data_wait_lines(summary, progress.slowest_data_rank, parts)
        return [*scale_lines, *self._stage_lines, *costs, *closing_lines(summary, folder)]

    def _loop(self) -> bool:
        """Take all remaining steps. Return whether a stop was requested before the last step."""
        evaluator, start = self._evaluator, self._progress.start
        is_over = self._data.is_last_step(start) or evaluator.ended_early
        if is_over or (start and evaluator.is_due() and self._progress.evaluated != start):
            evaluator.evaluate()  # a run that stops on request at this step does not evaluate before it ends
        while not evaluator.ended_early:
            if isinstance(outcome := self._take_steps(), bool):
                return outcome
            self._parts.load(outcome)
            self._progress.roll_back(outcome)
            self._load(outcome)
            evaluator.load(outcome.trainer_state.loop)
        return False

    def _take_steps(self) -> bool | ResumePoint:
        """Take steps until the last one (False), a requested stop (True), or a rollback (the state to restore)."""
        parts, progress = self._parts, self._progress
        batches = self._data.batches(progress.step)
        # exact strategies must scale each loss in the same way at every world size
        one_each = parts.plan.virtual_ranks == self._world.data.size and parts.plan.accumulation == 1
        one_each = one_each and self._config.strategy not in EXACT_STRATEGIES
        records = fit(
            parts.replica, batches, parts.task.loss, parts.schedule,
            start=progress.step, max_norm=self._config.optimizer.clip_norm,
            votes=lambda: progress.votes(end=self._evaluator.end_vote),
            page=self._page, on_device=self._on_device, order=progress.order,
            may_skip=self._config.guard.not_finite != "stop", ahead=parts.loading.ahead, scale=self._scale,
            one_each=one_each, audits=self._audits,
            may_defer_read=self._may_defer_read if self._can_defer_read else None,
        )  # fmt: skip
        with closing(batches), closing(records):  # also ends the loader processes if a step fails
            for record in records:
                if record.result.skip_cause is None and parts.weight_average is not None:
                    parts.weight_average.update()
                self._data.advance()
                self._record_step(record)  # from here on a checkpoint may contain the step
                if (origin := progress.rollback_point(record)) is not None:
                    return origin
                self._data.detect_epoch_end(record)
                if (stops := self._after_step(record)) or self._evaluator.ended_early:
                    return stops
        return False

    def _may_defer_read(self, step: int) -> bool:
        """Whether nothing looks at the state after `step`, so that its result may be read in the next step."""
        is_end = self._data.is_last_step(step) or step == self._config.checkpoint.rehearse_preemption
        return not (is_end or self._evaluator.is_due(step) or self._progress.is_due(step))

    def _load(self, origin: ResumePoint) -> None:
        self._data.load(origin.trainer_state.loop)
        if self._scale is not None:
            self._scale.load_json_state(origin.trainer_state.loop)

    def _record_step(self, record: StepRecord) -> None:
        progress, total = self._progress, self._parts.total_steps
        waited, total_seconds = self._waited_seconds
        waited += record.phase_seconds.get(Phase.SYNC.word, 0.0)
        self._waited_seconds = [waited, total_seconds + record.seconds]
        tracked = record.step % self._config.run.log_interval == 0 or record.step == total
        progress.record_step(record, self._data.global_batch_samples(record), tracked=tracked)
        self._display.show_step(
            record.step, epoch=self._data.epoch(record.step), loss=record.result.loss, lr=record.lr,
            rate=progress.throughput.recent_rate(),
            samples_left=(total - record.step) * self._parts.plan.global_batch if total else None,
        )  # fmt: skip

    def _after_step(self, record: StepRecord) -> bool:
        """Save and evaluate as due after this step. Return whether all ranks stop here on request."""
        config, votes, evaluator, step = self._config.checkpoint, record.result.votes, self._evaluator, record.step
        evaluator.call_on_step(record)
        is_last = self._data.is_last_step(step)
        if votes.ended_by_callback and not is_last:
            is_last, evaluator.ended_early = True, "a callback of the task has stopped it"
        stops = votes.stop > 0 and not is_last
        at_end = is_last or self._data.is_epoch_end(step)
        save = stops or (at_end and (config.checkpoint_epochs or (is_last and config.checkpoint_every is not None)))
        # wait for the checkpoint of an epoch, so that an error in the evaluation cannot lose it
        wait = at_end and not stops
        self._progress.save_if_due(votes, partial(self._numbers, self._world), save=save, wait=wait)
        if (at_end or evaluator.is_due()) and not stops:
            evaluator.evaluate()
        if step == config.rehearse_preemption and self._world.rank == self._world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)  # a request on one rank is sufficient
        return stops

    def _numbers(self, world: World | None) -> dict[str, Any]:
        scale = self._scale.json_state() if self._scale else {}
        return (
            self._evaluator.checkpoint_values()
            | self._parts.schedule.json_state()
            | self._data.json_state(world)
            | scale
        )
