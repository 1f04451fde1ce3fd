"""The run folder of a session: what every step leaves behind, what is saved on the way, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from paceline.checkpoint.exported import state_names
from paceline.checkpoint.whole import sha256_of
from paceline.config import CheckpointConfig, DataConfig, RunConfig, TrainConfig, dump
from paceline.data.plan import BatchPlan
from paceline.errors import ExitCode, PacelineError, TrainingError
from paceline.observe import events
from paceline.observe import folder as run_folder
from paceline.observe.progress import Throughput
from paceline.observe.summary import Summary, scores_line, write_summary
from paceline.observe.track import Tracking
from paceline.sessions.started import Holders
from paceline.stepping.votes import Votes
from paceline.sums import check_equal, told_once
from paceline.train.fit import StepRecord
from paceline.train.keeping import Keeping, Place, Rhythm
from paceline.train.records import write_started, write_step
from paceline.train.resume import Content, Origin
from paceline.train.weights import rescue_alone, save
from paceline.train.wording import finite
from paceline.worker.guard import Guard
from paceline.worker.world import World

TRACK_EVERY = 50  # steps between two reports of the loss


class Course:
    """What a session writes down; nothing, where it has no folder."""

    def __init__(
        self,
        place: Place | None,
        origin: Origin | None,
        world: World,
        name: str,
        rhythm: Rhythm,
        keep: int,
        trackers: list[str],
        say: Callable[[str], None],
    ) -> None:
        self._place, self.origin, self._world, self._name = place, origin, world, name
        self._rhythm, self._keep, self._trackers, self._say = rhythm, keep, trackers, say
        self.step = origin.step if origin else 0
        self.samples = origin.content.samples_seen if origin else 0
        self.metrics: dict[str, float] = dict(origin.content.metrics) if origin else {}
        self._evaluated = origin.content.evaluated if origin else 0
        self._throughput = Throughput()
        self._writer: events.EventWriter | None = None
        self._keeping: Keeping | None = None
        self._tracking: Tracking | None = None
        self._facts: dict[str, Any] = {}

    @property
    def definition(self) -> dict[str, Any]:
        """What defines the run."""
        return self._place.definition if self._place else {}

    @property
    def rate(self) -> float | None:
        """Samples per second over all ranks; None while warming up."""
        return self._throughput.recent()

    def open(
        self, holders: Holders, plan: BatchPlan, definition: dict[str, Any], *, seed: int, strategy: str, epochs: int
    ) -> None:
        """The first step is near: write the settings, and take the folder for checkpoints (a collective)."""
        self._holders, self._plan = holders, plan
        self._names = [state_names(part.replica.model) for part in holders.parts]
        self._facts = {"strategy": strategy, "global_batch": plan.global_batch}
        if self._place is None:
            return
        self._place = place = replace(self._place, definition=definition)
        world = self._world
        if place.attempt_dir is not None:
            shape = DataConfig(
                global_batch=plan.global_batch, accumulation=plan.accumulation, virtual_ranks=plan.virtual_ranks,
                tail=plan.tail,
            )  # fmt: skip
            settings = TrainConfig(
                task=self._name, data=shape, run=RunConfig(seed=seed, epochs=epochs), checkpoint=CheckpointConfig(),
                strategy=strategy,
            )  # fmt: skip
            run_folder.shelve_summary(place.folder, place.attempt)
            run_folder.write_settings(place.folder, dump(settings))
        self._writer = events.EventWriter(place.folder / f"events-{world.rank}.jsonl")
        self._keeping = Keeping(
            holders, place, self.origin, self._rhythm, keep=self._keep, writer=self._writer, say=self._say,
            enter=Guard.of_process().box.enter,
        )  # fmt: skip
        if world.rank == 0:
            self._tracking = Tracking(self._trackers, place.folder, definition, self._say)
        write_started(self._writer.write, world, plan, place, self.step)
        for line in place.notices:
            self._say(line)
        if self.origin:
            self._say(f"goes on after step {self.step}, from {self.origin.where}")

    def votes(self) -> Votes:
        """What this rank has to say about the checkpoint on its way."""
        return self._keeping.votes() if self._keeping else Votes()

    def note(self, record: StepRecord, samples: int, share: range) -> None:
        """A step on a global batch of `samples` samples has ended."""
        self.step, self.samples = record.step, self.samples + samples
        Guard.of_process().box.set_step(self.step)
        self._throughput.step(samples)
        if self._writer is None:
            return
        if self._tracking is not None and self.step % TRACK_EVERY == 0:
            self._tracking.log(self.step, {"loss": record.result.loss, "lr": record.lr})
        write_step(self._writer.write, record, samples, share, listed=self._plan.own_order)

    def between(self, votes: Votes, loop: Callable[[], dict[str, Any]], *, save: bool, settled: bool) -> None:
        """Do what is due after the step; `settled`: it is on disk before anything else is done (a collective)."""
        if self._keeping is not None:
            self._throughput.pause(self._keeping.between(self.step, votes, lambda: self._content(loop()), save=save))
            if settled:
                self._keeping.settle()

    def log(self, metrics: dict[str, float]) -> None:
        """Numbers that the loop has found, the same on all ranks."""
        self.metrics |= metrics
        self._evaluated = self.step
        if self._writer is not None:
            self._writer.write(events.Evaluated(self.step, finite(metrics), 0.0))
        if self._tracking is not None:
            self._tracking.log(self.step, metrics)
        self._say(f"after step {self.step}: {scores_line(metrics)}")

    def stop(self) -> None:
        """The run was asked to stop, and its state is saved (a collective)."""
        assert self._keeping is not None and self._place is not None
        self._keeping.end()
        if failed := self._keeping.failed:
            where = rescue_alone(self._holders.parts[0].replica, self._place.folder) if self._world.rank == 0 else ""
            words = f"asked to stop after step {self.step}, but the state could not be saved: {failed}; {where}"
            raise told_once(TrainingError(words), self._world)
        self._end(ExitCode.SAVED)
        self._say(f"asked to stop: saved after step {self.step}. Start the script again to go on")

    def finish(self) -> None:
        """The loop is over: wait for the last checkpoint, write the weights and the summary (a collective)."""
        if self._keeping is None or self._place is None:
            return
        self._keeping.end()
        sha256 = ""
        for part in self._holders.parts:
            with part.replica.merged_buffers():
                weights = part.replica.weights()
                digest = sha256_of(weights)
                check_equal("final weights", digest, self._world, error=TrainingError)
                if self._world.rank == 0:
                    name = f"model-{part.number + 1}.safetensors" if part.number else run_folder.WEIGHTS
                    save(weights, self._place.folder / name)
            sha256 = sha256 or digest
        self._end(ExitCode.DONE, sha256)
        self._say(f"weights {sha256[:16]}...")
        self._say(f"run folder {self._place.folder}")
        if failed := self._keeping.failed:
            words = f"the run is complete and its weights are saved, but its last checkpoint is not: {failed}"
            raise told_once(TrainingError(words), self._world)

    def fail(self, error: BaseException, loop: Callable[[], dict[str, Any]], *, whole: bool) -> None:
        """The run ends with an error: rank 0 saves what is whole, alone, and writes the summary. Never raises."""
        keeping, place = self._keeping, self._place
        if keeping is None or place is None:
            return
        usage = isinstance(error, PacelineError) and error.exit_code == ExitCode.USAGE
        with suppress(Exception):
            if whole and self.step:
                keeping.save_after(error, self.step, lambda: self._content(loop()))
            keeping.abandon()
            if self._world.rank == 0 and not (usage and place.attempt > 1):
                code = error.exit_code if isinstance(error, PacelineError) else ExitCode.FAILED
                write_summary(
                    place.folder, self._summary(ExitCode(code), failure=f"{type(error).__name__}: {error}"[:2000])
                )

    def close(self) -> None:
        """Let go of the files."""
        if self._tracking is not None:
            self._tracking.close()
        if self._writer is not None:
            self._writer.__exit__(None, None, None)

    def _content(self, loop: dict[str, Any]) -> Content:
        return Content(self.samples, finite(self.metrics), self.definition, self._evaluated, loop, self._names)

    def _end(self, code: ExitCode, sha256: str = "") -> None:
        assert self._place is not None and self._writer is not None
        self._writer.write(events.Ended(self.step, time.time()))
        if self._world.rank == 0:
            write_summary(self._place.folder, self._summary(code, weights_sha256=sha256 or None))

    def _summary(self, code: ExitCode, **known: Any) -> Summary:
        return Summary(
            task=self._name, exit=int(code), world_size=self._world.size, steps=self.step, samples_seen=self.samples,
            virtual_ranks=self._holders.virtual_ranks,
            epochs=self.step / self._plan.known_steps if self._plan.known_steps else None,
            test_metrics=self.metrics or None, test_accuracy=self.metrics.get("accuracy"),
            samples_per_second=self._throughput.overall(), threads_per_rank=torch.get_num_threads(), **self._facts,
            **known,
        )  # fmt: skip
