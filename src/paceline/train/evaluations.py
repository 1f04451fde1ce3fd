"""The evaluations on a training's way: when one is due, what follows from it, and who else is told."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.contract.evidence import Phase
from paceline.definition import settings
from paceline.observe import events
from paceline.observe.folder import AVERAGE_WEIGHTS, BEST_WEIGHTS
from paceline.observe.summary import scores_line
from paceline.observe.track import Tracking, wanted
from paceline.sums import together
from paceline.tasks.moment import Callback, Moment
from paceline.tasks.task import Split
from paceline.train.best import Best
from paceline.train.evaluate import evaluate
from paceline.train.fit import StepRecord
from paceline.train.keeping import Place
from paceline.train.prepare import Parts
from paceline.train.resume import Content
from paceline.train.weights import save
from paceline.train.wording import finite
from paceline.worker.guard import Guard


class Evaluations:
    """What they have found so far; the same on all ranks."""

    def __init__(
        self,
        parts: Parts,
        place: Place,
        found: Content | None,
        write: Callable[[events.Event], None],
        say: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        """`found`: of the state that is gone on with; `say` shows a line and records it (a collective).

        Raises:
            UsageError: on one rank, for a metric or tracker that is not there.
        """
        self._parts, self._place, self._write, self._say, self._show = parts, place, write, say, show
        self._world, self._run = parts.replica.world, parts.config.run
        self._record: StepRecord | None = None
        self._told_to_end = False
        self._judged: Split
        self._judged, *self._unseen = parts.eval_sets
        self._at_end: dict[Split, dict[str, float]] = {}
        with together(self._world):
            tracked = wanted(self._run.track) if self._world.rank == 0 else []
            self.take(found or Content(0, {}, {}))
        self._tracking = Tracking(tracked, place.folder, settings(parts.config), say)
        self.close = self._tracking.close

    def take(self, found: Content) -> None:
        """Go on with what an earlier start has found."""
        self.metrics, self.step = dict(found.metrics), found.evaluated
        names = ["loss", *self._parts.task.metrics]
        self.best = Best(self._run.keep_best, self._run.patience, names, found.loop.get("best", {}))
        self.ended_early: str = found.loop.get("ended_early", "")
        """why there will be no more steps, if that was decided on the way"""

    def content(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, beside the metrics."""
        return {"best": self.best.as_json()} | ({"ended_early": self.ended_early} if self.ended_early else {})

    def summary(self) -> dict[str, Any]:
        """What the run's summary says of it."""
        best, found = self.best, {self._judged: finite(self.metrics), **self._at_end}
        test = finite(found.get("test", {}))
        judged = best.value is not None and (self._run.keep_best or self._run.patience)
        return {
            "test_accuracy": test.get("accuracy"), "test_loss": test.get("loss"),
            "test_metrics": test if "test" in found else None, "validation_metrics": found.get("validation"),
            "best": {"step": best.step, best.name: best.value} if judged else None,
            "ended_early": self.ended_early or None,
        }  # fmt: skip

    def due(self, step: int) -> bool:
        """Whether one is due after `step`: at the end of each epoch, and as --eval-every says."""
        every = self._run.eval_every
        return step % self._parts.plan.steps_per_epoch == 0 or (every is not None and step % every == 0)

    def after_step(self, record: StepRecord) -> None:
        """A step is done."""
        self._record = record
        if record.step % self._run.log_interval == 0 or record.step == self._parts.total_steps:
            norm = {} if record.result.grad_norm is None else {"grad_norm": record.result.grad_norm}
            self._tracking.log(record.step, {"loss": record.result.loss, "lr": record.lr, **norm})
        self.call(self._parts.task.on_step, record.step)

    def asked_to_end(self) -> float:
        """This rank's vote."""
        return float(self._told_to_end)

    def evaluate(self, step: int) -> float:
        """Evaluate the state after `step`, keep its weights if it is the best (a collective); the seconds it took."""
        parts, began = self._parts, time.perf_counter()
        self.metrics = self._scores(self._judged, step)
        self.step = step
        if self.best.judge(step, self.metrics) and self.best.keeps:
            self._save(BEST_WEIGHTS)
        if self.best.is_over and step < parts.total_steps:
            self.ended_early = self.best.words
            self._say(f"ends after step {step}: {self.ended_early}")
        self.call(parts.task.on_evaluation, step)
        return time.perf_counter() - began

    def evaluate_at_end(self, step: int) -> None:
        """Evaluate the splits that were not evaluated on the way: no choice was made by them (a collective)."""
        self._at_end = {split: self._scores(split, step) for split in self._unseen}

    def _scores(self, split: Split, step: int) -> dict[str, float]:
        parts, began, box = self._parts, time.perf_counter(), Guard.of_process().box
        before = box.enter(Phase.EVALUATE)  # and it stays so after an error: whose it is, is seen by it
        found = evaluate(
            parts.judged, parts.eval_sets[split], parts.task.loss, parts.task.metrics,
            replace(parts.loading, box=box, evaluates=True), tick=box.tick,
        )  # fmt: skip
        box.enter(before)
        self._write(events.Evaluated(step, finite(found), time.perf_counter() - began, split))
        self._tracking.log(step, {f"{split}/{name}": value for name, value in found.items()})
        self._show(f"{split} after step {step}: {scores_line(found)}")
        return found

    def end(self, step: int) -> None:
        """The weights after the last step are saved (a collective)."""
        if self._parts.average is not None:
            self._save(AVERAGE_WEIGHTS)
        self.call(self._parts.task.on_end, step)

    def _save(self, name: str) -> None:
        """Write the weights that are evaluated into the run folder (a collective)."""
        judged = self._parts.judged
        with judged.merged_buffers():
            weights = judged.weights()
            if self._world.rank == 0:
                save(weights, self._place.folder / name)

    def call(self, callback: Callback | None, step: int) -> None:
        """Let a function of the task see where the training is."""
        if callback is None:
            return
        record, world, parts = self._record, self._world, self._parts
        result = record.result if record else None
        moment = Moment(
            step=step,
            total_steps=parts.total_steps,
            epoch=max(0, step - 1) // parts.plan.steps_per_epoch,
            loss=result.loss if result else math.nan,
            lr=record.lr if record else math.nan,
            grad_norm=result.grad_norm if result else None,
            metrics=dict(self.metrics),
            model=parts.replica.model,
            rank=world.rank,
            world_size=world.size,
            stop=self._stop,
        )
        try:
            callback(moment)
        except OSError as error:  # not one of ours: the disk may be in order
            raise RuntimeError(f"{getattr(callback, '__name__', 'a function')} of the task has failed") from error

    def _stop(self) -> None:
        self._told_to_end = True
