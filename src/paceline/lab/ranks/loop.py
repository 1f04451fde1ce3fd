"""A user-written loop on a rank of `paceline verify my_loop.py:main`: it runs unchanged, and an observer records it.

What is recorded of samples are sums over them, which do not depend on which rank has which.

In the plain run, with which the others are compared, one process computes whole global batches. There the gradient of
the loss is what `loss.backward()` begins with, and the sum of the gradients is not divided. So the scaling and the
division of the step do not count in it.
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

from paceline.checkpoint.shards import sha256_of
from paceline.data.plan import BatchPlan, Work
from paceline.errors import PacelineError
from paceline.lab.ranks.reference import Observed, has_batch_norm, in_double, to_double
from paceline.lab.ranks.trial import digests_of, fingerprints, gradients_of, parameters_of, world_on
from paceline.lab.verify import TOLERANCES, LoopCase, LoopSpec, StepBits
from paceline.nested import mapped, tensors
from paceline.protocol.evidence import is_victim
from paceline.rank.world import World
from paceline.seeding import derive, seed_streams, stream_states
from paceline.sessions.lifecycle import UNSEEDED, close_all
from paceline.sessions.loader import Loader
from paceline.sessions.observer import Apply, Observer, observed_by
from paceline.stepping.hooks import nodes_of, own_functions, own_hooks
from paceline.stepping.micro_step import MicroStep, Reduction
from paceline.stepping.trained_model import TrainedModel
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.tasks import load_function
from paceline.train.fit import StepRecord

PROBES = 4096  # values of a tensor that are kept, evenly spread


@dataclass
class LoopStep(Observed):
    """A step as a rank has seen it. Its samples are the rank's own, and of each tensor it keeps some values."""

    epoch: int = 0
    micro_batches: int = 0
    rates: list[float] = field(default_factory=list[float])  # learning rates
    input: float = 0.0  # a sum over what the models were given
    output: float = 0.0
    values: float = 0.0  # how many these were: padding to the longest sample of a micro-batch changes that
    updates: bool = False  # whether an optimizer has updated a model
    beside: list[str] = field(default_factory=list[str])  # parameters whose .grad has changed before s.backward
    between: bool = False  # whether one has changed between two s.backward calls


@dataclass
class LoopRun:
    """A run of a loop as a rank has seen it."""

    strategy: str
    optimizer: str = "-"
    steps: list[LoopStep] = field(default_factory=list[LoopStep])
    notes: list[str] = field(default_factory=list[str])  # what the session has said against the loop
    path: list[str] = field(default_factory=list[str])  # hooks and own functions on the gradient path
    bits: list[StepBits] = field(default_factory=list[StepBits])  # of each step, in place of tensors, if they count
    start: dict[str, Any] = field(default_factory=dict[str, Any])  # of the models, before the first step
    draws: bool = False  # whether the loop draws random numbers
    precision: str = "float64"  # the least precise type in the graphs of its losses
    digests: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # of weights and state, at the end
    error: str = ""
    victim: bool = False  # whether the error only says that other ranks are gone


