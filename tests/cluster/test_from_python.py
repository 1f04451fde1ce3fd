"""paceline.run over the user's own ssh: a function goes to all hosts, and what it returns there comes back."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts

SCRIPT = """
import os, sys, time
from pathlib import Path
import paceline, paceline.errors

def where(fails):
    with paceline.session() as s:
        if fails and s.rank == 1:
            raise KeyError(f"not on {os.uname().nodename}")
        return os.uname().nodename, s.rank, s.sum(1.0)

def waits():
    with paceline.session() as s:
        if s.size == 2:
            Path(f"waits-{s.rank}").touch()
            time.sleep(100)
        return os.uname().nodename, s.size

def go(function, *args, **more):
    return paceline.run(function, 1, args, on="ssh", hosts=["n1", "n2"], options=["--ssh", sys.argv[1]], **more)

if sys.argv[2] == "lost":
    print(go(waits, nodes="1:2"))
else:
    print(go(where, False, nodes=2))
    try:
        go(where, True)
    except KeyError as error:
        print("raised", error, error.__notes__[0].splitlines()[0])
    try:
        go(where, nodes=0)
    except paceline.errors.UsageError as error:
        print("refused", error)
"""


def script(lab: Lab, ssh_hosts: SshHosts, folder: Path, act: str) -> subprocess.Popen[str]:
    (folder / "mine.py").write_text(SCRIPT)
    return lab.popen(
        "n1", sys.executable, "mine.py", ssh_hosts.command, act, cwd=folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_a_function_on_two_hosts(lab: Lab, ssh_hosts: SshHosts, tmp_path: Path) -> None:
    said, _ = script(lab, ssh_hosts, tmp_path, "all").communicate(timeout=420)
    assert "[('n1', 0, 2.0), ('n2', 1, 2.0)]" in said, said
    assert "on rank 1 (n2)" in said
    assert "refused --nodes 0" in said
    assert [*(tmp_path / "runs").iterdir()] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_function_goes_on_without_a_lost_host(lab: Lab, ssh_hosts: SshHosts, tmp_path: Path) -> None:
    process = script(lab, ssh_hosts, tmp_path, "lost")
    try:
        while not all((tmp_path / f"waits-{rank}").exists() for rank in range(2)):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        lab.kill("n2")
        said, _ = process.communicate(timeout=180)
    finally:
        process.kill()
        lab.boot("n2")
    assert "[('n1', 1)]" in said, said
