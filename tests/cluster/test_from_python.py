"""paceline.run over the user's own ssh: a function goes to all hosts, and what it returns there comes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts

SCRIPT = """
import os, sys
import paceline

def where(fails):
    with paceline.session() as s:
        if fails and s.rank == 1:
            raise KeyError(f"not on {os.uname().nodename}")
        return os.uname().nodename, s.rank, s.sum(1.0)

def go(fails=False):
    return paceline.run(where, 1, (fails,), on="ssh", hosts=["n1", "n2"], options=["--ssh", sys.argv[1]])

print(go())
try:
    go(fails=True)
except KeyError as error:
    print("raised", error, error.__notes__[0].splitlines()[0])
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_function_on_two_hosts(lab: Lab, ssh_hosts: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = lab.popen(
        "n1", sys.executable, "mine.py", ssh_hosts.command, cwd=tmp_path, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said, _ = done.communicate(timeout=140)
    assert "[('n1', 0, 2.0), ('n2', 1, 2.0)]" in said, said
    assert "raised 'not on n2' on rank 1 (n2)" in said
    assert [*(tmp_path / "runs").iterdir()] == []
