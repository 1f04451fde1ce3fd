"""Are the bits the same at every world size, and after every kill? The long proof, case by case.

    PYTHONPATH=. python tests/soak_bits.py --part digests --out benchmarks/results/bits-digests.json

    digests    each task, optimizer, strategy and world size once: every bit of a row of the table must be the same
    workers    kill -9 of workers at random moments; their agent restarts them, perhaps with one fewer
    launchers  kill -9 (or SIGTERM) of the launcher at random moments; the run is resumed on another world size

Bits are the weights, the test metrics, and the loss and gradient norm of every step as every rank of every attempt
wrote it down: a step that is done again must repeat itself. A part that was interrupted goes on: cases that are in the
file already are left out. The exit code is 1 if a case failed or a row has two digests. tests/cli/test_bits.py is a
small sample of this.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests import warm
from tests.launch.launch_harness import MARK, carriers, kill_all, survivors
from tests.small_mnist import write_mnist

from paceline.cli import ledger
from paceline.runs.events import Step, read_events
from paceline.runs.folder import CONFIG
from paceline.runs.summary import read_summary

TRANSFORMER = Path(__file__).parents[1] / "examples/own_transformer.py"
SHM = Path("/dev/shm")
HANGS_SECONDS = 240.0  # a run takes 5 to 40
POLL_SECONDS = 0.005
POLICY = "not restarted: the same failure at the same step twice"

Settings = Mapping[str, object]
"""of `paceline train`, flag -> value"""
COMMON: Settings = {"virtual_ranks": 8, "accumulation": 2, "clip_norm": 1.0, "device": "cpu"}
TASKS: Mapping[str, Settings] = {  # uneven shares, and 5 samples, fewer than virtual ranks, in an epoch's last batch
    "mnist-cnn": {"global_batch": 27, "epochs": 2},
    "mnist-resnet18": {"global_batch": 27, "epochs": 1, "stem": "small"},
    f"{TRANSFORMER}:task": {"global_batch": 399, "epochs": 1},
}
OPTIMIZERS: Mapping[str, Settings] = {"adamw": {}, "sgd": {"optimizer": "sgd", "lr": 0.05}}
WORLD_SIZES = (1, 2, 3, 4, 5, 8)
DIGEST_SAMPLES, KILLED_SAMPLES = 59, 101
KILLED_STEPS = 40
KILLED: Settings = {**COMMON, "global_batch": 24, "steps": KILLED_STEPS}  # 5 steps an epoch
WORKER_KILLS = ("one", "two", "two at once", "in the restart", "one fewer")
STOPPED = "asked to stop"  # with SIGTERM; then a checkpoint is written also where none is due
LAUNCHER_KILLS = ("early", "at a step", "in a checkpoint", "at any time", STOPPED)


# ---- one run ------------------------------------------------------------------------------------------------------


@dataclass
class Lab:
    """One run folder and the processes that work on it, which all carry its mark. As a context it ends them."""

    folder: Path
    data: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    shm: frozenset[str] = field(default_factory=lambda: shared_memory())
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def start(self, task: str, settings: Settings) -> None:
        """Start `paceline train`; without a task, the run's own record has to name it, and the data."""
        named = [task] * bool(task) + [f"--data-dir={self.data}"] * task.startswith("mnist")
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        with self.log.open("ab") as log:
            self.process = warm.Popen(
                ["-m", "paceline", "train", *named, f"--run-dir={self.folder}", *flags],
                cwd=self.folder.parent,
                env={**os.environ, MARK: self.mark},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, number: signal.Signals | None = None) -> int:
        """Send the launcher a signal, if any, and wait for its end: its exit code as a shell sees it.

        Raises:
            subprocess.TimeoutExpired: if it hangs.
        """
        assert self.process is not None
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(HANGS_SECONDS)
        return code if code >= 0 else 128 - code

    def wait_for(self, condition: Callable[[], object]) -> bool:
        """Return True as soon as `condition()` holds, False if the launcher has ended before.

        Raises:
            subprocess.TimeoutExpired: if it hangs.
        """
        assert self.process is not None
        deadline = time.monotonic() + HANGS_SECONDS
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("paceline train", HANGS_SECONDS)
            time.sleep(POLL_SECONDS)
        return True

    def kill(self, *ranks: int) -> str:
        """kill -9 of workers, in words."""
        pids, ours = workers(self.folder), carriers(self.mark)
        killed = [rank for rank in ranks if pids.get(rank) in ours]
        for rank in killed:
            os.kill(pids[rank], signal.SIGKILL)
        return f"rank {', '.join(map(str, killed))} at step {last_step(self.folder)}" if killed else "missed"

    def faults(self) -> Iterator[str]:
        """What is wrong with a run that has ended with 0, other than its bits."""
        yield from (f"pid {pid} survived: {words}" for pid, words in survivors(self.mark).items())
        yield from (f"left in /dev/shm: {name}" for name in shared_memory() - self.shm)
        with self.log.open("a") as log, contextlib.redirect_stdout(log):
            if code := ledger.main([str(self.folder)]):
                yield f"paceline ledger ended with {code}"

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        kill_all(self.mark)
        if self.process is not None:
            self.process.wait()


