"""`paceline launch --check` itself: real starts of a script with several pitfalls, and of one that fails."""

from pathlib import Path
from typing import Any

import pytest
from tests.check.planted_cases import HERE, PLAIN, Case, checked, marked
from tests.errors import raises

from paceline.cli import launch
from paceline.protocol.facts import MAX_STEPS

pytestmark = pytest.mark.sample(5)

SCRIPT = "planted/plain.py"
SEVERAL = (
    "same order", "same augmentation in workers", "mean over padding", "unused parameters", "threads",
    "score of a share", "one file", "one log",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_with_eight_pitfalls_is_told_each_of_them_at_its_line() -> None:
    outcome = checked(Case(SCRIPT, ",".join(SEVERAL)), started=True)
    sites = {(one["rule"], one["site"].partition(" ")[0]) for one in outcome.counted}
    lines = {(PLAIN[plant], f"plain.py:{line}") for plant in SEVERAL for line in marked(Case(SCRIPT, plant))}
    assert sites == lines, outcome.text
    assert outcome.code == 1
    assert any("set_epoch" in one["type_instead"] for one in outcome.counted if one["rule"] == "same order")


@pytest.mark.ranks
@pytest.mark.parametrize("plant", ["own plateau", "own weights"])
def test_replicas_that_drift_apart_are_a_mistake_and_no_notice_beside_a_diagnosis(plant: str) -> None:
    outcome = checked(Case(SCRIPT, plant, "replicas"))
    assert [one["rule"] for one in outcome.counted] == ["replicas"], outcome.text
    assert outcome.on_its_line and outcome.code == 1
    assert "nothing wrong" not in outcome.text


@pytest.mark.ranks
def test_gradients_cleared_within_a_window_and_a_weighted_sampler_are_found_with_what_to_type() -> None:
    outcome = checked(Case(SCRIPT, "cleared in windows,weighted sampler"))
    lines = [marked(Case(SCRIPT, plant))[0] for plant in ("weighted sampler", "cleared in windows")]
    told = {one["rule"]: one for one in outcome.counted}
    assert [*told] == ["same batches", "lost gradients"], outcome.text
    assert [one["site"].partition(" ")[0] for one in told.values()] == [f"plain.py:{line}" for line in lines]
    assert "WeightedRandomSampler(weights" in told["same batches"]["type_instead"]
    assert outcome.code == 1


@pytest.mark.ranks
@pytest.mark.parametrize("plant", ["", "same order", "last window divided"])
def test_a_sampler_that_counts_its_epochs_and_steps_with_a_closure_are_as_in_a_plain_script(plant: str) -> None:
    outcome = checked(Case("planted/closures.py", plant, PLAIN.get(plant, "")))
    assert outcome.found and not outcome.others, outcome.text
    notes = {one["rule"] for one in outcome.findings if one["level"] == "note"}
    assert notes <= {"learning rate", "slow", "batch shrinks"}, outcome.text
    if plant:
        assert outcome.on_its_line
    else:
        assert {"last window", "same order"} <= {one["rule"] for one in outcome.findings if one["level"] == "right"}


@pytest.mark.ranks
@pytest.mark.parametrize("script", ["labels", "shards"])
def test_data_of_each_rank_s_own_with_the_same_labels_are_right(script: str) -> None:
    outcome = checked(Case(f"clean/{script}.py"))
    assert outcome.found and not outcome.counted, outcome.text


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "kind"),
    [
        pytest.param("with_accelerate", "streamed", marks=pytest.mark.needs("accelerate")),
        pytest.param("with_trainer", "resumed", marks=pytest.mark.needs("transformers")),
    ],
)
def test_nothing_is_wrong_with_a_framework_that_is_used_as_it_should_be(script: str, kind: str) -> None:
    outcome = checked(Case(f"clean/{script}.py", kind=kind))
    assert outcome.found, outcome.text


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("script", "note"),
    [("probe_alone", ""), ("own_folds", "past DDP"), ("own_classes", "own parameters"), ("experts", "own parameters")],
)
def test_what_ranks_rightly_have_or_train_for_themselves_is_noted_and_not_wrong(script: str, note: str) -> None:
    outcome = checked(Case(f"clean/{script}.py"))
    assert outcome.counted == [] and outcome.code == 0, outcome.text
    rules = {(one["rule"], one["level"]) for one in outcome.findings}
    assert not note or (note, "note") in rules
    assert ("gradients", "right") in rules  # the other parameters are still checked


@pytest.mark.ranks
def test_a_session_has_no_pitfalls_of_scripts_and_ends_after_some_steps_while_the_script_goes_on() -> None:
    outcome = checked(Case("clean/session.py"))
    assert outcome.counted == [] and outcome.code == 0, outcome.text
    assert ("session", "note") in {(one["rule"], one["level"]) for one in outcome.findings}
    assert f"trained {MAX_STEPS}\n" in outcome.text and f"{MAX_STEPS} steps:" in outcome.text


@pytest.mark.ranks
def test_a_script_that_fails_tells_its_error_first_and_nothing_of_what_was_right() -> None:
    outcome = checked(Case(SCRIPT, "fails"))
    assert outcome.counted == []
    assert outcome.code == 1
    assert "RuntimeError" in outcome.text and "exit code 1" in outcome.text


@pytest.mark.parametrize(
    ("options", "code", "fields"),
    [
        (["--nproc", "2", "--on", "ssh", "--hosts", "a,b"], "check-option", {"options": "--on ssh"}),
        (["--nproc", "2", "--detach"], "check-option", {"options": "--detach"}),
        (["--nproc", "2", "--dry-run"], "check-option", {"options": "--dry-run"}),
        (["--nproc", "2", "--max-restarts", "1"], "check-option", {"options": "--max-restarts"}),
        (["--nproc", "1"], "check-of-one-rank", {}),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_starts(
    options: list[str], code: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(code, **fields):
        launch.main(["--check", *options, "--", str(HERE / SCRIPT)])
    assert not [*tmp_path.iterdir()]


def test_only_python_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises("check-not-python", value="ls"):
        launch.main(["--check", "--nproc", "2", "--", "ls"])
