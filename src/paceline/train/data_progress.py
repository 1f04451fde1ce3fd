"""The position of a task in its training data: the epoch, the next batches, and the end of the data."""

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from paceline.data.loader import MicroBatch, load_micro_batch_for_audit, load_steps, split_inputs_and_targets
from paceline.data.plan import BatchPlan
from paceline.protocol.status_page import StatusPage
from paceline.rank.world import World
from paceline.train.prepare import TrainingComponents
from paceline.train.progress import TrainingProgress
from paceline.train.step_record import StepRecord
from paceline.train.streaming import GlobalBatchStream


class DataProgress:
    """The position in a map-style dataset. It follows from the number of the step."""

    def __init__(self, parts: TrainingComponents, page: StatusPage) -> None:
        self._parts, self._plan, self._total = parts, parts.plan, parts.total_steps
        self._loading = replace(parts.loading, page=page)

    def batches(self, start: int) -> Generator[list[MicroBatch]]:
        parts = self._parts
        return load_steps(
            parts.train_set, parts.plan, parts.local_virtual_ranks, self._loading,
            start=start, stop=self._total, merged=parts.config.model.batchnorm == "sync",
        )  # fmt: skip

    def reload_micro_batch(self, plan: BatchPlan, epoch: int, step: int, virtual_rank: int) -> MicroBatch | None:
        batch = load_micro_batch_for_audit(self._parts.train_set, self._loading, plan, epoch, step, virtual_rank)
        return None if batch is None else split_inputs_and_targets(batch)

    def global_batch_samples(self, record: StepRecord) -> int:
        return record.microbatches[0].work.global_samples

    def advance(self) -> None:
        """Advance past the batch of a step, before the step is recorded: then a checkpoint may contain it."""

    def detect_epoch_end(self, record: StepRecord) -> None:
        """Find out whether the epoch has ended (collective)."""

    def is_epoch_end(self, step: int) -> bool:
        return step % self._plan.steps_per_epoch == 0

    def is_last_step(self, step: int) -> bool:
        return step >= self._total

    def epoch(self, step: int) -> int:
        return max(0, step - 1) // self._plan.steps_per_epoch

    def json_state(self, world: World | None) -> dict[str, Any]:
        """The position in a checkpoint. Collective if `world` is given; otherwise that of this rank."""
        return {}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `json_state`."""


class StreamProgress(DataProgress):
    def __init__(
        self, parts: TrainingComponents, stream: GlobalBatchStream, page: StatusPage, progress: TrainingProgress
    ) -> None:
        super().__init__(parts, page)
        self._stream, self._progress, stream.loading, stream.say = stream, progress, self._loading, progress.say
        self.load({})

    def batches(self, start: int) -> Generator[list[MicroBatch]]:
        where, step = self._where, start
        while not self.is_last_step(step):
            if where["ended"]:
                where |= {"passes": where["passes"] + 1, "batch": 0, "ended": 0}
                self._stream.saved = {}
            epoch_steps = self._stream.training_batches(
                self._plan, self._parts.local_virtual_ranks, where["passes"], where["batch"]
            )
            with closing(epoch_steps):
                for micro_batches in epoch_steps:
                    step, self._progress.micro_batches = step + 1, micro_batches
                    yield [split_inputs_and_targets(batch) for batch in micro_batches]
                    if self.is_last_step(step):
                        return
            where["ended"] = 1  # also if the epoch was already over in the checkpoint

    def global_batch_samples(self, record: StepRecord) -> int:
        return self._stream.global_batch_samples()

    def advance(self) -> None:
        self._where["batch"] += 1

    def detect_epoch_end(self, record: StepRecord) -> None:
        batch, samples = self._where["batch"] - 1, record.result.votes.next_batch_samples
        self._where["ended"] = int(self._stream.is_last_batch(batch, samples))

    def is_epoch_end(self, step: int) -> bool:
        return bool(self._where["ended"])

    def is_last_step(self, step: int) -> bool:
        if self._total:
            return step >= self._total
        return self.is_epoch_end(step) and self._where["passes"] + 1 >= self._parts.config.run.epochs

    def epoch(self, step: int) -> int:
        return self._where["passes"]

    def json_state(self, world: World | None) -> dict[str, Any]:
        return {"where": dict(self._where), "streams": self._stream.checkpoint_position(self._where, world)}

    def load(self, saved: Mapping[str, Any]) -> None:
        self._where: dict[str, int] = {"passes": 0, "batch": 0, "ended": 0, **saved.get("where", {})}
        self._stream.saved = saved.get("streams") or {}
