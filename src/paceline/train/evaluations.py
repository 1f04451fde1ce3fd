"""Evaluations during training: when they are due, best weights, early stopping, and callbacks of the task."""

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from paceline.collectives.control import raise_on_all_ranks
from paceline.errors import unknown_name_error
from paceline.protocol.evidence import Phase
from paceline.rank.guard import HangGuard
from paceline.runs.folder import AVERAGE_WEIGHTS, BEST_WEIGHTS
from paceline.runs.summary import finite_metrics
from paceline.tasks.task import Callback, CallbackState, Split
from paceline.train.data_progress import DataProgress
from paceline.train.evaluate import evaluate
from paceline.train.prepare import TrainingComponents
from paceline.train.progress import TrainingProgress
from paceline.train.step_record import StepRecord
from paceline.train.weights import save

LESS_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer", "cer")


class BestEvaluation:
    """The best evaluation so far. It is the same on all ranks, because their metrics are equal."""

    def __init__(
        self, keep: str | None, patience: int | None, names: Collection[str], saved: Mapping[str, Any]
    ) -> None:
        self.keeps, self._patience = keep is not None, patience
        direction, _, self.name = (keep or "loss").rpartition(":")
        if direction not in ("", "min", "max") or self.name.partition("/")[0] not in names:
            raise unknown_name_error("metric", keep or "loss", [*names, *(f"max:{name}" for name in names)])
        less_is_better = any(word in LESS_IS_BETTER for word in self.name.lower().replace("/", "_").split("_"))
        self._sign = -1.0 if (direction or ("min" if less_is_better else "max")) == "min" else 1.0
        self.step: int = saved.get("step", 0)
        self.value: float | None = saved.get("value")
        self.since: int = saved.get("since", 0)
        """The number of evaluations since the best one."""

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Update the best evaluation. Return whether the evaluation after `step` is the best so far."""
        if self.name not in metrics:
            raise unknown_name_error("metric", self.name, metrics)
        value = metrics[self.name]
        is_better = math.isfinite(value) and (self.value is None or self._sign * (value - self.value) > 0)
        if is_better:
            self.step, self.value, self.since = step, value, 0
        else:
            self.since += 1
        return is_better

    @property
    def is_patience_exhausted(self) -> bool:
        return self._patience is not None and self.since >= self._patience

    def as_json(self) -> dict[str, Any]:
        return {"step": self.step, "value": self.value, "since": self.since}


class Evaluator:
    """Evaluates during and after training. Its state is the same on all ranks."""

    def __init__(self, parts: TrainingComponents, progress: TrainingProgress, data_progress: DataProgress) -> None:
        self._parts, self._progress, self._data_progress = parts, progress, data_progress
        self._world, self._run = parts.replica.world, parts.config.run
        self._record: StepRecord | None = None
        self.end_vote = 0.0
        """1.0 if a callback on this rank has ended the training."""
        self._tracked: Split
        self._tracked, *self._at_end_only = parts.eval_sets
        self._at_end: dict[Split, dict[str, float]] = {}
        with raise_on_all_ranks(self._world):
            self.load(progress.origin.trainer_state.loop if progress.origin else {})

    def load(self, saved: Mapping[str, Any]) -> None:
        names = ["loss", *self._parts.task.metrics]
        self.best = BestEvaluation(self._run.keep_best, self._run.patience, names, saved.get("best", {}))
        self.ended_early: str = saved.get("ended_early", "")
        """Why the training ends before its last step; empty if it does not."""

    def checkpoint_values(self) -> dict[str, Any]:
        return {"best": self.best.as_json()} | ({"ended_early": self.ended_early} if self.ended_early else {})

    def summary_fields(self) -> dict[str, Any]:
        best, results = self.best, {self._tracked: finite_metrics(self._progress.metrics), **self._at_end}
        test = finite_metrics(results.get("test", {}))
        has_best = best.value is not None and (self._run.keep_best or self._run.patience)
        return {
            "test_accuracy": test.get("accuracy"), "test_loss": test.get("loss"),
            "test_metrics": test if "test" in results else None, "validation_metrics": results.get("validation"),
            "best": {"step": best.step, best.name: best.value} if has_best else None,
            "ended_early": self.ended_early or None,
        }  # fmt: skip

    def is_due(self, step: int | None = None) -> bool:
        """Whether an evaluation is due after `step`. Default: the last step."""
        every, step = self._run.eval_every, self._progress.step if step is None else step
        return self._data_progress.is_epoch_end(step) or (every is not None and step % every == 0)

    def call_on_step(self, record: StepRecord) -> None:
        self._record = record
        self.run_callback(self._parts.task.on_step)

    def evaluate(self) -> None:
        """Evaluate the state after the last step, and save its weights if they are the best (collective)."""
        progress, began = self._progress, time.perf_counter()
        progress.metrics, progress.evaluated = self._evaluate(self._tracked), progress.step
        if self.best.update(progress.step, progress.metrics) and self.best.keeps:
            self._save(BEST_WEIGHTS)
        if (best := self.best).is_patience_exhausted and not self._data_progress.is_last_step(progress.step):
            result = f"the best was {best.value} after step {best.step}"
            self.ended_early = f"no better {best.name} in {best.since} evaluations: {result}"
            progress.say(f"ends after step {progress.step}: {self.ended_early}")
        self.run_callback(self._parts.task.on_evaluation)
        progress.throughput.exclude_pause(time.perf_counter() - began)

    def evaluate_at_end(self) -> None:
        self._at_end = {split: self._evaluate(split) for split in self._at_end_only}

    def _evaluate(self, split: Split) -> dict[str, float]:
        parts, began, page = self._parts, time.perf_counter(), HangGuard.of_process().page
        previous = page.enter(Phase.EVALUATE)  # not restored after an error: `save_after_failure` reads the phase
        metrics = evaluate(
            parts.replica, parts.eval_sets[split], parts.task.loss, parts.task.metrics,
            replace(parts.loading, page=page, evaluates=True), tick=page.tick,
        )  # fmt: skip
        page.enter(previous)
        self._progress.log_evaluation(self._progress.step, metrics, split, time.perf_counter() - began)
        return metrics

    def end(self) -> None:
        if self._parts.weight_average is not None:
            self._save(AVERAGE_WEIGHTS)
        self.run_callback(self._parts.task.on_end)

    def _save(self, name: str) -> None:
        replica, location = self._parts.replica, self._progress.place
        with replica.evaluated():
            weights = replica.weights()
            if self._world.rank == 0 and location is not None:
                save(weights, location.folder / name)

    def run_callback(self, callback: Callback | None) -> None:
        if callback is None:
            return
        record, world, parts, step = self._record, self._world, self._parts, self._progress.step
        result = (record.result.loss, record.lr, record.result.grad_norm) if record else (math.nan, math.nan, None)
        loss, lr, norm = result
        state = CallbackState(
            step=step, total_steps=parts.total_steps, epoch=self._data_progress.epoch(step), loss=loss,
            lr=lr, grad_norm=norm, metrics=dict(self._progress.metrics), model=parts.replica.model, rank=world.rank,
            world_size=world.size, stop=lambda: vars(self).update(end_vote=1.0),
        )  # fmt: skip
        try:
            callback(state)
        except OSError as error:  # raised by the callback, so it is not an error of the run's files
            name = getattr(callback, "__name__", type(callback).__name__)
            raise RuntimeError(f"callback {name} of the task failed") from error
