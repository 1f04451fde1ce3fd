"""Does a run survive what machines do, wherever it was launched? The long proof on real daemons, case by case.

    PYTHONPATH=. python tests/cluster/soak_launch.py --part kills --out benchmarks/results/launch-kills.json

    digests  trainings over ssh, on Slurm and by the printed commands: the weights of one process here
    scripts  an existing DDP script by every launcher: one digest
    kills    one process of a run is killed at a random moment: nothing is left, and who failed is named
    slurm    time limit, preemption, node failure: the job queues again and comes to the same weights
    ports    two jobs at once with one port: both right, or one refused
    head     node 0 is lost: the others end within 20 s, and the run can be resumed

soak_hosts.py has hosts that are lost while the others go on. Root only. A part that was interrupted goes on: cases that
are in the file already are left out. The exit code is 1 if a case has a fault. tests/cluster/test_kills.py is a small
sample of this.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tests.cluster import soak_cases
from tests.cluster.kills import WHATS
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.soak_cases import RUN_SECONDS, TASKS, Bench, Result
from tests.cluster.ssh import SshHosts
from tests.cluster.training import Cluster, trained_here
from tests.soak_bits import cases_before

Case = Callable[[Bench], Result]
Cases = Iterator[tuple[str, Case]]


# ---- the parts: which cases there are -----------------------------------------------------------------------------


def cases_of(part: str, seed: int, count: int) -> Cases:
    """`count` cases of a part, its kinds by turns, each with dice of its own."""
    kinds: Mapping[str, list[tuple[str, Callable[..., Result]]]] = {
        "digests": [
            (f"{on} {task}", partial(soak_cases.digest_case, on=on, task=task))
            for task in TASKS
            for on in ("ssh", "slurm", "print torchrun", "print paceline")
        ],
        "scripts": [("all ways", soak_cases.script_case)],
        "kills": [
            (f"{on}, {what}", partial(soak_cases.kill_case, on=on, what=what)) for on in WHATS for what in WHATS[on]
        ],
        "slurm": [
            (fault, partial(soak_cases.slurm_case, fault=fault))
            for fault in ("preemption", "node failure", "time limit")
        ],
        "ports": [("over ssh", soak_cases.ports_case)],
        "head": [(fault, partial(soak_cases.head_case, fault=fault)) for fault in ("power_off", "cut", "kill")],
    }
    every = kinds[part]
    for number in range(count):
        name, case = every[number % len(every)]
        dice = random.Random(f"{seed} {part} {number}")
        yield f"{number} {name}", partial(case, dice=dice)


SSH_ALONE = ("ports", "head")
COUNTS: Mapping[str, int] = {
    "digests": 24, "scripts": 2, "kills": 45, "slurm": 9, "ports": 20, "head": 3,
}  # fmt: skip


# ---- running a part -----------------------------------------------------------------------------------------------


def run_case(case: Case, bench: Bench, *, with_slurm: bool) -> Result:
    """Run it; what it raises is a fault. Afterwards the hosts are as before."""
    began, cluster = time.monotonic(), bench.cluster
    bench.folder.mkdir()
    try:
        result = case(bench)
    except (AssertionError, subprocess.TimeoutExpired, TimeoutError, OSError, ValueError) as error:
        result = Result(faults=[f"{type(error).__name__}: {error}"[:3000]])
    result.seconds = round(time.monotonic() - began, 1)
    for pid in cluster.processes():
        os.kill(pid, signal.SIGKILL)
    cluster.lab.restore()
    if with_slurm:  # a host that was cut off is down to Slurm for minutes
        cluster.slurm.settle(60)
    return result


def machine() -> dict[str, object]:
    said = {name: subprocess.run([name, "-V"], capture_output=True, text=True) for name in ("slurmd", "ssh")}
    return {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        **{name: (done.stdout + done.stderr).strip() for name, done in said.items()},
    }


def soak(part: str, seed: int, count: int, out: Path, root: Path) -> dict[str, Result]:
    """All cases of a part, those that `out` holds already included; it is written after each."""
    cases = {name: Result(**result) for name, result in cases_before(part, seed, out).items()}
    known: dict[tuple[str, ...], str] = {}

    def expected(task: list[str]) -> str:
        if tuple(task) not in known:
            known[tuple(task)] = trained_here(task, root / f"expected-{len(known)}", RUN_SECONDS)
        return known[tuple(task)]

    for name in ("lab", "ssh", "slurm"):
        (root / name).mkdir()
    lab = Lab(root / "lab", 4)
    try:
        cluster = Cluster(lab, SshHosts.start(lab, root / "ssh"), Slurm.start(lab, root / "slurm"))
        for number, (name, case) in enumerate(cases_of(part, seed, count)):
            if name in cases:
                continue
            result = cases[name] = run_case(
                case, Bench(cluster, root / f"case-{number}", expected), with_slurm=part not in SSH_ALONE
            )
            result.told["load"] = round(os.getloadavg()[0], 1)  # what else ran on the machine
            told = {name: asdict(result) for name, result in cases.items()}
            out.write_text(json.dumps({"part": part, "seed": seed, **machine(), "cases": told}, indent=2) + "\n")
            print(f"{result.seconds:6.1f} s  {name}: {result.told}", flush=True)
            for fault in result.faults:
                print(f"          FAULT, see {root / f'case-{number}'}: {fault}", flush=True)
            if not result.faults:
                shutil.rmtree(root / f"case-{number}")
    finally:
        lab.close()
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=COUNTS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where the results are, and go: JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help=f"cases (default: {dict(COUNTS)})")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the lab's room dies with us in any case
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell, by children too
    root = Path(tempfile.mkdtemp(prefix="soak-launch-"))
    cases = soak(told.part, told.seed, told.count or COUNTS[told.part], told.out, root)
    faulty = [name for name, result in cases.items() if result.faults]
    words_of_faults = f"{len(faulty)} with faults: {'; '.join(faulty)}; see {root}" if faulty else "no fault"
    print(f"{len(cases)} cases, {words_of_faults}")
    if not faulty:
        shutil.rmtree(root)
    return int(bool(faulty))


if __name__ == "__main__":
    sys.exit(main())
