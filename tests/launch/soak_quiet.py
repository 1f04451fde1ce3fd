"""Does the guard leave healthy runs alone? `make soak-quiet`: an hour of everything that looks like a fault.

A training on two ranks under `--hang-timeout auto`: evaluations in which rank 0 alone is busy for a minute, a first
batch that takes half a minute, checkpoints, long garbage collections, workers stopped by SIGSTOP for less than the
window, and a machine that others load. Beside it an unmodified script whose rank 0 evaluates for a minute while the
others wait in a barrier. Each alarm is a fault; warnings are counted.

And three ranks of what only looks like a silent fault: the scenes of looks_wrong.py and scripts of tests/check/clean,
one after the other, in an order that is drawn anew each time. Each word about them is a fault.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median

from paceline.runs.attempt import read_notices

SCENES = Path(__file__).with_name("looks_wrong.py")
CLEAN = SCENES.parents[1] / "check" / "clean"
OF_CLEAN = ("gan", "lbfgs", "own_classes", "own_folds", "probe_alone", "uneven")
MAY_BE_SAID = {("own_folds", "left")}  # by which script: once, and the run goes on
PACELINE = [sys.executable, "-m", "paceline"]
TASK = """
import gc, time
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from paceline import Task

def rank(): return dist.get_rank() if dist.is_initialized() else 0

class Slow(torch.utils.data.Dataset):
    def __init__(self, size): self.size, self.begun = size, False
    def __len__(self): return self.size
    def __getitem__(self, i):
        if not self.begun and self.size > 500:
            self.begun = True
            time.sleep({first_seconds})                       # a cold cache
        if i == 7 and rank() == 1:
            rings = [[] for _ in range(1_500_000)]            # a long collection
            for ring in rings: ring.append(ring)
            del rings; gc.collect()
        g = torch.Generator().manual_seed(i)
        x = torch.randn(32, generator=g)
        time.sleep(0.002)
        return x, (x.sum() > 0).long()

evaluations = 0
def slow_metric(outputs, targets):
    global evaluations
    evaluations += 1
    if evaluations % 2 == 1 and rank() == 0: time.sleep({evaluation_seconds})
    return (outputs.argmax(1) == targets).float()

task = Task(lambda: nn.Linear(32, 2), lambda split: Slow(2000 if split == "train" else 40),
            lambda o, t: F.cross_entropy(o, t, reduction="none"), {{"accuracy": slow_metric}})
"""

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
until, x, step = time.monotonic() + float(sys.argv[1]), torch.ones(1000), 0
go_on = torch.ones(1)
while go_on.item():
    dist.all_reduce(x); x /= 2; step += 1
    time.sleep(0.02)
    if step % 500 == 0:
        if dist.get_rank() == 0: time.sleep(float(sys.argv[2]))
        dist.barrier()
    go_on.fill_(float(time.monotonic() < until))
    dist.broadcast(go_on, 0)
dist.destroy_process_group()
"""

BUSY = "import time\nwhile True: sum(range(1000000))"


def ranks_of(run_dir: Path) -> list[int]:
    """The pids of the workers, from what their agent has written down."""
    rosters = sorted(run_dir.glob("attempt-*/agent-0.json"))
    return [worker["pid"] for worker in json.loads(rosters[-1].read_text())["workers"]] if rosters else []


