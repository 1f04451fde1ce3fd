"""A link between two hosts that is rate-limited: `scale` says of their runs that communication is what is lost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts
from tests.cluster.training import FOLLOWER, HEAD, PACELINE, words

from paceline.lab.scale import EXCHANGE, REST

TASKS = Path(__file__).parents[1] / "lab" / "tasks_to_measure.py"
WEIGHT_BYTES = 4 * (256 * 512 + 512 + 4 * (512 * 512 + 512))
RATE_BYTES = 200e6 / 8


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_rate_limited_link_is_communication_and_the_rate_is_found_again(
    lab: Lab, ssh_hosts: SshHosts, tmp_path: Path
) -> None:
    task = words("train", f"{TASKS}:large", "--steps", 25, "--batch-size", 32, "--device", "cpu",
                 "--threads-per-rank", 1, "--strategy", "exact")  # fmt: skip
    folders = [tmp_path / "one", tmp_path / "two"]
    one = subprocess.run(
        [*PACELINE, *task, *words("--nproc", 1, "--run-dir", folders[0])],
        capture_output=True, text=True, timeout=750, cwd=tmp_path,
    )  # fmt: skip
    assert one.returncode == 0, one.stderr
    lab.rate(FOLLOWER, "200mbit")
    where = words("--on", "ssh", "--hosts", f"{HEAD},{FOLLOWER}", "--nproc", 1, "--ssh", ssh_hosts.command, "--run-dir",
                  folders[1])  # fmt: skip
    two = lab.run("n1", *PACELINE, *task, *where, cwd=tmp_path, timeout=750)
    assert two.returncode == 0, two.stderr + two.stdout
    runs = ",".join(map(str, folders))
    scale = words("scale", "--runs", runs, "--mode", "weak", "--out", tmp_path / "found.json")
    said = subprocess.run([*PACELINE, *scale], capture_output=True, text=True, timeout=180)
    assert said.returncode == 0, said.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    [lost] = found["lost"]
    shares = {share["cause"]: share for share in lost["shares"]}
    assert lost["shares"][0]["cause"] == EXCHANGE, said.stdout
    assert sum(share["percent"] for share in lost["shares"] if share["cause"] != REST) == pytest.approx(100, abs=5)
    # of two, each sends as much as it has, both ways at once; the link bursts a little, and headers are more
    assert WEIGHT_BYTES / shares[EXCHANGE]["seconds"] == pytest.approx(RATE_BYTES, rel=0.35)
    assert "most of it" in said.stdout and "to exposed communication" in said.stdout
