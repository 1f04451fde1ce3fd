"""Ranks of several hosts add up in memory first, and get the bits of one process.

Each rank reports a different `memory.node_key`, so that one host counts as several.
"""

import contextlib
import io
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.odd_model import Odd, by_leaf, grads, over_torch
from tests.collectives.one_backward import one_backward
from tests.run_ranks import run_ranks
from torch import nn

from paceline.collectives import hosts as hosts_module
from paceline.collectives import shared_memory as handshake
from paceline.collectives import shm_communicator as communicators
from paceline.collectives.buckets import group_into_buckets, trainable_parameters
from paceline.collectives.communicator import get_communicator as exchange
from paceline.collectives.communicator import make_communicator
from paceline.collectives.control import all_gather_object
from paceline.collectives.hosts import HierarchicalBucketReducer, NodeTopology
from paceline.collectives.reducer import Reducer, make_reducer
from paceline.collectives.replicate import broadcast_module
from paceline.collectives.shared_memory import (
    MemoryLayout,
    SharedMemoryUnavailable,
    connect_shared_memory,
    consecutive_ranks_by_node,
)
from paceline.collectives.shm_communicator import node_topology
from paceline.collectives.sum_tree import LeafPartition, add_gradient_lists, tree_sum
from paceline.data.plan import virtual_ranks_of
from paceline.lab.ranks.memory import SentBytesCounter
from paceline.lab.ranks.verify import verify
from paceline.lab.verify import VerifySpec
from paceline.protocol.control import SHARED_MEMORY
from paceline.rank.guard import HangGuard
from paceline.rank.world import World

ranks = pytest.mark.ranks
TASKS = Path(__file__).parents[1] / "lab" / "ranks" / "tasks_under_test.py"


def plus(left: str, right: str) -> str:
    return f"({left} + {right})"


def whole(node: tuple[int, int]) -> str:
    first, stop = node
    return tree_sum({(n, n + 1): str(first + n) for n in range(stop - first)}, plus, stop - first)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.integers(1, 4), st.integers(0, 9))
