"""What does `paceline scale` say of runs over several hosts? Hosts are namespaces, joined by cables of a limited rate,
which may be long ones, too.

All hosts have the same cores, those of this machine: more than there are cores take turns. Root only, and the programs
of tests/cluster (.ci/install). Used by scale_causes.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.host.cgroup import usable_cores
from paceline.lab.scale import (
    NetworkSpeed,
    ScalePoint,
    ScalingInputs,
    estimate_exchanged_bytes,
    estimate_step_seconds,
    parse_network,
    read_runs,
    step_parts_by_point,
)
from race.quiet import wait_until_idle
from race.wire import Wire

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the hosts are those of the tests
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts

RATE = "200mbit"
NETWORK = parse_network(RATE)
PACELINE = (sys.executable, "-m", "paceline")
PROGRAMS = ("ip", "tc", "nsenter", "unshare", "setpriv", "setsid", "hostname", "ssh", "ssh-keygen", "/usr/sbin/sshd")
WARM_UP = 5
LIMIT_SECONDS = 300
LONG = ("100mbit", "100mbit,10ms")  # of up to 8 hosts: to pass on 8 times 200 Mbit/s keeps both cores busy
UP_TO_8 = (1, 2, 4, 6, 8)


def hindrance() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root: hosts are made of namespaces"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(missing)}: as root, .ci/install installs it" if missing else ""


@dataclass(frozen=True)
class Hosts:
    """n1, n2, ..., each with a cable of RATE, and where runs on them leave their folders."""

    lab: Lab
    ssh: SshHosts
    folder: Path
    nic: str = ""  # over which ranks exchange; empty: as the agents find

    def train(self, task: str, ranks: int, batch: int, steps: int, name: str, *, strategy: str = "bucketed") -> Path:
        """One rank on each of so many hosts: the run's folder."""
        wait_until_idle(20.0)
        run_dir = self.folder / name
        words = [*PACELINE, "train", task, "--steps", steps + WARM_UP, "--batch-size", batch, "--device", "cpu",
                 "--threads-per-rank", 1, "--strategy", strategy, "--nproc", 1, "--run-dir", run_dir]  # fmt: skip
        if ranks > 1:
            names = ",".join(self.lab.hosts[:ranks])
            words += ["--on", "ssh", "--hosts", names, "--ssh", self.ssh.command]
            words += ["--env", f"GLOO_SOCKET_IFNAME={self.nic}"] if self.nic else []
        done = self.lab.run("n1", *words, cwd=self.folder, timeout=LIMIT_SECONDS)
        if done.returncode:
            raise RuntimeError(f"{ranks} hosts: {done.stderr}{done.stdout}")
        return run_dir


@contextmanager
def hosts(count: int, network: NetworkSpeed = NETWORK) -> Generator[Hosts]:
    """So many fresh ones."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, ExitStack() as stack:
        lab = Lab(Path(folder), count)
        stack.callback(lab.close)
        ssh = SshHosts.start(lab, Path(folder))
        bits, nic = 8 * network.bytes_per_second, ""
        if network.latency_seconds:
            nic = stack.enter_context(Wire(lab, lab.hosts, rate=bits, delay=network.latency_seconds)).NIC
        else:
            for host in lab.hosts:
                lab.rate(host, f"{bits:.0f}bit")
        yield Hosts(lab, ssh, Path(folder), nic)


def shares_over_hosts(tasks: Path, times: int, steps: int) -> Iterator[dict[str, Any]]:
    """What `paceline scale --runs` says of one rank and of two on two hosts, whose cable is what is slow."""
    with hosts(2) as found:
        for number in range(times):
            runs = [found.train(f"{tasks}:large", n, 64, steps, f"{n}-{number}") for n in (1, 2)]
            out = found.folder / "found.json"
            words = ["scale", "--runs", ",".join(map(str, runs)), "--mode", "weak", "--out", str(out)]
            said = subprocess.run([*PACELINE, *words], check=True, capture_output=True, text=True, timeout=60)
            yield {**json.loads(out.read_text()), "said": said.stdout}


def estimated_over_hosts(tasks: Path, ranks: Sequence[int], times: int, steps: int, link: str = RATE) -> dict[str, Any]:
    """Each number of hosts, weak and strong, estimated from one rank and the link."""
    each, whole, network = 64, 768, parse_network(link)
    with hosts(max(ranks), network) as found:
        runs = [
            found.train(f"{tasks}:large", n, batch, steps, f"{n}-{batch}-{number}")
            for number in range(times)
            for n in ranks
            for batch in ({each, whole // n} if n > 1 else {each, *(whole // m for m in ranks)})
        ]
        size, parts = estimate_exchanged_bytes(runs), step_parts_by_point(read_runs(runs, skip=WARM_UP), {})
    machine = ScalingInputs(usable_cores(), 1, size, exchanges_over_network=True)
    rows: list[dict[str, Any]] = []
    for at, one in parts.items():
        if at.ranks > 1:
            # more hosts than cores take turns: each works that much longer
            turns = machine.core_oversubscription(at.ranks) - 1
            seconds = (
                estimate_step_seconds(parts, machine, at.ranks, at.batch, network)
                + turns * parts[ScalePoint(1, at.batch)].step
            )
            rows.append({
                "at": {"ranks": at.ranks, "batch": at.batch}, "mode": "weak" if at.batch == each else "strong",
                "measured_seconds": one.step, "estimated_seconds": seconds, "error": seconds / one.step - 1,
            })  # fmt: skip
    what = f"one rank a host, {size / 1e6:.1f} MB of weights, cables of {link}"
    return {"what": what, "estimated": rows}
