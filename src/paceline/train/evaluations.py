"""The evaluations on a training's way: when one is due, what follows from it, and who else is told."""

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from paceline.collectives.control import raise_on_all_ranks
from paceline.errors import unknown
from paceline.protocol.evidence import Phase
from paceline.rank.guard import Guard
from paceline.runs.folder import AVERAGE_WEIGHTS, BEST_WEIGHTS
from paceline.runs.summary import finite
from paceline.tasks.task import Callback, Moment, Split
from paceline.train.course import Course
from paceline.train.evaluate import evaluate
from paceline.train.fit import StepRecord
from paceline.train.passes import Passes
from paceline.train.prepare import Parts
from paceline.train.weights import save

LESS_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer", "cer")


class Best:
    """The best evaluation so far. All ranks find the same, as their metrics are the same."""

    def __init__(
        self, keep: str | None, patience: int | None, names: Collection[str], saved: Mapping[str, Any]
    ) -> None:
        """From --keep-best, --patience, the names of what is evaluated, and `as_json` of an earlier start.

        Raises:
            UsageError: nothing of that name is evaluated.
        """
        self.keeps, self._patience = keep is not None, patience
        direction, _, self.name = (keep or "loss").rpartition(":")
        if direction not in ("", "min", "max") or self.name.partition("/")[0] not in names:
            raise unknown("metric", keep or "loss", [*names, *(f"max:{name}" for name in names)])
        less = any(word in LESS_IS_BETTER for word in self.name.lower().replace("/", "_").split("_"))
        self._sign = -1.0 if (direction or ("min" if less else "max")) == "min" else 1.0
        self.step: int = saved.get("step", 0)
        self.value: float | None = saved.get("value")
        self.since: int = saved.get("since", 0)
        """evaluations after it that were not better"""

    def judge(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the evaluation after `step` is the best so far.

        Raises:
            UsageError: it has not found what is to be compared.
        """
        if self.name not in metrics:
            raise unknown("metric", self.name, metrics)
        value = metrics[self.name]
        better = math.isfinite(value) and (self.value is None or self._sign * (value - self.value) > 0)
        if better:
            self.step, self.value, self.since = step, value, 0
        else:
            self.since += 1
        return better

    @property
    def is_over(self) -> bool:
        """Whether --patience is at its end."""
        return self._patience is not None and self.since >= self._patience

    @property
    def words(self) -> str:
        """Why the run ends."""
        return f"no better {self.name} in {self.since} evaluations: the best was {self.value} after step {self.step}"

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"step": self.step, "value": self.value, "since": self.since}


class Evaluations:
    """What they have found so far; the same on all ranks."""

    def __init__(self, parts: Parts, course: Course, passes: Passes) -> None:
        """A collective; UsageError on one rank, for a metric that is not there."""
        self._parts, self._course, self._passes = parts, course, passes
        self._world, self._run = parts.replica.world, parts.config.run
        self._record: StepRecord | None = None
        self.told_to_end = 0.0
        """this rank's vote"""
        self._judged: Split
        self._judged, *self._unseen = parts.eval_sets
        self._at_end: dict[Split, dict[str, float]] = {}
        with raise_on_all_ranks(self._world):
            self.take(course.origin.content.loop if course.origin else {})

    def take(self, found: Mapping[str, Any]) -> None:
        """Go on with the `content` of an earlier start."""
        names = ["loss", *self._parts.task.metrics]
        self.best = Best(self._run.keep_best, self._run.patience, names, found.get("best", {}))
        self.ended_early: str = found.get("ended_early", "")
        """why there will be no more steps, if that was decided on the way"""

    def content(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, beside the metrics."""
        return {"best": self.best.as_json()} | ({"ended_early": self.ended_early} if self.ended_early else {})

    def summary(self) -> dict[str, Any]:
        """What the run's summary says of it."""
        best, found = self.best, {self._judged: finite(self._course.metrics), **self._at_end}
        test = finite(found.get("test", {}))
        judged = best.value is not None and (self._run.keep_best or self._run.patience)
        return {
            "test_accuracy": test.get("accuracy"), "test_loss": test.get("loss"),
            "test_metrics": test if "test" in found else None, "validation_metrics": found.get("validation"),
            "best": {"step": best.step, best.name: best.value} if judged else None,
            "ended_early": self.ended_early or None,
        }  # fmt: skip

    def due(self) -> bool:
        """Whether one is due after the last step: at the end of each epoch, and as --eval-every says."""
        every, step = self._run.eval_every, self._course.step
        return self._passes.at_end(step) or (every is not None and step % every == 0)

    def after_step(self, record: StepRecord) -> None:
        """A step is done."""
        self._record = record
        self.call(self._parts.task.on_step)

    def evaluate(self) -> None:
        """Evaluate the state after the last step, keep its weights if it is the best (a collective)."""
        parts, course, began = self._parts, self._course, time.perf_counter()
        course.metrics, course.evaluated = self._scores(self._judged), course.step
        if self.best.judge(course.step, course.metrics) and self.best.keeps:
            self._save(BEST_WEIGHTS)
        if self.best.is_over and not self._passes.is_over(course.step):
            self.ended_early = self.best.words
            course.say(f"ends after step {course.step}: {self.ended_early}")
        self.call(parts.task.on_evaluation)
        course.throughput.pause(time.perf_counter() - began)

    def evaluate_at_end(self) -> None:
        """Evaluate the splits that were not evaluated on the way: no choice was made by them (a collective)."""
        self._at_end = {split: self._scores(split) for split in self._unseen}

    def _scores(self, split: Split) -> dict[str, float]:
        parts, began, box = self._parts, time.perf_counter(), Guard.of_process().box
        before = box.enter(Phase.EVALUATE)  # and it stays so after an error: whose it is, is seen by it
        found = evaluate(
            parts.replica, parts.eval_sets[split], parts.task.loss, parts.task.metrics,
            replace(parts.loading, box=box, evaluates=True), tick=box.tick,
        )  # fmt: skip
        box.enter(before)
        self._course.found(self._course.step, found, split, time.perf_counter() - began)
        return found

    def end(self) -> None:
        """The weights after the last step are saved (a collective)."""
        if self._parts.average is not None:
            self._save(AVERAGE_WEIGHTS)
        self.call(self._parts.task.on_end)

    def _save(self, name: str) -> None:
        replica, place = self._parts.replica, self._course.place
        with replica.evaluated():
            weights = replica.weights()
            if self._world.rank == 0 and place is not None:
                save(weights, place.folder / name)

    def call(self, callback: Callback | None) -> None:
        """Let a function of the task see where the training is."""
        if callback is None:
            return
        record, world, parts, step = self._record, self._world, self._parts, self._course.step
        loss, lr, norm = (
            (record.result.loss, record.lr, record.result.grad_norm) if record else (math.nan, math.nan, None)
        )
        moment = Moment(
            step=step, total_steps=parts.total_steps, epoch=self._passes.epoch(step), loss=loss,
            lr=lr, grad_norm=norm, metrics=dict(self._course.metrics), model=parts.replica.model, rank=world.rank,
            world_size=world.size, stop=lambda: vars(self).update(told_to_end=1.0),
        )  # fmt: skip
        try:
            callback(moment)
        except OSError as error:  # not one of ours: the disk may be in order
            raise RuntimeError(f"{getattr(callback, '__name__', 'a function')} of the task has failed") from error