def shared_memory() -> frozenset[str]:
    """The files in /dev/shm; a folder there is somebody else's."""
    return frozenset(path.name for path in SHM.iterdir() if path.is_file()) if SHM.is_dir() else frozenset()


def steps(events: Path) -> list[Step]:
    """The steps that one rank has logged, in the order of time."""
    return [event for event in read_events(events) if isinstance(event, Step)] if events.is_file() else []


def last_step(run_dir: Path) -> int:
    """What rank 0 has logged last; after a restart it may be less than before."""
    return next((step.step for step in reversed(steps(run_dir / "events-0.jsonl"))), 0)


def workers(run_dir: Path) -> dict[int, int]:
    """rank -> pid of the newest generation, as far as it has been started."""
    rosters = sorted(run_dir.glob("attempt-*/agent-0.json"), key=lambda path: path.stat().st_mtime_ns)
    return {w["rank"]: w["pid"] for w in json.loads(rosters[-1].read_bytes())["workers"]} if rosters else {}


def bits(run_dir: Path) -> str:
    """The digest of the weights, and that of all losses, gradient norms and test metrics."""
    summary = read_summary(run_dir)
    if summary is None or summary.weights_sha256 is None:
        return "no weights"
    every = [step for path in run_dir.glob("events-*.jsonl") for step in steps(path)]
    way = sorted({(step.step, step.loss.hex(), (step.grad_norm or 0.0).hex()) for step in every})
    end = [(name, value.hex()) for name, value in (summary.test_metrics or {}).items()]
    return f"{summary.weights_sha256[:12]} {hashlib.sha256(repr((way, end)).encode()).hexdigest()[:12]}"


# ---- the cases ----------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What came of a case; all cases of a `row` must have one digest."""

    row: str
    code: int = 0
    digest: str = ""
    seconds: float = 0.0
    told: list[str] = field(default_factory=list[str])
    faults: list[str] = field(default_factory=list[str])


Cases = Iterator[tuple[str, Callable[[Lab], Result]]]


def whole_run(lab: Lab, row: str, task: str, settings: Settings) -> Result:
    """A run that nobody kills."""
    lab.start(task, settings)
    code = lab.finish()
    return Result(row, code, bits(lab.folder))


