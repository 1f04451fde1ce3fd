"""What hosts on a slow network do differently: they send less in each step, or nothing in most (see `outer`)."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import PrefixedSource, Source, TensorShard, needed
from paceline.collectives.across import Across
from paceline.collectives.buckets import trainable
from paceline.collectives.communicator import fit_in_memory, make_communicator, say
from paceline.collectives.control import told_once
from paceline.collectives.hosts import Hosts
from paceline.collectives.memory_sum import MAX_TENSORS
from paceline.collectives.reducer import sum_on_each_host
from paceline.data.plan import Work
from paceline.errors import UsageError, flag
from paceline.ladder import COMPRESS, SLOW, wrong_between_hosts
from paceline.strategies.base import MakeOptimizer, Replica, replica
from paceline.strategies.outer import Between, Outer
from paceline.worker.world import World


def between_hosts(
    model: nn.Module, make_optimizer: MakeOptimizer, world: World, virtual_ranks: int | None, between: Between
) -> Replica | None:
    """`model` in training on hosts that do what `between` says; None where they do nothing (a collective).

    Raises:
        ValueError: these ranks cannot do it.
    """
    hosts = _hosts_for(between, model, world)
    if hosts is None:
        return None
    optimizer = make_optimizer(model.parameters())
    across = Across(trainable(model), hosts, between.get("compress"), between.get("powersgd_rank"))
    outer = Outer(model, optimizer, hosts, between, across) if between.get("local_steps") else None
    reducer = sum_on_each_host(model, hosts, across if outer is None else None)

    def backward(_: Work, is_last: bool) -> AbstractContextManager[None]:
        return reducer.leaf(hosts.memory.rank, is_last=is_last)

    common = partial(
        replica, model, optimizer, world, virtual_ranks=virtual_ranks, reset=reducer.reset, backward=backward
    )
    if outer is None:
        return _with_feedback(common(sync_gradients=reducer.finish), hosts, across)

    def sync_gradients(total_weight: float | Tensor) -> bool:
        # the mean of the hosts' steps is then, of plain SGD, the step on the global batch
        return reducer.finish(total_weight / hosts.count)

    made = common(
        sync_gradients=sync_gradients,
        hold_parameters=outer.hold_parameters,
        hold=outer.hold,
        load=outer.load,
        host=hosts,
    )
    alone = replace(made, merged_buffers=partial(outer.shown, made), all_finite=outer.all_finite)
    return _with_feedback(alone, hosts, across)


def _hosts_for(between: Between, model: nn.Module, world: World) -> Hosts | None:
    """None where nothing was asked for, or there is one host: then that is said."""
    asked: dict[str, Any] = {name: between.get(name) for name in SLOW}
    if wrong := wrong_between_hosts(*asked.values()):
        raise told_once(UsageError(code=wrong, **asked, allowed=[*COMPRESS]), world)
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


def _with_feedback(plain: Replica, hosts: Hosts, across: Across) -> Replica:
    """The replica with what its host holds back in its state: dropped with a step that is left out, as buffers are."""
    prefix = f"feedback/{hosts.rank}/"
    division = torch.tensor([hosts.count, hosts.memory.size])

    def keep() -> None:
        plain.keep_buffers()
        across.keep()

    def put_back() -> None:
        plain.put_back_buffers()
        across.put_back()

    def state() -> list[TensorShard]:
        own = [TensorShard(prefix + name, one, replicated=False) for name, one in across.state().items()]
        return [*plain.state(), TensorShard("feedback/division", division), *own]

    def load(source: Source) -> None:
        plain.load(source)
        across.forget()
        saved = source.tensor("feedback/division")
        if saved is not None and torch.equal(saved, division):
            there = PrefixedSource(source, prefix)
            across.load({name: needed(there, name, one) for name, one in across.state().items()})
        elif saved is not None:
            say(
                f"the checkpoint is of {_hosts(saved)}, now there are {_hosts(division)}: what they held back "
                "is dropped, and they begin with nothing held back"
            )

    return replace(plain, keep_buffers=keep, put_back_buffers=put_back, state=state, load=load)


def nothing_held_back(plain: Replica) -> Replica:
    """The replica, which says what it drops of a state in which hosts have held something back."""

    def load(source: Source) -> None:
        plain.load(source)
        saved = source.tensor("feedback/division")
        if saved is not None and any(not name.endswith("/used") for name in source.names("feedback/0/")):
            say(f"the checkpoint is of {_hosts(saved)}: what they held back is dropped")

    return replace(plain, load=load)


def _hosts(division: Tensor) -> str:
    count, size = division.tolist()
    return f"{count} hosts of {size} rank{'s' if size > 1 else ''}"
