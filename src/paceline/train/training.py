"""One rank's way through the steps: what is noted, evaluated and decided between them."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager

from paceline.collectives import check_equal, told_once
from paceline.config import default_strategy
from paceline.data.consumed import add, fingerprint
from paceline.data.loader import load_steps
from paceline.errors import ExitCode, TrainingError
from paceline.launch.box import Box
from paceline.observe import events
from paceline.observe.progress import Display
from paceline.observe.summary import Summary, write_summary
from paceline.observe.throughput import Throughput
from paceline.train.evaluate import evaluate
from paceline.train.fit import StepRecord, fit
from paceline.train.keeping import Keeping, Place, Rhythm
from paceline.train.preemption import StopRequest, noticing
from paceline.train.prepare import Parts
from paceline.train.resume import Content, Origin
from paceline.train.weights import digest, rescue, save
from paceline.train.wording import bits_hold_for, closing_lines, opening_lines, scores_line, stopped_line


class Training:
    """The state that the loop over steps, its records and its end share."""

    def __init__(self, parts: Parts, place: Place, origin: Origin | None) -> None:
        """A collective; UsageError if the run's files cannot be written."""
        self._parts, self._place, self._origin = parts, place, origin
        self._world, self._config = parts.replica.world, parts.config
        self._throughput = Throughput()
        self._start = self._step = origin.step if origin else 0
        self._samples = origin.content.samples_seen if origin else 0
        self._metrics: dict[str, float] = dict(origin.content.metrics) if origin else {}
        self._evaluated = origin.content.evaluated if origin else 0
        self._request = StopRequest()
        self._box = Box.from_env()
        shown = self._world.rank == 0
        self._display = Display(total_steps=parts.total_steps, interval=self._config.run.log_interval, shown=shown)
        self._writer = events.EventWriter(place.folder / f"events-{self._world.rank}.jsonl")
        c = self._config.checkpoint
        rhythm = Rhythm(c.watch_every, c.checkpoint_every, c.snapshot_every)
        self._keeping = Keeping(
            parts.replica, place, origin, rhythm, keep=c.keep, writer=self._writer, say=self._say
        )  # fmt: skip

    def run(self) -> ExitCode:
        """Train, evaluate, save, summarise; SAVED if the run was asked to stop and its state is on disk."""
        began = time.perf_counter()
        with noticing() as self._request:
            with self._weights_survive(), self._writer, self._display:
                self._open()
                try:
                    stopped = self._loop()
                    self._keeping.end()
                finally:
                    self._keeping.abandon()
                self._writer.write(events.Ended(self._step, time.time()))
            with self._weights_survive():
                return self._stop() if stopped else self._finish(time.perf_counter() - began)

    def _open(self) -> None:
        world, plan, place = self._world, self._parts.plan, self._place
        self._writer.write(
            events.Started(
                attempt=place.attempt,
                rank=world.rank,
                world_size=world.size,
                host=socket.gethostname(),
                pid=os.getpid(),
                device=str(world.device),
                unix_time=time.time(),
                generation=place.generation,
                start_step=self._start,
                num_samples=plan.num_samples,
                steps_per_epoch=plan.steps_per_epoch,
            )
        )
        for line in [*place.notices, *opening_lines(self._parts)]:
            self._say(line)
        if self._origin:
            self._say(f"goes on after step {self._start} of {self._parts.total_steps}, from {self._origin.where}")

    def _loop(self) -> bool:
        """Take all steps that are left; returns whether the run was asked to stop before."""
        parts = self._parts
        batches = load_steps(
            parts.train_set, parts.plan, parts.share, parts.loading,
            start=self._start, stop=parts.total_steps, merged=self._config.model.batchnorm == "sync",
        )  # fmt: skip
        records = fit(
            parts.replica, batches, parts.task.loss, parts.schedule,
            start=self._start, max_norm=self._config.optimizer.clip_norm, votes=self._votes,
        )  # fmt: skip
        at_epoch = self._start and self._start % parts.plan.steps_per_epoch == 0
        if self._start >= parts.total_steps or (at_epoch and self._evaluated != self._start):
            self._evaluate()  # what was asked to stop just there had no time for it
        try:
            for record in records:
                self._note(record)
                if self._between(record):
                    return True
        finally:  # ends the loader's processes also when a step fails
            records.close()
            batches.close()
        return False

    def _votes(self) -> list[float]:
        return [float(self._request.by is not None), *self._keeping.votes()]

    def _between(self, record: StepRecord) -> bool:
        """What is due between this step and the next; returns whether all ranks stop here."""
        config, is_last = self._config.checkpoint, self._step == self._parts.total_steps
        asked, *votes = record.result.votes
        stopping = asked > 0 and not is_last
        if is_last or (self._step % self._parts.plan.steps_per_epoch == 0 and not stopping):
            self._evaluate()
        scores = {name: score for name, score in self._metrics.items() if math.isfinite(score)}  # JSON has no others
        content = Content(self._samples, scores, self._place.definition, self._evaluated)
        save = stopping or (is_last and config.checkpoint_every is not None)
        self._throughput.pause(self._keeping.between(self._step, votes, content, save=save))
        if self._step == config.rehearse_preemption and self._world.rank == self._world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)  # one rank is enough: all agree
        return stopping

    def _note(self, record: StepRecord) -> None:
        plan = self._parts.plan
        epoch, step = divmod(record.step - 1, plan.steps_per_epoch)
        samples = len(plan.global_indices(epoch, step))
        self._step, self._samples = record.step, self._samples + samples
        if self._box is not None:
            self._box.set_step(self._step)
        self._throughput.step(samples)
        loss, norm = record.result.loss, record.result.grad_norm
        used = [batch.work for batch in record.microbatches if batch.work.counted]
        if self._config.run.record_samples:
            for work in used:
                indices: list[int] = work.indices.tolist()
                self._writer.write(events.Samples(record.step, epoch, work.virtual_rank, work.part, indices))
        self._writer.write(  # after the samples: a step that is written down vouches for them
            events.Step(
                step=record.step,
                epoch=epoch,
                loss=loss,
                samples=samples,
                lr=record.lr,
                seconds=record.seconds,
                data_seconds=record.data_seconds,
                unix_time=time.time(),
                grad_norm=norm,
                share=(self._parts.share.start, self._parts.share.stop),
                consumed=sum(len(work.indices) for work in used),
                fingerprint=f"{add(*(fingerprint(work.indices) for work in used)):016x}",
            )
        )
        left = (self._parts.total_steps - record.step) * plan.global_batch
        rate = self._throughput.recent()
        self._display.step(record.step, epoch=epoch, loss=loss, lr=record.lr, rate=rate, samples_left=left)

    def _evaluate(self) -> None:
        parts, began = self._parts, time.perf_counter()
        self._metrics = evaluate(parts.replica, parts.test_set, parts.task.loss, parts.task.metrics, parts.loading)
        seconds = time.perf_counter() - began
        self._evaluated = self._step
        self._throughput.pause(seconds)
        self._writer.write(events.Evaluated(self._step, self._metrics, seconds))
        self._display.say(f"test after step {self._step}: {scores_line(self._metrics)}")

    def _say(self, line: str) -> None:
        self._display.say(line)
        self._writer.write(events.Notice(line))

    def _stop(self) -> ExitCode:
        """The state is on disk: say where the run goes on."""
        failed = self._keeping.failed
        if failed:
            where = rescue(self._parts.replica.model, self._place.folder) if self._world.rank == 0 else ""
            error = TrainingError(
                f"asked to stop after step {self._step}, but the state could not be saved: {failed}; {where}"
            )
            raise told_once(error, self._world)
        if self._world.rank == 0:
            write_summary(self._place.folder, self._summary(ExitCode.SAVED))
            self._display.say(stopped_line(self._step, self._parts.total_steps, self._place.folder))
        return ExitCode.SAVED

    def _finish(self, seconds: float) -> ExitCode:
        replica = self._parts.replica
        with replica.merged_buffers():
            sha256 = digest(replica.model)
            # In lockstep to the last: a rank whose weights differ has not computed this run.
            check_equal("final weights", sha256, self._world, error=TrainingError)
            if self._world.rank == 0:
                save(replica.model, self._place.folder / "model.safetensors")
        if self._world.rank == 0:
            summary = self._summary(ExitCode.DONE, sha256, seconds)
            write_summary(self._place.folder, summary)
            for line in closing_lines(summary, self._place.folder):
                self._display.say(line)
        if self._keeping.failed:
            error = TrainingError(
                f"the run is complete and its weights are saved, but its last checkpoint is not: {self._keeping.failed}"
            )
            raise told_once(error, self._world)
        return ExitCode.DONE

    def _summary(self, code: ExitCode, sha256: str | None = None, seconds: float | None = None) -> Summary:
        parts = self._parts
        return Summary(
            task=str(self._config.task),
            exit=int(code),
            strategy=default_strategy(self._config, self._world.size),
            world_size=self._world.size,
            virtual_ranks=parts.plan.virtual_ranks,
            global_batch=parts.plan.global_batch,
            epochs=self._step / parts.plan.steps_per_epoch,
            steps=self._step,
            samples_seen=self._samples,
            test_accuracy=self._metrics.get("accuracy"),
            test_loss=self._metrics.get("loss"),
            test_metrics=self._metrics,
            samples_per_second=self._throughput.overall(),
            seconds=seconds,
            weights_sha256=sha256,
            bits_hold_for=bits_hold_for(self._place.definition) if self._place.definition["unbroken"] else None,
        )

    @contextmanager
    def _weights_survive(self) -> Generator[None]:
        """Inside, a file that cannot be written ends the run, but not without putting the weights somewhere."""
        try:
            yield
        except OSError as error:
            trained = self._step > self._start
            where = rescue(self._parts.replica.model, self._place.folder) if trained else "nothing was trained yet"
            raise TrainingError(
                f"rank {self._world.rank} cannot go on after step {self._step}: {error}; {where}"
            ) from error
