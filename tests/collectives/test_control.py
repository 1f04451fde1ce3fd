"""Sums and numbers besides gradients: late reads give the same values, and all ranks call from the same line."""

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.collectives.memory_harness import in_threads
from tests.run_ranks import run_ranks

from paceline.collectives import torch_collectives as gather
from paceline.collectives.control import LOOP_SUMS_NAME, sum_over_ranks
from paceline.collectives.shm_collectives import AsyncAllReduce
from paceline.collectives.torch_collectives import MAX_EXTRA_BYTES, start_all_reduce
from paceline.errors import ExitCode, PacelineError
from paceline.protocol.control import SHARED_MEMORY


def values(rank: int, number: int) -> torch.Tensor:
    return torch.tensor([1e16 * (rank == 0), 1.0 + number, -1e16 * (rank == 1)], dtype=torch.float64)


def wanted(world: int, number: int) -> list[float]:
    total = values(0, number).clone()
    for rank in range(1, world):
        total += values(rank, number)
    return total.tolist()


@pytest.mark.parametrize("world", [2, 3])
def test_sums_that_are_begun_before_others_have_ended_mix_up_nothing(world):
    def act(memory):
        begun = [
            AsyncAllReduce(memory, values(memory.rank, number).tolist(), "totals of the step") for number in range(7)
        ]
        assert all(one.is_completed() for one in begun[:-1])
        order = reversed(begun) if memory.rank else begun
        first = {id(one): one.finish() for one in order}
        return [first[id(one)] for one in begun], [one.finish() for one in begun]

    for once, again in in_threads(world, act):
        assert once == again == [wanted(world, number) for number in range(7)]


def test_a_sum_that_has_failed_gives_no_number_later():
    def act(memory):
        if memory.rank == 1:
            memory.mark_as_left()
            return
        begun = AsyncAllReduce(memory, values(0, 0).tolist(), "totals of the step")
        with pytest.raises(RuntimeError, match=r"totals of the step.*rank 1 \(pid \d+\) has left"):
            begun.finish()
        assert begun.is_completed()  # nobody waits for it any more
        with pytest.raises(RuntimeError, match="has already failed"):
            begun.finish()

    in_threads(2, act)


def sums_over_gloo(rank: int, world_size: int) -> list[tuple[list[float], str]]:
    found = list[tuple[list[float], str]]()
    for count in (3, MAX_EXTRA_BYTES // 4):
        with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as to_all:
            waits = [
                start_all_reduce(values(rank, number).repeat(-(-count // 3))[:count], "of a test") for number in (0, 1)
            ]
            total, _ = (wait() for wait in reversed(waits))  # the later one is waited for first
        found.append((total[:3].tolist(), "to all" if to_all.called else "ring"))
    return found


def gathered_over_gloo(rank: int, world_size: int) -> list[tuple[list[list[float]], bool]]:
    found = list[tuple[list[list[float]], bool]]()
    for most in (gather.MAX_GATHER_COPY_BYTES, 8):
        with (
            mock.patch.object(gather, "MAX_GATHER_COPY_BYTES", most),
            mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as to_all,
        ):
            found.append((gather.start_all_gather(values(rank, 0), "of a test")().tolist(), to_all.called))
    return found


def test_what_is_large_is_not_copied_for_each_rank(tmp_path):
    everything = [values(rank, 0).tolist() for rank in range(3)]
    assert run_ranks(gathered_over_gloo, 3, tmp_path) == [[(everything, True), (everything, False)]] * 3


def test_a_few_numbers_are_sent_to_all_at_once_and_many_go_round(tmp_path):
    (small, large), *others = run_ranks(sums_over_gloo, 3, tmp_path)
    assert small == (wanted(3, 1), "to all")  # in the order of ranks, to the last bit
    assert large[1] == "ring"
    assert all(other == [small, large] for other in others)
    assert [how for _, how in run_ranks(sums_over_gloo, 2, tmp_path)[0]] == ["to all"] * 2  # as many bytes as a ring


def ended(act: Callable[[], float]) -> float | str:
    try:
        return act()
    except PacelineError as error:
        assert error.exit_code is ExitCode.MISMATCH
        return type(error).__name__


def added(number: float, *where: int, name: str = LOOP_SUMS_NAME) -> float:
    return float(sum_over_ranks(torch.tensor([number], dtype=torch.float64), name, where=where))


def other_place(rank: int, _: int) -> list[float | str]:
    """Ranks 1 and 2 call from a second line while rank 0 calls again from the first."""
    found: list[float | str] = [ended(lambda: added(1.0)) for _ in range(1 + (rank == 0))]
    return [*found, *([] if rank == 0 else [ended(lambda: added(2.0))])]


def other_where(rank: int, _: int) -> list[float | str]:
    return [ended(lambda: added(1.0, 3, min(rank, 1)))]


def branch(rank: int, _: int) -> list[float | str]:
    return [ended(lambda: added(1.0)) if rank == 0 else ended(lambda: added(2.0)) for _ in range(3)]


def other_names(rank: int, _: int) -> list[float | str]:
    os.environ[SHARED_MEMORY] = "off"  # there, names are compared anyway
    return [ended(lambda: added(1.0, name=f"sum {min(rank, 1)}"))]


def test_a_sum_from_a_place_that_others_have_passed_is_an_error_that_one_rank_tells(tmp_path: Path) -> None:
    assert run_ranks(other_place, 3, tmp_path) == [[3.0, "TrainingError"], *[[3.0, "ReportedByPeer"]] * 2]


def test_another_epoch_is_an_error_at_the_first_call_and_the_minority_tells_it(tmp_path: Path) -> None:
    assert run_ranks(other_where, 3, tmp_path) == [["TrainingError"], *[["ReportedByPeer"]] * 2]


def test_a_branch_for_each_rank_adds_up(tmp_path: Path) -> None:
    assert run_ranks(branch, 3, tmp_path) == [[5.0] * 3] * 3


def test_sums_of_other_names_get_no_bytes_of_each_other(tmp_path: Path) -> None:
    assert run_ranks(other_names, 3, tmp_path) == [["TrainingError"]] * 3