@dataclass
class _Recorder(Observer):
    """Makes a loop's epochs short, computes in float64 unless the case is exact, and records each step."""

    spec: LoopSpec
    case: LoopCase
    run: LoopRun
    _step: LoopStep = field(default_factory=LoopStep)
    _work: Work | None = None
    _sums: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict[tuple[int, int], dict[str, float]])
    """of each micro-batch: what its forwards were given, and gave"""
    _passes: int = 1
    _streams: Tensor = field(default_factory=Tensor)
    _summed: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])
    """gradients after s.backward, by the number of the model; what no update uses counts for nothing"""
    _left: dict[str, tuple[Tensor | None, int]] = field(default_factory=dict[str, tuple[Tensor | None, int]])
    """by parameter, its gradient and version after the last backward"""
    _left_in: tuple[MicroStep | None, int] = (
        None,
        0,
    )  # the body of that backward; how many optimizers had stepped in it
    _unhook: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        where, own = world_on(self.spec.device), {"strategy": self.case.strategy} if self.case.strategy else {}
        self.options = {"device": where.device.type, "backend": where.backend, "threads": 1, "resume": False}
        self.options |= {"track": None, "virtual_ranks": self.case.virtual_ranks, **own}
        self.max_steps = self.spec.steps

    def wrap_strategy(self, name: str, apply: Apply) -> Apply:
        """Nothing in float64 depends on how a batch is divided: no dropout, batch norm with what it knows."""
        self.run.strategy = name

        def applied(model: nn.Module, make_optimizer: MakeOptimizer, world: World) -> Strategy:
            if not self.case.exact:
                for module in in_double(model).modules():
                    if isinstance(module, (_BatchNorm, _DropoutNd)):
                        vars(module.eval())["train"] = partial(_stays, module)
            hooked = (f"a hook on {name}" for name, p in model.named_parameters() if p._backward_hooks)  # pyright: ignore
            self.run.path += [*hooked, *filter(None, [own_hooks([model])])]
            replica = apply(model, make_optimizer, world)
            if self.case.plain:
                vars(replica)["sync_gradients"] = partial(_undivided, replica.sync_gradients)

            def seen(module: nn.Module, *seen: Any) -> None:  # a function: copies of the model do not copy the session
                if module is model:
                    self._on_forward(*seen)

            model.register_forward_hook(seen, with_kwargs=True)
            self.run.start |= _constants(model) | fingerprints(parameters_of(replica))
            self.run.optimizer = type(replica.optimizer).__name__
            return replica

        return applied

    def on_register(self, thing: object) -> None:
        """An average of a model is in float64, as the model is."""
        if not self.case.exact and isinstance(thing, nn.Module):
            in_double(thing)

    def on_loader(self, loader: Loader, *, per_virtual_rank: bool) -> None:
        """Its epochs are short. The plain run computes the whole global batch at once."""
        loader.short_epoch = self._short_epoch
        if self.case.plain:
            size = loader.plan.global_batch * (self.spec.virtual_ranks if per_virtual_rank else 1)
            loader.plan = replace(loader.plan, global_batch=size, accumulation=1)

    def _short_epoch(self, plan: BatchPlan) -> tuple[int, int]:
        """Some whole global batches, and an uneven one, which does not reach every virtual rank."""
        most = self.spec.virtual_ranks
        # batch norm: the statistics of a single value are none
        uneven = 2 * most + 1 if any(has_batch_norm(part.replica.model) for part in self.parts) else max(1, most - 1)
        rest = plan.global_batch if plan.tail == "drop" else min(uneven, plan.global_batch)
        return max(2, self.spec.steps // 2), rest

    def on_batch(self, inputs: Any, work: Work | None) -> Any:
        if work is not None:
            self._work, key = work, (work.virtual_rank, work.part)
            self._passes += key in self._sums
            self._sums[key] = {}  # a later pass over the same micro-batch replaces the first
            self._streams = stream_states(self.parts[0].replica.world.device)
        return inputs if self.case.exact else mapped(inputs, to_double)

    def on_batch_end(self) -> None:
        self._work = None
        self.run.draws |= not torch.equal(self._streams, stream_states(self.parts[0].replica.world.device))

    def _on_forward(self, *seen: Any) -> None:
        """Add up what goes in and out. A longer row of zeros adds nothing."""
        work = self._work
        if work is None or not work.counted:
            return
        sums = self._sums[work.virtual_rank, work.part]
        for what, value in (("input", seen[:2]), ("output", seen[2:])):
            for tensor in tensors(value):
                if tensor.ndim and len(tensor) == len(work.indices):
                    rows = tensor.detach().double().reshape(len(tensor), -1)
                    signs = torch.arange(rows.shape[1], device=rows.device).double().cos()
                    sums[what] = sums.get(what, 0.0) + float((rows @ signs).sum())
                    sums["values"] = sums.get("values", 0.0) + rows.numel()

    def on_backward(
        self, loss: Tensor, weight: float | Tensor | None, reduction: Reduction, micro_step: MicroStep | None
    ) -> None:
        """Note which gradients the loop has changed since the last backward: to zero or None is no change of a sum."""
        again = (
            micro_step is not None and micro_step is self._left_in[0] and len(micro_step.stepped) == self._left_in[1]
        )
        for name, p in self._named():
            if p.grad is (before := self._left.get(name, (None, -1)))[0] and _version(p.grad) == before[1]:
                continue
            self._step.between |= again
            if p.grad is not None and bool(p.grad.any()):
                self._step.beside.append(name)
        if not isinstance(loss, Tensor) or not loss.requires_grad:  # pyright: ignore[reportUnnecessaryIsInstance]
            return
        if not self._left:
            self.run.path += filter(None, [own_functions(loss)])
        if not self.case.exact:
            dtypes = (str(one.dtype) for node in nodes_of(loss) for one in node._input_metadata)
            self.run.precision = least_precise([self.run.precision, *dtypes])
        if self.case.plain:
            first = _of_mean(loss, weight, reduction)
            self._unhook = loss.register_hook(lambda _: first).remove

    def on_gradients(self, micro_step: MicroStep | None) -> None:
        self._unhook()
        for part in self.parts if micro_step is not None and micro_step.is_last else ():
            self._summed[part.number] = self._values(part, gradients_of(part.replica))
        self._left = {name: (p.grad, _version(p.grad)) for name, p in self._named() if p.grad is not None}
        self._left_in = micro_step, len(micro_step.stepped) if micro_step is not None else 0

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters whose whole gradient this rank has."""
        named = [(one.prefix, one.replica.model.named_parameters()) for one in self.parts if not one.replica.sharded]
        return [(prefix + name, p) for prefix, parameters in named for name, p in parameters]

    def _values(self, part: TrainedModel, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies by the names of all models, of all values if bits count, else of some, evenly spread."""
        found: dict[str, Tensor] = {}
        for name, tensor in named.items():
            every = 1 if self.case.exact else max(1, -(-tensor.numel() // PROBES))
            found[part.prefix + name] = tensor.detach().reshape(-1)[::every].to("cpu", copy=True)
        return found

    def on_update(self, part: TrainedModel) -> None:
        self._step.gradients = {**self._step.gradients, **self._summed.pop(part.number, {})}
        self._step.stepped = {**self._step.stepped, **self._values(part, gradients_of(part.replica))}
        self._step.updates = True

    def on_step(self, record: StepRecord) -> None:
        batches, step = record.microbatches, self._step
        step.samples = sorted(i for one in batches if one.work.counted for i in one.work.indices.tolist())
        step.scalars = {"loss": record.result.loss}
        step.rates = [rate for part in self.parts for rate in part.rates()]
        step.epoch, step.micro_batches = batches[0].work.epoch, len(batches)
        step.input = sum(sums.get("input", 0.0) for sums in self._sums.values())
        step.values = sum(sums.get("values", 0.0) for sums in self._sums.values())
        if self._passes == 1:  # else a later pass has computed them anew, by a model that has stepped
            step.output = sum(sums.get("output", 0.0) for sums in self._sums.values())
        for part in self.parts:
            step.parameters = {**step.parameters, **self._values(part, parameters_of(part.replica))}
        if self.case.exact:
            digests = [
                sha256_of({n: t for n, t in of.items() if t is not None}) for of in (step.gradients, step.parameters)
            ]
            self.run.bits.append(StepBits(record.result.loss.hex(), "", *digests))
            step.gradients = step.stepped = step.parameters = {}
        self.run.steps.append(step)
        self._step, self._sums, self._passes = LoopStep(), {}, 1

    def on_numbers(self, named: Mapping[str, float]) -> None:
        for step in self.run.steps[-1:]:
            step.scalars |= {f"{name}, {n}": value for n, (name, value) in enumerate(named.items(), len(step.scalars))}

    def on_print(self, words: Sequence[Any]) -> None:
        """Keep what the session has to say against the loop."""
        if str(words[0] if words else "").startswith("NOTE: "):
            self.run.notes.append(str(words[0]).removeprefix("NOTE: "))

    def on_end(self) -> None:
        self.run.digests = [digests_of(part.replica) for part in self.parts]


def least_precise(dtypes: Iterable[str]) -> str:
    """The one with the largest tolerance, as a key of TOLERANCES; others do not count."""
    names = {dtype.removeprefix("torch.") for dtype in dtypes} & TOLERANCES.keys()
    return max(names, key=TOLERANCES.__getitem__, default="float64")


def run_loop(spec: LoopSpec, folder: Path, world: World) -> None:
    """Run all cases that this world has ranks for, until one fails. Each leaves a file."""
    sys.argv[:] = [spec.target.rpartition(":")[0], *spec.words]
    for number, case in enumerate(spec.cases):
        if case.virtual_ranks < world.size:
            continue
        run = _run_case(spec, case, world.rank)
        torch.save(run, folder / f"{world.size}-{number}-{world.rank}.pt")
        if run.error:
            break


def read_run(folder: Path, size: int, number: int) -> list[LoopRun]:
    """What the ranks of a world have recorded of a case; nothing of a rank that has not come to its end."""
    files = [folder / f"{size}-{number}-{rank}.pt" for rank in range(size)]
    with torch.serialization.safe_globals([LoopRun, LoopStep, StepBits]):
        return [torch.load(file, weights_only=True) for file in files if file.is_file()]


def _run_case(spec: LoopSpec, case: LoopCase, rank: int) -> LoopRun:
    """Run the loop once."""
    run = LoopRun(case.strategy)
    torch.set_default_dtype(torch.float32 if case.exact else torch.float64)
    seed_streams(derive(spec.seed, "loop", rank) % UNSEEDED)  # only a broadcast makes the ranks alike
    before, folder = set(sys.modules), Path(spec.target.rpartition(":")[0]).resolve().parent
    try:
        with observed_by(_Recorder(spec, case, run)), nullcontext() if case.exact else _without_dropout():
            load_function(spec.target)()
            close_all()
    except BaseException as error:
        close_all(error)
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            kind = "" if isinstance(error, PacelineError) else f"{type(error).__name__}: "
            run.error, run.victim = f"{kind}{error}", is_victim(error)
            if run.steps and not run.steps[-1].updates:  # optimizer.step() raised it: no step was taken
                run.steps.pop()
    for name in set(sys.modules) - before:  # what the loop's own modules keep is not the next run's
        if Path(str(getattr(sys.modules[name], "__file__", ""))).resolve().parent == folder:
            del sys.modules[name]
    return run


@contextmanager
def _without_dropout() -> Generator[None]:
    """Inside, the functions that modules call for it drop nothing."""
    before = _, attention = F.dropout, F.scaled_dot_product_attention

    def whole(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **named: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *more, **named)

    F.dropout, F.scaled_dot_product_attention = lambda input, *_, **__: input, whole
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = before


def _of_mean(loss: Tensor, weight: float | Tensor | None, reduction: Reduction) -> Tensor:
    """The gradient, with respect to `loss`, of what a single-process script calls `backward` on."""
    whole = torch.ones_like(loss)
    if loss.ndim == 0 or reduction == "sum":
        return whole
    if isinstance(weight, Tensor) and weight.shape == loss.shape:
        return (whole * weight / weight.sum()).to(loss.dtype)
    return whole / loss.numel()


def _undivided(sync_gradients: Callable[[float | Tensor], Any], _divisor: float | Tensor) -> Any:
    return sync_gradients(1.0)


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version  # pyright: ignore[reportPrivateUsage]


def _stays(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _constants(model: nn.Module) -> dict[str, Any]:
    """What no broadcast makes the same: the numbers that modules keep."""
    modules = model.named_modules()
    found = {f"{name}.{key}".lstrip("."): value for name, module in modules for key, value in vars(module).items()}
    return {n: v for n, v in found.items() if isinstance(v, (int, float, str)) and not n.endswith("training")}
