"""Does the test cluster vanish with the test run, however that ends, and do several of them not meet?"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster import cgroups
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm

REPOSITORY = Path(__file__).parents[2]
CLUSTER = """
import sys
from pathlib import Path
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
folder = Path(sys.argv[1])
lab = Lab(folder, 2)
(folder / "slurm").mkdir()
slurm = Slurm.start(lab, folder / "slurm")
lab.run("n2", "env", "-i", sys.argv[2], "/bin/sh", "-c", "(setsid sleep 64.5 >/dev/null 2>&1 &)")
print(slurm.run("srun", "-N2", "hostname").stdout.split(), flush=True)
if input() == "close":
    lab.close()
"""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_nothing_is_left_of_a_cluster(lab: Lab, slurm: Slurm, tmp_path: Path, end: str) -> None:
    # Beside this one, with the same names: each sees its own n1 and n2, and a job of one is none of the other's.
    mark = f"CLUSTER_MARK={tmp_path}"
    command = [sys.executable, "-c", CLUSTER, str(tmp_path), mark]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert sorted(eval(other.stdout.readline())) == ["n1", "n2"]
        assert lab.processes("n2") == {}
        assert slurm.run("srun", "-N2", "hostname").returncode == 0
        spaces = _namespaces_of_hosts(tmp_path)
        assert len(spaces) == 2
        # Slurm names its folders after the nodes: in the machine's root both clusters would have the same one.
        assert [path.name for path in _folders(other.pid, "slurm_*")] == ["slurm_n1", "slurm_n2"]
        if end == "kill":
            other.kill()
        else:
            other.stdin.write("close\n")
            other.stdin.flush()
        assert other.wait(10) == {"close": 0, "kill": -signal.SIGKILL}[end]
    deadline = time.monotonic() + 5
    while _namespaces_of_hosts(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _namespaces_of_hosts(tmp_path)
    while end == "kill" and _folders(other.pid) and time.monotonic() < deadline:
        cgroups.sweep()  # as the next cluster does: nobody was left to do it; who is just ending still holds its folder
        time.sleep(0.02)
    assert not _folders(other.pid)
    assert slurm.run("srun", "-N2", "hostname").returncode == 0


def _folders(owner: int, inside: str = "") -> list[Path]:
    return sorted(cgroups.ROOT.glob(f"*/{cgroups.PREFIX}{owner}-*/{inside}"))


def _namespaces_of_hosts(folder: Path) -> set[Path]:
    """The network namespaces, not this process's, of all processes that name the folder in their words or variables."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = b"".join((process / file).read_bytes() for file in ("cmdline", "environ"))
            if os.fsencode(folder) in words:
                found.add((process / "ns/net").readlink())
    return found - {Path("/proc/self/ns/net").readlink()}
