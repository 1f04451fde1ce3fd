"""A Trainer script on a real Slurm: before the time limit it saves, is queued again, and resumes."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.slurm import Slurm
from tests.stops.soak_stops import ENVIRONMENT, HERE


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_a_script_is_queued_again_and_resumes(slurm: Slurm, tmp_path: Path) -> None:
    for file in HERE.glob("*.py"):
        shutil.copy(file, tmp_path)
    launch = ("launch", "--on", "slurm", "--nproc", 2, "--time", 10, "--run-dir", tmp_path / "run")
    words = ["env", *(f"{name}={value}" for name, value in ENVIRONMENT.items()), sys.executable, "-m", "paceline"]
    started = slurm.run(*words, *launch, "trainer.py", cwd=tmp_path)
    assert started.returncode == 0, started.stderr
    (job,) = slurm.run("squeue", "-h", "-o", "%i").stdout.split()

    def output() -> str:
        return "".join(path.read_text() for path in (tmp_path / "run").glob("submit-*/slurm-*.out"))

    deadline = time.monotonic() + 120
    while "REACHED step" not in output():
        assert time.monotonic() < deadline, output()
        time.sleep(0.1)
    assert slurm.run("scancel", "--batch", "--signal=USR1", job).returncode == 0
    assert slurm.wait(job, 150) == "COMPLETED", output()
    assert slurm.show(job)["Restarts"] == "1"
    assert "resuming from" in output() and "REACHED digest" in output()
