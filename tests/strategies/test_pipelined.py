"""Stages of a pipeline equal one process, whatever flows through them; and verify sees it where they do not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.run_ranks import run_ranks

from paceline.lab.ranks.verify import verify
from paceline.lab.verify import CaseResult, VerifySpec
from paceline.parallel.pipeline import ModelStage, Pipeline, stage_schedule
from paceline.rank.world import World
from paceline.strategies import pipelined

TASKS = f"{Path(__file__).parents[1]}/lab/ranks/tasks_under_test.py"
CHAINS = f"{Path(__file__).parent}/chains.py"
DRAWING = f"{CHAINS}:drawing"  # in eval mode, too
TRANSFORMER, SPELLER = (
    f"{Path(__file__).parents[2]}/examples/{name}.py:task" for name in ("own_transformer", "own_task")
)


def results(rank: int, world_size: int, task: str, mesh: str, *optimizers: str, steps: int = 4) -> list[CaseResult]:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    name, _, schedule = mesh.partition("/")
    options: Any = {"mesh": name, "schedule_pipeline": schedule or "1f1b"}
    # dropout, clipping, several uneven micro-batches, a last batch that does not reach every virtual rank
    spec = VerifySpec(task, {}, ["bucketed"], [*(optimizers or ["adamw"])], 3, 2, steps, 0, 1.0, **options)
    return verify(spec, world).results


def all_results(rank: int, world_size: int, cases: list[tuple[str, str]]) -> list[CaseResult]:
    return [found for task, mesh in cases for found in results(rank, world_size, task, mesh)]


def check(found: list[CaseResult]) -> None:
    for result in found:
        print(result.case, result.errors)
        assert result.finding is None, f"{result.case}: {result.finding}"
        assert 0 <= result.errors["loss"] <= 1e-12
        assert 0 <= result.errors["gradient"] <= 1e-12


@pytest.mark.ranks
def test_two_stages_equal_one_process(tmp_path):
    cases = [(TRANSFORMER, "pipeline=2"), (f"{TASKS}:batchnorm", "pipeline=2/gpipe"), (DRAWING, "pipeline=2")]
    check(run_ranks(all_results, 2, tmp_path, cases)[0])


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("size", "mesh"), [(2, "pipeline=2"), (3, "pipeline=3"), (4, "data=2,pipeline=2")])
def test_all_models_equal_one_process(size, mesh, tmp_path):
    tasks = [TRANSFORMER, *(f"{CHAINS}:{name}" for name in ("gpt2", "drawing", "resnet"))]
    tasks += [f"{TASKS}:{name}" for name in ("batchnorm", "unused", "dropout")]
    tasks += [f"{TASKS}:tokens"] if size != 3 else []  # it has two layers
    tasks += [SPELLER] if size == 2 else []
    cases = [(task, f"{mesh}{way}") for task in tasks for way in ("", "/gpipe")]
    check(run_ranks(all_results, size, tmp_path, cases, timeout=850)[0])


# ---- planted bugs ------------------------------------------------------------------------------------------------

BACKWARD, FROM_BELOW = Pipeline.backward, Pipeline._receive_gradient
BUGS: dict[str, tuple[Any, str, Any]] = {
    "no bug": (pipelined, "_shared_parameters", pipelined._shared_parameters),
    "stages that share a parameter do not add up its gradients": (pipelined, "_shared_parameters", lambda *_: []),
    "a gradient counts twice on its way up": (Pipeline, "_receive_gradient", lambda *args: 2 * FROM_BELOW(*args)),
    "the gradient of another micro-batch": (
        Pipeline, "_receive_gradient", lambda self, like: FROM_BELOW(self, like).roll(1, 0),
    ),
    "random streams stay where they are": (
        ModelStage, "_draws", property(lambda _: False, lambda *_: None),
    ),
    "a stage goes backward twice": (
        Pipeline, "backward", lambda self, run, go: BACKWARD(self, run, go and (lambda: _twice(go))),
    ),
    "a micro-batch is never gone backward with": (
        Pipeline,
        "actions",
        lambda self, count: stage_schedule(self._schedule, self.number, self.stages, count - (count > 2)),
    ),
}  # fmt: skip


def _twice(propagate: Callable[[], object]) -> None:
    with patch.object(torch.Tensor, "backward", lambda total: torch.autograd.backward(2 * total)):
        propagate()


def with_bugs(rank: int, world_size: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, (owner, attribute, wrong) in BUGS.items():
        with patch.object(owner, attribute, wrong, create=True):
            (result,) = results(rank, world_size, TRANSFORMER, "pipeline=2", "sgd", steps=2)
        found[name] = "" if result.finding is None else result.finding.cause
    return found


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_planted_bugs_are_seen(tmp_path):
    found = run_ranks(with_bugs, 2, tmp_path, timeout=840)[0]
    print(found)
    assert found.pop("no bug") == ""
    assert all(found.values()), found
