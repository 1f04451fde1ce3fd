"""What is one case of the soak of launching? A run on two hosts, what is done to it, and what must come of it."""

import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.kills import Kill, kill_once
from tests.cluster.training import (
    EXACT,
    FOLLOWER,
    HEAD,
    MNIST,
    PACELINE,
    SCRIPT,
    Cluster,
    clean_ledger,
    resumed_here,
    steps_done,
    submit,
    type_everywhere,
    wait_for_step,
    weights,
    words,
)  # fmt: skip

STEPS = 200
LONG = words("train", "mnist-cnn", "--steps", STEPS, "--batch-size", 4, *EXACT, "--checkpoint-every", 10)
ENDLESS = words("train", "mnist-cnn", "--steps", 99999, "--batch-size", 4, *EXACT, "--checkpoint-every", 10)
SHORT = words("train", "mnist-cnn", "--steps", 4, "--batch-size", 16, *EXACT)
TASKS = {
    "mnist-cnn": words("train", "mnist-cnn", "--steps", 20, "--batch-size", 16, *EXACT),
    "mnist-resnet18": words("train", "mnist-resnet18", "--steps", 3, "--batch-size", 2, *EXACT),
}
LONGEST_SECONDS = 16.0  # to a kill: the first step comes after about 9
HEAD_SECONDS = 20.0
SILENT_SECONDS = 40.0  # an agent that is cut off ends its workers after 30 s of silence, and their grace
RUN_SECONDS = 180.0
TRIES = 3


