"""What happens to machines does not happen to the run: it ends in good order, goes on by itself, to the same bits."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.ssh import SshHosts
from tests.cluster.training import (
    PACELINE,
    clean_ledger,
    resumed_here,
    steps_done,
    submit,
    trained_here,
    wait_for_step,
    weights,
    words,
)

pytestmark = pytest.mark.soak  # minutes of training; CI has the same laws on small workers and jobs
STEPS = 200


@pytest.fixture(scope="session")
def long_task(small_mnist: Path) -> list[str]:
    return words(
        *("train", "mnist-cnn", "--data-dir", small_mnist, "--steps", STEPS, "--batch-size", 4),
        *("--strategy", "exact", "--virtual-ranks", 4, "--device", "cpu", "--checkpoint-every", 10),
    )


@pytest.fixture(scope="session")
def long_expected(long_task: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained_here(long_task, tmp_path_factory.mktemp("expected") / "run")


@pytest.mark.timeout(360)  # with the time of the run here that it is compared with
def test_the_warning_before_the_time_limit_saves_and_queues_again_and_the_run_goes_on(
    slurm: Slurm, long_task: list[str], long_expected: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = submit(slurm, long_task, run_dir)
    wait_for_step(run_dir, 30)
    assert slurm.run("scancel", "--batch", "--signal=USR1", job).returncode == 0  # as Slurm itself does it
    assert slurm.wait(job, 90) == "COMPLETED"
    assert int(slurm.show(job)["Restarts"]) == 1
    assert (run_dir / "attempt-2").is_dir()
    assert weights(run_dir) == long_expected
    clean_ledger(run_dir)


def test_cancel_saves_and_does_not_queue_again(slurm: Slurm, long_task: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = submit(slurm, long_task, run_dir)
    wait_for_step(run_dir, 20)
    done = slurm.run(*PACELINE, "cancel", run_dir, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert slurm.wait(job, 30) in ("CANCELLED", "FAILED")
    reached = steps_done(run_dir)
    assert list((run_dir / "checkpoints").glob(f"step-*{reached}"))
    assert not (run_dir / "attempt-2").exists()


def test_a_preempted_run_goes_on_after_the_other_job(
    slurm: Slurm, long_task: list[str], long_expected: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = submit(slurm, long_task, run_dir, "--partition", "main")
    wait_for_step(run_dir, 30)
    other = slurm.run("sbatch", "--parsable", "-p", "high", "-N4", "--wrap", "sleep 1").stdout.strip()
    assert slurm.wait(other, 60) == "COMPLETED"
    assert slurm.wait(job, 120) == "COMPLETED"
    assert int(slurm.show(job)["Restarts"]) >= 1
    assert weights(run_dir) == long_expected
    clean_ledger(run_dir)


@pytest.mark.timeout(720)
def test_a_run_whose_slurm_node_dies_goes_on_on_others(
    lab: Lab, slurm: Slurm, long_task: list[str], long_expected: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = submit(slurm, long_task, run_dir, "--sbatch", "exclude=n1")
    wait_for_step(run_dir, 30)
    lab.power_off("n3")
    assert slurm.wait(job, 180) == "COMPLETED"
    lab.boot("n3")
    assert int(slurm.show(job)["Restarts"]) >= 1
    assert weights(run_dir) == long_expected
    clean_ledger(run_dir)


@pytest.mark.parametrize("fault", ["power_off", "cut", "kill"])
def test_an_ssh_run_goes_on_without_a_lost_host(
    lab: Lab, ssh_hosts: SshHosts, long_task: list[str], long_expected: str, tmp_path: Path, fault: str
) -> None:
    run_dir = tmp_path / "run"
    where = words(
        *("--on", "ssh", "--hosts", "n2,n3", "--nodes", "1:2", "--nproc", 2),
        *("--ssh", ssh_hosts.command, "--run-dir", run_dir),
    )
    launcher = lab.popen(
        "n1", *PACELINE, *long_task, *where, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_for_step(run_dir, 30)
        getattr(lab, fault)("n3")
        said = launcher.communicate(timeout=300)[0]
    finally:
        launcher.kill()
        if fault == "cut":
            lab.heal("n3")
        else:
            lab.boot("n3")
    assert launcher.returncode == 0, said
    assert "n3" in said and ": 2 ranks on 1 " in said
    assert weights(run_dir) == long_expected
    clean_ledger(run_dir)


def test_without_its_first_host_an_ssh_run_ends_everywhere_and_can_be_resumed(
    lab: Lab, ssh_hosts: SshHosts, long_task: list[str], long_expected: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    where = words(*("--on", "ssh", "--hosts", "n2,n3", "--nodes", "1:2", "--nproc", 2, "--ssh", ssh_hosts.command))
    launcher = lab.popen(
        "n1",
        *PACELINE,
        *long_task,
        *where,
        "--run-dir",
        run_dir,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for_step(run_dir, 30)
        begun = time.monotonic()
        lab.power_off("n2")
        said = launcher.communicate(timeout=120)[0]
        assert launcher.returncode == 1, said
        while lab.processes("n3"):
            assert time.monotonic() - begun < 30
            time.sleep(0.1)
    finally:
        launcher.kill()
        lab.boot("n2")
    assert resumed_here(run_dir, 100) == long_expected
    clean_ledger(run_dir)
