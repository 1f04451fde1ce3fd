"""A seeded sample of `make soak-loops`: each loop equals the plain one, or is rejected in time."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.sessions.looped import Case, plain
from tests.sessions.soak_loops import SAMPLE, draw, examine, settings

SEED = 0


@pytest.mark.sample(10)
@pytest.mark.parametrize("number", SAMPLE)
def test_a_loop_that_is_drawn_equals_the_plain_one_or_is_rejected(number: int, tmp_path: Path) -> None:
    case = draw(SEED, number)
    outcome = examine(case, tmp_path)
    assert outcome.is_good, (outcome.word, outcome.what, settings(case))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_global_batch_without_samples_is_rejected(ranks: int, tmp_path: Path) -> None:
    case = Case(number=542, samples=37, order="mining", collate="drops", evaluation="mean", ranks=ranks)
    with pytest.raises(IndexError):  # of torch's default_collate
        plain(case)
    outcome = examine(case, tmp_path)
    assert outcome.word == "rejected" and "sum to 0" in outcome.what


@pytest.mark.parametrize(
    "case",
    [
        Case(number=1163, ranks=2, accumulation=2, strategy="zero", loss="constant", path="function"),
        Case(number=1928, virtual_ranks=4, loss="constant", path="function"),
    ],
    ids=["one rank", "one micro-batch"],
)
def test_own_code_in_the_graph_of_some_losses_is_rejected_before_any_update(case: Case, tmp_path: Path) -> None:
    """The last micro-batch's loss is constant, on one rank or on all."""
    outcome = examine(case, tmp_path)
    assert outcome.word == "rejected", outcome


@pytest.mark.sample(6)
@pytest.mark.parametrize("stop", [1, 4, 9])
@pytest.mark.parametrize(
    "case",
    [
        Case(optimizer="added_group", clip="torch", loops=2, phases=(2,)),
        Case(optimizer="momentum", clears=0, ranks=2, virtual_ranks=2),
        Case(optimizer="momentum", clears=0, ranks=2, virtual_ranks=2, strategy="fsdp"),
        Case(optimizer="momentum", clears=3, ranks=2, virtual_ranks=2),
    ],
    ids=["not trained yet", "never cleared", "never cleared under fsdp", "cleared at times"],
)
def test_gradients_that_the_loop_does_not_clear_are_resumed(case: Case, stop: int, tmp_path: Path) -> None:
    outcome = examine(replace(case, stop=stop), tmp_path)
    assert outcome.word == "equal", outcome.what


def test_the_comparison_sees_another_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain loop that is not the session's: what every failure of the soak comes down to."""
    monkeypatch.setattr("tests.sessions.soak_loops.plain", lambda case, orders: plain(Case(optimizer="adamw"), orders))
    outcome = examine(Case(phases=(1,)), tmp_path)
    assert outcome.word == "different" and "weights" in outcome.what and not outcome.is_good
