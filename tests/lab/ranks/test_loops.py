"""`paceline verify my_loop.py:main`: a loop without a bug equals one process, and planted bugs are called by name.

All of them, with a table: `make soak-mutations`.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import ended_with, raises
from tests.lab.ranks import loops
from tests.lab.ranks.loop_table import ENDS, RANKS, RIGHT, right, said_of, spec_of

from paceline.lab.ranks.causes import ErrorTracker
from paceline.lab.ranks.loop_findings import make_verify_reports
from paceline.lab.ranks.reference import StepValues
from paceline.lab.verify import LOOP_CAUSES, CaseResult, StrategyCase, VerifyReport, print_report

LOOPS = Path(loops.__file__)
# three virtual ranks on one process show these as well as three ranks do
ON_ONE = (
    "right", "right_with_two_models", "right_with_gradients_added_up", "right_with_a_stream",
    "weight_forgotten", "no_zero_grad",
    "evaluated_in_training_mode", "sum_taken_for_a_mean", "augmented_by_time", "torchs_own_backward",
    "two_backwards_for_the_same_bits",
)  # fmt: skip


def wrong(said: dict[str, str]) -> dict[str, str]:
    return {name: words for name, words in said.items() if not right(name, words)}


@pytest.mark.slow
def test_on_one_process_that_is_three_virtual_ranks(tmp_path: Path) -> None:
    said = said_of(ON_ONE, tmp_path, ranks=(1,))
    assert wrong(said) == {}
    assert [said[name] for name in ON_ONE[:3]] == [""] * 3
    with raises("verify-no-step"):
        said_of(["trains_nothing"], tmp_path, ranks=(1,))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])  # CI takes a sample
def test_planted_bugs_are_named_on_three_ranks_and_nothing_else_is(tmp_path: Path, every: int) -> None:
    assert len(loops.BUGS) >= 18
    names = ["right", *[name for name in (*RIGHT[1:], *loops.BUGS) if name not in ENDS][::every]]
    said = said_of(names, tmp_path, RANKS if every == 1 else (1, 3))
    assert wrong(said) == {}
    assert said["right"] == ""


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(360)
@pytest.mark.parametrize("name", [ENDS[0], *(pytest.param(name, marks=pytest.mark.soak) for name in ENDS[1:])])
def test_a_bug_that_ends_the_ranks_is_named(tmp_path: Path, name: str) -> None:
    assert wrong(said_of([name], tmp_path, (1, 3), window=8)) == {}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(450)
def test_the_command_says_what_it_found(paceline: Any, tmp_path: Path) -> None:
    fine = paceline(
        "verify", f"{LOOPS}:right", "--ranks", "1,2", "--strategies", "manual,exact", "--json", "found.json"
    )
    assert fine.returncode == 0, fine.stdout + fine.stderr
    assert "bit-identical" in fine.stdout
    report, bits = json.loads((tmp_path / "found.json").read_text())
    assert sorted(r["case"]["strategy"] for r in report["results"]) == ["exact", "exact", "manual", "manual"]
    assert all(r["finding"] is r["not_run"] is None for r in report["results"]) and len(bits) == 2
    assert not list(tmp_path.glob("runs*"))
    bad = paceline("verify", f"{LOOPS}:lr_by_number_of_ranks", "--ranks", "2")
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert LOOP_CAUSES["settings"] in " ".join(bad.stdout.split())


LOWER = {  # loops with padded batches: the type in which the loss is computed, and the cause of the difference
    "train_on_texts": ("float64", None),
    "padded_in_float32": ("float32", None),
    "padded_in_bfloat16": ("bfloat16", None),
    "padded_without_weights": ("float64", "refused"),
    "padded_without_weights_in_float32": ("float32", "refused"),
}


@pytest.mark.slow
def test_a_loss_in_a_lower_precision_has_its_tolerance_and_padding_is_no_other_input(tmp_path: Path) -> None:
    said_of([*LOWER], tmp_path, ranks=(1,))
    for name, (precision, cause) in LOWER.items():
        report, bits = make_verify_reports(tmp_path / name, spec_of(name), (1,), {1: ""})
        if cause != "refused":
            assert (report.precision, len(report.notes), len(bits)) == (precision, int(precision != "float64"), 1), name
        assert [one.finding and one.finding.cause for one in report.results] == [cause], (name, report.results)


def compared(error: float, precision: str, *, moved: float = 0.0) -> list[str]:
    """The kinds that differ, if all numbers are off by `error`."""
    want, got = (torch.full((3,), value, dtype=torch.float64) for value in (1.0, 1.0 + error))
    comparison = ErrorTracker(adaptive=True, precision=precision, max_rounding_move=moved)
    seen = [StepValues(scalars={"loss": float(t[0])}, gradients={"w": t}, parameters={"w": t}) for t in (got, want)]
    return [one.kind for one in comparison.compare_step(*seen)]


def test_the_tolerance_is_that_of_the_precision() -> None:
    assert compared(1e-6, "float32") == [] and compared(1e-6, "float64") == ["loss", "gradient", "parameter"]
    assert compared(1e-2, "float32") == ["loss", "gradient", "parameter"] and compared(1e-2, "bfloat16") == []
    # Adam makes a whole step of a rounding error
    assert compared(1e-2, "float32", moved=1e-2) == ["loss", "gradient"]


def test_what_was_not_compared_is_no_zero_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    comparison, seen = ErrorTracker(adaptive=False), StepValues(scalars={"loss": 1.0})
    assert comparison.compare_step(seen, seen) == [] and comparison.errors == {"loss": 0.0}
    print_report(
        None,
        [VerifyReport(1, 0, 0, [CaseResult(StrategyCase("dp", 1, "none", "SGD"), comparison.errors, [], 0.0)], [])],
    )
    row = next(line for line in capsys.readouterr().out.splitlines() if "SGD" in line)
    assert re.findall(r"(?<= )[0-]+(?= )", row.partition("SGD")[2]) == ["0", "-", "-", "-", "-"]


@pytest.mark.slow
def test_a_script_that_trains_while_it_is_imported_is_refused(paceline: Any, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(f"{LOOPS.read_text()}\nright()\n")
    ended_with(paceline("verify", "loop.py:right", "--ranks", "1"), "session-at-import")


def test_what_is_for_tasks_is_refused_for_a_loop_and_the_other_way_round(paceline: Any) -> None:
    told = paceline("verify", f"{LOOPS}:right", "--optimizers", "adamw")
    ended_with(told, "verify-option-of-task")
    told = paceline("verify", f"{Path(__file__).with_name('tasks_under_test.py')}:dropout", "--", "--epochs", "3")
    ended_with(told, "verify-arguments-of-task")
