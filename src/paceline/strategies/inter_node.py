"""Training of several nodes on a slow network: compressed gradients, or local steps.

With local steps each node trains separately, and the nodes synchronise their parameters after every H steps. The
synchronisation is an *outer* step of SGD with Nesterov momentum on the last common parameters. Its gradient is the mean
over nodes of (common parameters - parameters of the node). With the defaults, learning rate 1 and momentum 0, the
result is the mean of the nodes' parameters (local SGD, Stich 2018). With 0.7 and 0.9 it is DiLoCo (Douillard et al.
2023).
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import (
    PrefixedSource,
    StateSource,
    TensorShard,
    load_shard,
    read_matching_tensor,
    unsharded_parameter_shards,
)
from paceline.collectives.buckets import trainable_parameters
from paceline.collectives.communicator import make_communicator
from paceline.collectives.control import error_on_one_rank, sum_over_ranks
from paceline.collectives.hosts import NodeTopology
from paceline.collectives.inter_node import InterNodeAllReduce
from paceline.collectives.reducer import make_node_reducer
from paceline.collectives.shm_collectives import MAX_TENSORS
from paceline.collectives.shm_communicator import node_topology, supports_shared_memory_sum
from paceline.collectives.torch_communicator import print_on_rank_0
from paceline.config.strategies import SLOW_NETWORK_SETTINGS, find_network_settings_error
from paceline.errors import UsageError, format_option
from paceline.rank.world import World
from paceline.strategies import optimizers
from paceline.strategies.base import MakeOptimizer, Strategy


class InterNodeOptions(TypedDict, total=False):
    """Options for the communication between nodes. None is the same as an absent option."""

    compress: str | None
    """bf16, int8 or powersgd: the compression of gradients, see `collectives.across`"""
    powersgd_rank: int | None
    local_steps: int | None
    """H: the number of steps between two synchronisations"""
    outer_lr: float | None
    outer_momentum: float | None


def inter_node_strategy(
    model: nn.Module, make_optimizer: MakeOptimizer, world: World, virtual_ranks: int | None, options: InterNodeOptions
) -> "InterNodeStrategy | None":
    hosts = _node_topology(options, model, world)
    if hosts is None:
        return None
    strategy = LocalSGDStrategy if options.get("local_steps") else InterNodeStrategy
    return strategy(model, make_optimizer, world, hosts, virtual_ranks, options)


def _node_topology(options: InterNodeOptions, model: nn.Module, world: World) -> NodeTopology | None:
    """The nodes of `world`. None if no option is set, or if there is one node; then a message explains it."""
    values: dict[str, Any] = {name: options.get(name) for name in SLOW_NETWORK_SETTINGS}
    if error := find_network_settings_error(values):
        raise error_on_one_rank(error, world)
    option_names = [name for name in ("compress", "local_steps") if values[name] is not None]
    if not option_names:
        return None
    parameters, exchange = trainable_parameters(model), make_communicator()
    hosts = node_topology(exchange)
    if hosts is not None and supports_shared_memory_sum(parameters):
        return hosts
    if world.size > 1 and exchange.kind != "shared":
        error = UsageError(code="no-shared-memory-on-nodes", setting=option_names[0], most=MAX_TENSORS)
        raise error_on_one_rank(error, world)
    flags = " ".join(format_option(name, values[name]) for name in option_names)
    print_on_rank_0(f"{flags} has no effect: all ranks are on one node")
    return None


class InterNodeStrategy(Strategy):
    """Sums gradients on each node, and sends them compressed between nodes.

    The compression residuals of each node are a part of the state. A skipped step also drops its changes of them.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        world: World,
        hosts: NodeTopology,
        virtual_ranks: int | None,
        options: InterNodeOptions,
    ) -> None:
        optimizer = make_optimizer(model.parameters())
        self._hosts = hosts
        parameters, compress = trainable_parameters(model), options.get("compress")
        self._across = InterNodeAllReduce(parameters, hosts, compress, options.get("powersgd_rank"))
        self._division = torch.tensor([hosts.node_count, hosts.memory.size])
        self._prefix = f"feedback/{hosts.rank}/"
        reducer = make_node_reducer(model, hosts, None if options.get("local_steps") else self._across)
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, reducer=reducer)

    def save_buffers(self) -> None:
        super().save_buffers()
        self._across.save_state()

    def restore_buffers(self) -> None:
        super().restore_buffers()
        self._across.restore_state()

    def _state(self) -> list[TensorShard]:
        residuals = self._across.state().items()
        shards = [TensorShard(self._prefix + name, tensor, replicated=False) for name, tensor in residuals]
        return [*super()._state(), TensorShard("feedback/division", self._division), *shards]

    def _load(self, source: StateSource) -> None:
        super()._load(source)
        self._across.reset_residual()
        saved = source.tensor("feedback/division")
        if saved is not None and torch.equal(saved, self._division):
            rank_source = PrefixedSource(source, self._prefix)
            residuals = self._across.state().items()
            self._across.load({name: read_matching_tensor(rank_source, name, tensor) for name, tensor in residuals})
        elif saved is not None:
            print_on_rank_0(
                f"the checkpoint was saved on {describe_node_sizes(saved)}, now there are "
                f"{describe_node_sizes(self._division)}: the compression residuals are dropped and start at zero"
            )


