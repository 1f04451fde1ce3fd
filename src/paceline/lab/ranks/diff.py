"""Repeats steps of a run for `paceline diff`, and records a digest of each tensor in the order of execution.

The digests need little memory. A second replay with the same bits fetches the one tensor that differs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.shards import hash_tensors
from paceline.checkpoint.state import ResumePoint
from paceline.data.loader import MicroBatch
from paceline.data.plan import MicroBatchPlan
from paceline.lab.ranks.replay import ReplayObserver, replay_session, replay_task
from paceline.lab.replay import (
    Kind,
    RecordRequest,
    ReplayRequest,
    ReplaySource,
    RunDifference,
    StepRecording,
    TensorRecord,
)
from paceline.nested import tensors
from paceline.rank.world import World
from paceline.strategies.base import Strategy
from paceline.train.determinism import hardware_facts
from paceline.train.step_record import StepRecord

DIGEST_LENGTH = 32  # characters, which is 128 bits


@dataclass
class TensorRecorder(ReplayObserver):
    last: int = 0
    fetch: int | None = None
    records: list[TensorRecord] = field(default_factory=list[TensorRecord])
    losses: dict[int, float | None] = field(default_factory=dict[int, float | None])
    fetched: Tensor | None = None
    _step: int = 0
    _knows_start: bool = False
    _calls: dict[Any, int] = field(default_factory=dict[Any, int])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.until, self.saved = self.last, None

    def find_start_checkpoint(self, world: World) -> ResumePoint | None:
        origin = super().find_start_checkpoint(world)
        self._step = self.result.start + 1
        return origin

    def attach(self, replica: Strategy, prefix: str = "") -> None:
        super().attach(replica, prefix)
        replica.optimizer.register_step_pre_hook(lambda *_: self._before_update(replica, prefix))
        for name, module in replica.model.named_modules():
            full_name = prefix + (name or f"the model ({type(module).__name__})")
            if not name:
                module.register_forward_pre_hook(partial(self._before_forward, full_name))
            module.register_forward_hook(partial(self._record_output, full_name))

    def before_micro_batch(self) -> None:
        if not self._knows_start:
            self._record_state("state before")

    def on_micro_batch(self, batch: MicroBatch, replica: Strategy, prefix: str) -> None:
        super().on_micro_batch(batch, replica, prefix)
        if self.work is not None and not prefix:
            self._record("samples", "indices", self.work.indices, self.work)
            self._record_all("input", "batch", (batch.inputs, batch.targets), self.work)

    def on_gradients(self, replica: Strategy, prefix: str) -> None:
        super().on_gradients(replica, prefix)
        self._record_gradients("gradient", replica, prefix)

    def _before_update(self, replica: Strategy, prefix: str) -> None:
        if self.is_on:
            rates = [float(group["lr"]) for group in replica.optimizer.param_groups]
            self._record("learning rate", f"of {prefix}all groups", torch.tensor(rates, dtype=torch.float64))
            self._record_gradients("applied gradient", replica, prefix)

    def _record_gradients(self, kind: Kind, replica: Strategy, prefix: str) -> None:
        for shard in reversed(replica.gradients()):  # backward begins with the last layer
            self._record(kind, prefix + shard.name, shard.tensor)

    def _before_forward(self, name: str, _: nn.Module, inputs: Any) -> None:
        if self.work is not None:
            self._record_all("input", name, inputs, self.work)

    def _record_output(self, name: str, _: nn.Module, inputs: Any, output: Any) -> None:
        if (work := self.work) is None:
            return
        self._record_all("output", name, output, work)
        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._record("gradient of output", name, gradient, work))

    def note_losses(self, values: Tensor, weights: Tensor | None = None) -> bool:
        if self.work is not None:
            self._record_all("loss", "of the samples" if values.ndim else "of the batch", (values, weights), self.work)
        return super().note_losses(values, weights)

    def note_step(self, record: StepRecord) -> bool:
        self.losses[record.step] = record.result.loss
        if self.is_on:
            self._record_state("state after")
        super().note_step(record)
        self._step, self._calls, self._knows_start = record.step + 1, {}, self.is_on
        self.is_on = self.request.step <= self._step <= self.last
        return record.step >= self.until

    def _record_state(self, kind: Kind) -> None:
        self._knows_start = True
        for prefix, replica in self.replicas.items():
            for shard in sorted(replica.state(), key=lambda shard: not shard.name.startswith("model/")):
                self._record(kind, prefix + shard.name, shard.tensor)

    def _record_all(self, kind: Kind, name: str, values: Any, work: MicroBatchPlan) -> None:
        for tensor in tensors(values):
            self._record(kind, name, tensor, work)

    def _record(self, kind: Kind, name: str, tensor: Tensor, work: MicroBatchPlan | None = None) -> None:
        tensor = tensor.detach()
        virtual_rank, micro_batch = (0, 0) if work is None else (work.virtual_rank, work.micro_batch)
        key = kind, name, virtual_rank, micro_batch
        self._calls[key] = call = self._calls.get(key, -1) + 1
        if len(self.records) == self.fetch:
            self.fetched = tensor.to("cpu", copy=True)
        digest = hash_tensors({"": tensor})[:DIGEST_LENGTH]
        samples: tuple[int, ...] = tuple(tensor.tolist()) if kind == "samples" else ()
        self.records.append(TensorRecord(self._step, kind, name, digest, (virtual_rank, micro_batch, call), samples))


def record_steps(source: ReplaySource, request: RecordRequest, folder: Path) -> StepRecording:
    """Repeat the steps of a request. A wanted tensor is saved in `folder`."""
    recorder = TensorRecorder(ReplayRequest(request.first), source, last=request.last, fetch=request.fetch)
    if request.script:
        replay_session(recorder, Path(request.script), request.arguments)
    else:
        replay_task(recorder)
    if recorder.fetched is not None:
        torch.save(recorder.fetched, folder / "tensor.pt")
    device = next(iter(recorder.replicas.values())).world.device
    return StepRecording(recorder.records, recorder.losses, hardware_facts(device))


def set_tensor_difference(result: RunDifference, files: Iterable[Path], samples: Sequence[int]) -> None:
    """Set by how much the first tensor differs, from its values in both runs. `samples`: those of its micro-batch."""
    a, b = (torch.load(file, map_location="cpu", weights_only=True) for file in files)
    if a.shape != b.shape:
        return
    different = (a != b) & ~((a != a) & (b != b))
    result.elements = int(different.sum())
    if a.dtype == b.dtype and not a.is_complex():
        result.largest = float((a.double() - b.double()).abs()[different].max()) if result.elements else 0.0
    if a.ndim and len(a) == len(samples):
        rows = different.reshape(len(samples), -1).any(1).tolist()
        result.samples = [index for index, differs in zip(samples, rows, strict=True) if differs]
