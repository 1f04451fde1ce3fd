"""Numbers of a loop are added up only if they come from the same place on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from tests.run_ranks import run_ranks

from paceline.contract.variables import SHARED_MEMORY
from paceline.errors import ExitCode, PacelineError
from paceline.sums import sum_over_ranks
from paceline.sums.totals import LOOP_NUMBERS


def ended(act: Callable[[], float]) -> float | str:
    """What it gives, or the class and code of its error."""
    try:
        return act()
    except PacelineError as error:
        assert error.exit_code is ExitCode.MISMATCH
        return type(error).__name__


def added(number: float, *where: int, name: str = LOOP_NUMBERS) -> float:
    return float(sum_over_ranks(torch.tensor([number], dtype=torch.float64), name, where=where))


def other_place(rank: int, _: int) -> list[float | str]:
    """Ranks 1 and 2 call at a second line while rank 0 calls once more at the first."""
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
    assert run_ranks(other_place, 3, tmp_path) == [[3.0, "TrainingError"], *[[3.0, "ToldElsewhere"]] * 2]


def test_another_epoch_is_an_error_at_the_first_call_and_the_minority_tells_it(tmp_path: Path) -> None:
    assert run_ranks(other_where, 3, tmp_path) == [["TrainingError"], *[["ToldElsewhere"]] * 2]


def test_a_branch_for_each_rank_adds_up(tmp_path: Path) -> None:
    assert run_ranks(branch, 3, tmp_path) == [[5.0] * 3] * 3


def test_sums_of_other_names_get_no_bytes_of_each_other(tmp_path: Path) -> None:
    assert run_ranks(other_names, 3, tmp_path) == [["TrainingError"]] * 3
