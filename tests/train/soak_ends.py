"""What is on disk after each way in which a training may end: `python tests/train/soak_ends.py --out FILE` (root).

Real trainings of three epochs on two processes. Each row: what was done to it, its exit code, the step it had reached,
the newest checkpoint that is whole, the steps that a resume has to take again, and what the run said last.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint.manager import Checkpoints
from paceline.runs.events import Step, event_files, read_events

TASK = """
import os, signal, time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from paceline import Task

EPOCH = 40

class Data(Dataset):
    def __init__(self, bad): self.bad = bad
    def __len__(self): return EPOCH * 8
    def __getitem__(self, index):
        if index == self.bad: raise OSError(f"sample {index} cannot be decoded")
        return torch.randn(64, generator=torch.Generator().manual_seed(index)), index % 10

class Slow(nn.Sequential):
    calls = 0
    def forward(self, x):
        time.sleep(0.01)
        Slow.calls += self.training
        return super().forward(x)

def model(): return Slow(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

def loss(outputs, targets): return F.cross_entropy(outputs, targets, reduction="none")

def nan(outputs, targets):
    found = loss(outputs, targets)
    return found * float("nan") if Slow.calls == EPOCH + 20 else found

def bug(outputs, targets):
    if Slow.calls == EPOCH + 20: raise ValueError("a bug of mine")
    return loss(outputs, targets)

asked = 0
def late(outputs, targets):
    global asked
    asked += 1
    if asked > 1: raise ValueError("the metric fails")
    return (outputs.argmax(1) == targets).float()

def last(moment):
    if moment.step == 2 * EPOCH - 1 and moment.rank == 1: os.kill(os.getpid(), signal.SIGKILL)

def make(**more): return Task(**{"make_model": model, "make_dataset": lambda split: Data(None), "loss": loss, **more})

fine = make()
metric = make(metrics={"accuracy": late})
corrupt = make(make_dataset=lambda split: Data(300 if split == "test" else None))
train_sample = make(make_dataset=lambda split: Data(77 if split == "train" else None))
not_finite = make(loss=nan)
error = make(loss=bug)
killed = make(on_step=last)
"""
Act = Callable[[subprocess.Popen[str], Path], None]


def nothing(process: subprocess.Popen[str], run: Path) -> None:
    """Let it be."""


def interrupt(process: subprocess.Popen[str], run: Path) -> None:
    """Ctrl-C within the first second after the first step."""
    while process.poll() is None and steps(run) < 1:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)


def steps(run: Path) -> int:
    """The last step that any rank has recorded."""
    found = [0]
    for path in event_files(run).values() if run.is_dir() else ():
        found += [event.step for event in read_events(path) if isinstance(event, Step)]
    return max(found)


CASES: dict[str, tuple[str, Act, str]] = {
    "nothing": ("fine", nothing, ""),
    "a metric fails at the first evaluation": ("metric", nothing, ""),
    "a test sample cannot be decoded": ("corrupt", nothing, ""),
    "a training sample cannot be decoded": ("train_sample", nothing, ""),
    "a bug in the loss, in mid-epoch": ("error", nothing, ""),
    "NaN in mid-epoch": ("not_finite", nothing, ""),
    "Ctrl-C in the first second": ("fine", interrupt, ""),
    "kill -9 of a rank in the last step of an epoch": ("killed", nothing, ""),
    "kill -9 in that step, --checkpoint-every 0.2s": ("killed", nothing, "--checkpoint-every 0.2s"),
    "kill -9 in that step, --max-restarts 1": ("killed", nothing, "--max-restarts 1"),
    "a full disk": ("fine", nothing, "disk"),
}


def row(name: str, folder: Path) -> tuple[str, ...]:
    task, act, flags = CASES[name]
    run, full = folder / "run", flags == "disk"
    (folder / "mine.py").write_text(TASK)
    if full:  # room for the first checkpoint, not for the second beside it
        run = folder / "disk" / "run"
        run.parent.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", run.parent], check=True)
    try:
        command = [sys.executable, "-m", "paceline", "train", "mine.py:" + task, "--nproc", "2", "--epochs", "3"]
        command += ["--batch-size", "4", "--run-dir", str(run), *("" if full else flags).split()]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        act(process, run)
        complaints = process.communicate()[1]
        reached = steps(run)
        checkpoints = Checkpoints(run / "checkpoints")
        whole = [step for step, path in checkpoints.entries() if checkpoints.check(path) is not None]
        kept = " and the weights" if (run / "model.safetensors").exists() or "rescued" in complaints else ""
    finally:
        if full:
            subprocess.run(["umount", "-l", run.parent], check=True)
    newest = max(whole, default=0)
    ending = ("output of", "run folder", " ", "again")
    words = [line for line in complaints.splitlines() if line.strip() and not line.startswith(ending)]
    said = words[-1][:120] if words else ""
    return name, str(process.returncode), str(reached), f"{newest}{kept}", str(reached - newest), said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    heads = ("what happens", "exit", "step reached", "newest on disk", "steps lost", "last words")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in CASES:
        if asked.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = row(name, Path(folder))
        lines.append("| " + " | ".join(cell.replace(folder, "") for cell in found) + " |")
        print(lines[-1], flush=True)
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
