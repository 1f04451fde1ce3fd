"""Complete trainings on a group that behaves like NCCL's: the same bits, and nothing of an aborted step stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import warm
from tests.doubles import nccl
from tests.doubles.test_late import TASK as LATE_TASK
from tests.ended import digest, ended

from paceline.guard.report import read_diagnosis

ROOT = Path(__file__).parents[2]
TASK = f"{ROOT / 'examples' / 'own_task.py'}:task"

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(540)]


def train(
    folder: Path, strategy: str, *more: str, double: bool = True, task: str = TASK, **env: str
) -> subprocess.CompletedProcess[str]:
    """Two ranks, 12 steps, a checkpoint after each step."""
    words = (
        "-m", "paceline", "train", task, "--nproc", "2", "--collectives", "torch", "--steps", "12", "--strategy",
        strategy, "--run-dir", str(folder), "--checkpoint-every", "1", "--keep-checkpoints", "20", *more,
    )  # fmt: skip
    if not double:
        return warm.run(words, timeout=1700)
    path = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests" / "doubles" / "site")]
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **env}, text=True,
        capture_output=True, timeout=1700, check=False,
    )  # fmt: skip


def state(folder: Path, step: int) -> dict[str, bytes]:
    files = sorted((folder / "checkpoints" / f"step-{step:08}").rglob("*.safetensors"))
    assert files
    return {file.name: file.read_bytes() for file in files}


def newest(folder: Path) -> int:
    return max(int(one.name.removeprefix("step-")) for one in (folder / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "run"
    done = train(folder, "bucketed", double=False)
    assert done.returncode == 0, done.stderr
    return folder


ALL = [pytest.param(one, marks=pytest.mark.soak) for one in ("bucketed", "manual", "ddp", "exact", "zero", "fsdp")]


@pytest.mark.parametrize("strategy", ALL)
def test_buffers_that_are_late_and_poisoned_change_no_bit(strategy: str, healthy: Path, tmp_path: Path) -> None:
    done = train(tmp_path / "run", strategy, **{nccl.DELAY: "0.02"})
    assert done.returncode == 0, done.stderr
    if strategy == "ddp":  # its buckets are summed in another order
        assert train(tmp_path / "gloo", strategy, double=False).returncode == 0
        healthy = tmp_path / "gloo"
    assert digest(tmp_path / "run") == digest(healthy)


def test_a_rank_that_is_freed_in_a_gradient_applies_and_keeps_nothing_of_it(healthy: Path, tmp_path: Path) -> None:
    hangs = {nccl.HANGS: "1:bucket 0:5"}
    done = train(tmp_path / "run", "bucketed", "--hang-timeout", "3", **hangs)
    assert done.returncode == 3, done.stdout + done.stderr
    (folder,) = (tmp_path / "run").glob("attempt-1/diagnosis-*")
    record = read_diagnosis(folder)
    assert record.diagnosis.op is not None and record.diagnosis.op.kind == "all_reduce"
    assert [evidence.rank for evidence in record.evidence if not evidence.ops[-1].done] == [0, 1]
    kept = newest(tmp_path / "run")
    assert kept == 4  # the fifth step's gradients never came
    assert state(tmp_path / "run", kept) == state(healthy, kept)
    resumed = train(tmp_path / "run", "bucketed", "--resume", "auto")
    assert resumed.returncode == 0 and digest(tmp_path / "run") == digest(healthy), resumed.stderr


@pytest.mark.parametrize("strategy", ["bucketed", "exact"])
def test_the_device_does_not_apply_a_late_step_whose_gradient_was_aborted(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LATE_TASK)
    task, often = f"{tmp_path / 'mine.py'}:finite", ("--global-batch", "12", "--hang-timeout", "3")
    assert train(tmp_path / "healthy", strategy, *often, double=False, task=task).returncode == 0
    options = (*often, "--checkpoint-every", "100")  # otherwise no step is late
    late = {"LATE": "1", nccl.HANGS: "1:bucket 0:9", "LATE_FILE": str(tmp_path / "late.txt")}
    done = train(tmp_path / "run", strategy, *options, task=task, **late)
    assert done.returncode == 3, done.stdout + done.stderr
    assert len((tmp_path / "late.txt").read_text().splitlines()) >= 2 * 4  # steps of both ranks
    assert newest(tmp_path / "run") == 8  # the gradients of step 9 never came
    resumed = train(tmp_path / "run", strategy, *options, "--resume", "auto", task=task, double=False)
    assert resumed.returncode == 0 and digest(tmp_path / "run") == digest(tmp_path / "healthy"), resumed.stderr


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_healthy_steps_with_late_operations_raise_no_alarm(tmp_path: Path) -> None:
    less = ("--batch-size", "2", "--checkpoint-every", "100")  # else each step is an epoch, with all that it ends with
    done = train(tmp_path / "run", "bucketed", "--steps", "1000", *less, DOUBLE_NCCL_DELAY="0.02")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    # that a rank or the network is slow may be said: on a busy machine it is true
    assert not [word for word in ("no progress", "STALL", "DISAGREE", "CAUSE") if word in said], said
    assert not [*(tmp_path / "run").rglob("diagnosis-*")]
    assert ended(tmp_path / "run").steps == 1000
