"""What hosts on a slow network do differently: they send less in each step, or nothing in most (see `outer`)."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.state import PrefixedSource, Source, TensorShard, needed
from paceline.collectives.across import Across
from paceline.collectives.buckets import trainable
from paceline.collectives.communicator import fit_in_memory, make_communicator, say
from paceline.collectives.control import told_once
from paceline.collectives.hosts import Hosts
from paceline.collectives.memory_sum import MAX_TENSORS
from paceline.collectives.reducer import sum_on_each_host
from paceline.config.strategies import SLOW, network_error
from paceline.errors import UsageError, flag
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.outer_optimizer import InterNodeOptions, OuterOptimizer


def inter_node_strategy(
    model: nn.Module, make_optimizer: MakeOptimizer, world: World, virtual_ranks: int | None, between: InterNodeOptions
) -> "InterNodeStrategy | None":
    """`model` in training on hosts that do what `between` says; None where they do nothing (a collective).

    Raises:
        ValueError: these ranks cannot do it.
    """
    hosts = _hosts_for(between, model, world)
    if hosts is None:
        return None
    kind = LocalSteps if between.get("local_steps") else InterNodeStrategy
    return kind(model, make_optimizer, world, hosts, virtual_ranks, between)


def _hosts_for(between: InterNodeOptions, model: nn.Module, world: World) -> Hosts | None:
    """None where nothing was asked for, or there is one host: then that is said."""
    asked: dict[str, Any] = {name: between.get(name) for name in SLOW}
    if error := network_error(asked):
        raise told_once(error, world)
    given = [name for name in ("compress", "local_steps") if asked[name] is not None]
    if not given:
        return None
    parameters, exchange = trainable(model), make_communicator()
    place = exchange.hosts()
    if place is not None and fit_in_memory(parameters):
        return place
    if world.size > 1 and exchange.kind != "shared":
        raise told_once(UsageError(code="no-shared-memory-on-nodes", setting=given[0], most=MAX_TENSORS), world)
    words = " ".join(flag(name, asked[name]) for name in given)
    say(f"{words} has no effect: all ranks are on one node, which sends nothing to another")
    return None


class InterNodeStrategy(Strategy):
    """Gradients are summed on each host, and compressed between hosts.

    What a host holds back of its gradients is a part of the state. A step that is skipped drops its changes, too.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        world: World,
        hosts: Hosts,
        virtual_ranks: int | None,
        between: InterNodeOptions,
    ) -> None:
        """`hosts` are those of `world`, `between` is what they do."""
        optimizer = make_optimizer(model.parameters())
        self._hosts = hosts
        self._across = Across(trainable(model), hosts, between.get("compress"), between.get("powersgd_rank"))
        self._division = torch.tensor([hosts.count, hosts.memory.size])
        self._prefix = f"feedback/{hosts.rank}/"
        reducer = sum_on_each_host(model, hosts, self._prepare(model, optimizer, between))
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, reducer=reducer)

    def _prepare(self, model: nn.Module, optimizer: Optimizer, between: InterNodeOptions) -> Across | None:
        """What sums gradients over hosts in each step, if anything does."""
        return self._across

    def keep_buffers(self) -> None:
        """See Strategy."""
        super().keep_buffers()
        self._across.keep()

    def put_back_buffers(self) -> None:
        """See Strategy."""
        super().put_back_buffers()
        self._across.put_back()

    def _state(self) -> list[TensorShard]:
        held_back = self._across.state().items()
        own = [TensorShard(self._prefix + name, tensor, replicated=False) for name, tensor in held_back]
        return [*super()._state(), TensorShard("feedback/division", self._division), *own]

    def _load(self, source: Source) -> None:
        super()._load(source)
        self._across.forget()
        saved = source.tensor("feedback/division")
        if saved is not None and torch.equal(saved, self._division):
            there = PrefixedSource(source, self._prefix)
            held_back = self._across.state().items()
            self._across.load({name: needed(there, name, tensor) for name, tensor in held_back})
        elif saved is not None:
            say(
                f"the checkpoint is of {describe_division(saved)}, now there are {describe_division(self._division)}: what they held "
                "back is dropped, and they begin with nothing held back"
            )


class LocalSteps(InterNodeStrategy):
    """Each host takes its steps by itself; see `outer`."""

    def _prepare(self, model: nn.Module, optimizer: Optimizer, between: InterNodeOptions) -> Across | None:
        self._outer = OuterOptimizer(model, optimizer, self._hosts, between, self._across)
        self.host = self._hosts
        return None

    def _reduce(self, divisor: float | Tensor) -> bool | None:
        assert self.reducer is not None
        # the mean of the hosts' steps is then, of plain SGD, the step on the global batch
        return self.reducer.finish(divisor / self._hosts.count) or None

    def all_finite(self) -> bool:
        """See Strategy."""
        return self._outer.all_finite()

    def merged_buffers(self) -> AbstractContextManager[None]:
        """See Strategy."""
        return self._outer.shown(super().merged_buffers)

    def _hold_parameters(self) -> list[TensorShard]:
        return self._outer.hold_parameters()

    def _hold_optimizer(self) -> list[TensorShard]:
        return self._outer.hold()

    def _load_optimizer(self, source: Source) -> None:
        self._outer.load(source)


def describe_division(division: Tensor) -> str:
    """In words, of (hosts, ranks of each)."""
    count, size = division.tolist()
    return f"{count} hosts of {size} rank{'s' if size > 1 else ''}"
