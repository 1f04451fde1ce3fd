"""The batch script and its commands on a real Slurm, with stand-ins for the agents (slurm_stub.py)."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.slurm import Slurm
from tests.launch.launch_harness import wait_until

pytestmark = pytest.mark.sample(2)

START = Path(__file__).with_name("slurm_start.py")
PACELINE = (sys.executable, "-m", "paceline")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a name that has to be quoted, twice as Slurm's patterns count."""
    folder = tmp_path / "my 50% $(run)"
    folder.mkdir()
    return folder


def start(slurm: Slurm, run: Path, seconds: float, code: int, *options: str) -> str:
    done = slurm.run(sys.executable, START, run, seconds, code, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def notes(run: Path) -> list[str]:
    path = run / "agents.txt"
    return path.read_text().splitlines() if path.exists() else []


def wait_for(run: Path, text: str, count: int = 1, timeout: float = 90) -> None:
    wait_until(lambda: sum(text in line for line in notes(run)) >= count, f"{text!r} in the notes", timeout)


def test_slurm_accepts_the_script_and_starts_an_agent_on_each_node(slurm: Slurm, run: Path) -> None:
    job = start(slurm, run, 0, 0, "cpus_per_rank=1", "minutes=5", "partition=main")
    tried = slurm.run("sbatch", "--test-only", run / "submit-1" / "job.sbatch")
    assert tried.returncode == 0, tried.stderr
    assert slurm.wait(job) == "COMPLETED"
    heads = f"--node0 n1 --node0 {slurm.lab.address('n1')}"
    assert sorted(line for line in notes(run) if "started" in line) == [
        f"0 0 started 2 {heads}",
        f"0 1 started 2 {heads}",
    ]
    output = (run / "submit-1" / f"slurm-{job}.out").read_text()
    assert "output of node 0" in output and "output of node 1" in output


@pytest.mark.slow
def test_an_exit_code_of_all_agents_is_the_jobs(slurm: Slurm, run: Path) -> None:
    done = slurm.run(sys.executable, START, run, 0, 7, "how=follow")
    assert done.returncode == 7, done.stderr
    assert "FAILED (NonZeroExitCode)" in done.stdout and "output of node 1" in done.stdout


@pytest.mark.slow
def test_when_time_is_nearly_over_the_run_saves_queues_again_and_goes_on(slurm: Slurm, run: Path) -> None:
    with slurm.popen(sys.executable, START, run, 60, 0, "how=follow", stdout=subprocess.PIPE, text=True) as following:
        wait_for(run, "started", 2)
        assert slurm.run("squeue", "-h", "-o", "%i").returncode == 0
        (job,) = slurm.run("squeue", "-h", "-o", "%i").stdout.split()
        assert slurm.run("scancel", "--batch", "--signal=USR1", job).returncode == 0  # what --signal=B:USR1 sends
        shown, _ = following.communicate(timeout=90)
        assert following.returncode == 0
    assert sorted(line for line in notes(run) if "told" in line) == ["0 0 told SIGUSR1", "0 1 told SIGUSR1"]
    assert sum(line.startswith("1 ") and "ended" in line for line in notes(run)) == 2
    states = [line.split(": ")[1] for line in shown.splitlines() if line.startswith(f"job {job}: ")]
    assert states[-1] == "COMPLETED on n[1-2], start 2" and any("BeginTime" in state for state in states)


def test_a_cancelled_run_saves_and_does_not_queue_again(slurm: Slurm, run: Path) -> None:
    job = start(slurm, run, 60, 0)
    wait_for(run, "started", 2)
    waiting = slurm.run(*PACELINE, "status", run)
    assert f"job {job}, on n[1-2]" in waiting.stdout and "running: RUNNING" in waiting.stdout
    done = slurm.run(*PACELINE, "cancel", run)
    assert done.returncode == 0, done.stderr
    assert "cancelled" in done.stdout and "CANCELLED" in done.stdout
    assert sorted(line for line in notes(run) if "told" in line) == ["0 0 told SIGTERM", "0 1 told SIGTERM"]
    assert sum("saved" in line for line in notes(run)) == 2
    assert slurm.state(job) == "CANCELLED" and slurm.show(job)["Restarts"] == "0"
    again = slurm.run(*PACELINE, "cancel", run)
    assert again.returncode == 0 and "nothing to cancel" in again.stderr


@pytest.mark.slow
def test_a_run_that_is_cancelled_now_does_not_save(slurm: Slurm, run: Path) -> None:
    job = start(slurm, run, 60, 0)
    wait_for(run, "started", 2)
    assert slurm.run(*PACELINE, "cancel", run, "--now").returncode == 0
    assert sorted(line for line in notes(run) if "saved" in line or "killed" in line) == ["0 0 killed", "0 1 killed"]
    assert slurm.show(job)["Restarts"] == "0"


def test_a_waiting_run_is_told_with_slurms_reason_and_can_be_cancelled(slurm: Slurm, run: Path) -> None:
    start(slurm, run, 0, 0, "options=hold")
    status = slurm.run(*PACELINE, "status", run).stdout
    assert "PENDING (JobHeldUser). " in status
    assert slurm.run(*PACELINE, "cancel", run, "--now").returncode == 0
    assert notes(run) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("nodes=5",), "--nodes 5 is more than the 4 nodes of partition main"),
        (("partition=gpx",), "Did you mean 'gpu'?"),
        (("gpus_per_node=2",), "partition main has 2 nodes"),
        (("options=constraint=none",), "nothing was submitted: Invalid feature specification"),
    ],
)
def test_what_the_cluster_cannot_run_is_refused_and_not_queued(
    slurm: Slurm, run: Path, options: tuple[str, ...], words: str
) -> None:
    if options == ("gpus_per_node=2",):
        options = (*options, "nodes=3")
    done = slurm.run(sys.executable, START, run, 0, 0, *options)
    assert done.returncode == 2 and words in done.stderr
    assert slurm.run("squeue", "-h").stdout == ""


