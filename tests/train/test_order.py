"""Collectives in another order are found before the step counts; branches by rank are not taken for one."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.errors import codes
from tests.run_ranks import run_ranks

from paceline.errors import PacelineError
from paceline.protocol.evidence import Op
from paceline.rank.guard import HangGuard
from paceline.rank.world import World
from paceline.stepping.order import CallMismatch, CollectiveOrderCheck, compare_call_orders

NOTHING = frozenset[str]()


def op(site: str, *, kind: str = "all_reduce", name: str = "", shape: str = "[64]", group: str = "0") -> Op:
    return Op(group, 0, kind, name, shape, "float32", site)


def lines(text: str, **rest: str) -> list[Op]:
    """One all_reduce for each letter, from a line of that name."""
    return [op(letter, **rest) for letter in text]


def odd(*histories: list[Op], known: frozenset[str] = NOTHING) -> tuple[int, ...]:
    """The ranks that are named for a difference."""
    found = compare_call_orders([*histories], NOTHING, known)
    assert isinstance(found, CallMismatch)
    return found.minority_ranks


# ---- what is a difference ----------------------------------------------------------------------------------------


@given(st.permutations("abcdef"), st.integers(3, 5), st.data())
def test_a_rank_that_takes_the_same_lines_in_another_order_is_named(other, world_size, data):
    assume("".join(other) != "abcdef")
    odd = data.draw(st.integers(0, world_size - 1))
    found = compare_call_orders(
        [lines("".join(other) if rank == odd else "abcdef") for rank in range(world_size)], NOTHING
    )
    at = next(i for i, letter in enumerate(other) if letter != "abcdef"[i])
    assert isinstance(found, CallMismatch)
    assert found.minority_ranks == (odd,)
    assert [call.site for call in found.calls if call] == [
        other[at] if rank == odd else "abcdef"[at] for rank in range(world_size)
    ]


def test_of_two_ranks_nobody_is_accused():
    assert odd(lines("ab"), lines("ba")) == ()


@pytest.mark.parametrize("other", [{"kind": "broadcast"}, {"shape": "[63]"}, {"name": "bucket 1"}], ids=str)
def test_another_kind_shape_or_name_is_a_difference_whatever_the_line(other):
    assert odd(lines("a"), lines("a"), lines("b", **other)) == (2,)


def test_one_call_more_is_a_difference():
    found = compare_call_orders([lines("ab"), lines("ab"), lines("abc")], NOTHING)
    assert isinstance(found, CallMismatch)
    assert found.minority_ranks == (2,) and found.calls[0] is None


@pytest.mark.parametrize(
    ("histories", "local"),
    [
        ([lines("acd"), lines("bcd")], {"a", "b"}),  # if rank == 0: ... else: ...
        ([lines("aacd"), lines("abcd"), lines("aacd")], {"a", "b"}),  # only sometimes
        # each rank is the root in turn, and asks whether it is
        ([lines("ab", kind="broadcast"), lines("ba", kind="broadcast")], set()),
        # a bucket leaves from within backward here, and after it there
        ([lines("ab", name="bucket 0"), lines("ba", name="bucket 0")], set()),
        # two groups have no order between them
        ([[op("a"), op("b", group="1")], [op("b", group="1"), op("a")]], set()),
    ],
    ids=["branch", "branch now and then", "roots in turn", "named", "groups"],
)
def test_what_a_right_program_does_is_no_difference(histories, local):
    assert compare_call_orders(histories, NOTHING) == local


def test_a_reordering_beside_a_branch_is_seen():
    assert odd(lines("xab"), lines("yba"), lines("yab")) == (1,)


def test_who_leaves_the_lines_of_all_for_two_calls_that_look_alike_is_named_even_of_two():
    assert odd(lines("ab"), lines("cd"), known=frozenset("ab")) == (1,)


@pytest.mark.parametrize(
    "histories",
    [
        [lines("a"), lines("c")],  # one call has no order
        [[op("a"), op("b", shape="[1]")], [op("c"), op("d", shape="[1]")]],  # cannot be mixed up silently
        [lines("xy"), lines("zw")],  # a branch that comes for the first time, on all ranks
    ],
    ids=["one", "unlike", "all new"],
)
def test_leaving_known_lines_is_allowed_where_nothing_can_be_exchanged(histories):
    assert not isinstance(compare_call_orders(histories, NOTHING, frozenset("ab")), CallMismatch)


# ---- between ranks -----------------------------------------------------------------------------------------------


def sum_one() -> None:
    dist.all_reduce(torch.ones(4))


def sum_two() -> None:
    dist.all_reduce(torch.zeros(4))


def branch(rank: int) -> None:
    if rank == 1:
        dist.all_reduce(torch.ones(3))
    else:
        dist.all_reduce(torch.ones(3))


def compared(rank: int, size: int) -> dict[str, Any]:
    """Steps of a world, in the last of which the last rank takes the second sum first."""
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    guard = HangGuard.of_process().watch_torch()
    notices: list[str] = []
    order = CollectiveOrderCheck(world, guard.ledger.take_order_hash, guard.ledger.last_ordered_calls, notices.append)

    def step(*calls: Any) -> str:
        for call in calls:
            call()
        slots = torch.tensor(order.hashes(), dtype=torch.float64)
        dist.all_reduce(slots)
        try:
            order.check(slots.tolist(), "step 7")
        except PacelineError as error:
            return f"{type(error).__name__} {int(error.exit_code)}: {error.message_with_code}"
        return ""

    found: dict[str, Any] = {"as planned": [step(sum_one, sum_two) for _ in range(3)]}
    found["branches"] = [step(sum_one, lambda: branch(rank), sum_two) for _ in range(3)]
    found["notices"] = notices
    calls = [sum_one, sum_two] if rank < size - 1 else [sum_two, sum_one]
    found["swapped"] = step(*calls)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_swapped_sums_end_the_run_on_all_ranks_and_a_branch_is_told_once(size, tmp_path):
    ranks = run_ranks(compared, size, tmp_path)
    for found in ranks:
        assert found["as planned"] == found["branches"] == [""] * 3
        (notice,) = found["notices"]
        assert notice.count(" in branch") == 2
    teller = size - 1 if size > 2 else 0
    for rank, found in enumerate(ranks):
        kind = "TrainingError" if rank == teller else "ReportedByPeer"
        assert found["swapped"].startswith(f"{kind} 4: ")
    told = ranks[teller]["swapped"]
    assert codes(told) == ["collectives-differ"] and "before step 7" in told
    for rank in range(size) if size == 2 else [2]:
        line = "sum_two" if rank == size - 1 else "sum_one"
        call = rf"rank {rank} called all_reduce \[4\] float32 at test_order\.py:\d+ in {line}\b"
        assert re.search(call, told)
    assert ("all others" in told, "a majority" in told) == (size > 2, size == 2)
