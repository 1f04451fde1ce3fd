"""Audits: a second rank repeats a micro-batch. Wrong numbers are found and named, and healthy ranks never are."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bit_flips import Flip
from tests.run_ranks import run_ranks
from tests.train.audited import Net, Training, are_equal, flip_always, flip_once, outcome
from torch import Tensor, nn


def healthy(rank: int, size: int, strategy: str, virtual_ranks: int, accumulation: int) -> list[Any]:
    """Audited steps, and the same without audits: the errors, whether both are equal, and who repeated what."""
    options: Any = {"strategy": strategy, "accumulation": accumulation}
    training, twin = (Training(rank, size, virtual_ranks, every, **options) for every in (1, None))
    repeated: list[tuple[int, int]] = []
    reload_micro_batch, steps = training.audits._load_again, 2 * virtual_ranks * (size - 1)  # pyright: ignore
    training.audits._load_again = lambda *place: repeated.append((place[-1], rank)) or reload_micro_batch(*place)  # pyright: ignore
    errors = [training.step(number) or twin.step(number) for number in range(steps)]
    return [[str(error) for error in errors if error], are_equal(training, twin), repeated[1:]]


@pytest.mark.ranks
@pytest.mark.parametrize(("size", "strategy", "virtual_ranks", "accumulation"), [(3, "exact", 5, 2), (2, "zero", 4, 1)])
def test_audits_change_no_bit_and_every_rank_repeats_each_foreign_virtual_rank(
    tmp_path: Path, size: int, strategy: str, virtual_ranks: int, accumulation: int
) -> None:
    results = run_ranks(healthy, size, tmp_path, strategy, virtual_ranks, accumulation)
    assert [(errors, same) for errors, same, _ in results] == [([], True)] * size
    turns = Counter(turn for *_, repeated in results for turn in repeated)
    assert len(turns) == virtual_ranks * (size - 1) and max(turns.values()) <= 2


@pytest.mark.ranks
@pytest.mark.parametrize(("size", "strategy", "virtual_ranks", "accumulation"), [(3, "exact", 5, 2), (2, "zero", 3, 1)])
def test_a_bit_that_flips_once_is_found_in_its_step_on_the_right_rank(
    tmp_path: Path, size: int, strategy: str, virtual_ranks: int, accumulation: int
) -> None:
    results, *_ = run_ranks(flip_once, size, tmp_path, 0, 24, strategy, virtual_ranks, accumulation)
    found = [result for result in results if "code" in result]
    assert len(results) == 24 and all(result["same"] for result in results)  # a flip that is not found has no effect
    assert len(found) > 12 and {result["code"] for result in found} == {"audit-wrong-numbers"}
    assert all(result["ranks"] == [result["faulty"]] for result in found)


@pytest.mark.ranks
def test_a_rank_that_always_computes_wrongly_is_named_and_of_two_both(tmp_path: Path) -> None:
    for size, code in ((3, "audit-wrong-numbers"), (2, "audit-undecided")):
        results, *_ = run_ranks(flip_always, size, tmp_path, 0, 4, "exact", 4, 2)
        assert {result["code"] for result in results} == {code}
        for result in results:
            assert result["ranks"] == [result["faulty"]] if size == 3 else sorted(result["ranks"]) == [0, 1]


def proof(rank: int, size: int, fault: str) -> tuple[dict[str, Any], int]:
    """What is reported of the first step if rank 1 alone has a fault in its first or second computation, or in each."""
    training = Training(rank, size, 4, 5, model=Unseeded() if rank == 1 and fault == "always" else Net())
    call = {"first": 0, "second": 1}.get(fault)
    flip = None if rank != 1 or call is None else Flip("backward", 4, 3, 30, call)
    return outcome(training, training.step(0, flip)), training.saved


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "fault", "code"),
    [
        (2, "always", "audit-not-repeatable"),
        (3, "always", "audit-wrong-numbers"),
        (2, "first", "audit-wrong-numbers"),
        (2, "second", "audit-wrong-numbers"),
    ],
)
def test_a_third_computation_tells_a_fault_in_the_first_step_from_code_that_is_not_repeatable(
    tmp_path: Path, size: int, fault: str, code: str
) -> None:
    assert run_ranks(proof, size, tmp_path, fault) == [({"code": code, "ranks": [1]}, 1)] * size


class Unseeded(Net):
    """Draws from a generator that no seed reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(x.shape, generator=self.generator))


class BufferFault(nn.Module):
    """Its forward counts calls in a buffer, on rank 1 wrongly in the third step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear, self.rank, self.calls = nn.Linear(8, 1), rank, 0
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 2 if self.rank == 1 and self.calls == 6 else 1
        return self.linear(x)


def special(rank: int, size: int) -> list[Any]:
    """What is reported of a wrong buffer; whether the state was saved; the error."""
    training = Training(rank, size, 2, 1, model=BufferFault(rank))
    found = [outcome(training, training.step(number)) for number in range(4)]
    last = Training(rank, size, 2, 1)
    flip = Flip("backward", 4, 3, 30, 0)
    assert last.step(0) is None
    error = last.step(1, flip if rank == 1 else None)
    return [found, last.saved, type(error).__name__, int(error.exit_code) if error else 0]


@pytest.mark.ranks
def test_a_wrong_buffer_is_found_and_the_state_before_the_step_is_saved(tmp_path: Path) -> None:
    results = run_ranks(special, 2, tmp_path)
    for (found, saved, _, exit_code), rank in zip(results, range(2), strict=True):
        named = [report for report in found if report]
        assert named == [{"code": "audit-wrong-numbers", "ranks": [1]}], (rank, found)
        assert saved == 1 and exit_code == 6
    assert [name for *_, name, _ in results] == ["ReportedByPeer", "TrainingError"]