@dataclass
class Result:
    seconds: float = 0.0
    told: dict[str, object] = field(default_factory=dict[str, object])
    faults: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Bench:
    """What a case works with: a cluster, a folder of its own, and the weights that one process comes to."""

    cluster: Cluster
    folder: Path
    expected: Callable[[list[str]], str]

    def run(self, *command: object) -> str:
        """Run a command on n1, which must end well; what it says on stdout alone."""
        done = self.cluster.slurm.run(*PACELINE, *command, cwd=self.folder, timeout=RUN_SECONDS)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def launcher(self, *command: object) -> subprocess.Popen[str]:
        """Start a command on n1."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return self.cluster.slurm.popen(*PACELINE, *command, cwd=self.folder, **pipes)


def compared(result: Result, run_dir: Path, expected: str) -> Result:
    """Add what is wrong with a run that has ended well."""
    if (found := weights(run_dir)) != expected:
        result.faults.append(f"weights {found[:12]}, not {expected[:12]}")
    result.told["weights"] = found[:12]
    clean_ledger(run_dir)
    return result


def digest_case(bench: Bench, dice: random.Random, on: str, task: str) -> Result:
    run_dir, printed = bench.folder / "run", on.startswith("print")
    more = {"slurm": ["--follow"], "print torchrun": [], "print paceline": ["--agent", "paceline"]}.get(on, [])
    where = bench.cluster.where(on.split()[0], "--nproc", 2, *more, "--run-dir", run_dir)
    said = bench.run(*TASKS[task], *where)
    if printed:
        type_everywhere(bench.cluster.lab, said, bench.folder, RUN_SECONDS)
    return compared(Result(), run_dir, bench.expected(TASKS[task]))


def script_case(bench: Bench, dice: random.Random) -> Result:
    script = ("--", SCRIPT, "--epochs", dice.randint(1, 2), "--data", MNIST)
    shape = ("--threads-per-rank", 1, "--nproc", 2)
    ways = {on: bench.cluster.where(on, *shape, *["--follow"] * (on == "slurm")) for on in ("ssh", "slurm", "print")}
    ways["local"] = words("--nproc", 4, "--threads-per-rank", 1)
    digests: dict[str, object] = {}
    for on, way in ways.items():
        said = bench.run("launch", *way, "--run-dir", bench.folder / on, *script)
        if on == "print":
            said = type_everywhere(bench.cluster.lab, said, bench.folder, RUN_SECONDS)
        digests[on] = " ".join({line.rpartition(" ")[2][:12] for line in said.splitlines() if "weights" in line})
    same = len(set(digests.values())) == 1 and "" not in digests.values()
    return Result(told=digests, faults=[] if same else ["different digests"])


def kill_case(bench: Bench, dice: random.Random, on: str, what: str) -> Result:
    for number in range(TRIES):
        kill = Kill.drawn(dice, on, what, LONGEST_SECONDS)
        outcome = kill_once(bench.cluster, kill, ENDLESS, bench.folder / f"{number}")
        if outcome is not None:
            told = asdict(outcome)
            faults, said = told.pop("faults"), told.pop("said")
            return Result(told={**told, **({"said": said[-3000:]} if faults else {})}, faults=faults)
    return Result(faults=[f"the run ended {TRIES} times before it could be killed"])


def slurm_case(bench: Bench, dice: random.Random, fault: str) -> Result:
    cluster, run_dir = bench.cluster, bench.folder / "run"
    task, more = LONG, ("--sbatch", "exclude=n1")
    if fault == "time limit":  # a real one: the first turn is over after a minute, 10 s early
        task = words(*LONG, "--steps", 2500)
        more = (*more, "--time", 2, "--save-before", 30)
    job = submit(cluster.slurm, task, run_dir, *more)
    wait_for_step(run_dir, dice.randint(5, 100))
    told: dict[str, object] = {"step": steps_done(run_dir)}
    if fault == "preemption":
        other = cluster.slurm.run("sbatch", "--parsable", "-p", "high", "-N4", "--wrap", "sleep 1").stdout.strip()
        told["other"] = cluster.slurm.wait(other, 90)
    elif fault == "node failure":
        cluster.lab.power_off(FOLLOWER)
    ended = cluster.slurm.wait(job, 600 if fault == "time limit" else RUN_SECONDS)
    told |= {"state": ended, "restarts": int(cluster.slurm.show(job)["Restarts"])}
    assert ended == "COMPLETED", (told, [path.read_text()[-2000:] for path in run_dir.glob("submit-1/*.out")])
    faults = [] if told["restarts"] else ["not queued again"]
    return compared(Result(told=told, faults=faults), run_dir, bench.expected(task))


def ports_case(bench: Bench, dice: random.Random) -> Result:
    return at_once(bench.cluster, SHORT, bench.expected(SHORT), bench.folder, dice.randint(20000, 30000))


def at_once(cluster: Cluster, task: list[str], expected: str, folder: Path, port: int) -> Result:
    """Two jobs on the same hosts with the same port: both come to `expected`, or one says that the port is taken."""
    runs = [folder / name for name in ("one", "two")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
    launchers = [
        cluster.lab.popen(
            "n1", *PACELINE, *task, *cluster.where("ssh", "--nproc", 1, "--port", port, "--run-dir", run), **pipes
        )
        for run in runs
    ]
    said = [launcher.communicate(timeout=RUN_SECONDS)[0] for launcher in launchers]
    codes = [launcher.returncode for launcher in launchers]
    result = Result(told={"port": port, "codes": codes})
    if 0 not in codes:
        result.faults.append("both are refused")
    for run, code, text in zip(runs, codes, said, strict=True):
        if code == 0 and weights(run) != expected:
            result.faults.append(f"{run.name} came to other weights")
        if code != 0 and not (code in (1, 2) and str(port) in text):
            result.faults.append(f"{run.name} ended with {code}, and does not say why")
    return result if not result.faults else Result(told={**result.told, "said": said}, faults=result.faults)


def head_case(bench: Bench, dice: random.Random, fault: str) -> Result:
    run_dir, lab = bench.folder / "run", bench.cluster.lab
    launcher = bench.launcher(*LONG, *bench.cluster.where("ssh", "--nodes", "1:2", "--nproc", 2, "--run-dir", run_dir))
    wait_for_step(run_dir, dice.randint(15, STEPS // 2))
    struck, told = time.monotonic(), {"step": steps_done(run_dir)}
    getattr(lab, fault)(HEAD)
    while lab.processes(FOLLOWER) and time.monotonic() < struck + RUN_SECONDS:
        time.sleep(0.05)
    follower_seconds = time.monotonic() - struck
    said = launcher.communicate(timeout=RUN_SECONDS)[0]
    told |= {"code": launcher.returncode, "follower_seconds": round(follower_seconds, 1)}
    told["launcher_seconds"] = round(time.monotonic() - struck, 1)
    faults = ["the follower ended late"] if follower_seconds > HEAD_SECONDS else []
    if launcher.returncode != 1 or HEAD not in said:
        faults.append(f"ended with {launcher.returncode}: {said[-1000:]}")
    while fault == "cut" and lab.processes(HEAD) and time.monotonic() < struck + SILENT_SECONDS:
        time.sleep(0.05)
    told["head_seconds"] = round(time.monotonic() - struck, 1)  # nobody can tell it, so it must end by itself
    if fault == "cut":
        faults += [f"left on {HEAD}: {said}" for said in lab.processes(HEAD).values()]
    lab.restore()
    if resumed_here(run_dir) != bench.expected(LONG):
        faults.append("other weights after the resume")
    clean_ledger(run_dir)
    return Result(told={**told}, faults=faults)