class Scenes(threading.Thread):
    """Those of looks_wrong.py and OF_CLEAN, again and again, until `deadline`."""

    def __init__(self, folder: Path, dice: random.Random, each_seconds: float, deadline: float) -> None:
        super().__init__()
        self._folder, self._dice, self._seconds, self._deadline = folder, dice, each_seconds, deadline
        self.run_dir = folder
        self.done: Counter[str] = Counter()
        self.steps = 0
        self.told: list[str] = []
        """what was said, or went wrong: nothing should"""

    def run(self) -> None:
        names = [*re.findall(r"^def (\w+)\(\) -> None:", SCENES.read_text(), re.MULTILINE), *OF_CLEAN]
        while time.monotonic() < self._deadline:
            for number, name in enumerate(self._dice.sample(names, len(names))):
                if time.monotonic() < self._deadline:
                    self._one(name, sum(self.done.values()) + number)

    def _one(self, name: str, seed: int) -> None:
        self.run_dir = run_dir = self._folder / f"{sum(self.done.values())}-{name}"
        script = [str(CLEAN / f"{name}.py")] if name in OF_CLEAN else [str(SCENES), name, str(self._seconds), str(seed)]
        words = ["launch", "--nproc", "3", "--run-dir", str(run_dir), *script]
        ended = subprocess.run([*PACELINE, *words], cwd=self._folder, capture_output=True, text=True, check=False)
        self.done[name] += 1
        self.steps += sum(map(int, re.findall(r"(\d+) steps", ended.stdout)))
        told = [one for one in read_notices(run_dir / "attempt-1") if (name, one.kind) not in MAY_BE_SAID]
        self.told += [f"{name} {seed}: {noted.words}" for noted in told]
        if ended.returncode or "CAUSE" in ended.stderr:
            self.told.append(f"{name} {seed}: exit code {ended.returncode}: {ended.stderr[-1500:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--evaluation-seconds", type=float, default=60)
    parser.add_argument("--first-seconds", type=float, default=25)
    parser.add_argument("--scene-seconds", type=float, default=30)
    parser.add_argument("--longest-stop-seconds", type=float, default=7)  # the window is 10 s at least
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dice, began = random.Random(arguments.seed), time.monotonic()
    deadline = began + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(
            TASK.format(first_seconds=arguments.first_seconds, evaluation_seconds=arguments.evaluation_seconds)
        )
        (folder / "script.py").write_text(SCRIPT)
        (folder / "scenes").mkdir()
        runs = {
            "training": [*PACELINE, "train", "task.py:task", "--nproc", "2", "--epochs", "100000", "--batch-size", "25",
                         "--checkpoint-every", "10", "--lr", "1e-4", "--run-dir", "training"],
            "script": [*PACELINE, "launch", "--nproc", "2", "--run-dir", "script", "--", "script.py",
                       str(60 * arguments.minutes), str(arguments.evaluation_seconds)],
        }  # fmt: skip
        files = {key: (folder / f"{key}.txt").open("wb") for key in runs}
        started = {
            key: subprocess.Popen(command, cwd=folder, stdout=files[key], stderr=subprocess.STDOUT)
            for key, command in runs.items()
        }
        scenes = Scenes(folder / "scenes", random.Random(arguments.seed), arguments.scene_seconds, deadline)
        scenes.start()
        counts, loads = {"stops": 0, "loads": 0}, [os.getloadavg()[0]]
        while time.monotonic() < deadline and all(run.poll() is None for run in started.values()):
            time.sleep(dice.uniform(5, 15))
            loads.append(os.getloadavg()[0])
            if dice.random() < 0.5:
                run_dir = dice.choice([folder / "training", folder / "script", scenes.run_dir])
                if pids := ranks_of(run_dir):
                    stop_for_a_while(dice.choice(pids), dice.uniform(0.2, arguments.longest_stop_seconds))
                    counts["stops"] += 1
            else:
                load(dice.uniform(2, 12))
                counts["loads"] += 1
        if started["training"].poll() is None:
            started["training"].send_signal(signal.SIGTERM)
        codes = {key: run.wait(300) for key, run in started.items()}
        scenes.join()
        said = {key: (folder / f"{key}.txt").read_text() for key in runs}
        steps = sum('"step"' in line for line in (folder / "training/events-0.jsonl").read_text().splitlines())
    alarms = {key: text.count("CAUSE") + text.count("STALL") for key, text in said.items()}
    warnings = {key: [line for line in text.splitlines() if "no progress for" in line] for key, text in said.items()}
    result = {
        "minutes": round((time.monotonic() - began) / 60, 1), "steps": steps, **counts, "codes": codes,
        "alarms": alarms, "warnings": warnings,
        "scenes": dict(sorted(scenes.done.items())), "steps_of_scenes": scenes.steps, "said_of_scenes": scenes.told,
        "cores": os.cpu_count(), "load": {"least": min(loads), "median": median(loads), "most": max(loads)},
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    good = not any(alarms.values()) and codes == {"training": 75, "script": 0} and not scenes.told
    if not good:
        print("\n".join(text[-3000:] for text in said.values()))
    return 0 if good else 1


def stop_for_a_while(pid: int, seconds: float) -> None:
    """SIGSTOP, and SIGCONT after `seconds`."""
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def load(seconds: float) -> None:
    """Keep as many processes as there are cores busy."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    time.sleep(seconds)
    for process in busy:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
