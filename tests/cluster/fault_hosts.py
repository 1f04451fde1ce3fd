"""What are the faults between hosts, and how does each strike? One run on n2 and n3, with paceline or torchrun."""

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.fault import Fault
from benchmarks.faults.run import PROGRAM, USERS, Launcher, Score, fault_environment, score, struck_now
from benchmarks.faults.setups import Ran, run_command
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts
from tests.cluster.training import FOLLOWER, HEAD, PACELINE, words

LAUNCHER_HOST, OTHER = "n1", "n4"
LIMIT_SECONDS = 90.0
JOIN_SECONDS = 20  # that an agent waits for the others, where they never come
ENDLESS = "100000"  # steps: until it is ended
LATE_SECONDS = 7.0  # of the host with the wrong clock: torchrun's rendezvous trusts clocks when one joins
SETTLE_SECONDS = 3.0
PORT = "29717"
AGENTS: Mapping[Launcher, str] = {"paceline": "paceline.launch.agent", "torchrun": "torch.distributed.run"}
CLOCK_BEHIND = """import datetime, time
BEHIND_SECONDS = 60
now = time.time
time.time = lambda: now() - BEHIND_SECONDS
class Behind(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) - datetime.timedelta(seconds=BEHIND_SECONDS)
    @classmethod
    def utcnow(cls):
        return super().utcnow() - datetime.timedelta(seconds=BEHIND_SECONDS)
datetime.datetime = Behind
"""


@dataclass(frozen=True)
class Hosts:
    """Two hosts for a run, one to start it from, one that is only there."""

    lab: Lab
    ssh: SshHosts

    def left(self) -> tuple[str, ...]:
        """What still runs on any of them, after a while."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (found := self._running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return tuple(f"{host}: {said}" for host, said in found.values())

    def kill_all(self) -> None:
        for pid in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _running(self) -> dict[int, tuple[str, str]]:
        return {pid: (host, said) for host in self.lab.hosts for pid, said in self.lab.processes(host).items()}


# ---- faults that strike a run ------------------------------------------------------------------------------------


def power_off(hosts: Hosts, launcher: Launcher) -> None:
    hosts.lab.power_off(FOLLOWER)


def kill_host(hosts: Hosts, launcher: Launcher) -> None:
    hosts.lab.kill(FOLLOWER)


def kill_agent(hosts: Hosts, launcher: Launcher) -> None:
    pids = [pid for pid, said in hosts.lab.processes(FOLLOWER).items() if AGENTS[launcher] in said]
    assert pids, hosts.lab.processes(FOLLOWER)
    os.kill(min(pids), signal.SIGKILL)


def cut(hosts: Hosts, launcher: Launcher) -> None:
    hosts.lab.cut(FOLLOWER)


def one_way(hosts: Hosts, launcher: Launcher) -> None:
    hosts.lab.deny(FOLLOWER, from_=HEAD)


def power_off_head(hosts: Hosts, launcher: Launcher) -> None:
    hosts.lab.power_off(HEAD)


STRIKES: Mapping[str, Callable[[Hosts, Launcher], None]] = {
    "node-powered-off": power_off,
    "node-killed": kill_host,
    "agent-killed": kill_agent,
    "network-cut": cut,
    "one-way-cut": one_way,
    "head-lost": power_off_head,
}


# ---- faults that keep a run from starting ------------------------------------------------------------------------


def wrong_address(hosts: Hosts) -> None:
    hosts.lab.names(FOLLOWER, f"{hosts.lab.address(OTHER)} {HEAD}")


def blackhole(hosts: Hosts) -> None:
    hosts.lab.deny(HEAD, from_=FOLLOWER)


def nothing(hosts: Hosts) -> None:
    pass


BEFORE: Mapping[str, Callable[[Hosts], None]] = {
    "wrong-address": wrong_address,
    "blackhole": blackhole,
    "unknown-name": nothing,
    "clock-behind": nothing,
}


# ---- one run -----------------------------------------------------------------------------------------------------


def run_on_hosts(fault: Fault, launcher: Launcher, hosts: Hosts, folder: Path, *, hang_timeout: str) -> Score:
    """One run in `folder`, which must not exist; afterwards the hosts are as before."""
    folder.mkdir(parents=True)
    for file in USERS.glob("*.py"):
        shutil.copy(file, folder)
    env = {**fault_environment(fault, launcher, folder), "GLOO_SOCKET_IFNAME": "eth0"}
    over = threading.Event()
    try:
        if fault.name in STRIKES:
            env["FAULT_STEPS"] = ENDLESS
            with striking(fault, launcher, hosts, folder, over):
                ran = launched(fault, launcher, hosts, folder, env, hang_timeout)
        else:
            BEFORE[fault.name](hosts)
            struck_now(folder)
            ran = typed(fault, launcher, hosts, folder, env, hang_timeout)
        ran = replace(ran, processes_left=hosts.left())
    finally:
        over.set()
        hosts.kill_all()
        hosts.lab.restore()
    return score(fault, launcher, ran, folder)


@contextlib.contextmanager
def striking(fault: Fault, launcher: Launcher, hosts: Hosts, folder: Path, over: threading.Event) -> Generator[None]:
    """Meanwhile wait for the moment that the guilty rank gives, and strike."""
    moment = folder / f"struck-{fault.ranks[0]}"

    def strike() -> None:
        while not moment.exists():
            if over.wait(0.01):
                return
        STRIKES[fault.name](hosts, launcher)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def launched(
    fault: Fault, launcher: Launcher, hosts: Hosts, folder: Path, env: Mapping[str, str], hang_timeout: str
) -> Ran:
    """A run that was started as people start it: over ssh, or by torchrun's command on each host."""
    if launcher == "torchrun":
        return typed(fault, launcher, hosts, folder, env, hang_timeout)
    own = [name for name in env if name != "OMP_NUM_THREADS"]  # the launcher's business
    told = [word for name in own for word in ("--env", f"{name}={env[name]}")]
    where = words("--on", "ssh", "--hosts", f"{HEAD},{FOLLOWER}", "--ssh", hosts.ssh.command, "--nproc", 1, *told)
    argv = [*PACELINE, "launch", *where, "--hang-timeout", hang_timeout, "--run-dir", f"{folder}/run", "--", PROGRAM]
    return on_host(hosts, LAUNCHER_HOST, argv, folder, {})


