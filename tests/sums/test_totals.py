"""Totals that travel while a step computes: whoever asks late, twice or in another order gets the same sums."""

import pytest
import torch
from tests.sums.memory_harness import in_threads

from paceline.sums.totals import StartedSum


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
        begun = [StartedSum(memory, values(memory.rank, number)) for number in range(7)]
        assert all(one.is_completed() for one in begun[:-1])
        order = reversed(begun) if memory.rank else begun
        first = {id(one): one.finish().tolist() for one in order}
        return [first[id(one)] for one in begun], [one.finish().tolist() for one in begun]

    for once, again in in_threads(world, act):
        assert once == again == [wanted(world, number) for number in range(7)]


def test_a_sum_that_has_failed_gives_no_number_later():
    def act(memory):
        if memory.rank == 1:
            memory.leave()
            return
        begun = StartedSum(memory, values(0, 0))
        with pytest.raises(RuntimeError, match=r"totals of the step.*rank 1 \(pid \d+\) has left"):
            begun.finish()
        assert begun.is_completed()  # nobody waits for it any more
        with pytest.raises(RuntimeError, match="has failed already"):
            begun.finish()

    in_threads(2, act)
