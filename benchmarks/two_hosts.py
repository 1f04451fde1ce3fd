"""How fast over a network? Two hosts made of namespaces, joined by a cable of a stated rate.

    python benchmarks/two_hosts.py --out benchmarks/results/two-hosts.json --rate 1gbit

`paceline train --on ssh` against torchrun with two nodes (DDP, as in benchmarks/peers.py and by its method), one rank
on each host, of which both have the same two cores. Beside them stands what the cable alone needs for the gradients: no
exchange between two ranks can be faster; with `--per-host 2`, none between two hosts. After the race each contender
takes some steps alone, and what leaves the hosts meanwhile is counted at their cables. Root only, and the programs of
tests/cluster (.ci/install).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from race.contenders import BASE, FLAGS, MODES, absent, contender, train
from race.figures import Row, rows_of, table, write
from race.heats import FIRST_STEPS, Pace, race
from race.starter import HERE, Contender, Lane, Launch, Popen
from race.works import WORKS

sys.path.insert(0, str(HERE.parents[1]))  # the hosts are those of the tests
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts

HOSTS = ("n1", "n2")
COUNTER = "/sys/class/net/eth0/statistics/tx_bytes"
COUNTED_STEPS = 10
PORT = 29500  # of torchrun: the hosts are ours alone
PROGRAMS = ("ip", "tc", "nsenter", "unshare", "setpriv", "setsid", "hostname", "ssh", "ssh-keygen", "/usr/sbin/sshd")
BITS = {"mbit": 1e6, "gbit": 1e9}


def over_ssh(name: str, work: str, ranks: int, ssh: SshHosts) -> Contender:
    """A mode of paceline, started on the first host by a person who has come to it."""
    passed = [word for variable in ("RACE_SOCKET", "PYTHONPATH") for word in ("--env", f"{variable}={{{variable}}}")]
    # the socket that ranks report to is a file, which all hosts see; what crosses the cable is the training
    # the hosts have the same cores: each rank would take all of them. The base has one thread, too
    where = ["--on", "ssh", "--hosts", ",".join(HOSTS), "--ssh", ssh.command, "--threads-per-rank", "1", *passed]
    plain = contender(name, work, len(HOSTS) * ranks)
    launch = Launch(train(work, "run", ["--nproc", str(ranks), *FLAGS.get(name, ()), *where]), host=HOSTS[0])
    return Contender(name, [launch], plain.ranks, plain.samples, exact=plain.exact)


def under_torchrun(work: str, ranks: int, lab: Lab) -> Contender:
    """The base: an agent on each host."""
    launches: list[Launch] = []
    for number, host in enumerate(HOSTS):
        where = [f"--nnodes={len(HOSTS)}", f"--node-rank={number}", f"--nproc-per-node={ranks}"]
        meet = [f"--master-addr={lab.address(HOSTS[0])}", f"--master-port={PORT}"]
        script = [str(HERE / "loops" / "vanilla.py"), work]
        argv = [sys.executable, "-m", "torch.distributed.run", *where, *meet, *script]
        launches.append(Launch(argv, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}, host))
    everybody = len(HOSTS) * ranks
    return Contender(BASE, launches, everybody, everybody * WORKS[work].batch)


def wire_ms(work: str, rate: str) -> float:
    """Milliseconds that one direction of the cable needs for one rank's gradients."""
    bits_a_second = float(rate[:-4]) * BITS[rate[-4:]]
    return 1000 * 8 * WORKS[work].parameter_bytes() / bits_a_second


def sent_mb(contenders: Sequence[Contender], lab: Lab, folder: Path, popen: Popen) -> dict[str, float]:
    """Megabytes that leave a host in a step, by its cable's own count: the mean of both hosts."""

    def sent_bytes() -> int:
        return sum(int(lab.run(host, "cat", COUNTER).stdout) for host in HOSTS)

    found: dict[str, float] = {}
    for number, one in enumerate(contenders):
        lane = Lane(one, folder / f"sent-{number}", popen)
        try:
            lane.ready()
            lane.lap(FIRST_STEPS)
            before = sent_bytes()
            lane.lap(COUNTED_STEPS)
            found[one.name] = round((sent_bytes() - before) / len(HOSTS) / COUNTED_STEPS / 1e6, 3)
        finally:
            lane.close()
    return found


def hindrance() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root: hosts are made of namespaces"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(missing)}: as root, .ci/install installs it" if missing else ""


def measure(work: str, rate: str, arguments: argparse.Namespace, pace: Pace) -> tuple[list[Row], dict[str, Any]]:
    """All contenders between two fresh hosts, at one rate of their cables."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        lab = Lab(Path(folder), len(HOSTS))
        try:
            ssh = SshHosts.start(lab, Path(folder))
            for host in HOSTS:
                lab.rate(host, rate)

            def popen(launch: Launch, env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[Any]:
                return lab.popen(launch.host, *launch.argv, env=env, stdout=log, stderr=log)

            modes = [name for name in arguments.modes if not absent(name)]
            contenders = [under_torchrun(work, arguments.per_host, lab)]
            contenders += [over_ssh(name, work, arguments.per_host, ssh) for name in modes]
            outcome = race(contenders, pace, popen)
            ran = [one for one in contenders if one.name not in outcome.left_out]
            sent = sent_mb(ran, lab, Path(folder), popen)
        finally:
            lab.close()
    about = {
        "steps_a_lap": outcome.steps,
        f"loss_after_{FIRST_STEPS}_steps": outcome.losses,
        "wire_ms": round(wire_ms(work, rate), 2),
        "gradient_mb": round(WORKS[work].parameter_bytes() / 1e6, 3),
        "sent_mb_by_a_host": sent,
        "faults": outcome.faults,
    }
    return rows_of(f"{work} {rate}", contenders, outcome), about


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["W1", "W3g"])
    parser.add_argument("--rate", nargs="+", default=["1gbit"], help="of each host's cable, e.g. 100mbit 1gbit")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=("default", "exact"))
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--patience", type=float, default=20.0)
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds of 2 steps: does it work?")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if why := hindrance():
        print(f"skipped: {why}")
        return 0
    for rate in arguments.rate:
        if rate[-4:] not in BITS or not rate[:-4].isdecimal():
            parser.error(f"--rate {rate}: a whole number and mbit or gbit, e.g. 100mbit, 1gbit")
    pace = Pace(2, 2, 0.0) if arguments.quick else Pace(arguments.rounds, None, arguments.patience)
    rows: list[Row] = []
    about: dict[str, Any] = {"hosts": len(HOSTS), "per_host": arguments.per_host, "rounds": pace.rounds, "works": {}}
    for work in ["tiny"] if arguments.quick else arguments.work:
        for rate in arguments.rate:
            found, about["works"][f"{work} {rate}"] = measure(work, rate, arguments, pace)
            rows += found
            if found:
                print(table(found))
            one = about["works"][f"{work} {rate}"]
            print(f"the cable alone: {wire_ms(work, rate):.1f} ms/step, gradients {one['gradient_mb']} MB")
            print(f"sent by a host, MB/step: {one['sent_mb_by_a_host']}\n")
            if arguments.out:
                write(arguments.out, about, rows)
    faults = [fault for one in about["works"].values() for fault in one["faults"]]
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
