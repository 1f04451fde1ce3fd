"""Training of several nodes on a slow network: compressed gradients, or local steps (see `outer_optimizer`)."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.state import PrefixedSource, Source, TensorShard, read_matching_tensor
from paceline.collectives.buckets import trainable
from paceline.collectives.communicator import can_use_shared_memory, make_communicator, print_notice
from paceline.collectives.control import report_on_one_rank
from paceline.collectives.hosts import NodeTopology
from paceline.collectives.inter_node import InterNodeSum
from paceline.collectives.memory_sum import MAX_TENSORS
from paceline.collectives.reducer import make_host_reducer
from paceline.config.strategies import SLOW_NETWORK_SETTINGS, network_error
from paceline.errors import UsageError, format_option
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.outer_optimizer import InterNodeOptions, OuterOptimizer


def inter_node_strategy(
    model: nn.Module, make_optimizer: MakeOptimizer, world: World, virtual_ranks: int | None, options: InterNodeOptions
) -> "InterNodeStrategy | None":
    """The strategy for these `options` between nodes; None if no option applies (a collective).

    Raises:
        ValueError: if the ranks do not support the options.
    """
    hosts = _node_topology(options, model, world)
    if hosts is None:
        return None
    strategy = LocalSteps if options.get("local_steps") else InterNodeStrategy
    return strategy(model, make_optimizer, world, hosts, virtual_ranks, options)


def _node_topology(options: InterNodeOptions, model: nn.Module, world: World) -> NodeTopology | None:
    """The nodes of `world`. None if no option is set, or if there is one node; then a message explains it."""
    values: dict[str, Any] = {name: options.get(name) for name in SLOW_NETWORK_SETTINGS}
    if error := network_error(values):
        raise report_on_one_rank(error, world)
    option_names = [name for name in ("compress", "local_steps") if values[name] is not None]
    if not option_names:
        return None
    parameters, exchange = trainable(model), make_communicator()
    hosts = exchange.node_topology()
    if hosts is not None and can_use_shared_memory(parameters):
        return hosts
    if world.size > 1 and exchange.kind != "shared":
        raise report_on_one_rank(
            UsageError(code="no-shared-memory-on-nodes", setting=option_names[0], most=MAX_TENSORS), world
        )
    flags = " ".join(format_option(name, values[name]) for name in option_names)
    print_notice(f"{flags} has no effect: all ranks are on one node")
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
        self._across = InterNodeSum(trainable(model), hosts, options.get("compress"), options.get("powersgd_rank"))
        self._division = torch.tensor([hosts.node_count, hosts.memory.size])
        self._prefix = f"feedback/{hosts.rank}/"
        reducer = make_host_reducer(model, hosts, self._make_inter_node_sum(model, optimizer, options))
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, reducer=reducer)

    def _make_inter_node_sum(
        self, model: nn.Module, optimizer: Optimizer, options: InterNodeOptions
    ) -> InterNodeSum | None:
        return self._across

    def keep_buffers(self) -> None:
        super().keep_buffers()
        self._across.save_state()

    def put_back_buffers(self) -> None:
        super().put_back_buffers()
        self._across.restore_state()

    def _state(self) -> list[TensorShard]:
        residuals = self._across.state().items()
        shards = [TensorShard(self._prefix + name, tensor, replicated=False) for name, tensor in residuals]
        return [*super()._state(), TensorShard("feedback/division", self._division), *shards]

    def _load(self, source: Source) -> None:
        super()._load(source)
        self._across.reset_residual()
        saved = source.tensor("feedback/division")
        if saved is not None and torch.equal(saved, self._division):
            rank_source = PrefixedSource(source, self._prefix)
            residuals = self._across.state().items()
            self._across.load({name: read_matching_tensor(rank_source, name, tensor) for name, tensor in residuals})
        elif saved is not None:
            print_notice(
                f"the checkpoint was saved on {describe_division(saved)}, now there are "
                f"{describe_division(self._division)}: the compression residuals are dropped and start at zero"
            )


class LocalSteps(InterNodeStrategy):
    """Each node trains separately between outer steps; see `outer_optimizer`."""

    def _make_inter_node_sum(
        self, model: nn.Module, optimizer: Optimizer, options: InterNodeOptions
    ) -> InterNodeSum | None:
        self._outer = OuterOptimizer(model, optimizer, self._hosts, options, self._across)
        self.local_step_node = self._hosts
        return None

    def _reduce(self, divisor: float | Tensor) -> bool | None:
        assert self.reducer is not None
        # with plain SGD the mean of the nodes' steps is then the step on the global batch
        return self.reducer.finish(divisor / self._hosts.node_count) or None

    def all_finite(self) -> bool:
        return self._outer.all_finite()

    def merged_buffers(self) -> AbstractContextManager[None]:
        return self._outer.use_averaged_parameters(super().merged_buffers)

    def _parameter_shards(self) -> list[TensorShard]:
        return self._outer.common_parameter_shards()

    def _optimizer_shards(self) -> list[TensorShard]:
        return self._outer.state_shards()

    def _load_optimizer(self, source: Source) -> None:
        self._outer.load(source)


def describe_division(division: Tensor) -> str:
    count, size = division.tolist()
    return f"{count} nodes of {size} rank{'s' if size > 1 else ''}"
