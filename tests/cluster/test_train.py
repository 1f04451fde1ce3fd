"""One command, three ways to two hosts: the same training, to the last bit, on real daemons."""

import os
import re
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.soak_hosts import TASK as SLOW_TASK
from tests.cluster.ssh import SshHosts
from tests.cluster.training import (
    EXACT,
    PACELINE,
    clean_ledger,
    events,
    resumed_after,
    trained_here,
    type_everywhere,
    wait_for_step,
    weights,
    words,
)
from tests.ended import start_steps
from tests.errors import codes
from tests.launch.test_audit import SESSION as AUDITED_SESSION
from tests.launch.test_audit import TASK as AUDITED_TASK
from tests.run_script import run_script

from paceline.tasks.mnist import CNN

GRADIENT_BYTES = 4 * sum(parameter.numel() for parameter in CNN().parameters())
SAID = "gradients are added up in shared memory on each of 2 nodes (2 ranks each), and over gloo between nodes"


@pytest.fixture(scope="session")
def task(small_mnist: Path) -> list[str]:
    """A training of 8 steps."""
    return words("train", "mnist-cnn", "--data-dir", small_mnist, "--steps", 8, "--batch-size", 16, *EXACT)


@pytest.fixture(scope="session")
def expected(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that one process on this machine comes to."""
    return trained_here(task, tmp_path_factory.mktemp("expected") / "run", 60)


def sent_bytes(lab: Lab, host: str) -> int:
    return int(lab.run(host, "cat", "/sys/class/net/eth0/statistics/tx_bytes").stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [EXACT, pytest.param(("--device", "cpu"), marks=pytest.mark.soak)], ids=["exact", "default"]
)
def test_two_ssh_hosts_of_two_ranks_send_gradients_once_and_come_to_the_weights_of_one_process(
    lab: Lab, ssh_hosts: SshHosts, task: list[str], expected: str, tmp_path: Path, how: tuple[object, ...]
) -> None:
    """The default promises no bits; but of 2 x 2 ranks it has the same tree."""
    run_dir, before = tmp_path / "run", sent_bytes(lab, "n3")
    where = words("--on", "ssh", "--hosts", "n2,n3", "--nproc", 2, "--ssh", ssh_hosts.command, "--run-dir", run_dir)
    done = lab.run("n1", *PACELINE, *task[: -len(EXACT)], *words(*how), *where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "step 8/8" in done.stdout
    assert (done.stderr + done.stdout).count(SAID) == 1, done.stderr + done.stdout
    assert weights(run_dir) == expected
    sent = sent_bytes(lab, "n3") - before
    # besides: headers, totals, words, and what the launcher says; 1.5 times as much in a ring of all four ranks
    assert 8 * GRADIENT_BYTES < sent < 1.3 * 8 * GRADIENT_BYTES
    clean_ledger(run_dir)


@pytest.mark.slow
def test_two_slurm_nodes_come_to_the_weights_of_one_process(
    slurm: Slurm, task: list[str], expected: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    where = words("--on", "slurm", "--nodes", 2, "--nproc", 2, "--time", 10, "--follow", "--run-dir", run_dir)
    done = slurm.run(*PACELINE, *task, *where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "step 8/8" in done.stdout
    assert weights(run_dir) == expected
    clean_ledger(run_dir)


@pytest.mark.slow
def test_a_slow_ssh_host_gets_fewer_virtual_ranks(lab: Lab, ssh_hosts: SshHosts, tmp_path: Path) -> None:
    script, run_dir = tmp_path / "task.py", tmp_path / "run"
    task = words("train", f"{script}:task", "--steps", 80, "--global-batch", 24, *EXACT)
    script.write_text(SLOW_TASK.replace("STEP_SECONDS", "0"))
    expected = trained_here(task, tmp_path / "expected", 60)
    script.write_text(SLOW_TASK.replace("STEP_SECONDS", "0.1 if __import__('os').environ.get('RANK') == '1' else 0.02"))
    hosts = words("--on", "ssh", "--hosts", "n2,n3", "--nproc", 1, "--ssh", ssh_hosts.command, "--balance", "auto")
    done = lab.run("n1", *PACELINE, *task, *hosts, "--run-dir", run_dir, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert [event["share"] for event in events(run_dir) if event.get("kind") == "step"][-1] == [0, 3]
    assert weights(run_dir) == expected
    clean_ledger(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "right_calls", "right_steps", "left"),  # audited in the next step, in which it begins to compute wrongly
    [
        pytest.param(3, 9, 6, 2, id="whole-node-1"),
        pytest.param(1, 5, 4, 3, id="one-rank-of-node-0"),
        pytest.param(0, 5, 3, 3, id="rank-0"),
    ],
)
def test_a_rank_with_wrong_numbers_is_excluded_on_either_of_two_ssh_hosts(
    lab: Lab, ssh_hosts: SshHosts, tmp_path: Path, wrong: int, right_calls: int, right_steps: int, left: int
) -> None:
    script, run_dir = tmp_path / "mine.py", tmp_path / "run"
    condition = f'self.calls > {right_calls} and [os.environ[n] for n in ("RANK", "WORLD_SIZE")] == ["{wrong}", "4"]'
    script.write_text(re.sub(r"self.calls > .*(?=:$)", condition, AUDITED_TASK, count=1, flags=re.MULTILINE))
    task = words("train", f"{script}:task", "--global-batch", 24, "--steps", 12, *EXACT)
    expected = trained_here(task, tmp_path / "expected")
    hosts = words("--on", "ssh", "--hosts", "n2,n3", "--nodes", "1:2", "--nproc", 2, "--ssh", ssh_hosts.command)
    audits = words("--audit-every", 1, "--on-audit", "exclude", "--checkpoint-every", 100)
    done = lab.run("n1", *PACELINE, *task, *hosts, *audits, "--run-dir", run_dir, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert codes(done.stderr)[:1] == ["audit-wrong-numbers"], done.stderr
    assert f"rank {wrong} ({'n3' if wrong > 1 else 'n2'})" in done.stderr
    assert start_steps(run_dir) == [0, right_steps]
    sizes = [event["world_size"] for event in events(run_dir) if event.get("kind") == "started"]
    assert sizes == [4, left]
    assert weights(run_dir) == expected
    clean_ledger(run_dir)


@pytest.mark.slow
def test_a_session_that_could_not_exclude_a_node_is_an_error_before_the_first_step(
    lab: Lab, ssh_hosts: SshHosts, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(AUDITED_SESSION)
    where = words("--on", "ssh", "--hosts", "n2,n3", "--nproc", 1, "--ssh", ssh_hosts.command)
    done = lab.run("n1", *PACELINE, "launch", *where, "loop.py", "exclude", cwd=tmp_path)
    assert done.returncode == 2 and "exclude-from-fixed-nodes" in codes(done.stderr), done.stderr
    assert not [*(tmp_path / "run").glob("events*")]


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options",
    [
        "--strategy exact --virtual-ranks 4",  # all ranks hold all
        "--strategy zero --virtual-ranks 4",  # each holds a share
        "--local-steps 4 --compress int8",  # each host has parameters of its own, and what it holds back
    ],
)
def test_a_lost_host_costs_the_steps_since_the_last_snapshot_in_the_memory_of_another(
    lab: Lab, ssh_hosts: SshHosts, tmp_path: Path, options: str
) -> None:
    script, run_dir = tmp_path / "task.py", tmp_path / "run"
    never = 1000  # there is no checkpoint to go on from
    task = words("train", f"{script}:task", "--steps", 60, "--batch-size", 4, *options.split())
    task += words("--device", "cpu", "--checkpoint-every", never)
    script.write_text(SLOW_TASK.replace("STEP_SECONDS", "0"))
    expected = trained_here(task, tmp_path / "expected", 60)
    # long enough that on busy cores, too, a snapshot is exchanged within 5 % of the time: else some are left out
    script.write_text(SLOW_TASK.replace("STEP_SECONDS", "0.1"))
    hosts = words("--on", "ssh", "--hosts", "n2,n3", "--nodes", "1:2", "--nproc", 1, "--max-restarts", 1)
    hosts += ["--ssh", ssh_hosts.command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launcher = lab.popen("n1", *PACELINE, *task, *hosts, "--run-dir", run_dir, cwd=tmp_path, **pipes)
    try:
        wait_for_step(run_dir, 25)
        own = next(event["pid"] for event in events(run_dir) if event.get("kind") == "started")
        (left,) = (pid for pid in lab.processes("n2") if pid_within(pid) == own)
        os.kill(left, signal.SIGKILL)  # else it saves what it has after its last step
        lab.kill("n3")
        said = launcher.communicate(timeout=180)[0]
    finally:
        launcher.kill()
        lab.boot("n3")
    assert launcher.returncode == 0, said
    assert resumed_after(run_dir) >= 20, said  # from a snapshot: there is no checkpoint
    if "--local-steps" in options:
        assert weights(run_dir) != expected and "are dropped" in said and "from the mean" in said
    else:
        assert weights(run_dir) == expected
    clean_ledger(run_dir)
    ends = [int(str(e["step"])) for e in events(run_dir) if e.get("kind") == "step"]
    again = next(before - after + 1 for before, after in pairwise(ends) if after <= before)
    assert again <= 10  # the interval of snapshots


TWO_ON_A_HOST = """
import os
from paceline.collectives import shared_memory
shared_memory.node_key = lambda: str(int(os.environ["RANK"]) // 2)
"""


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "tensor=4"])  # each host has a whole model; both share one
def test_a_killed_rank_of_a_mesh_over_hosts_costs_the_steps_since_the_last_snapshot(
    lab: Lab, ssh_hosts: SshHosts, tmp_path: Path, mesh: str
) -> None:
    script, run_dir = tmp_path / "task.py", tmp_path / "run"
    how = words("--steps", 60, "--batch-size", 4, "--mesh", mesh, "--device", "cpu", "--threads-per-rank", 1)
    (tmp_path / "here.py").write_text(TWO_ON_A_HOST + SLOW_TASK.replace("STEP_SECONDS", "0"))
    here = ("-m", "paceline", "train", "here.py:task", *how, "--run-dir", "expected")
    done = run_script(4, *here, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    script.write_text(SLOW_TASK.replace("STEP_SECONDS", "0.02"))
    task = words("train", f"{script}:task", *how, "--checkpoint-every", 1000, "--max-restarts", 1)
    task += words("--on", "ssh", "--hosts", "n2,n3", "--nproc", 2, "--ssh", ssh_hosts.command)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launcher = lab.popen("n1", *PACELINE, *task, "--run-dir", run_dir, cwd=tmp_path, **pipes)
    wait_for_step(run_dir, 25)
    os.kill(max(pid for pid, command in lab.processes("n3").items() if " train " in command), signal.SIGKILL)
    said = launcher.communicate(timeout=180)[0]
    assert launcher.returncode == 0, said
    assert resumed_after(run_dir) >= 20, said
    assert weights(run_dir) == weights(tmp_path / "expected")
    clean_ledger(run_dir)


def pid_within(pid: int) -> int:
    """The pid that a process of a host has there."""
    numbers = re.search(r"^NSpid:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert numbers is not None
    return int(numbers[1].split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["torchrun", "paceline"])
def test_what_is_printed_and_typed_on_two_hosts_comes_to_the_weights_of_one_process(
    lab: Lab, task: list[str], expected: str, tmp_path: Path, agent: str
) -> None:
    run_dir = tmp_path / "run"
    where = words("--on", "print", "--hosts", "n2,n3", "--nproc", 2, "--agent", agent, "--run-dir", run_dir)
    printed = lab.run("n1", *PACELINE, *task, *where, cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    type_everywhere(lab, printed.stdout, tmp_path)
    assert weights(run_dir) == expected


@pytest.mark.slow
def test_a_failing_rank_on_a_slurm_node_is_named_and_its_exit_code_comes_out(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(7)\ntime.sleep(60)\n")
    begun = time.monotonic()
    done = slurm.run(
        *PACELINE, "launch", *words("--on", "slurm", "--nodes", 2, "--nproc", 2, "--follow", "--", script), cwd=tmp_path
    )
    assert done.returncode == 7, done.stderr + done.stdout
    assert "rank 3 (n2, pid" in done.stdout
    assert time.monotonic() - begun < 30
