"""A sample of `make soak-stops`: a stopped Trainer resumes to the weights of an uninterrupted run."""

import json
from pathlib import Path

import pytest
from tests import warm
from tests.stops.soak_stops import SCRIPTS, Stop, batches, finished, stopped

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "stops.json"
MODULES = {"trainer": "transformers", "accelerated": "accelerate"}  # no extra has Lightning: `make soak-stops` runs it


@pytest.mark.ranks
@pytest.mark.sample(3)
@pytest.mark.parametrize("script", [pytest.param(name, marks=pytest.mark.needs(MODULES[name])) for name in MODULES])
def test_the_same_command_resumes_to_the_same_weights(script: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    code, reached = stopped(script, Stop("save", 2, who="rank 1, SIGTERM"), cut, warm.with_ranks)
    assert code == 75 and not [moment for moment in reached if moment.startswith("digest")]
    records = [*cut.rglob("paceline-stopped.json")]
    assert len(records) == (script != "accelerated")
    assert finished(script, cut, warm.with_ranks) == finished(script, whole, warm.with_ranks)
    assert not [*cut.rglob("paceline-stopped.json")]
    assert batches(script, cut) == batches(script, whole)


@pytest.mark.ranks
@pytest.mark.sample(5)
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("twice", 5),  # the second training does not resume from the first
        ("patient", 9),  # in the middle of the patience of early stopping
        ("best", 7),  # at the end of an epoch, where an evaluation decides about the checkpoint
        ("unsaved", 4),
        ("steps", 4),
    ],
)
def test_trainer_resumes_with_its_settings(kind: str, number: int, tmp_path: Path) -> None:
    whole, cut, script = tmp_path / "whole", tmp_path / "cut", f"trainer {kind}"
    whole.mkdir(), cut.mkdir()
    code, _ = stopped(script, Stop("step", number, who="rank 1, SIGTERM"), cut, warm.with_ranks)
    assert code == 75
    assert finished(script, cut, warm.with_ranks) == finished(script, whole, warm.with_ranks)
    assert batches(script, cut) == batches(script, whole)


@pytest.mark.ranks
@pytest.mark.sample(2)
@pytest.mark.parametrize(("option", "is_hooked"), [("--hang-timeout=60", True), ("--check", False)])
def test_a_check_does_not_resume_what_was_stopped(option: str, is_hooked: bool, tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    module = "import torch\nclass Trainer:\n    def train(self): ...\n    def _save_checkpoint(self): ...\n"
    (tmp_path / "transformers" / "trainer.py").write_text(module)
    code = "from transformers.trainer import Trainer\nprint('hooked', hasattr(Trainer.train, '__wrapped__'))\n"
    (tmp_path / "script.py").write_text(code)
    run = warm.run(("-m", "paceline", "launch", "--nproc=2", option, "script.py"), ranks=True, cwd=tmp_path)
    assert f"hooked {is_hooked}" in run.stdout, run.stderr


def test_each_repeat_of_the_record_is_right() -> None:
    record = json.loads(RECORD.read_text())
    assert all(one["right"] for one in record["repeats"].values())
    assert {one["script"] for one in record["repeats"].values()} == {*SCRIPTS}
