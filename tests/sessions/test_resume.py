"""A session's loop that is killed, stopped or fails goes on, on another number of ranks, to the same bits."""

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.ended import ended, start_steps
from tests.errors import codes
from tests.run_script import run_script

from paceline.checkpoint.manager import Checkpoints
from paceline.cli import ledger, status
from paceline.errors import ExitCode
from paceline.runs.summary import Summary

KILLED = Path(__file__).with_name("killed.py")
CUT = Path(__file__).with_name("cut.py")


FEWER = """
import sys, torch, paceline
from torch import nn
from torch.utils.data import TensorDataset
torch.set_default_dtype(torch.float64)
s = paceline.session(sys.argv[1], resume=True, checkpoint_every=1, seed=0)
model = nn.Linear(3, 1)
model, optimizer = s.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
data = TensorDataset(torch.arange(96.0).view(32, 3) / 96)
steps = 0
for epoch in s.epochs(2):
    for (x,) in s.loader(data, global_batch=8):
        optimizer.zero_grad()
        s.backward((model(x) - 1).square().mean())
        optimizer.step()
        steps += s.last
        if [str(steps)] == sys.argv[2:]:
            raise SystemExit(1)
print("weights", s.weights(model)["weight"].sum().item())
"""


def start(ranks: int, folder: Path, *words: object, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_script(ranks, script or KILLED, folder, *words, cwd=folder.parent)


@pytest.mark.ranks
def test_it_resumes_on_fewer_ranks_than_it_was_started_on_and_not_on_more(tmp_path: Path) -> None:
    (tmp_path / "fewer.py").write_text(FEWER)
    done = [start(ranks, tmp_path / folder, *words, script=tmp_path / "fewer.py")
            for ranks, folder, *words in ((2, "whole"), (2, "run", 3), (3, "run"), (1, "run"))]  # fmt: skip
    assert [one.returncode for one in done] == [0, 1, 2, 0], done[3].stderr
    assert codes(done[2].stderr) == ["more-ranks-than-at-the-start"]
    whole, resumed = (float(one.stdout.partition("weights ")[2].split()[0]) for one in (done[0], done[3]))
    assert resumed == pytest.approx(whole, rel=1e-13)


def test_settings_that_the_script_has_changed_are_named_with_both_values(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "killed.py"
    assert start(1, run, 3, "raise").returncode == 1
    other.write_text(KILLED.read_text().replace("lr=1e-2", "lr=2e-2, weight_decay=0.5"))
    done = start(1, run, script=other)
    (note,) = [line for line in done.stdout.splitlines() if line.startswith("NOTE: optimizer ")]  # not the second one
    assert note.startswith("NOTE: optimizer 1 keeps"), note
    assert note.endswith(": lr 0.01 -> 0.02, weight_decay 0.01 -> 0.5"), note


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("SGD(p, lr=0.1, momentum=0.9)", "Adagrad(p, lr=0.1)", "optimizer-class-differs"),
        ("lambda o: ReduceLROnPlateau(o, patience=0)", "lambda o: Changed(o, patience=0)", "scheduler-class-differs"),
    ],
)
def test_another_second_optimizer_or_scheduler_is_refused(old: str, new: str, code: str, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "killed.py"
    assert start(1, run, 3, "raise").returncode == 1
    text = KILLED.read_text().replace("import paceline\n", "import paceline\nclass Changed(ReduceLROnPlateau): pass\n")
    other.write_text(text.replace(old, new))
    done = start(1, run, script=other)
    assert done.returncode == 2 and codes(done.stderr) == [code]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, str]:
    """A run that nothing happens to: its summary, and what it has printed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = start(2, folder)
    assert done.returncode == 0, done.stderr
    return ended(folder), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_killed_stopped_and_failed_on_other_numbers_of_ranks_it_comes_to_the_same_bits(
    whole: tuple[Summary, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert start(3, run, 6, "kill", 2).returncode == 137
    assert start(1, run, 13, "raise", 5).returncode == 1
    assert ended(run).failure == "ValueError: mine"
    stopped = start(2, run, 19, "term", 5)
    assert stopped.returncode == ExitCode.SAVED and start_steps(run)[-1] == 13  # saved as it failed
    assert ended(run).exit == ExitCode.SAVED
    done = start(3, run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ended(run).weights_sha256 == whole[0].weights_sha256
    losses = [text.partition("losses [")[2].partition("]")[0] for text in (whole[1], done.stdout)]  # in s.saved
    assert losses[0].count(",") == 2 and losses[1] == losses[0]
    assert (run / "model-2.safetensors").is_file()
    capsys.readouterr()
    assert ledger.main([str(run), "--json", str(tmp_path / "used.json")]) == 0
    used = json.loads((tmp_path / "used.json").read_text())
    assert (used["num_samples"], [epoch["once"] for epoch in used["epochs"]]) == (96, [96] * 3)
    capsys.readouterr()
    assert status.main([str(run)]) == 0
    assert "step      24 of 24" in capsys.readouterr().out


@pytest.mark.slow
def test_an_error_between_backward_and_step_leaves_no_half_of_it(whole: tuple[Summary, str], tmp_path: Path) -> None:
    """Neither its gradients, which nobody clears before the next backward, nor its batch norm's statistics."""
    run = tmp_path / "run"
    assert start(1, run, 7, "early").returncode == 1
    done = start(1, run)
    assert done.returncode == 0 and start_steps(run)[-1] == 6
    assert "NOTE: optimizer" not in done.stdout
    assert ended(run).weights_sha256 == whole[0].weights_sha256


@pytest.mark.slow
def test_each_epoch_is_kept_and_one_that_is_killed_in_its_evaluation_is_not_trained_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start(2, run, 9, "kill").returncode == 137
    assert [step for step, _ in Checkpoints(run / "checkpoints").entries()] == [8]
    done = start(2, run)
    assert done.returncode == 0 and start_steps(run)[-1] == 8


@pytest.mark.soak  # half a minute; the law is sampled by the other tests, and tests/strategies/test_state.py
@pytest.mark.timeout(540)
def test_a_model_that_is_cut_goes_on_uncut_and_the_other_way_round_in_the_middle_of_an_accumulation(
    tmp_path: Path,
) -> None:
    assert start(1, tmp_path / "whole", "bucketed", script=CUT).returncode == 0
    run = tmp_path / "run"
    assert start(3, run, "fsdp", 5, "kill", script=CUT).returncode == 137
    stopped = start(1, run, "bucketed", 9, "term", script=CUT)
    assert stopped.returncode == ExitCode.SAVED and start_steps(run)[-1] == 3
    assert start(2, run, "fsdp", 14, "raise", script=CUT).returncode == 1
    done = start(2, run, "fsdp", script=CUT)
    assert done.returncode == 0 and start_steps(run)[-1] > 0, done.stdout + done.stderr
    assert ended(run).steps == 20
    for name in ("model.safetensors", "model-2.safetensors"):
        one, other = load_file(tmp_path / "whole" / name), load_file(run / name)
        assert max(float((one[key] - other[key]).abs().max()) for key in one) <= 1e-12
