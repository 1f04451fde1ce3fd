"""A Trainer script on a real Slurm saves before its time limit, is queued again, and ends with the same weights."""

import shutil
import sys
from pathlib import Path

import pytest
from tests import warm
from tests.cluster.slurm import Slurm
from tests.launch.launch_harness import wait_until
from tests.stops.soak_stops import ENVIRONMENT, HERE, finished

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]


def submit(slurm: Slurm, folder: Path, *options: object, **environment: str) -> str:
    """Queue the script on two ranks; return the number of the job."""
    for file in HERE.glob("*.py"):
        shutil.copy(file, folder)
    launch = ("launch", "--on", "slurm", "--nproc", 2, "--run-dir", folder / "run", *options)
    words = ["env", *(f"{name}={value}" for name, value in (ENVIRONMENT | environment).items())]
    started = slurm.run(*words, sys.executable, "-m", "paceline", *launch, "trainer.py", cwd=folder)
    assert started.returncode == 0, started.stderr
    return slurm.run("squeue", "-h", "-o", "%i").stdout.strip()


def output(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "run").glob("submit-*/slurm-*.out"))


def test_a_script_is_queued_again_and_resumes(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--time", 10)
    wait_until(lambda: "REACHED step" in output(tmp_path), "the first step", 120)
    assert slurm.run("scancel", "--batch", "--signal=USR1", job).returncode == 0
    assert slurm.wait(job, 150) == "COMPLETED", output(tmp_path)
    assert slurm.show(job)["Restarts"] == "1"
    assert "resuming from" in output(tmp_path) and "REACHED digest" in output(tmp_path)


@pytest.mark.timeout(900)
def test_a_script_that_is_longer_than_its_time_limit_ends_with_the_same_weights(slurm: Slurm, tmp_path: Path) -> None:
    """It takes 150 s. Slurm warns 60 to 120 s before the limit of three minutes."""
    (tmp_path / "whole").mkdir()
    code, digest = finished("trainer", tmp_path / "whole", warm.with_ranks)
    assert code == 0
    job = submit(slurm, tmp_path, "--time", 3, "--save-before", 60, STEP_SECONDS="3")
    assert slurm.wait(job, 800) == "COMPLETED", output(tmp_path)
    assert int(slurm.show(job)["Restarts"]) >= 1
    assert "resuming from" in output(tmp_path) and f"REACHED digest {digest}" in output(tmp_path)