def workers_killed(lab: Lab, settings: Settings, dice: random.Random, kind: str) -> Result:
    """Workers are killed, their agent restarts them, and the run ends as if nothing had been."""
    nproc, run_steps = int(str(settings["nproc"])), int(str(settings["steps"]))
    first, other = dice.sample(range(nproc), 2)
    at = dice.randint(1, run_steps * 3 // 4)
    lab.start("mnist-cnn", settings)
    lab.wait_for(lambda: last_step(lab.folder) >= at)
    before = set(workers(lab.folder).values())
    told = [lab.kill(first, other) if kind == "two at once" else lab.kill(first)]
    if kind == "two":
        later = dice.randint(at + 4, run_steps - 2)
        lab.wait_for(lambda: last_step(lab.folder) >= later)
        told.append(lab.kill(dice.choice([first, other])))
    if kind in ("in the restart", "one fewer"):
        # the same rank again, without any progress, ends the run by policy, or makes it go on with one fewer
        victim = other if kind == "in the restart" else first
        lab.wait_for(lambda: victim in (now := workers(lab.folder)) and not before & set(now.values()))
        time.sleep(dice.uniform(0.0, 3.0))
        told.append(lab.kill(victim))
    return _ended(lab, settings, told)


def launcher_killed(lab: Lab, settings: Settings, dice: random.Random, kind: str) -> Result:
    """The launcher is killed up to three times, and the run resumed each time on a random world size."""
    told: list[str] = []
    wrong: list[str] = []
    for _ in range(dice.randint(1, 3)):
        code, words = _stopped_once(lab, settings, dice, kind)
        told.append(f"{words}: {code}")
        if code not in (0, 75 if kind == STOPPED else 137):  # 0: it had ended before
            wrong.append(told[-1])
        if dice.random() < 0.5:
            survivors(lab.mark)  # else the next attempt finds the folder still taken, and has to wait
    nproc, last = dice.randint(1, int(str(settings["virtual_ranks"])) // 2), last_step(lab.folder)
    rehearsed = {"rehearse_preemption": last + 2} if kind == STOPPED and dice.random() < 0.5 else {}
    _begin(lab, {**settings, "nproc": nproc, **rehearsed}, bare=not rehearsed and dice.random() < 0.5)
    result = _ended(lab, settings, [*told, f"ended on {nproc}{' with a rehearsal' * bool(rehearsed)}"])
    result.faults += wrong
    return result


def _stopped_once(lab: Lab, settings: Settings, dice: random.Random, kind: str) -> tuple[int, str]:
    """Begin or go on, on a random world size, and be stopped: the launcher's exit code, and what happened."""
    nproc, target = dice.randint(1, 4), last_step(lab.folder) + dice.randint(1, 12)
    _begin(lab, {**settings, "nproc": nproc}, bare=dice.random() < 0.5)
    _wait_for_moment(lab, kind, target, dice)
    code = lab.finish(signal.SIGTERM if kind == STOPPED else signal.SIGKILL)
    return code, f"at step {last_step(lab.folder)} on {nproc}"


def _begin(lab: Lab, settings: Settings, *, bare: bool = False) -> None:
    """Begin or go on; with `bare`, the settings are left to the run's own record, where there is one."""
    if bare and (lab.folder / CONFIG).is_file():
        lab.start("", {"resume": "auto", "nproc": settings["nproc"]})
    else:
        lab.start("mnist-cnn", {**settings, "resume": "auto"})


def _wait_for_moment(lab: Lab, kind: str, target: int, dice: random.Random) -> None:
    unfinished = set((lab.folder / "checkpoints").glob(".tmp-*"))
    until = time.monotonic() + dice.uniform(0.0, 2.5 if kind == "early" else 12.0)
    if kind in ("early", "at any time"):
        lab.wait_for(lambda: time.monotonic() > until)
    elif kind == "in a checkpoint":
        lab.wait_for(lambda: set((lab.folder / "checkpoints").glob(".tmp-*")) - unfinished)
    else:
        lab.wait_for(lambda: last_step(lab.folder) >= target)


def _ended(lab: Lab, settings: Settings, told: list[str]) -> Result:
    result = Result(_row(settings), lab.finish())
    result.told = [*(f"{name}={value}" for name, value in settings.items() if name not in KILLED), *told]
    if result.code and POLICY in lab.log.read_text(errors="replace"):
        result.row, result.code, result.digest = POLICY, 0, "-"
    else:
        result.digest = bits(lab.folder)
        result.faults += lab.faults()
    return result


def _row(settings: Settings) -> str:
    return f"{settings['virtual_ranks']} virtual ranks"


# ---- the parts: which cases there are -----------------------------------------------------------------------------


def digest_cases(seed: int, count: int) -> Cases:
    every = [(t, o, s, w) for t in TASKS for o in OPTIMIZERS for s in ("exact", "zero") for w in WORLD_SIZES]
    random.Random(f"{seed} digests").shuffle(every)  # so that a few are of all kinds
    for task, optimizer, strategy, nproc in every[:count]:
        row = f"{Path(task).name.removesuffix(':task')} {optimizer}"
        settings = {**COMMON, **TASKS[task], **OPTIMIZERS[optimizer], "strategy": strategy, "nproc": nproc}
        yield f"{row} {strategy} on {nproc}", partial(whole_run, row=row, task=task, settings=settings)


def never_killed() -> Cases:
    for virtual_ranks in (4, 8):
        settings = {**KILLED, "virtual_ranks": virtual_ranks, "strategy": "exact", "nproc": 1}
        case = partial(whole_run, row=_row(settings), task="mnist-cnn", settings=settings)
        yield f"never killed, {_row(settings)}", case


def worker_cases(seed: int, count: int) -> Cases:
    yield from never_killed()
    for number in range(count):
        dice, kind = random.Random(f"{seed} workers {number}"), WORKER_KILLS[number % len(WORKER_KILLS)]
        nproc, some = dice.randint(2, 4), {"checkpoint_every": dice.choice([2, 5, 9])}
        settings = {
            **KILLED, "virtual_ranks": dice.choice([4, 8]), "nproc": nproc, "strategy": dice.choice(["exact", "zero"]),
            "max_restarts": 3, "snapshot_every": dice.choice([1, 3, 7, 100]), **(some if dice.random() < 0.5 else {}),
            **({"min_nproc": nproc - 1} if kind == "one fewer" else {}),
        }  # fmt: skip
        yield f"{number} {kind}", partial(workers_killed, settings=settings, dice=dice, kind=kind)


def launcher_cases(seed: int, count: int) -> Cases:
    yield from never_killed()
    for number in range(count):
        dice, kind = random.Random(f"{seed} launchers {number}"), LAUNCHER_KILLS[number % len(LAUNCHER_KILLS)]
        settings = {
            **KILLED, "virtual_ranks": dice.choice([4, 8]), "strategy": dice.choice(["exact", "zero"]),
            **({"checkpoint_every": dice.choice([2, 5, 9])} if kind != STOPPED or dice.random() < 0.5 else {}),
        }  # fmt: skip
        yield f"{number} {kind}", partial(launcher_killed, settings=settings, dice=dice, kind=kind)


@dataclass(frozen=True)
class Part:
    """A part of the proof, how many cases it has, and on how many samples of MNIST."""

    cases: Callable[[int, int], Cases]
    count: int
    samples: int


PARTS: Mapping[str, Part] = {
    "digests": Part(digest_cases, 72, DIGEST_SAMPLES),
    "workers": Part(worker_cases, 50, KILLED_SAMPLES),
    "launchers": Part(launcher_cases, 25, KILLED_SAMPLES),
}


# ---- running a part -----------------------------------------------------------------------------------------------


def run_case(case: Callable[[Lab], Result], lab: Lab) -> Result:
    """Run it, and count as a fault also what ends with another code than 0, or not at all."""
    began = time.monotonic()
    with lab:
        try:
            result = case(lab)
        except subprocess.TimeoutExpired:
            result = Result("hangs", faults=[f"nothing ended within {HANGS_SECONDS:g} s"])
    if result.code:
        result.faults.append(f"ended with {result.code}")
    result.seconds = round(time.monotonic() - began, 1)
    return result


def table(cases: Mapping[str, Result]) -> Iterator[str]:
    """One line per row: which digests, in how many cases. Lines that begin with a blank are complaints."""
    rows: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, result in cases.items():
        if not result.code:
            rows[result.row][result.digest].append(name)
    for row, digests in sorted(rows.items()):
        yield f"{row:28} " + "  ".join(f"{digest} ({len(names)})" for digest, names in digests.items())
        if len(digests) > 1:
            yield from (f"  DIFFERENT: {digest}: {'; '.join(names)}" for digest, names in digests.items())
    for name, result in cases.items():
        yield from (f"  FAULT: {name}: {fault}" for fault in result.faults)


def cases_before(part: str, seed: int, out: Path) -> dict[str, Any]:
    """The results that the file of a part that was interrupted holds, by the name of the case."""
    if not out.is_file():
        return {}
    before = json.loads(out.read_bytes())
    if (before["part"], before["seed"]) != (part, seed):
        raise SystemExit(f"{out} holds part {before['part']} of seed {before['seed']}: name another file")
    return before["cases"]


def soak(part: str, seed: int, count: int | None, out: Path, root: Path) -> dict[str, Result]:
    """All cases of a part, those that `out` holds already included; it is written after each."""
    cases = {name: Result(**result) for name, result in cases_before(part, seed, out).items()}
    data = write_mnist(root / "mnist", train=PARTS[part].samples)
    for number, (name, case) in enumerate(PARTS[part].cases(seed, count or PARTS[part].count)):
        if name in cases:
            continue
        lab = Lab(root / f"run-{number}", data)
        result = cases[name] = run_case(case, lab)
        told = {"part": part, "seed": seed, "cases": {name: asdict(result) for name, result in cases.items()}}
        out.write_text(json.dumps(told, indent=2) + "\n")
        print(f"{result.seconds:6.1f} s  {name}: {result.digest}  {'; '.join(result.told)}", flush=True)
        if result.faults:
            print(f"          FAULT, see {lab.log}: {'; '.join(result.faults)}", flush=True)
        else:
            shutil.rmtree(lab.folder)
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where the results are, and go: JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="cases (default: digests 72, workers 50, launchers 25)")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the lab ends what it has started
    root = Path(tempfile.mkdtemp(prefix="soak-bits-"))
    cases = soak(told.part, told.seed, told.count, told.out, root)
    lines = list(table(cases))
    print("\n".join(lines))
    complaints = sum(line.startswith(" ") for line in lines)
    print(f"{len(cases)} cases, " + (f"{complaints} complaints; see {root}" if complaints else "all bits the same"))
    if not complaints:
        shutil.rmtree(root)
    return int(complaints > 0)


if __name__ == "__main__":
    sys.exit(main())