def test_the_sums_of_hosts_are_parts_of_the_one_tree_whatever_its_leaves_and_ranks(hosts, size, more):
    world = hosts * size
    cuts = [rank * (world + more) // world for rank in range(world + 1)]
    parts: dict[tuple[int, int], str] = {}
    for number in range(hosts):
        partition = LeafPartition([*pairwise(cuts)], number * size)
        plan = hosts_module.make_leaf_order_plan(partition, size)
        nodes = partition.subtrees_by_rank
        assert plan.max_lanes == max(map(len, nodes))
        for node, subtree in zip(plan.node_partition.subtrees_by_rank[number], plan.node_subtrees, strict=True):
            own = {at: whole(nodes[number * size + rank][lane]) for at, (rank, lane) in subtree.lane_by_part.items()}
            parts[node] = tree_sum(own, plus, subtree.leaf_count)
    assert tree_sum(parts, plus, world + more) == whole((0, world + more))


def test_over_ranks_each_host_has_one_sum_of_all_its_ranks():
    plan = hosts_module.make_rank_order_plan(LeafPartition.one_leaf_per_rank(12, 7), 3)
    assert (plan.node_partition.rank, plan.node_partition.leaf_count, plan.max_lanes) == (2, 4, 1)
    assert [(one.leaf_count, [*one.lane_by_part.values()]) for one in plan.node_subtrees] == [
        (3, [(0, 0), (1, 0), (2, 0)])
    ]


def test_hosts_are_runs_of_ranks():
    assert consecutive_ranks_by_node(["a", "a", "b", "b"]) == [range(2), range(2, 4)]
    assert consecutive_ranks_by_node(["b", "a", "a"]) == [range(1), range(1, 3)]
    assert consecutive_ranks_by_node(["a", "b", "a"]) == []


def put_on(host: object, rank: int, world_size: int, folder: Path) -> None:
    dist.barrier()  # some may still be connecting
    dist.destroy_process_group()
    handshake.node_key = lambda: str(host)
    name = f"file://{folder}/meeting-{len(list(folder.glob(f'been-{rank}-*')))}"
    (folder / f"been-{rank}-{name.rpartition('-')[2]}").touch()
    dist.init_process_group("gloo", init_method=name, rank=rank, world_size=world_size)


def in_order(model: Odd, hosts: int, size: int) -> nn.Module:
    """Set .grad of `model` to the sum over ranks, by hosts, each in the order of a tree over its ranks."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def leaf(rank: int) -> list:
        model.zero_grad(set_to_none=True)
        for part in range(2):
            model(rank + 100 * part).backward()
        return [None if p.grad is None else p.grad.clone() for p in parameters]

    sums = [
        tree_sum({(n, n + 1): leaf(h * size + n) for n in range(size)}, add_gradient_lists, size) for h in range(hosts)
    ]
    total = tree_sum({(h, h + 1): one for h, one in enumerate(sums)}, add_gradient_lists, hosts)
    for parameter, value in zip(parameters, total or [], strict=True):
        parameter.grad = None if value is None else torch.empty_like(parameter).copy_(value.div_(3.0))
    return model


def compare(rank: int, world_size: int, folder: Path, cases: list[tuple[int, list[int]]]) -> int:
    """Compare bits and None for each number of ranks on a host, and all numbers of virtual ranks."""
    hosts_module.BUNDLE_BYTES = communicators.BUNDLE_BYTES = 32 << 10  # so that several are under way
    communicators.BULK_BYTES = 64 << 10
    compared = 0
    for size, leaves in cases:
        put_on(rank // size, rank, world_size, folder)
        place = node_topology(make_communicator())
        assert isinstance(place, NodeTopology) and (place.rank, place.node_index, place.memory.size) == (
            rank,
            rank // size,
            size,
        )
        for virtual_ranks in leaves:
            shares = [virtual_ranks_of(virtual_ranks, number, world_size) for number in range(world_size)]
            partition = LeafPartition([(share.start, share.stop) for share in shares], rank)
            for left_out in (None, virtual_ranks - 1):
                models = [Odd(), Odd()]
                sums = make_reducer(models[0], partition, in_order=True)
                assert isinstance(sums._transport, HierarchicalBucketReducer)
                for step in range(2):
                    found = by_leaf(sums, models[0], shares[rank], left_out)
                    alone = over_torch(models[1], LeafPartition([(0, virtual_ranks)], 0))
                    wanted = by_leaf(alone, models[1], range(virtual_ranks), left_out)
                    assert found == wanted, (size, virtual_ranks, left_out, step)
                    assert found["of_nobody"] is None and found["of_two"] is not None and found["large"] is not None
                    compared += 1
        model = Odd()
        sums = make_reducer(model, LeafPartition.one_leaf_per_rank(world_size, rank), in_order=False)
        assert isinstance(sums._transport, HierarchicalBucketReducer)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            for part in range(2):
                with one_backward(sums, rank, is_last=part == 1):
                    model(rank + 100 * part).backward()
            sums.finish(3.0)
            assert grads(model) == grads(in_order(Odd(), place.node_count, size))
        compared += 1
    return compared


@ranks
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_six_ranks_of_two_and_of_three_hosts_come_to_the_bits_of_one_process(tmp_path):
    cases = [(3, [6, 8]), (2, [6, 7])]
    assert run_ranks(compare, 6, tmp_path, tmp_path, cases, timeout=300) == [4 * 4 + 2] * 6


PLACES = {
    "aabb": "2 nodes",
    "abab": "the ranks are on 2 nodes, and the ranks of one node are not consecutive",
    "aaab": "the 2 nodes have different numbers of ranks: 3, 1",
    "abcd": "the ranks are on 4 nodes",
}


def meets(rank: int, world_size: int) -> list[str]:
    found: list[str] = []
    for hosts, broken in [*((hosts, False) for hosts in PLACES), ("aabb", True)]:
        handshake.node_key = lambda here=hosts[rank]: here
        with pytest.MonkeyPatch.context() as patch:
            if broken and rank == 3:
                patch.setattr(os, "memfd_create", refuse)
            try:
                met = connect_shared_memory(rank, MemoryLayout(world_size))
            except SharedMemoryUnavailable as refusal:
                found.append(str(refusal))
            else:
                assert [peer.rank for peer in met.peers] == [rank // 2 * 2, rank // 2 * 2 + 1]
                assert met.node_index == rank // 2
                found.append(f"{met.node_count} nodes")
    return found


def refuse(*_: object) -> int:
    raise PermissionError(1, "Operation not permitted")


def said(act) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as words:
        act()
    return words.getvalue()


def sends(rank: int, world_size: int, folder: Path) -> list[object]:
    HangGuard.of_process().watch_torch()
    put_on(rank // 2, rank, world_size, folder)
    words = said(lambda: (make_communicator("shared"), make_communicator()))
    assert exchange().memory is None and exchange().kind == "hosts"
    model = nn.Linear(999, 1000)
    broadcast_module(model)
    world = World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    assert exchange().start_float_sum([rank, 1.0], "test")() == [6.0, 4.0]
    assert all_gather_object(rank, world) == [0, 1, 2, 3]
    partition = LeafPartition.one_leaf_per_rank(4, rank)
    sent: list[float | None] = []
    for in_order in (True, False):
        model = nn.Linear(999, 1000)
        sums = make_reducer(model, partition, in_order=in_order)
        assert isinstance(sums._transport, HierarchicalBucketReducer)
        model.zero_grad(set_to_none=True)
        counted = SentBytesCounter(HangGuard.of_process().page, world, None)
        with one_backward(sums, rank, is_last=True):
            (model.weight.sum() + model.bias.sum()).mul(rank + 1).backward()
        sums.finish(2.0)
        sent.append(counted.sent_bytes())
        assert model.weight.grad is not None and torch.equal(model.weight.grad, torch.full((1000, 999), 5.0))
    put_on(rank, rank, world_size, folder)
    assert said(make_communicator) == "" and exchange().kind == "torch"
    put_on(rank // 2, rank, world_size, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARED_MEMORY, "off" if rank == 2 else "auto")
        assert make_communicator().kind == exchange().kind == "torch"
    put_on(rank // 3, rank, world_size, folder)
    return [words, *sent, said(make_communicator)]


def again(rank: int, world_size: int, folder: Path) -> list[float]:
    put_on(rank // 2, rank, world_size, folder)
    model, partition = nn.Linear(2, 1), LeafPartition.one_leaf_per_rank(4, rank)
    place = node_topology(make_communicator())
    assert isinstance(place, NodeTopology)
    buckets = group_into_buckets(trainable_parameters(model), 4)
    sums = Reducer(
        partition, HierarchicalBucketReducer(buckets, place, hosts_module.make_leaf_order_plan(partition, 2))
    )
    for attempt in range(2):
        model.zero_grad(set_to_none=True)
        try:
            with one_backward(sums, rank, is_last=True):
                (model.bias.sum() * (rank + 1)).backward()  # the first bucket
                if attempt == 0 and rank % 2 == 0:
                    raise ValueError("the user's own")
                (model.weight.sum() * (rank + 1)).backward()
                if attempt == 0:
                    raise ValueError("the user's own")
        except ValueError:
            sums.reset()
    sums.finish(1.0)
    assert model.weight.grad is not None and model.bias.grad is not None
    return [*model.weight.grad.flatten().tolist(), *model.bias.grad.tolist()]


def both(rank: int, world_size: int, folder: Path) -> list[object]:
    return [meets(rank, world_size), *sends(rank, world_size, folder), again(rank, world_size, folder)]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list:
    folder = tmp_path_factory.mktemp("four")
    return run_ranks(both, 4, folder, folder)


@ranks
@pytest.mark.slow
def test_ranks_share_memory_on_all_hosts_or_on_none(four):
    wanted = [*PLACES.values(), "rank 3: PermissionError: [Errno 1] Operation not permitted"]
    assert [one[0] for one in four] == [wanted] * 4


@ranks
@pytest.mark.slow
def test_a_host_of_two_ranks_sends_the_gradients_once_and_no_more(four):
    gradient_bytes = 4 * 1000 * 1000
    for way in (2, 3):
        for host in (four[:2], four[2:]):
            assert gradient_bytes <= sum(one[way] for one in host) < 1.01 * gradient_bytes


@ranks
@pytest.mark.slow
def test_rank_0_says_once_which_exchange_is_used(four):
    assert "2 nodes" in four[0][1] and PLACES["aaab"] in four[0][4]
    assert all("gloo" in four[0][number] and four[0][number].count("\n") == 1 for number in (1, 4))
    assert [one[number] for one in four[1:] for number in (1, 4)] == [""] * 6


@ranks
@pytest.mark.slow
def test_an_error_in_a_step_leaves_nothing_in_the_next(four):
    assert [one[5] for one in four] == [[10.0, 10.0, 10.0]] * 4


def verified(rank: int, world_size: int, folder: Path) -> list[tuple[str, str, str | None]]:
    put_on(rank // 2, rank, world_size, folder)
    world = World(rank, world_size, rank % 2, 2, torch.device("cpu"), "gloo")
    found = []
    for task in ("dropout", "batchnorm", "tokens", "unused", "strided"):
        spec = VerifySpec(
            f"{TASKS}:{task}", {}, ["bucketed", "exact", "zero"], ["adamw"], 4, 2, 4, 0, 1.0, short_tail=True
        )
        found += [(task, one.case.strategy, one.finding) for one in verify(spec, world).results]
    assert exchange().kind == "hosts"
    return found


@ranks
@pytest.mark.soak
@pytest.mark.timeout(720)
def test_strategies_equal_one_process_on_two_hosts_too(tmp_path):
    everybody = run_ranks(verified, 4, tmp_path, tmp_path, timeout=660)
    assert {(task, strategy) for task, strategy, _ in everybody[0]} >= {("unused", "exact"), ("unused", "bucketed")}
    assert [one for one in everybody[0] if one[2] is not None] == []
