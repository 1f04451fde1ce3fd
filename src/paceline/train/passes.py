"""The passes of a task over its training data: where the run is in them, and what comes next."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from paceline.data.loader import MicroBatch, as_pair, load_steps
from paceline.protocol.status_page import StatusPage
from paceline.rank.world import World
from paceline.train.fit import StepRecord
from paceline.train.prepare import Parts
from paceline.train.streaming import Stream


class Passes:
    """Over a dataset with samples by number: the step says all."""

    coming = 0.0
    """samples that this rank has of the next batch: a vote"""

    def __init__(self, parts: Parts, box: StatusPage) -> None:
        self._parts, self._plan, self._total = parts, parts.plan, parts.total_steps
        self._loading = replace(parts.loading, box=box)

    def batches(self, start: int) -> Generator[list[MicroBatch]]:
        """For each step from `start` to the last, this rank's micro-batches."""
        parts = self._parts
        return load_steps(
            parts.train_set, parts.plan, parts.share, self._loading,
            start=start, stop=self._total, merged=parts.config.model.batchnorm == "sync",
        )  # fmt: skip

    def samples(self, record: StepRecord) -> int:
        """Of the global batch that a step was on."""
        return record.microbatches[0].work.global_samples

    def note(self, record: StepRecord) -> None:
        """A step is done (a collective)."""

    def at_end(self, step: int) -> bool:
        """Whether a pass ends with `step`."""
        return step % self._plan.steps_per_epoch == 0

    def is_over(self, step: int) -> bool:
        """Whether no step follows `step`."""
        return step >= self._total

    def epoch(self, step: int) -> int:
        """In which pass `step` was, from 0."""
        return max(0, step - 1) // self._plan.steps_per_epoch

    def numbers(self, world: World | None) -> dict[str, Any]:
        """What a checkpoint keeps of it; with a `world` a collective."""
        return {}

    def take(self, found: Mapping[str, Any]) -> None:
        """Take over what `numbers` gave."""


class StreamPasses(Passes):
    """Over a stream, whose end nobody knows before it comes."""

    def __init__(self, parts: Parts, stream: Stream, box: StatusPage, say: Callable[[str], None]) -> None:
        super().__init__(parts, box)
        self._stream, stream.loading, stream.say = stream, self._loading, say
        self.take({})

    @property
    def coming(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See Passes."""
        return self._stream.coming

    def batches(self, start: int) -> Generator[list[MicroBatch]]:
        """See Passes."""
        where, step = self._where, start
        while not self.is_over(step):
            if where["ended"]:
                where |= {"passes": where["passes"] + 1, "batch": 0, "ended": 0}
                self._stream.saved = {}
            passed = self._stream.training(self._plan, self._parts.share, where["passes"], where["batch"])
            with closing(passed):
                for micro_batches in passed:
                    step += 1
                    pairs = ((one, *as_pair(one.inputs)) for one in micro_batches)
                    yield [replace(one, inputs=inputs, targets=targets) for one, inputs, targets in pairs]
                    if self.is_over(step):
                        return
            where["ended"] = 1  # also a pass that was over when the run was saved

    def samples(self, record: StepRecord) -> int:
        """See Passes."""
        return self._stream.samples()

    def note(self, record: StepRecord) -> None:
        """See Passes."""
        where = self._where
        where["ended"] = int(self._stream.is_end(where["batch"], record.result.votes.coming))
        where["batch"] += 1

    def at_end(self, step: int) -> bool:
        """See Passes."""
        return bool(self._where["ended"])

    def is_over(self, step: int) -> bool:
        """See Passes."""
        if self._total:
            return step >= self._total
        return self.at_end(step) and self._where["passes"] + 1 >= self._parts.config.run.epochs

    def epoch(self, step: int) -> int:
        """See Passes."""
        return self._where["passes"]

    def numbers(self, world: World | None) -> dict[str, Any]:
        """See Passes."""
        return {"where": dict(self._where), "streams": self._stream.position(self._where, world)}

    def take(self, found: Mapping[str, Any]) -> None:
        """See Passes."""
        self._where: dict[str, int] = {"passes": 0, "batch": 0, "ended": 0, **found.get("where", {})}
        self._stream.saved = found.get("streams") or {}
