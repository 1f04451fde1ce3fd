"""Takes one rank through all steps; records, evaluates and decides between them; ends the run."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager
from dataclasses import replace

from msgspec import structs

from paceline.checkpoint.exported import state_names
from paceline.checkpoint.whole import sha256_of
from paceline.contract.evidence import Phase
from paceline.data.loader import load_steps, naming_lost_processes
from paceline.errors import ExitCode, PacelineError, TrainingError, UsageError
from paceline.observe import events
from paceline.observe.folder import WEIGHTS
from paceline.observe.progress import Display, Throughput
from paceline.observe.summary import Summary, write_summary
from paceline.rhythm import steps_or_seconds
from paceline.stepping.nonfinite import LeftOut
from paceline.stepping.order import CallOrder
from paceline.stepping.votes import Votes
from paceline.sums import check_equal, told_once
from paceline.train.costs import Costs, Waiting, all_costs, data_lines
from paceline.train.evaluations import Evaluations
from paceline.train.fit import StepRecord, fit
from paceline.train.keeping import Keeping, Place, Rhythm
from paceline.train.preemption import StopRequest, noticing
from paceline.train.prepare import Parts
from paceline.train.records import write_started, write_step
from paceline.train.resume import Content, Origin
from paceline.train.weights import rescue, save, surviving
from paceline.train.wording import closing_lines, finite, opening_lines, stopped_line, summary_of
from paceline.worker.guard import Guard


class Training:
    """The state shared by the loop over steps, its records and its end."""

    def __init__(self, parts: Parts, place: Place, origin: Origin | None) -> None:
        """A collective; UsageError if the run's files cannot be written."""
        self._parts, self._place, self._origin = parts, place, origin
        self._world, self._config = parts.replica.world, parts.config
        self._throughput, self._waiting = Throughput(), Waiting()
        self._start = self._step = origin.step if origin else 0
        self._samples = origin.content.samples_seen if origin else 0
        self._names = [state_names(parts.replica.model)]
        self._request = StopRequest()
        self._guard = Guard.of_process()
        self._failed_in: int = Phase.CLOSE
        self._order = CallOrder(self._world, self._guard.take_order, self._guard.taken, self._say)
        self._left_out = LeftOut(self._config.guard.not_finite, self._world, self._say)
        interval, shown = self._config.run.log_interval, self._world.rank == 0
        self._display = Display(total_steps=parts.total_steps, interval=interval, shown=shown)
        self._writer = events.EventWriter(place.folder / f"events-{self._world.rank}.jsonl")
        c = self._config.checkpoint
        rhythm = Rhythm(c.watch_every, c.snapshot_every, *steps_or_seconds(c.checkpoint_every))
        said = self._writer.write, self._say, self._display.say
        self._evaluations = Evaluations(parts, place, origin and origin.content, *said)
        self._keeping = Keeping(
            parts.replica, place, origin, rhythm,
            keep=c.keep, writer=self._writer, say=self._say, enter=self._guard.box.enter,
        )  # fmt: skip

    def run(self) -> ExitCode:
        """Train, evaluate, save, summarise; SAVED if the run was asked to stop and its state is on disk."""
        began = time.perf_counter()
        with noticing(told=self._world.rank == 0) as self._request:
            with self._surviving(), self._writer, self._display:
                self._open()
                try:
                    with naming_lost_processes(self._guard.box, self._world.rank):
                        asked_to_stop = self._loop()
                        if not asked_to_stop:
                            self._evaluations.evaluate_at_end(self._step)
                    self._keeping.end()
                except Exception as error:
                    self._failed_in = self._guard.box.get("phase")
                    stalled = None if isinstance(error, PacelineError) else self._guard.stall_error(error)
                    self._save_what_is_whole(error)
                    if stalled is not None:
                        raise stalled from error
                    if isinstance(error, UsageError) and self._step > self._start:  # not before the first step
                        raise TrainingError(str(error)) from error
                    raise
                finally:
                    self._keeping.abandon()
                    self._evaluations.close()
                self._writer.write(events.Ended(self._step, time.time()))
            self._guard.box.enter(Phase.CLOSE)
            with self._surviving():
                return self._stop() if asked_to_stop else self._finish(time.perf_counter() - began)

    def _save_what_is_whole(self, error: Exception) -> None:
        """After an error: the state after the last step, unless that is half updated."""
        if self._step > self._start and self._failed_in != Phase.OPTIMIZER:
            self._keeping.save_after(error, self._step, self._content)

    def _open(self) -> None:
        write_started(self._writer.write, self._world, self._parts.plan, self._place, self._start)
        for line in [*self._place.notices, *opening_lines(self._parts)]:
            self._say(line)
        if self._config.guard.not_finite == "rollback" and not self._keeping.can_go_back:
            self._say("WARNING: --not-finite rollback has nothing to go back to: give --checkpoint-every STEPS")
        if self._origin:
            self._say(f"goes on after step {self._start} of {self._parts.total_steps}, from {self._origin.where}")

    def _loop(self) -> bool:
        """Take all steps that are left; return whether the run was asked to stop before the last."""
        evaluations = self._evaluations
        is_over = self._start >= self._parts.total_steps or evaluations.ended_early
        if is_over or (self._start and evaluations.due(self._start) and evaluations.step != self._start):
            evaluations.evaluate(self._start)  # a run that was asked to stop just there had no time for it
        while not evaluations.ended_early:
            if isinstance(end := self._pass(), bool):
                return end
            self._go_back(end)
        return False

    def _pass(self) -> bool | Origin:
        """Take steps until none is left (False), the run was asked to stop (True), or has to go back."""
        parts = self._parts
        batches = load_steps(
            parts.train_set, parts.plan, parts.share, replace(parts.loading, box=self._guard.box),
            start=self._step, stop=parts.total_steps, merged=self._config.model.batchnorm == "sync",
        )  # fmt: skip
        records = fit(
            parts.replica, batches, parts.task.loss, parts.schedule,
            start=self._step, max_norm=self._config.optimizer.clip_norm, votes=self._votes,
            enter=self._guard.box.enter, order=self._order, may_leave_out=self._config.guard.not_finite != "stop",
        )  # fmt: skip
        try:
            for record in records:
                self._note(record)
                if (found := record.result.left_out) is None and parts.average is not None:
                    parts.average.update()
                if found is not None and self._left_out.goes_back(self._step, found) and not record.result.votes.stop:
                    if (back := self._keeping.newest()) is not None:
                        return back
                    self._say(f"step {self._step} is left out: nothing is kept yet to go back to")
                if (stopping := self._between(record)) or self._evaluations.ended_early:
                    return stopping
        finally:  # end the loader's processes also when a step fails
            records.close()
            batches.close()
        return False

    def _votes(self) -> Votes:
        asked = self._request.by is not None
        return self._keeping.votes()._replace(stop=float(asked), end=self._evaluations.asked_to_end())

    def _between(self, record: StepRecord) -> bool:
        """Do what is due between this step and the next; return whether all ranks stop here."""
        config, votes, evaluations = self._config.checkpoint, record.result.votes, self._evaluations
        evaluations.after_step(record)
        is_last = self._step == self._parts.total_steps
        if votes.end and not is_last:
            is_last, evaluations.ended_early = True, "a function of the task has stopped it"
        stopping = votes.stop > 0 and not is_last
        at_end = is_last or self._step % self._parts.plan.steps_per_epoch == 0
        save = stopping or (at_end and (config.checkpoint_epochs or (is_last and config.checkpoint_every is not None)))
        self._throughput.pause(self._keeping.between(self._step, votes, self._content, save=save))
        if (at_end or evaluations.due(self._step)) and not stopping:
            if at_end:
                self._throughput.pause(self._keeping.settle())  # whatever the evaluation meets, the epoch is on disk
            self._throughput.pause(evaluations.evaluate(self._step))
        if self._step == config.rehearse_preemption and self._world.rank == self._world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)  # one rank is enough: all agree
        return stopping

    def _content(self) -> Content:
        found = self._evaluations
        loop = found.content() | self._parts.schedule.numbers()
        return Content(self._samples, finite(found.metrics), self._place.definition, found.step, loop, self._names)

    def _go_back(self, origin: Origin) -> None:
        self._parts.take_over(origin)
        self._writer.write(events.RolledBack(self._step, origin.step))
        self._say(f"goes back from step {self._step} to {origin.where}")
        self._step, self._samples = origin.step, origin.content.samples_seen
        self._evaluations.take(origin.content)
        self._guard.box.set_step(self._step)

    def _note(self, record: StepRecord) -> None:
        self._guard.box.enter(Phase.CHECKPOINT)  # the step is whole, whatever happens now
        plan = self._parts.plan
        epoch, step = divmod(record.step - 1, plan.steps_per_epoch)
        samples = len(plan.global_indices(epoch, step))
        self._step, self._samples = record.step, self._samples + samples
        self._guard.box.set_step(self._step)
        self._throughput.step(samples)
        self._waiting.step(record.data_seconds, record.seconds)
        write_step(self._writer.write, record, samples, self._parts.share, listed=self._config.run.record_samples)
        self._display.step(
            record.step, epoch=epoch, loss=record.result.loss, lr=record.lr, rate=self._throughput.recent(),
            samples_left=(self._parts.total_steps - record.step) * plan.global_batch,
        )  # fmt: skip

    def _say(self, line: str) -> None:
        self._display.say(line)
        self._writer.write(events.Notice(line))

    def _stop(self) -> ExitCode:
        """The state is on disk: say how the run goes on (a collective)."""
        costs, _ = all_costs(self._waiting, self._world)
        if failed := self._keeping.failed:
            weights = self._parts.replica.weights()
            where = rescue(weights, self._place.folder) if self._world.rank == 0 else ""
            words = f"asked to stop after step {self._step}, but the state could not be saved: {failed}; {where}"
            raise told_once(TrainingError(words), self._world)
        if self._world.rank == 0:
            write_summary(self._place.folder, self._summary(ExitCode.SAVED, costs))
            self._display.say(stopped_line(self._step, self._parts.total_steps, self._place.folder))
        return ExitCode.SAVED

    def _finish(self, seconds: float) -> ExitCode:
        replica = self._parts.replica
        costs, waited = all_costs(self._waiting, self._world)
        with replica.merged_buffers():
            weights = replica.weights()
            sha256 = sha256_of(weights)
            # A rank whose weights differ has not computed this run.
            check_equal("final weights", sha256, self._world, error=TrainingError)
            if self._world.rank == 0:
                save(weights, self._place.folder / WEIGHTS)
        self._evaluations.end(self._step)
        if self._world.rank == 0:
            summary = self._summary(ExitCode.DONE, costs, sha256, seconds)
            write_summary(self._place.folder, summary)
            for line in [*data_lines(costs, waited, self._parts), *closing_lines(summary, self._place.folder)]:
                self._display.say(line)
        if failed := self._keeping.failed:
            words = f"the run is complete and its weights are saved, but its last checkpoint is not: {failed}"
            raise told_once(TrainingError(words), self._world)
        return ExitCode.DONE

    def _summary(
        self, code: ExitCode, costs: Costs, sha256: str | None = None, seconds: float | None = None
    ) -> Summary:
        summary = summary_of(self._parts, self._place, code, self._step, self._samples, self._evaluations.summary())
        known = {"samples_per_second": self._throughput.overall(), "weights_sha256": sha256, "seconds": seconds}
        return structs.replace(summary, **known, **structs.asdict(costs))

    def _surviving(self) -> AbstractContextManager[None]:
        parts, folder = self._parts, self._place.folder
        return surviving(parts.replica, folder, lambda: (self._start, self._step), lambda: self._failed_in)
