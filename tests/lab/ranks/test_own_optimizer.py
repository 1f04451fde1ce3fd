"""Verify trains with the task's own optimizer and schedule, where it has any, in the ranks and in the one process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import raises
from tests.lab.ranks import tasks_under_test
from tests.lab.ranks.mutations import planted
from tests.run_ranks import run_ranks

from paceline.lab.ranks import trial
from paceline.lab.ranks.verify import collect_bit_digests, verify
from paceline.lab.verify import CaseResult, VerifySpec
from paceline.rank.world import World

TASKS = Path(tasks_under_test.__file__)


def spec(task: str, strategies: Sequence[str] = ("bucketed",), optimizers: Sequence[str] = ()) -> VerifySpec:
    return VerifySpec(
        task=f"{TASKS}:{task}", options={}, strategies=[*strategies], optimizers=[*optimizers], virtual_ranks=2,
        accumulation=2, steps=4, seed=0, clip_norm=0.1,
    )  # fmt: skip


def planted_into_ranks(**changes: Any) -> Any:
    """The ranks train another task than the one process."""
    real = trial.apply_strategy

    def other(setting: trial.VerificationSetup, *rest: Any) -> Any:
        return real(replace(setting, task=replace(setting.task, **changes)), *rest)

    return planted((trial, "apply_strategy", other))


def verified(rank: int, size: int) -> dict[str, Any]:
    """What is found of each task, also where the ranks forget something of it."""
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    found: dict[str, Any] = {
        "own": verify(spec("own", ["bucketed", "zero", "fsdp"]), world).results,
        "notes": verify(spec("own"), world).notes,
        "scheduled": verify(spec("scheduled", ["exact"], ["sgd"]), world).results,
        "whole": verify(spec("whole", ["bucketed", "zero"]), world).results,
        "joint": verify(spec("joint", ["bucketed", "zero"]), world).results,
    }
    one_group = lambda model: torch.optim.RMSprop(model.parameters(), lr=0.003)  # noqa: E731
    for name, forgotten in (("schedule", {"make_schedule": None}), ("groups", {"make_optimizer": one_group})):
        with planted_into_ranks(**forgotten):
            found[f"without {name}"] = verify(spec("own"), world).results
    with planted_into_ranks(make_schedule=None):
        found["scheduled, without"] = verify(spec("scheduled", ["exact"], ["sgd"]), world).results
    found["bits"] = [bits.steps for bits in collect_bit_digests(spec("own", ["exact", "zero"]), world).bits]
    with planted((trial, "has_schedule", lambda *_: False)):
        found["other bits"] = [bits.steps for bits in collect_bit_digests(spec("own", ["exact"]), world).bits]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(verified, 2, tmp_path_factory.mktemp("own"))[0]


def passed(results: list[CaseResult]) -> list[tuple[str, str, bool]]:
    return [(r.case.strategy, r.case.optimizer, r.passed) for r in results]


@pytest.mark.slow
@pytest.mark.ranks
def test_it_is_the_default_and_equals_one_process_with_groups_and_schedule(found: dict[str, Any]) -> None:
    assert passed(found["own"]) == [(name, "task", True) for name in ("bucketed", "zero", "fsdp")]
    assert all(r.errors["optimizer state"] < 1e-9 for r in found["own"])
    (note,) = found["notes"]
    assert note.startswith("optimizer task: RMSprop,") and "schedule" in note
    assert passed(found["scheduled"]) == [("exact", "sgd", True)]


@pytest.mark.slow
@pytest.mark.ranks
def test_an_optimizer_of_whole_parameters_is_verified_and_one_of_all_parameters_does_not_run_on_shards(
    found: dict[str, Any],
) -> None:
    assert passed(found["whole"]) == [("bucketed", "task", True), ("zero", "task", True)]
    sharded, whole = found["joint"]
    assert whole.passed
    assert sharded.not_run and "Joint" in sharded.not_run


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("planted_bug", "step"), [("without schedule", 1), ("without groups", 0), ("scheduled, without", 1)]
)
def test_what_ranks_forget_of_it_is_found(found: dict[str, Any], planted_bug: str, step: int) -> None:
    (result,) = found[planted_bug]
    assert (result.finding.cause, result.finding.step) == ("optimizer", step)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_bits_are_those_with_it(found: dict[str, Any]) -> None:
    exact, zero = found["bits"]
    (without,) = found["other bits"]
    assert exact == zero
    assert exact[0] == without[0] and exact[1].parameters != without[1].parameters


def test_what_is_no_optimizer_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch sets it where an optimizer is made
    for name, optimizers, code in (
        ("dropout", ["task"], "verify-task-without-optimizer"),
        ("lbfgs", [], "optimizer-needs-closure"),
    ):
        asked = spec(name, optimizers=optimizers)
        task = trial.load_task_to_verify(asked)
        with raises(code):
            trial.optimizers_to_verify(asked, task, trial.build_float64_model(task, 0, torch.device("cpu")))
    task = trial.load_task_to_verify(spec("dropout"))
    made = trial.optimizers_to_verify(spec("dropout"), task, trial.build_float64_model(task, 0, torch.device("cpu")))
    assert [*made] == ["sgd", "adamw"]
