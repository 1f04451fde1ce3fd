"""Local steps: each node trains separately, and the nodes synchronise their parameters after every H steps.

The synchronisation is an *outer* step of SGD with Nesterov momentum on the last common parameters. Its gradient is the
mean over nodes of (common parameters - parameters of the node). With the defaults, learning rate 1 and momentum 0, the
result is the mean of the nodes' parameters (local SGD, Stich 2018). With 0.7 and 0.9 it is DiLoCo (Douillard et al.
2023).
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.state import PrefixedSource, Source, TensorShard, load_into, unsharded_parameter_shards
from paceline.collectives.buckets import trainable
from paceline.collectives.communicator import print_notice
from paceline.collectives.control import sum_over_ranks
from paceline.collectives.hosts import NodeTopology
from paceline.collectives.inter_node import InterNodeSum
from paceline.strategies.optimizer_state import load_node_mean, load_optimizer, node_mean_message, optimizer_shards
from paceline.strategies.validation import check_optimizer_parameters


class InterNodeOptions(TypedDict, total=False):
    """Options for the communication between nodes. None is the same as an absent option."""

    compress: str | None
    """bf16, int8 or powersgd: the compression of gradients, see `collectives.across`"""
    powersgd_rank: int | None
    local_steps: int | None
    """H: the number of steps between two synchronisations"""
    outer_lr: float | None
    outer_momentum: float | None


class OuterOptimizer:
    """Takes the outer steps of a training with local steps. A hook of the optimizer counts the local steps.

    In a checkpoint `model/` has the last common parameters and `optimizer/` the state of node 0, so that every strategy
    can resume from it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        hosts: NodeTopology,
        options: InterNodeOptions,
        across: InterNodeSum,
    ) -> None:
        check_optimizer_parameters(model, optimizer)
        self._model, self._optimizer, self._hosts, self._across = model, optimizer, hosts, across
        self._every, self._lr = options.get("local_steps"), options.get("outer_lr") or 1.0
        self._momentum = options.get("outer_momentum") or 0.0
        self._parameters = trainable(model)
        self._whole = InterNodeSum(self._parameters, hosts)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._common = [p.detach().clone() for p in self._parameters]
        self._velocity = [torch.zeros_like(values) for values in self._common] if self._momentum else []
        self._steps = torch.zeros(1, dtype=torch.int64)  # local steps since the last outer step
        optimizer.register_step_post_hook(self._after_local_step)

    def all_finite(self) -> bool:
        grads = [p.grad for p in self._parameters]
        not_finite = [0.0 if grad is None else float(not bool(grad.isfinite().all())) for grad in grads]
        counts: list[float] = sum_over_ranks(
            torch.tensor(not_finite, dtype=torch.float64), "gradients not finite"
        ).tolist()
        for parameter, ranks in zip(self._parameters, counts, strict=True):
            if ranks:  # all ranks must come to the same decision, and name this parameter
                parameter.grad = torch.full_like(parameter, torch.nan)
        return not any(counts)

    @torch.no_grad()
    def _after_local_step(self, *_: object) -> None:
        self._steps += 1
        if int(self._steps) != self._every:
            return
        changes = self._across.sum([old - new for old, new in zip(self._common, self._parameters, strict=True)])
        for i, (common, change) in enumerate(zip(self._common, changes, strict=True)):
            assert change is not None
            mean = change.div_(self._hosts.node_count)
            if self._velocity:
                mean = mean.add_(self._velocity[i].mul_(self._momentum).add_(mean), alpha=self._momentum)
            common.sub_(mean, alpha=self._lr)
        self._set_parameters(self._common)
        self._steps.zero_()

    def _set_parameters(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.detach().copy_(value)

    @contextmanager
    def use_averaged_parameters(self, merged_buffers: Callable[[], AbstractContextManager[None]]) -> Generator[None]:
        """Inside, all nodes have the mean of their parameters, and merged buffers (a collective)."""
        local = [p.detach().clone() for p in self._parameters]
        if int(self._steps):
            self._set_parameters(
                [total / self._hosts.node_count for total in self._whole.sum([*local]) if total is not None]
            )
        try:
            with merged_buffers():
                yield
        finally:
            self._set_parameters(local)

    def common_parameter_shards(self) -> list[TensorShard]:
        common = dict(zip(map(id, self._parameters), self._common, strict=True))
        return unsharded_parameter_shards((name, common.get(id(p), p)) for name, p in self._model.named_parameters())

    def state_shards(self) -> list[TensorShard]:
        """The state of this node, distributed over its ranks, and the state of the outer optimizer."""
        hosts, names = self._hosts, [self._names[id(p)] for p in self._parameters]
        local = unsharded_parameter_shards(zip(names, self._parameters, strict=True))
        prefix = f"hosts/{hosts.node_index}/"
        shards = [replace(shard, name=prefix + shard.name) for shard in local] if int(self._steps) else []
        of_optimizer = optimizer_shards(self._model, self._optimizer)
        shards += (
            [replace(shard, name=prefix + shard.name) for shard in of_optimizer] if hosts.node_index else of_optimizer
        )
        own_shards = [replace(shard, replicated=False) for shard in shards[hosts.memory.rank :: hosts.memory.size]]
        velocity = zip(names, self._velocity, strict=bool(self._velocity))
        momentum = [TensorShard(f"outer/momentum/{name}", tensor) for name, tensor in velocity]
        counts = TensorShard("outer/steps", self._steps), TensorShard("outer/hosts", torch.tensor([hosts.node_count]))
        return [*own_shards, *counts, *momentum]

    def load(self, source: Source) -> None:
        """Load `state_shards`, or the state of a different strategy or number of nodes. Load `model/` first."""
        self._steps.zero_()
        for velocity in self._velocity:
            velocity.zero_()
        for shard in self.state_shards():
            if shard.name.startswith("outer/momentum/") and [*source.names(shard.name)]:
                load_into(source, shard)
        saved, prefix = source.tensor("outer/hosts"), f"hosts/{self._hosts.node_index}/"
        has_state = any(True for _ in source.names(prefix + "optimizer/"))
        load_optimizer(self._model, self._optimizer, PrefixedSource(source, prefix) if has_state else source)
        if saved is None or int(saved) != self._hosts.node_count:
            load_node_mean(source, self.common_parameter_shards())
            if saved is not None:
                print_notice(node_mean_message(int(saved), f"now there are {self._hosts.node_count}") + _NEW_NODES)
            self._set_parameters(self._common)
            return
        self._set_parameters(self._common)
        steps = source.tensor("outer/steps")
        assert steps is not None
        self._steps.copy_(steps)
        for parameter in self._parameters if int(steps) else ():
            load_into(source, TensorShard(f"{prefix}model/{self._names[id(parameter)]}", parameter.detach()))


_NEW_NODES = ". A new node starts with the optimizer state of node 0"