@pytest.mark.slow
def test_ctrl_c_stops_following_and_leaves_the_job(slurm: Slurm, run: Path) -> None:
    with slurm.popen(sys.executable, START, run, 60, 0, "how=follow", stdout=subprocess.PIPE, text=True) as following:
        wait_for(run, "started", 2)
        following.send_signal(signal.SIGINT)
        shown, _ = following.communicate(timeout=60)
    assert following.returncode == 130 and "continues" in shown
    (job,) = slurm.run("squeue", "-h", "-o", "%i").stdout.split()
    assert slurm.state(job) == "RUNNING"
    slurm.run("scancel", job)
    assert slurm.wait(job) == "CANCELLED"


def test_ctrl_c_cancels_the_job_where_that_was_asked(slurm: Slurm, run: Path) -> None:
    with slurm.popen(sys.executable, START, run, 60, 0, "how=cancel", stdout=subprocess.PIPE, text=True) as following:
        wait_for(run, "started", 2)
        following.send_signal(signal.SIGINT)
        shown, _ = following.communicate(timeout=90)
    assert following.returncode == 75 and "CANCELLED" in shown
    assert sum("saved" in line for line in notes(run)) == 2


# ---- inside an allocation --------------------------------------------------------------------------------------------


def salloc(slurm: Slurm, run: Path, seconds: float, code: int, *options: str) -> subprocess.Popen[str]:
    words = ("salloc", "-Q", "-N2", "-c2", "--ntasks-per-node=1", sys.executable, START, run, seconds, code, *options)
    return slurm.popen(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_allocation_is_used_as_it_is(slurm: Slurm, run: Path) -> None:
    with salloc(slurm, run, 0, 7) as shell:
        shell.communicate(timeout=90)
    assert shell.returncode == 7 and sum("started 2 --node0 n1" in line for line in notes(run)) == 2


def test_another_shape_than_the_allocations_is_refused(slurm: Slurm, run: Path) -> None:
    with salloc(slurm, run, 0, 0, "nodes=1") as shell:
        _, said = shell.communicate(timeout=90)
    assert shell.returncode == 2 and "--nodes 1: " in said
    assert notes(run) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_inside_an_allocation_the_run_ends_with_its_launcher_and_saves(
    slurm: Slurm, run: Path, number: signal.Signals
) -> None:
    with salloc(slurm, run, 60, 0) as shell:
        wait_for(run, "started", 2)
        pids = slurm.run("pgrep", "-f", "slurm_start.py").stdout.split()
        launcher = [pid for pid in pids if "python" in slurm.run("ps", "-o", "comm=", "-p", pid).stdout]
        slurm.run("kill", f"-{number.name[3:]}", *launcher)
        wait_for(run, "told", 2, timeout=10)
        shell.communicate(timeout=90)
    if number == signal.SIGINT:  # salloc makes 0 of a command that was killed
        assert shell.returncode == 75