class LocalSGDStrategy(InterNodeStrategy):
    """Each node trains separately between outer steps. A hook of the optimizer counts the local steps.

    In a checkpoint `model/` has the last common parameters and `optimizer/` the state of node 0, so that every strategy
    can resume from it.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        world: World,
        hosts: NodeTopology,
        virtual_ranks: int | None,
        options: InterNodeOptions,
    ) -> None:
        super().__init__(model, make_optimizer, world, hosts, virtual_ranks, options)
        self.local_step_node = hosts
        self._every, self._lr = options.get("local_steps"), options.get("outer_lr") or 1.0
        self._momentum = options.get("outer_momentum") or 0.0
        self._whole = InterNodeAllReduce(self.parameters, hosts)
        self._names = {id(p): name for name, p in self._named}
        self._common = [p.detach().clone() for p in self.parameters]
        self._velocity = [torch.zeros_like(values) for values in self._common] if self._momentum else []
        self._steps = torch.zeros(1, dtype=torch.int64)  # local steps since the last outer step
        self.optimizer.register_step_post_hook(self._after_local_step)

    def _reduce(self, divisor: float | Tensor) -> bool | None:
        assert self.reducer is not None
        # with plain SGD the mean of the nodes' steps is then the step on the global batch
        return self.reducer.finish(divisor / self._hosts.node_count) or None

    def check_finite_on_all_ranks(self) -> bool:
        grads = [p.grad for p in self.parameters]
        not_finite = [0.0 if grad is None else float(not bool(grad.isfinite().all())) for grad in grads]
        flags = torch.tensor(not_finite, dtype=torch.float64)
        counts: list[float] = sum_over_ranks(flags, "gradients not finite").tolist()
        for parameter, ranks in zip(self.parameters, counts, strict=True):
            if ranks:  # all ranks must come to the same decision, and name this parameter
                parameter.grad = torch.full_like(parameter, torch.nan)
        return not any(counts)

    @torch.no_grad()
    def _after_local_step(self, *_: object) -> None:
        self._steps += 1
        if int(self._steps) != self._every:
            return
        changes = self._across.sum([old - new for old, new in zip(self._common, self.parameters, strict=True)])
        for i, (common, change) in enumerate(zip(self._common, changes, strict=True)):
            assert change is not None
            mean = change.div_(self._hosts.node_count)
            if self._velocity:
                mean = mean.add_(self._velocity[i].mul_(self._momentum).add_(mean), alpha=self._momentum)
            common.sub_(mean, alpha=self._lr)
        self._set_parameters(self._common)
        self._steps.zero_()

    def _set_parameters(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.detach().copy_(value)

    @contextmanager
    def use_merged_buffers(self) -> Generator[None]:
        """Inside, all nodes have the mean of their parameters, and merged buffers (a collective)."""
        local = [p.detach().clone() for p in self.parameters]
        if int(self._steps):
            totals = self._whole.sum([*local])
            self._set_parameters([total / self._hosts.node_count for total in totals if total is not None])
        try:
            with super().use_merged_buffers():
                yield
        finally:
            self._set_parameters(local)

    def _parameter_shards(self) -> list[TensorShard]:
        common = dict(zip(map(id, self.parameters), self._common, strict=True))
        return unsharded_parameter_shards((name, common.get(id(p), p)) for name, p in self._named)

    def _optimizer_shards(self) -> list[TensorShard]:
        """The state of this node, distributed over its ranks, and the state of the outer optimizer."""
        hosts, names = self._hosts, [self._names[id(p)] for p in self.parameters]
        local = unsharded_parameter_shards(zip(names, self.parameters, strict=True))
        prefix = f"hosts/{hosts.node_index}/"
        shards = [replace(shard, name=prefix + shard.name) for shard in local] if int(self._steps) else []
        of_optimizer = optimizers.full_optimizer_state(self.model, self.optimizer)
        shards += (
            [replace(shard, name=prefix + shard.name) for shard in of_optimizer] if hosts.node_index else of_optimizer
        )
        own_shards = [replace(shard, replicated=False) for shard in shards[hosts.memory.rank :: hosts.memory.size]]
        velocity = zip(names, self._velocity, strict=bool(self._velocity))
        momentum = [TensorShard(f"outer/momentum/{name}", tensor) for name, tensor in velocity]
        counts = TensorShard("outer/steps", self._steps), TensorShard("outer/hosts", torch.tensor([hosts.node_count]))
        return [*own_shards, *counts, *momentum]

    def _load_optimizer(self, source: StateSource) -> None:
        """Load `_optimizer_shards`, or the state of a different strategy or number of nodes. Load `model/` first."""
        self._steps.zero_()
        for velocity in self._velocity:
            velocity.zero_()
        for shard in self._optimizer_shards():
            if shard.name.startswith("outer/momentum/") and [*source.names(shard.name)]:
                load_shard(source, shard)
        saved, prefix = source.tensor("outer/hosts"), f"hosts/{self._hosts.node_index}/"
        has_state = any(True for _ in source.names(prefix + "optimizer/"))
        optimizers.load_optimizer(self.model, self.optimizer, PrefixedSource(source, prefix) if has_state else source)
        if saved is None or int(saved) != self._hosts.node_count:
            optimizers.load_mean_parameters(source, self._parameter_shards())
            if saved is not None:
                mean = optimizers.describe_resume_from_mean(int(saved), f"now there are {self._hosts.node_count}")
                print_on_rank_0(f"{mean}. A new node starts with the optimizer state of node 0")
            self._set_parameters(self._common)
            return
        self._set_parameters(self._common)
        steps = source.tensor("outer/steps")
        assert steps is not None
        self._steps.copy_(steps)
        for parameter in self.parameters if int(steps) else ():
            load_shard(source, TensorShard(f"{prefix}model/{self._names[id(parameter)]}", parameter.detach()))


def describe_node_sizes(division: Tensor) -> str:
    count, size = division.tolist()
    return f"{count} nodes of {size} rank{'s' if size > 1 else ''}"