def typed(
    fault: Fault, launcher: Launcher, hosts: Hosts, folder: Path, env: Mapping[str, str], hang_timeout: str
) -> Ran:
    """A command typed on each host, the printed ones of paceline or torchrun's; what both say, in its order."""
    commands = agents(hosts, folder, hang_timeout) if launcher == "paceline" else torchruns(fault)
    more: list[dict[str, str]] = [{}, {}]
    if fault.name == "unknown-name":
        commands[1] = commands[1].replace(f"--node0 {HEAD}", "--node0 nosuch").replace(f"={HEAD}", "=nosuch")
    if fault.name == "clock-behind":
        (folder / "clock").mkdir()
        (folder / "clock" / "sitecustomize.py").write_text(CLOCK_BEHIND)
        more[1] = {"PYTHONPATH": str(folder / "clock")}
        commands[1] = f"sleep {LATE_SECONDS}; {commands[1]}"
    with ThreadPoolExecutor(2) as threads:
        both = [
            threads.submit(on_host, hosts, host, ["bash", "-c", command], folder, {**env, **own})
            for host, command, own in zip((HEAD, FOLLOWER), commands, more, strict=True)
        ]
        first, second = (one.result() for one in both)
    codes = [first.code, second.code]
    return Ran(
        code=None if None in codes else next((code for code in codes if code), 0),
        lines=tuple(sorted([*first.lines, *second.lines])),
        began_seconds=first.began_seconds,
        ended_seconds=max(first.ended_seconds, second.ended_seconds),
        processes_left=(),
        files_left=(*first.files_left, *second.files_left),
    )


def agents(hosts: Hosts, folder: Path, hang_timeout: str) -> list[str]:
    """The commands that paceline prints for both hosts."""
    where = words("--on", "print", "--agent", "paceline", "--hosts", f"{HEAD},{FOLLOWER}", "--nproc", 1)
    wait = words("--join-timeout", JOIN_SECONDS, "--hang-timeout", hang_timeout, "--run-dir", folder / "run")
    done = hosts.lab.run(LAUNCHER_HOST, *PACELINE, "launch", *where, *wait, "--", PROGRAM, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "paceline.launch.agent" in line]


def torchruns(fault: Fault) -> list[str]:
    """The commands that torchrun's documentation has for both hosts."""
    if fault.name == "clock-behind":
        meet = f"--rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint={HEAD}:{PORT} --nnodes=1:2"
    else:
        meet = f"--nnodes=2 --master-addr={HEAD} --master-port={PORT}"
    each = "" if "rdzv" in meet else "--node-rank={}"
    start = f"exec {sys.executable} -m torch.distributed.run {meet} --nproc-per-node=1"
    return [f"{start} {each.format(node)} {PROGRAM}" for node in range(2)]


def on_host(hosts: Hosts, host: str, argv: list[str], folder: Path, env: Mapping[str, str]) -> Ran:
    """Run a command on a host, in a session and with a TMPDIR of its own."""

    def popen(argv: list[str], **options: Any) -> Any:
        return hosts.lab.popen(host, *argv, **options)

    own = folder / host
    own.mkdir()
    run = partial(run_command, popen=popen, limit_seconds=LIMIT_SECONDS)
    return run(["sh", "-c", 'cd "$0" && exec "$@"', str(folder), *argv], own, env)
