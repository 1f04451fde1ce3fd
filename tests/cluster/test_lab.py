"""Are the hosts of the test cluster, sshd and Slurm as real ones? Is each fault what it says?"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts

pytestmark = pytest.mark.sample(2)


def knock(lab: Lab, host: str, other: str, port: int = 22) -> str:
    """What a TCP connection to `other` meets within half a second."""
    code = lab.run(host, "timeout", "0.5", "bash", "-c", f"</dev/tcp/{other}/{port}").returncode
    return {0: "open", 1: "refused", 124: "silence"}[code]


def comes_true(law: Callable[[], bool]) -> bool:
    """Whether it holds within 5 seconds: what was told to end needs a moment for it."""
    deadline = time.monotonic() + 5
    while not (true := law()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


# ---- hosts ---------------------------------------------------------------------------------------------------------


def test_what_is_left_on_a_host_is_listed_and_its_daemons_are_not(lab: Lab, ssh_hosts: SshHosts) -> None:
    assert lab.processes("n3") == {}
    # Away from parent, session and environment: what only the host still knows of.
    lab.run("n3", "env", "-i", "/bin/sh", "-c", "(setsid sleep 61.5 >/dev/null 2>&1 &)")
    assert comes_true(lambda: list(lab.processes("n3").values()) == ["sleep 61.5"])
    assert lab.processes("n2") == {}
    lab.run("n3", "pkill", "--exact", "sleep")
    assert comes_true(lambda: lab.processes("n3") == {})


# ---- faults --------------------------------------------------------------------------------------------------------


def test_restore_undoes_every_fault(lab: Lab, ssh_hosts: SshHosts, tmp_path: Path) -> None:
    look = (
        "ip -o -4 addr | cut -d/ -f1; cat /etc/hosts; ls {}; stat -f -c %b /dev/shm; tc qdisc; nft list ruleset;"
        "cut -d' ' -f5 /proc/self/mountinfo"
    )
    (tmp_path / "shared").write_text("x")
    before = [lab.run(host, "sh", "-c", look.format(tmp_path)).stdout for host in lab.hosts]
    lab.deny("n1", from_="n2")
    lab.rate("n1", "10mbit")
    lab.names("n1", "127.0.1.1 n1")
    lab.hide("n1", tmp_path)
    lab.small("n2", "/dev/shm", "1m")
    lab.add_nic("n2", "eth1", "10.78.0.2")
    lab.cut("n2", "eth1")
    lab.cut("n2")
    lab.kill("n3")
    lab.power_off("n4")
    lab.restore()
    after = [lab.run(host, "sh", "-c", look.format(tmp_path)).stdout for host in lab.hosts]
    assert after == before
    assert comes_true(lambda: all(knock(lab, "n1", host) == "open" for host in lab.hosts))


# ---- sshd and Slurm -------------------------------------------------------------------------------------------------
