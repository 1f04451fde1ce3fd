"""Settings for other machines: each has an effect or is refused, and what is secret is not written down."""

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.errors import ended_with, raises

from paceline.cli.jobs import check_cluster_options
from paceline.config.settings import ClusterConfig
from paceline.runs.folder import lock_run_dir


@pytest.mark.parametrize(
    ("on", "settings", "launchers"),
    [
        ("local", {"ssh": "ssh -v"}, ["ssh"]),
        ("slurm", {"ssh": "ssh -v"}, ["ssh"]),
        ("ssh", {"agent": "paceline"}, ["print"]),
        ("local", {"join_timeout": 7.0}, ["ssh", "slurm", "print"]),
        ("ssh", {"cpus_per_rank": 2}, ["slurm"]),
        ("print", {"save_before": 60}, ["slurm"]),
    ],
)
def test_a_setting_without_an_effect_is_refused(on, settings, launchers) -> None:
    [name] = settings
    with raises("option-of-another-launcher", setting=name, allowed=launchers, value=on):
        check_cluster_options(ClusterConfig(on=on, **settings))


@pytest.fixture
def launch(paceline, tmp_path: Path):
    """Run `paceline launch ARGUMENTS --run-dir run -- script.py`, or with other words behind `--`."""
    (tmp_path / "script.py").touch()

    def run(*arguments: str, script: tuple[str, ...] = ("script.py",), env: dict[str, str] | None = None):
        return paceline("launch", *arguments, "--run-dir", "run", "--", *script, env=env)

    return run


@pytest.mark.parametrize("form", [("--env", "API_KEY=s3cr3t"), ("--env=API_KEY=s3cr3t",)])
def test_a_secret_that_was_typed_is_not_written_down(launch, tmp_path: Path, form: tuple[str, ...]) -> None:
    done = launch("--on", "print", *form, script=("script.py", "--env=A=1"))
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert "API_KEY=…" in written["submitted.json"] and "--env=A=1" in written["submitted.json"]
    assert not any("s3cr3t" in text for text in (*written.values(), done.stdout, done.stderr))


@pytest.mark.slow
def test_a_second_start_of_an_active_run_leaves_nothing_that_status_or_cancel_would_take_for_it(
    launch, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "attempt-1").mkdir(parents=True)
    lock = lock_run_dir(run_dir)
    try:
        done = launch("--on", "print")
    finally:
        os.close(lock)
    ended_with(done, "run-is-active")
    assert f"{run_dir} (pid {os.getpid()} on " in done.stderr
    assert not list(run_dir.glob("submit-*"))


def limit_files(size_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


@pytest.mark.parametrize("words", ["launch --on slurm", "launch --on print", "train mnist-cnn --nproc 1"])
def test_a_file_that_cannot_be_written_is_told_in_words(tmp_path: Path, words: str) -> None:
    """A limit to the size of files ends a write as a full disk does, but for the word."""
    (tmp_path / "script.py").touch()
    script = ("--", str(tmp_path / "script.py")) if "launch" in words else ()
    done = subprocess.run(
        (sys.executable, "-B", "-m", "paceline", *words.split(), "--run-dir", str(tmp_path / "run"), *script),
        capture_output=True,
        text=True,
        timeout=180,
        preexec_fn=partial(limit_files, 60),
    )
    ended_with(done, "settings-not-written", exit_code=1)
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "rank",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        {
            "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
        },
    ],
)  # fmt: skip
@pytest.mark.parametrize("on", ["local", "slurm", "print"])
def test_a_rank_does_not_launch_a_run_of_its_own(launch, tmp_path: Path, rank: dict[str, str], on: str) -> None:
    """`srun -n 2 paceline launch --on slurm` would submit as many jobs as it has tasks."""
    done = launch("--on", on, env=rank)
    ended_with(done, "launch-within-launcher")
    assert "rank 0 of 2" in done.stderr
    assert not (tmp_path / "run").exists()


def test_gpus_are_asked_of_slurm_if_the_device_is_cuda(paceline, tmp_path: Path) -> None:
    words = ("train", "mnist-cnn", "--on", "slurm", "--nodes", 2, "--nproc", 4, "--dry-run", "--device")
    asked = {device: paceline(*words, device).stdout for device in ("cuda", "cpu")}
    assert "--gpus-per-node=4\n" in asked["cuda"] and "--gpus" not in asked["cpu"]
    assert not list(tmp_path.iterdir())  # a dry run makes nothing


@pytest.mark.parametrize(
    "words",
    ["train mnist-cnn --nproc 2", "launch", "train mnist-cnn --nproc 2 --on ssh --hosts n1,n2",
     "train mnist-cnn --nproc 2 --on slurm --nodes 2"],
)  # fmt: skip
def test_the_window_of_the_hang_guard_reaches_every_agent(paceline, tmp_path: Path, words: str) -> None:
    (tmp_path / "script.py").touch()
    script = ("--", "script.py") if words == "launch" else ()
    done = paceline(*words.split(), "--hang-timeout", "30s", "--dry-run", *script)
    assert done.returncode == 0, done.stderr
    assert '"hang_timeout": {"seconds": 30.0}' in " ".join(done.stdout.split()).replace("{ ", "{").replace(" }", "}")
