"""Takes one rank of `paceline train` through all steps, and evaluates between them; the rest is the run's course."""

import os
import signal
from contextlib import closing
from functools import partial
from typing import Any

from paceline.checkpoint.resume import ResumePoint, RunLocation
from paceline.compute.flops import Utilization
from paceline.compute.phase_events import phase_events
from paceline.config.choices import steps_or_seconds
from paceline.config.strategies import EXACT
from paceline.data.workers import naming_lost_processes
from paceline.errors import ExitCode, plural
from paceline.protocol.evidence import Phase
from paceline.rank.guard import Guard
from paceline.rank.world import World
from paceline.runs.progress import Display
from paceline.runs.summary import Summary
from paceline.stepping.totals import Votes
from paceline.stepping.trained_model import TrainedModel, loss_scale
from paceline.train.checkpointing import Rhythm
from paceline.train.costs import data_lines
from paceline.train.course import Course
from paceline.train.evaluations import Evaluations
from paceline.train.fit import StepRecord, fit
from paceline.train.passes import Passes, StreamPasses
from paceline.train.preemption import noticing
from paceline.train.prepare import Parts
from paceline.train.sharing import waited_line
from paceline.train.wording import closing_lines, facts, opening_lines, stopped_line


class Training:
    """The loop of a task over its steps."""

    def __init__(self, parts: Parts, place: RunLocation, origin: ResumePoint | None) -> None:
        """UsageError on one rank for a metric or tracker that is not there (a collective)."""
        self._parts, self._place = parts, place
        self._world, self._config = parts.replica.world, parts.config
        self._box = Guard.of_process().box
        self._box.on_device = self._on_device = phase_events(self._world.device)
        interval, shown = self._config.run.log_interval, self._world.rank == 0
        self._display = Display(total_steps=parts.total_steps, interval=interval, shown=shown)
        c = self._config.checkpoint
        rhythm = Rhythm(c.watch_every, c.snapshot_every, *steps_or_seconds(c.checkpoint_every), keep=c.keep)
        self._course = Course(place, origin, self._world, rhythm, self._config.guard.not_finite, self._display.say)
        compute = self._config.compute
        self._course.use = Utilization(self._world, compute.peak_tflops, parts.count, compute.precision)
        stream, say = parts.stream, self._course.say
        self._passes = Passes(parts, self._box) if stream is None else StreamPasses(parts, stream, self._box, say)
        self._scale = loss_scale(self._config.compute.precision)
        self._spent, self._stages = [0.0, 0.0], list[str]()  # waiting for other ranks, and in all
        if origin is not None:
            self._take(origin)
        self._evaluations = Evaluations(parts, self._course, self._passes)

    def run(self) -> ExitCode:
        """Train, evaluate, save, summarise; SAVED if the run was asked to stop and its state is on disk."""
        parts, course, run = self._parts, self._course, self._config.run
        with noticing(told=self._world.rank == 0) as course.request, closing(course), self._display:
            try:
                course.open(
                    [TrainedModel(parts.replica)], parts.plan, parts.share,
                    lambda: facts(parts, self._place) | self._evaluations.summary(), opening_lines(parts),
                    of=f" of {parts.total_steps}" if parts.total_steps else "", track=run.track,
                    listed=run.record_samples or parts.plan.own_order,
                )  # fmt: skip
                with naming_lost_processes(self._box, self._world.rank):
                    stopped = self._loop()
                    if not stopped:
                        self._evaluations.evaluate_at_end()
                    if parts.replica.pipeline is not None:
                        self._stages = [waited_line(self._spent, self._world)]
                return course.finish(stopped, self._closing, self._evaluations.end)
            except Exception as error:
                whole = self._box.get("phase") != Phase.OPTIMIZER
                if (instead := course.fail(error, partial(self._numbers, None), whole=whole)) is not None:
                    raise instead from error
                raise

    def _closing(self, summary: Summary) -> list[str]:
        course, parts, folder = self._course, self._parts, self._place.folder
        if summary.exit == ExitCode.SAVED:
            return [stopped_line(course.step, parts.total_steps, folder)]
        scaled = [f"fp16: {plural(self._scale.left_out, 'step')} left out by overflows"] if self._scale else []
        return [*scaled, *self._stages, *data_lines(summary, course.waited, parts), *closing_lines(summary, folder)]

    def _loop(self) -> bool:
        """Take all steps that are left; return whether the run was asked to stop before the last."""
        evaluations, start = self._evaluations, self._course.start
        is_over = self._passes.is_over(start) or evaluations.ended_early
        if is_over or (start and evaluations.due() and self._course.evaluated != start):
            evaluations.evaluate()  # a run that was asked to stop just there had no time for it
        while not evaluations.ended_early:
            if isinstance(end := self._pass(), bool):
                return end
            self._parts.take_over(end)
            self._course.go_back(end)
            self._take(end)
            evaluations.take(end.content.loop)
        return False

    def _pass(self) -> bool | ResumePoint:
        """Take steps until none is left (False), the run was asked to stop (True), or has to go back."""
        parts, course = self._parts, self._course
        batches = self._passes.batches(course.step)
        # the same bits at every world size need the same scale of losses, whoever computes what
        one_each = parts.plan.virtual_ranks == self._world.data.size and parts.plan.accumulation == 1
        one_each = one_each and self._config.strategy not in EXACT
        records = fit(
            parts.replica, batches, parts.task.loss, parts.schedule,
            start=course.step, max_norm=self._config.optimizer.clip_norm, votes=self._votes,
            on_device=self._on_device, enter=self._box.enter, order=course.order,
            may_leave_out=self._config.guard.not_finite != "stop", ahead=parts.loading.ahead, scale=self._scale,
            one_each=one_each,
        )  # fmt: skip
        with closing(batches), closing(records):  # ends the loader's processes also when a step fails
            for record in records:
                self._note(record)
                if record.result.left_out is None and parts.average is not None:
                    parts.average.update()
                if (back := course.back(record)) is not None:
                    return back
                self._passes.note(record)
                if (stopping := self._between(record)) or self._evaluations.ended_early:
                    return stopping
        return False

    def _take(self, origin: ResumePoint) -> None:
        self._passes.take(origin.content.loop)
        if self._scale is not None:
            self._scale.take(origin.content.loop)

    def _note(self, record: StepRecord) -> None:
        course, total = self._course, self._parts.total_steps
        waited = record.phase_seconds.get(Phase.SYNC.word, 0.0)
        self._spent = [self._spent[0] + waited, self._spent[1] + record.seconds]
        tracked = record.step % self._config.run.log_interval == 0 or record.step == total
        course.note(record, self._passes.samples(record), tracked=tracked)
        self._display.step(
            record.step, epoch=self._passes.epoch(record.step), loss=record.result.loss, lr=record.lr,
            rate=course.throughput.recent(),
            samples_left=(total - record.step) * self._parts.plan.global_batch if total else None,
        )  # fmt: skip

    def _votes(self) -> Votes:
        return self._course.votes(end=self._evaluations.told_to_end, coming=self._passes.coming)

    def _between(self, record: StepRecord) -> bool:
        """Do what is due between this step and the next; return whether all ranks stop here."""
        config, votes, evaluations = self._config.checkpoint, record.result.votes, self._evaluations
        course, step = self._course, record.step
        evaluations.after_step(record)
        is_last = self._passes.is_over(step)
        if votes.end and not is_last:
            is_last, evaluations.ended_early = True, "a function of the task has stopped it"
        stopping = votes.stop > 0 and not is_last
        at_end = is_last or self._passes.at_end(step)
        save = stopping or (at_end and (config.checkpoint_epochs or (is_last and config.checkpoint_every is not None)))
        # whatever an evaluation meets, the epoch is on disk
        course.between(votes, partial(self._numbers, self._world), save=save, settled=at_end and not stopping)
        if (at_end or evaluations.due()) and not stopping:
            evaluations.evaluate()
        if step == config.rehearse_preemption and self._world.rank == self._world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)  # one rank is enough: all agree
        return stopping

    def _numbers(self, world: World | None) -> dict[str, Any]:
        scale = self._scale.numbers() if self._scale else {}
        return self._evaluations.content() | self._parts.schedule.numbers() | self._passes.numbers(world) | scale
