"""The reference: a plain training loop on one process, without the code that it checks.

The reference uses no plan, loader, strategy or step of paceline, only their *definition*. Epoch e shuffles the samples
once, and splits them into global batches. Each global batch is distributed to V virtual ranks, and the portion of a
virtual rank is split into micro-batches. The loss is the mean over the global batch, and one plain `loss.backward()`
computes its gradient. Hooks, autograd functions and float16 parameters therefore get the same values as in a
single-process script.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from paceline.lab.verify import VerifySpec
from paceline.nested import map_tensors
from paceline.seeding import derive_seed
from paceline.strategies.optimizers import each_optimizer
from paceline.tasks.task import Task, call_model

NamedTensors = Mapping[str, Tensor | None]
NUM_GRADIENT_PROBES = 2048  # coordinates of the gradient that are used to explain a difference


@dataclass
class StepValues:
    """The values of one step, on one process or on several. Most are not copies: compare them before the next step."""

    samples: list[int] = field(default_factory=list[int])
    stream_fingerprints: dict[str, str] = field(default_factory=dict[str, str])
    """By virtual rank and micro-batch, a fingerprint of the random number stream at its start."""
    scalars: dict[str, float] = field(default_factory=dict[str, float])
    gradients: NamedTensors = field(default_factory=dict[str, "Tensor | None"])
    """The gradients of the mean over the global batch, before clipping."""
    applied_gradients: NamedTensors = field(default_factory=dict[str, "Tensor | None"])
    """The gradients that the optimizer used, after clipping."""
    parameters: NamedTensors = field(default_factory=dict[str, "Tensor | None"])
    buffers: NamedTensors = field(default_factory=dict[str, "Tensor | None"])
    state: NamedTensors = field(default_factory=dict[str, "Tensor | None"])


@dataclass
class Reference:
    """One process that computes all virtual ranks.

    With `joins_virtual_ranks` (synchronised batch norm) one forward computes the k-th micro-batches of all virtual
    ranks. Otherwise each has a separate forward, with the buffers of its virtual rank.
    """

    task: Task
    model: nn.Module
    optimizer: Optimizer  # its hooks step the task's schedulers
    dataset: Dataset[Any]
    global_batch: int
    spec: VerifySpec
    joins_virtual_ranks: bool
    weights: dict[str, float] = field(default_factory=dict[str, float])
    """The sum of the loss weights in the last step, by 'virtual rank.part'."""
    _buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])
    _initial: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    _step_start: "_StepStart | None" = None

    def __post_init__(self) -> None:
        self._initial = {name: b.clone() for name, b in self.model.named_buffers()}
        self._names = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def step(self, number: int) -> StepValues:
        steps_per_epoch = -(-len(self.dataset) // self.global_batch)  # pyright: ignore[reportArgumentType]
        epoch, step = divmod(number, steps_per_epoch)
        order = torch.randperm(
            len(self.dataset),  # pyright: ignore[reportArgumentType]
            generator=torch.Generator().manual_seed(derive_seed(self.spec.seed, "order", epoch)),
        )
        batch = order[step * self.global_batch : (step + 1) * self.global_batch]
        # _forward makes new buffers and never changes these
        parameters = {n: p.detach().clone() for n, p in self._names.items()}
        self._step_start = _StepStart(parameters, dict(self._buffers), batch, epoch, step)
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        losses, streams = list[Tensor](), dict[str, str]()
        self.weights = {}
        for key, stream, loss, weight in self._losses(self._step_start):
            losses.append(loss)
            streams[key], self.weights[key] = stream, weight
        weight = sum(self.weights.values())
        loss = torch.stack(losses).sum() / weight
        loss.backward()
        gradients = {n: None if g is None else g.clone() for n, g in gradients_by_name(self.model).items()}
        norm = float(nn.utils.clip_grad_norm_(self._names.values(), self.spec.clip_norm))
        clipped_gradients = gradients_by_name(self.model)
        self.optimizer.step()
        return StepValues(
            samples=sorted(batch.tolist()),
            stream_fingerprints={} if self.joins_virtual_ranks else streams,
            scalars={"loss": float(loss.detach()), "weight": weight, "gradient norm": norm},
            gradients=gradients,
            applied_gradients=clipped_gradients,
            parameters={n: p.detach() for n, p in self.model.named_parameters()},
            buffers=self._mean_buffers(),
            state=optimizer_state(self.optimizer, self.model),
        )

    def _microbatches(self, batch: Tensor) -> list[tuple[int, int, Tensor]]:
        portions = [batch[v :: self.spec.virtual_ranks] for v in range(self.spec.virtual_ranks)]
        count = min(self.spec.accumulation, max(len(portion) for portion in portions))
        parts = [portion.tensor_split(count) for portion in portions]
        if self.joins_virtual_ranks:
            return [(0, part, torch.cat([rank_parts[part] for rank_parts in parts])) for part in range(count)]
        microbatches = [(v, part, parts[v][part]) for v in range(self.spec.virtual_ranks) for part in range(count)]
        return [(v, part, indices) for v, part, indices in microbatches if len(indices)]

    def _losses(self, start: "_StepStart") -> Iterator[tuple[str, str, Tensor, float]]:
        """Of each micro-batch: 'virtual rank.part', its random stream, the sum of its losses, and its weight."""
        for virtual_rank, part, indices in self._microbatches(start.batch):
            torch.manual_seed(derive_seed(self.spec.seed, "forward", start.epoch, start.step, virtual_rank, part))
            yield f"{virtual_rank}.{part}", cpu_rng_fingerprint(), *self._forward(virtual_rank, indices)

    def _forward(self, virtual_rank: int, indices: Tensor) -> tuple[Tensor, float]:
        self._load_buffers(virtual_rank)
        samples = [self.dataset[i] for i in indices.tolist()]
        batch = (self.task.collate or default_collate)(samples)
        batch = map_tensors(batch, lambda tensor: tensor.to(next(self.model.parameters()).device))
        inputs, targets = (batch, batch) if isinstance(batch, Mapping) else batch
        result = self.task.loss(call_model(self.model, inputs), targets)
        losses, weights = result if isinstance(result, tuple) else (result, torch.ones_like(result))
        self._buffers[virtual_rank] = {n: b.clone() for n, b in self.model.named_buffers()}
        return (losses * weights).sum(), float(weights.detach().sum())

    def _load_buffers(self, virtual_rank: int) -> None:
        """Give the model new buffers, because the graphs of earlier micro-batches refer to the old ones."""
        values = self._buffers.get(virtual_rank, self._initial)
        new_buffers = {buffer: values[name].clone() for name, buffer in self.model.named_buffers()}
        for name, buffer in [*self.model.named_buffers(remove_duplicate=False)]:
            owner, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(owner), attribute, new_buffers[buffer])

    def _mean_buffers(self) -> dict[str, Tensor]:
        sets = [self._buffers[v] for v in sorted(self._buffers)]
        return {
            name: torch.stack([s[name] for s in sets]).mean(0) if first.is_floating_point() else first
            for name, first in sets[0].items()
        }

    def gradient_parts(self, factor: float = 1.0) -> Tensor:
        """(probes, micro-batches): the gradient of the last step, with a separate backward and column for each.

        The sum of the losses of a micro-batch is divided by the total weight and multiplied by `factor` before
        backward. Afterwards the gradient is divided by the factor. If the gradient path is linear, the columns add up
        to the gradient of the step for any factor.
        """
        start = self._step_start
        assert start is not None
        columns: list[Tensor] = []
        parameters, buffers = {n: p.data for n, p in self._names.items()}, self._buffers
        self._set(start.parameters, start.buffers)
        with torch.random.fork_rng(devices=[]):
            for _, _, losses, _ in self._losses(start):
                loss = losses * (factor / sum(self.weights.values()))
                gradients = torch.autograd.grad(loss, [*self._names.values()], allow_unused=True)
                by_name = dict(zip(self._names, gradients, strict=True))
                columns.append(pick_gradient_elements(by_name, self._names) / factor)
        self._set(parameters, buffers)
        return torch.stack(columns, 1)

    def _set(self, parameters: Mapping[str, Tensor], buffers: Mapping[int, dict[str, Tensor]]) -> None:
        for name, tensor in parameters.items():
            self._names[name].data = tensor
        self._buffers = dict(buffers)

    @property
    def hooked_parameters(self) -> list[str]:
        return [name for name, p in self._names.items() if p._backward_hooks]  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True)
class _StepStart:
    parameters: dict[str, Tensor]
    buffers: dict[int, dict[str, Tensor]]
    batch: Tensor
    epoch: int
    step: int


def cast_to_float64(model: nn.Module) -> nn.Module:
    """Cast `model`, and all its later inputs, to float64."""
    model.double().register_forward_pre_hook(lambda _, *inputs: map_tensors(inputs, floats_to_double), with_kwargs=True)
    return model


def floats_to_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) for m in model.modules())


def gradients_by_name(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def pick_gradient_elements(gradients: NamedTensors, like: Mapping[str, Tensor]) -> Tensor:
    """(n,) values of a gradient at evenly spaced coordinates; None counts as zeros."""
    per_tensor = max(1, NUM_GRADIENT_PROBES // max(1, len(gradients)))
    values: list[Tensor] = []
    for name, gradient in gradients.items():
        flat = (torch.zeros_like(like[name]) if gradient is None else gradient).detach().reshape(-1)
        values.append(flat[:: max(1, len(flat) // per_tensor)].clone())
    return torch.cat(values)


def cpu_rng_fingerprint() -> str:
    """The next number of the CPU's random number generator, without changing its state."""
    state = torch.get_rng_state()
    number = torch.rand(1, dtype=torch.float64)
    torch.set_rng_state(state)
    return float(number).hex()


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the optimizer without step counts, for example 'exp_avg of conv1.weight'."""
    names: dict[Tensor, str] = {p: n for n, p in model.named_parameters()}
    return {
        f"{key} of {names[p]}": value.detach()
        for one in each_optimizer(optimizer)
        for p, entries in one.state.items()
        for key, value in entries.items()
        if isinstance(value, Tensor) and value.shape == p.shape
    }
