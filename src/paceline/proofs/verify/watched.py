"""A session that `paceline verify` looks into: short epochs, and a note of what each step does.

What is noted of samples are sums over them, which do not depend on who has which.

In the plain case, with which the others are compared, `s.backward(loss)` is `loss.backward()` on the mean over the
whole global batch, without the step's scaling, micro-batches and division.
"""

import random
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from paceline.checkpoint.whole import sha256_of, whole
from paceline.data.plan import BatchPlan
from paceline.nested import mapped, tensors
from paceline.proofs.verify.setup import inputs_to_double, to_double, world_on
from paceline.proofs.verify.trial import fingerprints, parameters_of
from paceline.sessions import Session
from paceline.sessions.elsewhere import is_cut
from paceline.sessions.loader import Bodies, Loader
from paceline.sessions.order import DrawnPlan
from paceline.sessions.prepared import Prepared
from paceline.stepping.bodies import Reduction
from paceline.stepping.hooks import nodes_of
from paceline.train.fit import StepRecord
from paceline.verify.spec import LoopCase, LoopSpec
from paceline.worker.world import World

PROBES = 4096  # values of a tensor that are kept, evenly spread


class WatchedSession(Session):
    """In place of the Session that a loop asks for."""

    spec: LoopSpec
    case: LoopCase
    noted: dict[str, Any]

    def __init__(self, run_dir: Any = None, **options: Any) -> None:
        del run_dir  # nothing is written
        own = options.get("strategy", "bucketed")
        where = world_on(self.spec.device)
        given: dict[str, Any] = {"device": where.device.type, "backend": where.backend, "threads": 1, "resume": False}
        given |= {"track": None, "virtual_ranks": self.case.virtual_ranks, "strategy": self.case.strategy or own}
        super().__init__(None, **{**options, **given})
        self.noted["strategy"] = self._strategy
        self._of_step: dict[str, Any] = {}
        self._looks: dict[tuple[int, int], dict[str, float]] = {}
        self._plain_loss = torch.zeros(())
        self._marks: dict[str, tuple[Any, int]] = {}  # by parameter, its gradient and version after the last backward
        self._marked_in: tuple[Any, int] = (None, 0)  # the body of that backward; how many optimizers had stepped in it

    @property
    def is_over(self) -> bool:
        """Whether all steps that were asked for are done."""
        return self.step >= self.spec.steps

    def modules(self) -> list[nn.Module]:
        """Of all its models."""
        return [module for part in self._parts for module in part.replica.model.modules()]

    def prepare(self, model: nn.Module, optimizer: Any, scheduler: Any = None) -> Any:
        """See Session; in float64 nothing depends on how a batch is cut: no dropout, batch norm with what it knows."""
        if not self.case.exact:
            model.double().register_forward_pre_hook(inputs_to_double, with_kwargs=True)
            for module in model.modules():
                if isinstance(module, (_BatchNorm, _DropoutNd)):
                    vars(module.eval())["train"] = partial(_stays, module)
        self.noted["path"] += [f"a hook on {name}" for name, p in model.named_parameters() if _hooks(p)]
        self.noted["path"] += [
            f"a backward hook of {name or 'the model'}"
            for name, module in model.named_modules()
            if module._backward_hooks or module._backward_pre_hooks  # pyright: ignore[reportPrivateUsage]
        ]
        found = super().prepare(model, optimizer, scheduler)
        part = self._parts[-1]
        if self.case.plain:  # this object's own, so a fault of their class does not reach them
            part.backward = self._backward_plainly
            part.replica = replace(part.replica, sync_gradients=partial(_undivided, part.replica.sync_gradients))
        part.optimizer.register_step_pre_hook(partial(self._before_step, part))

        def seen(module: nn.Module, *seen: Any) -> None:  # a function: copies of the model do not copy the session
            if module is model:
                self._on_forward(*seen)

        model.register_forward_hook(seen, with_kwargs=True)
        self.noted["start"] |= _constants(model) | fingerprints(_parameters(part))
        self.noted["optimizer"] = type(part.optimizer).__name__
        return found

    def loader(self, data: Any, **options: Any) -> Loader:
        """See Session; its epochs are short."""
        made = super().loader(data, **options)
        if self.case.plain:  # the whole global batch at once
            of_each = options.get("batch_size") is not None or bool(options.get("per_rank"))
            whole_batch = made.plan.global_batch * (self.spec.virtual_ranks if of_each else 1)
            made.plan = replace(made.plan, global_batch=whole_batch, accumulation=1)
        watched: Any = _Short if type(made) is Loader else _Watched  # a stream has no epoch to cut
        made.__class__ = type(watched.__name__, (watched, type(made)), {"session": self})
        return made

    def register(self, name: str, thing: Any, *, saved: bool = True) -> None:
        """See Session; an average of a model is in float64, as the model is."""
        if not self.case.exact and isinstance(thing, nn.Module):
            thing.double().register_forward_pre_hook(inputs_to_double, with_kwargs=True)
        super().register(name, thing, saved=saved)

    def epochs(self, count: int) -> Generator[int]:
        """See Session; no more than the steps need."""
        with closing(super().epochs(count)) as epochs:
            for epoch in epochs:
                yield epoch
                if self.is_over:
                    return

    def backward(
        self, loss: Tensor, weight: float | Tensor | None = None, *, reduction: Reduction = "mean", **options: Any
    ) -> None:
        """See Session."""
        body = self._steps.body
        if not self._path_seen and isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._path_seen = True
            self.noted["path"] += [f"autograd function {name}" for name in _own_functions(loss)]
        self._look_at_gradients(body)
        self._plain_loss = _mean(loss, weight) if self.case.plain else loss
        super().backward(loss, weight, reduction=reduction, **options)
        for part in self._parts if body is not None and body.is_last else ():
            self._note(f"summed {part.number}", part, _gradients(part))
        self._marks = {name: (p.grad, _version(p.grad)) for name, p in self._named() if p.grad is not None}
        self._marked_in = (body, len(body.stepped) if body is not None else 0)

    def _backward_plainly(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        del loss  # scaled by the step
        self._plain_loss.backward(retain_graph=retain_graph or None)

    def _look_at_gradients(self, body: Any) -> None:
        """Note which gradients the loop has changed since the last backward: to zero or None is no change of a sum."""
        again = body is not None and body is self._marked_in[0] and len(body.stepped) == self._marked_in[1]
        for name, p in self._named():
            before, version = self._marks.get(name, (None, -1))
            if p.grad is before and _version(p.grad) == version:
                continue
            if again:
                self.noted["between"] = True
            if p.grad is not None and bool(p.grad.any()):
                self.noted["beside"].append(name)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        parts = [part for part in self._parts if not part.replica.sharded]
        return [(part.prefix + name, p) for part in parts for name, p in part.replica.model.named_parameters()]

    _path_seen = False
    """whether the first loss's graph was searched for functions of the loop's own"""

    def log(self, values: Mapping[str, float] | None = None, **more: float) -> None:
        """See Session."""
        for name, value in {**(values or {}), **more}.items():
            self._note_number(f"logged {name}", float(value))

    def mean(self, total: float | Tensor, count: float | Tensor) -> float:
        """See Session."""
        found = super().mean(total, count)
        self._note_number("s.mean", found)
        return found

    def save(self, model: nn.Module | None, path: Any) -> None:
        """Nothing is written."""

    def print(self, *words: Any) -> None:
        """Only what the session has to say against the loop is kept."""
        if str(words[0] if words else "").startswith("NOTE: "):
            self.noted["notes"].append(str(words[0]).removeprefix("NOTE: "))

    def close(self, error: BaseException | None = None) -> None:
        """See Session; a loop that has ended well shows its whole state."""
        if not self._closed and self._opened and isinstance(error or SystemExit(), SystemExit):
            self.noted["weights"] = [sha256_of(self.weights(part.replica.model)) for part in self._parts]
            self.noted["state"] = [sha256_of(whole(part.replica.state(), self.world)) for part in self._parts]
        super().close(error)

    def _train(self, loader: Loader) -> Generator[Any]:
        if self.is_over:
            raise SystemExit(0)
        with closing(super()._train(loader)) as batches:
            for batch in batches:
                if self._steps.body is not None:  # a later pass over the same micro-batch replaces the first
                    self._looks.pop((self._steps.body.work.virtual_rank, self._steps.body.work.part), None)
                drawn = _streams(self.device)
                yield self._cast(batch)
                self.noted["draws"] |= drawn != _streams(self.device)

    def _evaluate(self, loader: Loader) -> Generator[Any]:
        with closing(super()._evaluate(loader)) as batches:
            yield from map(self._cast, batches)

    def _cast(self, batch: Any) -> Any:
        return batch if self.case.exact else mapped(batch, to_double)

    def _on_forward(self, *seen: Any) -> None:
        """Adds up what goes in and out; a longer row of zeros adds nothing."""
        work = self._steps.body.work if self._steps.body is not None else None
        if work is None or not work.counted:
            return
        looks = self._looks.setdefault((work.virtual_rank, work.part), {})
        for what, value in (("input", seen[:2]), ("output", seen[2:])):
            for tensor in tensors(value):
                if tensor.ndim and len(tensor) == len(work.indices):
                    rows = tensor.detach().double().reshape(len(tensor), -1)
                    signs = torch.arange(rows.shape[1], device=rows.device).double().cos()
                    looks[what] = looks.get(what, 0.0) + float((rows @ signs).sum())

    def _note(self, what: str, part: Prepared, named: Mapping[str, Tensor]) -> None:
        named = {part.prefix + name: tensor.detach() for name, tensor in named.items()}
        self._of_step.setdefault(f"{what} bits", {}).update(fingerprints(named))
        if not self.case.exact and self.rank == 0:
            probes = {n: t.reshape(-1)[:: -(-t.numel() // PROBES) or 1].to("cpu", copy=True) for n, t in named.items()}
            self._of_step.setdefault(what, {}).update(probes)

    def _before_step(self, part: Prepared, *_: object) -> None:
        for kind in ("", " bits"):  # what a step does not use counts for nothing
            summed = self._of_step.pop(f"summed {part.number}{kind}", {})
            self._of_step.setdefault(f"gradients{kind}", {}).update(summed)
        self._note("stepped", part, _gradients(part))

    def _note_number(self, name: str, value: float) -> None:
        for step in self.noted["steps"][-1:]:
            step["numbers"][f"{name}, {len(step['numbers']) + 1}"] = value

    def _check_seed(self) -> None:
        """No note: verify has seeded each rank."""

    def _ended(self, record: StepRecord) -> None:
        for part in self._parts:
            self._note("parameters", part, _parameters(part))
        samples = sorted(i for one in record.microbatches if one.work.counted for i in one.work.indices.tolist())
        sums = {what: sum(look.get(what, 0.0) for look in self._looks.values()) for what in ("input", "output")}
        if self._steps.phases.number > 1:  # a later pass has computed them anew, by a model that has stepped
            sums["output"] = 0.0
        rates = [str(float(rate)) for part in self._parts for rate in part.rates()]
        self._of_step |= {"loss": record.result.loss, "samples": samples, "rates": rates, "numbers": {}}
        epoch = record.microbatches[0].work.epoch
        told = {"epoch": epoch, "bodies": len(record.microbatches), "beside": sorted({*self.noted["beside"]})}
        self.noted["beside"] = []
        self.noted["steps"].append({**self._of_step, **sums, **told, "between": self.noted.pop("between", False)})
        self._of_step, self._looks = {}, {}


class _Watched(Loader):
    """Ends when the steps are done."""

    session: WatchedSession

    def training(self, plan: BatchPlan, share: range, epoch: int, start: int) -> Generator[Bodies]:
        """See Loader."""
        with closing(super().training(plan, share, epoch, start)) as steps:
            for bodies in steps:
                yield bodies
                if self.session.is_over:
                    return


class _Short(_Watched):
    """Epochs of some whole global batches and an uneven one, which does not reach every virtual rank."""

    def __len__(self) -> int:
        full = super().__len__() if self.existing is not None else self._cut(self.plan).steps_per_epoch
        return min(full, self._whole_steps + 1)

    def drawn(self, world: World, put_back: dict[str, Any] | None, start: int = 0, **how: Any) -> BatchPlan:
        """See Loader."""
        return self._cut(super().drawn(world, put_back, start, **how))

    @property
    def _whole_steps(self) -> int:
        return max(2, self.session.spec.steps // 2)

    def _cut(self, plan: BatchPlan) -> BatchPlan:
        most = self.session.spec.virtual_ranks
        modules = self.session.modules()
        # batch norm: the statistics of a single value are none
        tail = 2 * most + 1 if any(isinstance(m, _BatchNorm) for m in modules) else max(1, most - 1)
        tail = min(tail, plan.global_batch)
        if not isinstance(plan, DrawnPlan):
            return replace(plan, num_samples=min(plan.num_samples, self._whole_steps * plan.global_batch + tail))
        if plan.order is not None:
            plan.order.shorten(self._whole_steps, plan.global_batch if plan.tail == "drop" else tail)
        return plan


def _mean(loss: Tensor, weight: float | Tensor | None) -> Tensor:
    """What a single-process script would call `backward` on: one micro-batch is the whole global batch."""
    if loss.ndim == 0:  # a mean, or a sum that is to be one
        return loss
    return (loss * weight).sum() / weight.sum() if isinstance(weight, Tensor) else loss.mean()


def _undivided(sync_gradients: Callable[[Tensor], Any], divisor: Tensor) -> Any:
    return sync_gradients(torch.ones_like(divisor))


def _hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks)  # pyright: ignore[reportPrivateUsage]


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version  # pyright: ignore[reportPrivateUsage]


def _own_functions(loss: Tensor) -> list[str]:
    """The names of the autograd functions, written in Python, in a loss's graph."""
    nodes = (node for node in nodes_of(loss) if isinstance(node, torch.autograd.function.BackwardCFunction))
    return sorted({type(node).__name__.removesuffix("Backward") for node in nodes})


def _stays(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _gradients(part: Prepared) -> dict[str, Tensor]:
    """By name, whole (a collective where ranks hold shares of them)."""
    if part.replica.sharded:
        return dict(whole(part.replica.gradients(), part.replica.world))
    return {name: p.grad for name, p in part.replica.model.named_parameters() if p.grad is not None}


def _parameters(part: Prepared) -> dict[str, Tensor]:
    """By name, whole (a collective where ranks hold shares of them)."""
    named: dict[str, Tensor] = dict(part.replica.model.named_parameters())
    return parameters_of(part.replica) if any(map(is_cut, named.values())) else named


def _constants(model: nn.Module) -> dict[str, Any]:
    """What no broadcast makes the same: the numbers that modules keep."""
    modules = model.named_modules()
    found = {f"{name}.{key}".lstrip("."): value for name, module in modules for key, value in vars(module).items()}
    return {n: v for n, v in found.items() if isinstance(v, (int, float, str)) and not n.endswith("training")}


def _streams(device: torch.device) -> Any:
    """Where the random streams are that a loop may draw from."""
    on_device = torch.get_device_module(device).get_rng_state(device).tolist() if device.type != "cpu" else None
    return random.getstate(), torch.get_rng_state().tolist(), on_device
