"""A rank of `paceline verify my_loop.py:main` runs a custom loop unchanged, and an observer records it.

The records about samples are sums over samples, which do not depend on their distribution to ranks.

The other runs are compared with the plain run, in which one process computes whole global batches. Its backward starts
with the gradient that `loss.backward()` uses, and the sum of the gradients is not divided. The plain run therefore does
not use the scaling and the division of paceline's step.
"""

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from paceline.checkpoint.shards import hash_tensors
from paceline.data.plan import BatchPlan, MicroBatchPlan
from paceline.errors import PacelineError
from paceline.lab.ranks.reference import StepValues, cast_to_float64, floats_to_double, has_batch_norm
from paceline.lab.ranks.trial import (
    digest_weights_and_state,
    full_gradients,
    full_parameters,
    make_world,
    tensor_checksums,
)
from paceline.lab.verify import TOLERANCES, LoopCase, LoopSpec, StepDigests
from paceline.nested import map_tensors, tensors
from paceline.protocol.evidence import is_lost_peer_error
from paceline.rank.world import World
from paceline.seeding import derive_seed, generator_states, seed_generators
from paceline.sessions.lifecycle import MIN_RANDOM_SEED, close_all_sessions
from paceline.sessions.loader import Loader
from paceline.sessions.observer import ApplyStrategy, Observer, use_observer
from paceline.stepping.hooks import describe_user_autograd_function, describe_user_backward_hook, graph_nodes
from paceline.stepping.micro_step import MicroStep, Reduction
from paceline.stepping.trained_model import ModelInTraining
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.optimizers import format_optimizer_types
from paceline.tasks.registry import load_function
from paceline.train.step_record import StepRecord

MAX_RECORDED_VALUES = 4096  # recorded values per tensor, evenly spaced


@dataclass
class LoopStep(StepValues):
    """The record of one step on one rank: the samples of this rank, and some values of each tensor."""

    epoch: int = 0
    micro_batches: int = 0
    rates: list[float] = field(default_factory=list[float])  # learning rates
    sums: dict[str, float] = field(default_factory=dict[str, float])
    """Over the inputs and the outputs of the models, and the number of values, which depends on the padding."""
    updates: bool = False  # whether an optimizer has updated a model
    # parameters whose .grad changed before s.backward
    externally_changed_grads: list[str] = field(default_factory=list[str])
    has_change_between_backwards: bool = False  # whether a gradient changed between two s.backward calls


@dataclass
class LoopRun:
    strategy: str
    optimizer: str = "-"
    steps: list[LoopStep] = field(default_factory=list[LoopStep])
    notes: list[str] = field(default_factory=list[str])  # the session's notes about the loop
    # hooks and custom autograd functions on the gradient path
    gradient_path_hooks: list[str] = field(default_factory=list[str])
    bits: list[StepDigests] = field(default_factory=list[StepDigests])  # instead of tensors, if the case is exact
    # fingerprints of the models before the first step
    start_fingerprints: dict[str, Any] = field(default_factory=dict[str, Any])
    draws_random_numbers: bool = False  # whether the loop draws random numbers
    trains_at_import: bool = False  # then its function was not called
    precision: str = "float64"  # the least precise type in the graphs of its losses
    digests: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # of weights and state, at the end
    error: str = ""
    victim: bool = False  # whether the error is only a consequence of a different rank's failure


