"""Local steps: each host takes its steps by itself, and after every H of them the hosts agree again.

That is an *outer* step: the mean of how far they have gone is the gradient of an outer SGD with Nesterov momentum on
the parameters that they agreed on last. With its defaults, rate 1 and momentum 0, that is the mean of the hosts'
parameters (local SGD, Stich 2018); with 0.7 and 0.9 it is DiLoCo (Douillard et al. 2023).
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.state import PrefixedSource, Source, TensorShard, load_into, whole_parameters
from paceline.collectives.across import Across
from paceline.collectives.buckets import trainable
from paceline.collectives.communicator import say
from paceline.collectives.control import sum_over_ranks
from paceline.collectives.hosts import Hosts
from paceline.strategies.optimizer_state import hold_optimizer, load_mean, load_optimizer, mean_message
from paceline.strategies.validation import check_optimizer_parameters


class InterNodeOptions(TypedDict, total=False):
    """What may be asked for between hosts; None is as nothing."""

    compress: str | None
    """bf16, int8 or powersgd: how gradients travel, see `sums.compress`"""
    powersgd_rank: int | None
    local_steps: int | None
    """H"""
    outer_lr: float | None
    outer_momentum: float | None


class OuterOptimizer:
    """The outer steps of a training whose hosts step by themselves. It hears each inner step from the optimizer.

    Of the state, `model/` is what hosts have agreed on last, `optimizer/` is that of host 0: so any strategy goes on.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, hosts: Hosts, between: InterNodeOptions, across: Across
    ) -> None:
        """`across` sums how far hosts have gone."""
        check_optimizer_parameters(model, optimizer)
        self._model, self._optimizer, self._hosts, self._across = model, optimizer, hosts, across
        self._every, self._lr = between.get("local_steps"), between.get("outer_lr") or 1.0
        self._momentum = between.get("outer_momentum") or 0.0
        self._parameters = trainable(model)
        self._whole = Across(self._parameters, hosts)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._agreed = [p.detach().clone() for p in self._parameters]
        self._velocity = [torch.zeros_like(one) for one in self._agreed] if self._momentum else []
        self._steps = torch.zeros(1, dtype=torch.int64)
        """since the hosts agreed"""
        optimizer.register_step_post_hook(self._stepped)

    def all_finite(self) -> bool:
        """Whether no host's gradient holds an infinity or NaN; what is so on one becomes so on all (a collective)."""
        grads = [p.grad for p in self._parameters]
        bad = [0.0 if grad is None else float(not bool(grad.isfinite().all())) for grad in grads]
        told: list[float] = sum_over_ranks(torch.tensor(bad, dtype=torch.float64), "gradients not finite").tolist()
        for parameter, ranks in zip(self._parameters, told, strict=True):
            if ranks:  # all ranks must judge alike, and name it
                parameter.grad = torch.full_like(parameter, torch.nan)
        return not any(told)

    @torch.no_grad()
    def _stepped(self, *_: object) -> None:
        self._steps += 1
        if int(self._steps) != self._every:
            return
        gone = self._across.sum([old - new for old, new in zip(self._agreed, self._parameters, strict=True)])
        for i, (agreed, one) in enumerate(zip(self._agreed, gone, strict=True)):
            assert one is not None
            mean = one.div_(self._hosts.count)
            if self._velocity:
                mean = mean.add_(self._velocity[i].mul_(self._momentum).add_(mean), alpha=self._momentum)
            agreed.sub_(mean, alpha=self._lr)
        self._put(self._agreed)
        self._steps.zero_()

    def _put(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.detach().copy_(value)

    @contextmanager
    def shown(self, merged_buffers: Callable[[], AbstractContextManager[None]]) -> Generator[None]:
        """Inside, all hosts have the mean of their parameters, and merged buffers (a collective)."""
        own = [p.detach().clone() for p in self._parameters]
        if int(self._steps):
            self._put([one / self._hosts.count for one in self._whole.sum([*own]) if one is not None])
        try:
            with merged_buffers():
                yield
        finally:
            self._put(own)

    def hold_parameters(self) -> list[TensorShard]:
        """What the hosts have agreed on last."""
        agreed = dict(zip(map(id, self._parameters), self._agreed, strict=True))
        return whole_parameters((name, agreed.get(id(p), p)) for name, p in self._model.named_parameters())

    def hold(self) -> list[TensorShard]:
        """What belongs to this host, dealt out to its ranks, and what the next outer step begins with."""
        hosts, names = self._hosts, [self._names[id(p)] for p in self._parameters]
        own = whole_parameters(zip(names, self._parameters, strict=True))
        prefix = f"hosts/{hosts.number}/"
        held = [replace(one, name=prefix + one.name) for one in own] if int(self._steps) else []
        of_optimizer = hold_optimizer(self._model, self._optimizer)
        held += [replace(one, name=prefix + one.name) for one in of_optimizer] if hosts.number else of_optimizer
        mine = [replace(one, replicated=False) for one in held[hosts.memory.rank :: hosts.memory.size]]
        velocity = zip(names, self._velocity, strict=bool(self._velocity))
        momentum = [TensorShard(f"outer/momentum/{name}", tensor) for name, tensor in velocity]
        counts = TensorShard("outer/steps", self._steps), TensorShard("outer/hosts", torch.tensor([hosts.count]))
        return [*mine, *counts, *momentum]

    def load(self, source: Source) -> None:
        """Take over what `hold` gave, or a state of another number of hosts or strategy, once `model/` is there."""
        self._steps.zero_()
        for velocity in self._velocity:
            velocity.zero_()
        for held in self.hold():
            if held.name.startswith("outer/momentum/") and [*source.names(held.name)]:
                load_into(source, held)
        saved, prefix = source.tensor("outer/hosts"), f"hosts/{self._hosts.number}/"
        there = any(True for _ in source.names(prefix + "optimizer/"))
        load_optimizer(self._model, self._optimizer, PrefixedSource(source, prefix) if there else source)
        if saved is None or int(saved) != self._hosts.count:
            load_mean(source, self.hold_parameters())
            if saved is not None:
                say(mean_message(int(saved), f"now there are {self._hosts.count}") + _MOMENTS)
            self._put(self._agreed)
            return
        self._put(self._agreed)
        steps = source.tensor("outer/steps")
        assert steps is not None
        self._steps.copy_(steps)
        for parameter in self._parameters if int(steps) else ():
            load_into(source, TensorShard(f"{prefix}model/{self._names[id(parameter)]}", parameter.detach()))


_MOMENTS = ". A host that is new begins with the optimizer's state of host 0"
