"""Who takes part, and the commands that start them.

default, exact, fast   `paceline train` as it is, with --strategy exact, with --precision bf16
one-rank               `paceline train` in one process with one thread: what scaling is judged by
vanilla                torchrun, DDP, DistributedSampler, DataLoader: the base of all ratios
accelerate, fabric, ignite
no-exchange            as many trainings by themselves as there are ranks, at the same time: the limit
no-exchange-fast       the same with --precision bf16
copying                as many copies of the gradients' bytes: the limit of an exchange
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from subprocess import run

from race.starter import HERE, Contender, Launch
from race.works import WORKS

BASE = "vanilla"
MODES = ("default", "exact", "fast")
PEERS = {"accelerate": "accelerate", "fabric": "lightning_fabric", "ignite": "ignite"}  # and the package of each
LIMITS = ("one-rank", "no-exchange", "no-exchange-fast", "copying")
NAMES = (BASE, *MODES, *PEERS, *LIMITS)
FOR_EVER = "1000000000"
FLAGS = {"exact": ("--strategy", "exact"), "fast": ("--precision", "bf16")}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
PACELINE = (sys.executable, "-m", "paceline", "train")


def contender(name: str, work: str, ranks: int, more: Sequence[str] = ()) -> Contender:
    """`name` on so many ranks of this machine. `more` are flags of `paceline train`."""
    batch = WORKS[work].batch
    if name in MODES:
        command = train(work, "run", ["--nproc", str(ranks), *FLAGS.get(name, ()), *more])
        return Contender(name, [Launch(command)], ranks, ranks * batch, exact=name != "fast")
    if name == "one-rank":
        return Contender(name, [alone(work, 0, more)], 1, batch, compared=False)
    if name.startswith("no-exchange"):
        own = (*FLAGS.get(name.removeprefix("no-exchange-"), ()), *more)
        return Contender(name, [alone(work, n, own) for n in range(ranks)], ranks, ranks * batch, compared=False)
    if name == "copying":
        launches = [
            Launch([sys.executable, str(HERE / "loops" / "copying.py"), work], {"RACE_RANK": str(n)})
            for n in range(ranks)
        ]
        return Contender(name, launches, ranks, ranks * batch, compared=False)
    script = "vanilla" if name == BASE else f"with_{name}"
    launcher = [*TORCHRUN, f"--nproc-per-node={ranks}", str(HERE / "loops" / f"{script}.py"), work]
    # one thread: torchrun's own choice, without its warning
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return Contender(name, [Launch(launcher, env)], ranks, ranks * batch)


def train(work: str, folder: str, flags: Sequence[str]) -> list[str]:
    """`paceline train` on a work, without end."""
    own = ["--steps", FOR_EVER, "--run-dir", "{RACE_FOLDER}/" + folder]
    return [*PACELINE, f"race.tasks:{work}", *WORKS[work].train_flags, *own, *flags]


def alone(work: str, number: int, more: Sequence[str] = ()) -> Launch:
    """A training by itself in one process with one thread."""
    flags = ["--nproc", "1", "--threads-per-rank", "1", *more]
    return Launch(train(work, f"run-{number}", flags), {"RACE_RANK": str(number), "OMP_NUM_THREADS": "1"})


def absent(name: str) -> str:
    """Why `name` cannot take part here; empty if it can."""
    if name in PEERS and find_spec(PEERS[name]) is None:
        return "not installed: pip install -c constraints.txt -e '.[bench]'"
    if name == "fast" and not understands("--precision"):
        return "this paceline train has no --precision"
    return ""


@cache
def understands(flag: str) -> bool:
    """Whether `paceline train` has this flag."""
    return flag in run([*PACELINE, "--help"], check=True, capture_output=True, text=True).stdout
