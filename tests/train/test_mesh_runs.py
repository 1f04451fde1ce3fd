"""Whole runs of a model that ranks share: what they end with, say, save, and take over from others."""

import re
from itertools import permutations
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.ended import start_steps
from tests.run_script import SAVED, run_script

from paceline.runs.summary import read_summary

pytestmark = pytest.mark.sample(2)

TASK = f"{Path(__file__).parents[2]}/examples/own_transformer.py:task"
STEPS, STOP = 4, 1
# how each is started: processes, and what it is given
WAYS = {
    "bucketed": (2, ("--mesh", "data=2", "--strategy", "bucketed")),
    "pipeline=2": (2, ("--mesh", "pipeline=2", "--strategy", "bucketed")),
    "data=2,pipeline=2": (4, ("--mesh", "data=2,pipeline=2", "--strategy", "bucketed")),
    "tensor=2": (2, ("--mesh", "tensor=2", "--strategy", "bucketed")),
    "data=2,tensor=2": (4, ("--mesh", "data=2,tensor=2", "--strategy", "bucketed", "--sequence-parallel")),
    "zero": (2, ("--mesh", "data=2", "--strategy", "zero")),
    # the embedding is in none of its blocks: its weight is used a second time, by hand
    "fsdp": (2, ("--mesh", "data=2", "--strategy", "fsdp", "--fsdp-wrap", "TransformerEncoderLayer")),
}


def train(tmp_path: Path, name: str, way: str, *more: object) -> str:
    size, given = WAYS[way]
    command = ("-m", "paceline", "train", TASK, "--steps", STEPS, "--batch-size", 5, "--accumulation", 2)
    command += ("--threads-per-rank", 1, "--optimizer", "sgd", "--lr", 0.1)  # AdamW would blow rounding up
    said = ("--virtual-ranks", 2, "--run-dir", tmp_path / name, "--clip-norm", 1.0)
    ended = run_script(size, *command, *said, *given, *more, cwd=tmp_path)
    assert ended.returncode == (SAVED if "--rehearse-preemption" in more else 0), ended.stderr
    return ended.stdout + ended.stderr


def apart(tmp_path: Path, one: str, other: str) -> float:
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def crossed(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    train(tmp_path, "whole", "bucketed")
    for number, (first, then) in enumerate(pairs):
        train(tmp_path, str(number), first, "--rehearse-preemption", STOP)
        told = train(tmp_path, str(number), then, "--resume", "auto")
        assert start_steps(tmp_path / str(number))[-1] == STOP + 1, told  # it was asked during the step before
        assert ("pipeline of 2 stages" in told) == ("pipeline" in then)
        assert apart(tmp_path, "whole", str(number)) < 1e-5, (first, then)
        scores = [read_summary(tmp_path / name).test_metrics["loss"] for name in ("whole", str(number))]
        assert scores[0] == pytest.approx(scores[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(360)
def test_a_mesh_goes_on_where_another_has_stopped_and_a_strategy_where_a_mesh_has(tmp_path):
    crossed(tmp_path, [("pipeline=2", "tensor=2"), ("tensor=2", "pipeline=2")])
    told = train(tmp_path, "named", "pipeline=2", "--stages-at", "norm", "--ema", 0.9)
    assert "2 stages, 1f1b, 4 micro-batches" in told
    assert "stage 1 from norm" in told
    assert re.search(r"stage 0 \d+%, stage 1 \d+% ", told)
    assert apart(tmp_path, "whole", "named") < 1e-5  # wherever it is cut


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_pairs(tmp_path):
    # from fsdp: tests/parallel/test_resume.py; here a run would have to forget its --fsdp-wrap
    crossed(tmp_path, [pair for pair in permutations(WAYS, 2) if pair[0] != "fsdp"])


@pytest.mark.ranks
def test_what_cannot_be_in_stages_is_refused(tmp_path):
    command = ("-m", "paceline", "train", TASK, "--steps", 1, "--mesh", "pipeline=2", "--run-dir", tmp_path / "run")
    ended = run_script(2, *command, "--stages-at", "layers", cwd=tmp_path)
    assert ended.returncode == 2
    assert "[stage-cannot-begin]" in ended.stderr and "layers.0, layers.1, norm" in ended.stderr