@dataclass
class _Recorder(Observer):
    """Shortens the epochs of a loop, computes in float64 unless the case is exact, and records each step."""

    spec: LoopSpec
    case: LoopCase
    run: LoopRun
    _step: LoopStep = field(default_factory=LoopStep)
    _work: MicroBatchPlan | None = None
    _sums: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict[tuple[int, int], dict[str, float]])
    """By micro-batch, sums over the inputs and outputs of its forwards."""
    _passes: int = 1
    _streams: Tensor = field(default_factory=Tensor)
    _reduced_gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])
    """Gradients after s.backward, by the number of the model. They are recorded when an update uses them."""
    _last_grads: dict[str, tuple[Tensor | None, int]] = field(default_factory=dict[str, tuple[Tensor | None, int]])
    """By parameter, its gradient and version after the last backward."""
    _last_backward: tuple[MicroStep | None, int] = None, 0  # its micro-step, and how many optimizers had stepped in it
    _unhook: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        world, overrides = make_world(self.spec.device), {"strategy": self.case.strategy} if self.case.strategy else {}
        self.options = {"device": world.device.type, "backend": world.backend, "threads": 1, "resume": False}
        self.options |= {"report_to": None, "precision": None, "virtual_ranks": self.case.virtual_ranks, **overrides}
        self.max_steps = self.spec.steps

    def wrap_strategy(self, name: str, apply: ApplyStrategy) -> ApplyStrategy:
        """In float64, turn off dropout and the updates of batch norm, which depend on the split of a batch."""
        self.run.strategy = name

        def applied(model: nn.Module, make_optimizer: MakeOptimizer, world: World) -> Strategy:
            if not self.case.exact:
                for module in cast_to_float64(model).modules():
                    if isinstance(module, (_BatchNorm, _DropoutNd)):
                        vars(module.eval())["train"] = partial(_keep_mode, module)
            hooks = (f"a hook on {name}" for name, p in model.named_parameters() if p._backward_hooks)  # pyright: ignore
            self.run.gradient_path_hooks += [*hooks, *filter(None, [describe_user_backward_hook([model])])]
            replica = apply(model, make_optimizer, world)
            if self.case.plain:
                vars(replica)["sync_gradients"] = partial(_sync_without_division, replica.sync_gradients)

            def after_forward(module: nn.Module, *values: Any) -> None:  # a copy of the model does not copy a function
                if module is model:
                    self._on_forward(*values)

            model.register_forward_hook(after_forward, with_kwargs=True)
            self.run.start_fingerprints |= _constants(model) | tensor_checksums(full_parameters(replica))
            self.run.optimizer = format_optimizer_types(replica.optimizer)
            return replica

        return applied

    def on_register(self, thing: object) -> None:
        """Convert an average of a model to float64, like the model."""
        if not self.case.exact and isinstance(thing, nn.Module):
            cast_to_float64(thing)

    def on_loader(self, loader: Loader, *, per_virtual_rank: bool) -> None:
        loader.short_epoch = self._short_epoch
        if self.case.plain:
            size = loader.plan.global_batch * (self.spec.virtual_ranks if per_virtual_rank else 1)
            loader.plan = replace(loader.plan, global_batch=size, accumulation=1)

    def _short_epoch(self, plan: BatchPlan) -> tuple[int, int]:
        """Some whole global batches, and a last one that is uneven, or too small for some virtual ranks."""
        size = self.spec.virtual_ranks
        # batch norm needs more than one value for its statistics
        needs_values = any(has_batch_norm(part.replica.model) for part in self.models)
        tail_size = 2 * size + 1 if needs_values else max(1, size - 1)
        last_size = plan.global_batch if plan.last_batch == "drop" else min(tail_size, plan.global_batch)
        return max(2, self.spec.steps // 2), last_size

    def on_batch(self, inputs: Any, work: MicroBatchPlan | None) -> Any:
        if work is not None:
            self._work, key = work, (work.virtual_rank, work.micro_batch)
            self._passes += key in self._sums
            self._sums[key] = {}  # a later pass over the same micro-batch replaces the first
            self._streams = generator_states(self.models[0].replica.world.device)
        return inputs if self.case.exact else map_tensors(inputs, floats_to_double)

    def on_batch_end(self) -> None:
        self._work = None
        streams = generator_states(self.models[0].replica.world.device)
        self.run.draws_random_numbers |= not torch.equal(self._streams, streams)

    def _on_forward(self, *values: Any) -> None:
        """Add up the inputs and the outputs. Zero padding adds nothing."""
        work = self._work
        if work is None or not work.is_counted:
            return
        sums = self._sums[work.virtual_rank, work.micro_batch]
        for name, value in (("input", values[:2]), ("output", values[2:])):
            for tensor in tensors(value):
                if tensor.ndim and len(tensor) == len(work.indices):
                    rows = tensor.detach().double().reshape(len(tensor), -1)
                    signs = torch.arange(rows.shape[1], device=rows.device).double().cos()
                    sums[name] = sums.get(name, 0.0) + float((rows @ signs).sum())
                    sums["values"] = sums.get("values", 0.0) + rows.numel()

    def on_backward(
        self, loss: Tensor, weight: float | Tensor | None, reduction: Reduction, micro_step: MicroStep | None
    ) -> None:
        """Record the gradients that the loop changed since the last backward, except to zero or None."""
        last_micro_step, step_count = self._last_backward
        is_repeated = (
            micro_step is not None
            and micro_step is last_micro_step
            and len(micro_step.stepped_optimizers) == step_count
        )
        for name, p in self._named():
            if p.grad is (last_grad := self._last_grads.get(name, (None, -1)))[0] and _version(p.grad) == last_grad[1]:
                continue
            self._step.has_change_between_backwards |= is_repeated
            if p.grad is not None and bool(p.grad.any()):
                self._step.externally_changed_grads.append(name)
        if not isinstance(loss, Tensor) or not loss.requires_grad:  # pyright: ignore[reportUnnecessaryIsInstance]
            return
        if not self._last_grads:
            self.run.gradient_path_hooks += filter(None, [describe_user_autograd_function(loss)])
        if not self.case.exact:
            dtypes = (str(metadata.dtype) for node in graph_nodes(loss.grad_fn) for metadata in node._input_metadata)
            self.run.precision = least_precise_dtype([self.run.precision, *dtypes])
        if self.case.plain:
            gradient = _gradient_of_mean(loss, weight, reduction)
            self._unhook = loss.register_hook(lambda _: gradient).remove

    def on_gradients(self, micro_step: MicroStep | None) -> None:
        self._unhook()
        for part in self.models if micro_step is not None and micro_step.is_last else ():
            self._reduced_gradients[part.number] = self._values(part, full_gradients(part.replica))
        self._last_grads = {name: (p.grad, _version(p.grad)) for name, p in self._named() if p.grad is not None}
        self._last_backward = micro_step, len(micro_step.stepped_optimizers) if micro_step is not None else 0

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        unsharded = [part for part in self.models if not part.replica.sharded]
        named_parameters = [(part.prefix, part.replica.model.named_parameters()) for part in unsharded]
        return [(prefix + name, p) for prefix, parameters in named_parameters for name, p in parameters]

    def _values(self, part: ModelInTraining, tensors_by_name: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for name, tensor in tensors_by_name.items():
            stride = 1 if self.case.exact else max(1, -(-tensor.numel() // MAX_RECORDED_VALUES))
            values[part.prefix + name] = tensor.detach().reshape(-1)[::stride].to("cpu", copy=True)
        return values

    def on_update(self, part: ModelInTraining) -> None:
        step, applied = self._step, self._values(part, full_gradients(part.replica))
        step.gradients = {**step.gradients, **self._reduced_gradients.pop(part.number, {})}
        step.applied_gradients = {**step.applied_gradients, **applied}
        step.updates = True

    def on_step(self, record: StepRecord) -> None:
        batches, step = record.microbatches, self._step
        step.samples = sorted(i for batch in batches if batch.work.is_counted for i in batch.work.indices.tolist())
        step.scalars = {"loss": record.result.loss}
        step.rates = [rate for part in self.models for rate in part.learning_rates()]
        step.epoch, step.micro_batches = batches[0].work.epoch, len(batches)
        # a later pass recomputes the outputs, after a model has stepped
        names = ("input", "output", "values") if self._passes == 1 else ("input", "values")
        step.sums = {name: sum(sums.get(name, 0.0) for sums in self._sums.values()) for name in names}
        for part in self.models:
            step.parameters = {**step.parameters, **self._values(part, full_parameters(part.replica))}
        if self.case.exact:
            tensor_sets = (step.gradients, step.parameters)
            digests = [hash_tensors({n: t for n, t in by_name.items() if t is not None}) for by_name in tensor_sets]
            self.run.bits.append(StepDigests(record.result.loss.hex(), "", *digests))
            step.gradients = step.applied_gradients = step.parameters = {}
        self.run.steps.append(step)
        self._step, self._sums, self._passes = LoopStep(), {}, 1

    def on_numbers(self, named: Mapping[str, float]) -> None:
        for step in self.run.steps[-1:]:
            step.scalars |= {f"{name}, {n}": value for n, (name, value) in enumerate(named.items(), len(step.scalars))}

    def on_print(self, words: Sequence[Any]) -> None:
        if str(words[0] if words else "").startswith("NOTE: "):
            self.run.notes.append(str(words[0]).removeprefix("NOTE: "))

    def on_end(self) -> None:
        self.run.digests = [digest_weights_and_state(part.replica) for part in self.models]


def least_precise_dtype(dtypes: Iterable[str]) -> str:
    names = {dtype.removeprefix("torch.") for dtype in dtypes} & TOLERANCES.keys()
    return max(names, key=TOLERANCES.__getitem__, default="float64")


def run_loop_cases(spec: LoopSpec, folder: Path, world: World) -> None:
    """Run the cases that have enough virtual ranks for this world, until one fails. Each writes a file."""
    sys.argv[:] = [spec.target.rpartition(":")[0], *spec.words]
    for number, case in enumerate(spec.cases):
        if case.virtual_ranks < world.size:
            continue
        run = _run_case(spec, case, world.rank)
        torch.save(run, folder / f"{world.size}-{number}-{world.rank}.pt")
        if run.error:
            break


def read_loop_runs(folder: Path, size: int, number: int) -> list[LoopRun]:
    files = [folder / f"{size}-{number}-{rank}.pt" for rank in range(size)]
    with torch.serialization.safe_globals([LoopRun, LoopStep, StepDigests]):
        return [torch.load(file, weights_only=True) for file in files if file.is_file()]


def _run_case(spec: LoopSpec, case: LoopCase, rank: int) -> LoopRun:
    run = LoopRun(case.strategy)
    torch.set_default_dtype(torch.float32 if case.exact else torch.float64)
    # per rank: only a broadcast makes models equal
    seed_generators(derive_seed(spec.seed, "loop", rank) % MIN_RANDOM_SEED)
    modules_before, folder = set(sys.modules), Path(spec.target.rpartition(":")[0]).resolve().parent
    try:
        with use_observer(_Recorder(spec, case, run)), nullcontext() if case.exact else _without_dropout():
            function = load_function(spec.target)
            run.trains_at_import = bool(run.steps)
            if not run.trains_at_import:
                function()
            close_all_sessions()
    except BaseException as error:
        close_all_sessions(error)
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            prefix = "" if isinstance(error, PacelineError) else f"{type(error).__name__}: "
            run.error, run.victim = f"{prefix}{error}", is_lost_peer_error(error)
            if run.steps and not run.steps[-1].updates:  # optimizer.step() raised the error, so there was no step
                run.steps.pop()
    for name in set(sys.modules) - modules_before:  # the next run must not see the state of the loop's modules
        if Path(str(getattr(sys.modules[name], "__file__", ""))).resolve().parent == folder:
            del sys.modules[name]
    return run


@contextmanager
def _without_dropout() -> Generator[None]:
    """Inside the block, the dropout functions of torch drop nothing."""
    originals = _, attention = F.dropout, F.scaled_dot_product_attention

    def whole(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **kwargs: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *more, **kwargs)

    F.dropout, F.scaled_dot_product_attention = lambda input, *_, **__: input, whole
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = originals


def _gradient_of_mean(loss: Tensor, weight: float | Tensor | None, reduction: Reduction) -> Tensor:
    """The gradient, with respect to `loss`, of the scalar on which a single-process script calls `backward`."""
    ones = torch.ones_like(loss)
    if loss.ndim == 0 or reduction == "sum":
        return ones
    if isinstance(weight, Tensor) and weight.shape == loss.shape:
        return (ones * weight / weight.sum()).to(loss.dtype)
    return ones / loss.numel()


def _sync_without_division(sync_gradients: Callable[[float | Tensor], Any], _divisor: float | Tensor) -> Any:
    return sync_gradients(1.0)


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version  # pyright: ignore[reportPrivateUsage]


def _keep_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _constants(model: nn.Module) -> dict[str, Any]:
    """The numbers and strings in the attributes of modules, which no broadcast makes equal."""
    modules = model.named_modules()
    constants = {f"{name}.{key}".lstrip("."): value for name, module in modules for key, value in vars(module).items()}
    return {n: v for n, v in constants.items() if isinstance(v, (int, float, str)) and not n.endswith("training")}
