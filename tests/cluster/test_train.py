"""One command, three ways to two hosts: the same training, to the last bit, on real daemons."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.ssh import SshHosts

PACELINE = (sys.executable, "-m", "paceline")
SCRIPT = Path(__file__).parents[2] / "examples" / "existing_ddp.py"
MNIST = SCRIPT.parents[1] / "src" / "paceline" / "data" / "mnist"
EXACT = ("--strategy", "exact", "--virtual-ranks", 4, "--device", "cpu")


def words(*values: object) -> list[str]:
    return [str(value) for value in values]


def weights(run_dir: Path) -> str:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exit"] == 0, summary
    return summary["weights_sha256"]


@pytest.fixture(scope="session")
def task(small_mnist: Path) -> list[str]:
    """A training of 8 steps."""
    return words("train", "mnist-cnn", "--data-dir", small_mnist, "--steps", 8, "--batch-size", 16, *EXACT)


@pytest.fixture(scope="session")
def expected(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that one process on this machine comes to."""
    run_dir = tmp_path_factory.mktemp("expected") / "run"
    done = subprocess.run(
        [*PACELINE, *task, *words("--nproc", 1, "--run-dir", run_dir)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return weights(run_dir)


def clean_ledger(run_dir: Path) -> None:
    done = subprocess.run([*PACELINE, "ledger", str(run_dir)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_ssh_hosts_come_to_the_weights_of_one_process(
    lab: Lab, ssh_hosts: SshHosts, task: list[str], expected: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    where = words("--on", "ssh", "--hosts", "n2,n3", "--nproc", 2, "--ssh", ssh_hosts.command, "--run-dir", run_dir)
    done = lab.run("n1", *PACELINE, *task, *where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "step 8/8" in done.stdout
    assert weights(run_dir) == expected
    clean_ledger(run_dir)


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


@pytest.mark.parametrize("agent", ["torchrun", "paceline"])
def test_what_is_printed_and_typed_on_two_hosts_comes_to_the_weights_of_one_process(
    lab: Lab, task: list[str], expected: str, tmp_path: Path, agent: str
) -> None:
    run_dir = tmp_path / "run"
    where = words("--on", "print", "--hosts", "n2,n3", "--nproc", 2, "--agent", agent, "--run-dir", run_dir)
    printed = lab.run("n1", *PACELINE, *task, *where, cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    typed = [line for line in printed.stdout.splitlines() if line and not line.startswith("#")]
    assert len(typed) == 2
    nodes = [
        lab.popen(host, "bash", "-c", line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for host, line in zip(("n2", "n3"), typed, strict=True)
    ]
    said = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert weights(run_dir) == expected


def test_an_unmodified_ddp_script_comes_to_the_same_weights_everywhere(
    lab: Lab, ssh_hosts: SshHosts, slurm: Slurm, tmp_path: Path
) -> None:
    """What torchrun would start, started by each of our launchers."""
    script = words("--", SCRIPT, "--epochs", 1, "--data", MNIST)
    shape = words("--nproc", 2, "--threads-per-rank", 1)
    ways = {
        "local": ["--nproc", "4", "--threads-per-rank", "1"],
        "ssh": [*shape, *words("--on", "ssh", "--hosts", "n2,n3", "--ssh", ssh_hosts.command)],
        "slurm": [*shape, *words("--on", "slurm", "--nodes", 2, "--follow")],
        "print": [*shape, *words("--on", "print", "--hosts", "n2,n3")],
    }
    digests: dict[str, set[str]] = {}
    for name, way in ways.items():
        done = slurm.run(*PACELINE, "launch", *way, "--run-dir", tmp_path / name, *script, cwd=tmp_path, timeout=90)
        assert done.returncode == 0, f"{name}: {done.stderr}{done.stdout}"
        said = done.stdout
        if name == "print":
            lines = [line for line in said.splitlines() if line and not line.startswith("#")]
            nodes = [
                lab.popen(host, "bash", "-c", line, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
                for host, line in zip(("n2", "n3"), lines, strict=True)
            ]
            said = "".join(node.communicate(timeout=60)[0] for node in nodes)
        digests[name] = {line.rpartition(" ")[2] for line in said.splitlines() if "weights" in line}
    assert digests["local"] and all(found == digests["local"] for found in digests.values()), digests


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
