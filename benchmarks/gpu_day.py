"""The first day on a GPU: ten things that must hold there, at most 10 minutes on one GPU, 20 on several.

    python benchmarks/gpu_day.py                  # goes on where it ended; --again begins anew, --steps 4,5 only these

Without a GPU each step runs on the stand-ins of tests/doubles (a device in Python, a group like NCCL's), as far as they
are honest for it; what only a GPU can show is marked so, and counts neither as right nor as wrong.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.observe.summary import read_summary
from race.figures import machine

ROOT = Path(__file__).parents[1]
GPUS = torch.cuda.device_count()
NEEDS = "needs a GPU"
LIMIT_SECONDS = 300
SIX = ("--virtual-ranks", 6, "--batch-size", 8)


class Wrong(Exception):  # noqa: N818 - the result of a step
    """What was found is not what was expected."""


@dataclass(frozen=True)
class Step:
    """One of the ten. `run` says what it found in a folder of its own, or raises Wrong."""

    name: str
    expected: str
    run: Callable[[Path], str]


def command(folder: Path, *words: object, code: int = 0, env: dict[str, str] | None = None) -> str:
    """What a command printed; where there is no GPU, with the one in Python."""
    path = [str(ROOT / "src"), str(ROOT), *([] if GPUS else [str(ROOT / "tests" / "doubles" / "site_gpu")])]
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, text=True, capture_output=True, timeout=LIMIT_SECONDS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | (env or {}), check=False,
    )  # fmt: skip
    if done.returncode != code:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise Wrong(f"{' '.join(map(str, words[2:]))[:80]}: exit code {done.returncode}: {' '.join(last)[:200]}")
    return done.stdout


def paceline(folder: Path, *words: object) -> str:
    """What a command of paceline's printed."""
    return command(folder, "-m", "paceline", *words)


def pytest(folder: Path, *words: str) -> str:
    """The last line of some tests."""
    tests = [str(ROOT / word) if word.startswith("tests/") else word for word in words]
    done = command(ROOT, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests,
                   env={"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)})  # fmt: skip
    return done.strip().splitlines()[-1].strip("= ")


def shared(ranks: int) -> tuple[object, ...]:
    """Flags for so many ranks: over NCCL where each has a GPU, else over gloo."""
    return ("--nproc", ranks, "--device", "auto", *(("--backend", "gloo") if ranks > max(GPUS, 1) or not GPUS else ()))


def trained(folder: Path, name: str, *flags: object) -> dict[str, str]:
    """A training of the MNIST CNN: what is in its summary."""
    paceline(folder, "train", "mnist-cnn", *flags, "--run-dir", name)
    summary = read_summary(folder / name)
    assert summary is not None
    return {"weights": (summary.weights_sha256 or "")[:16], "rate": f"{summary.samples_per_second or 0:.0f}"}


def versions(folder: Path) -> str:
    if not GPUS:
        return f"torch {torch.__version__}, no GPU; the stand-in records as NCCL does: " + pytest(
            folder, "tests/doubles/test_nccl.py", "-k", "recorder_shows"
        )
    code = (
        "import torch, torch.distributed as dist; from torch._C import _distributed_c10d as c; import pickle;"
        "dist.init_process_group('nccl', store=dist.HashStore(), rank=0, world_size=1,"
        "device_id=torch.device('cuda', 0));"
        "t = torch.ones(4, device='cuda'); dist.all_reduce(t); torch.cuda.synchronize();"
        "n = len(pickle.loads(c._dump_nccl_trace())['entries']); print(torch.cuda.nccl.version(), n);"
        "assert n > 0"
    )
    said = command(folder, "-c", code, env={"TORCH_FR_BUFFER_SIZE": "100"})
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(GPUS))
    return f"torch {torch.__version__}, {names}; NCCL and its entries: {said.strip()}"


def gpu_tests(folder: Path) -> str:
    return pytest(folder, "tests", "-m", "gpu") if GPUS else pytest(folder, "tests/doubles/test_gpu.py")


def syncs(folder: Path) -> str:
    return pytest(folder, "tests/doubles/test_syncs.py")


def epochs(folder: Path) -> str:
    if not GPUS:
        on_device, on_cpu = (trained(folder, n, "--steps", 30, "--device", d) for n, d in (("a", "auto"), ("b", "cpu")))
        same(on_device["weights"], on_cpu["weights"])
        return (
            f"30 steps in fp32 end with the CPU's weights {on_cpu['weights']}; an epoch, bf16, graphs, compile: {NEEDS}"
        )
    found: list[str] = []
    for name, flags in {"fp32": (), "bf16": ("--precision", "bf16"), "graphs": ("--cuda-graphs",),
                        "compile": ("--compile",)}.items():  # fmt: skip
        said = paceline(folder, "train", "mnist-cnn", "--epochs", 1, "--nproc", 1, *flags, "--run-dir", name)
        accuracy = float(re.findall(r"accuracy ([0-9.]+)%", said)[-1])
        found.append(f"{name} {accuracy} %")
        if accuracy < 98:
            raise Wrong(", ".join(found))
    return ", ".join(found)


def same(*digests: str) -> None:
    """Raise Wrong unless all are one."""
    if len({*digests}) != 1 or not digests[0]:
        raise Wrong(f"differ: {', '.join(digests)}")


def bits(folder: Path) -> str:
    found: list[str] = []
    for strategy in ("exact", "zero"):
        for precision in ("fp32", "bf16") if GPUS else ("fp32",):
            common = (
                "--strategy",
                strategy,
                "--virtual-ranks",
                6,
                "--batch-size",
                8,
                "--steps",
                12,
                "--precision",
                precision,
            )
            digests = [
                trained(folder, f"{strategy}-{precision}-{number}", *common, *shared(ranks))["weights"]
                for number, ranks in enumerate((1, 1, 2, 3))
            ]
            same(*digests)
            found.append(f"{strategy} {precision} {digests[0]}")
    return "; ".join(found) + ("" if GPUS else f"; bf16 and NCCL: {NEEDS}")


def killed(folder: Path) -> str:
    common = ("--strategy", "exact", *SIX, "--checkpoint-every", 4, "--keep", 99)
    whole = trained(folder, "whole", *common, "--steps", 24, *shared(2))["weights"]
    path = [str(ROOT / "src"), str(ROOT), *([] if GPUS else [str(ROOT / "tests" / "doubles" / "site_gpu")])]
    words = ["train", "mnist-cnn", *common, "--steps", 24, *shared(2), "--run-dir", "killed"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *map(str, words)], cwd=folder, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip
    while process.poll() is None and not any((folder / "killed" / "checkpoints").glob("step-*8")):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(5)  # its agent ends the ranks
    said = paceline(folder, "train", "--resume", "auto", "--run-dir", "killed", "--nproc", 1)
    after = re.search(r"goes on after step (\d+)", said)
    summary = read_summary(folder / "killed")
    same(whole, ((summary and summary.weights_sha256) or "")[:16])
    return f"killed, resumed after step {after[1] if after else '?'} on another number of ranks: {whole}"


def compared(folder: Path) -> str:
    short = ("--nproc", max(GPUS, 1), "--steps", 5, "--rounds", 1, "--device", "auto")
    said = paceline(folder, "compare", "mnist-cnn", "--strategies", "bucketed,exact", *short)
    return " ".join(said.strip().splitlines()[-1].split())[:160]


def collated(folder: Path) -> str:
    (folder / "mine.py").write_text(
        "from paceline.tasks import load_task\nfrom dataclasses import replace\n"
        "from torch.utils.data import default_collate\n"
        "task = replace(load_task('mnist-cnn', {}), collate=lambda samples: default_collate(samples))\n"
    )
    digests = []
    for workers in (0, 2):
        paceline(folder, "train", "mine.py:task", "--steps", 12, "--num-workers", workers, "--run-dir", workers)
        summary = read_summary(folder / str(workers))
        digests.append(((summary and summary.weights_sha256) or "")[:16])
    same(*digests)
    return f"0 and 2 loader processes: {digests[0]}"


def prefetched(folder: Path) -> str:
    if not GPUS:
        return pytest(folder, "tests/doubles", "-k", "stream or ahead") + f"; the race itself: {NEEDS}"
    code = (
        "import torch; from paceline.data.ahead import on_its_way\n"
        "def slow():\n"
        "  for i in range(50):\n"
        "    torch.cuda._sleep(20_000_000)\n"
        "    yield torch.full((1 << 20,), float(i)).pin_memory()\n"
        "for i, batch in enumerate(on_its_way(slow(), torch.device('cuda', 0))):\n"
        "  scratch = torch.full((1 << 20,), -1.0, device='cuda')\n"
        "  assert bool((batch == i).all()), i\n"
        "print('50 batches arrived whole')"
    )
    return command(folder, "-c", code).strip()


def beside_ddp(folder: Path) -> str:
    if not GPUS:
        return NEEDS
    out = ROOT / "benchmarks" / "results" / "gpu.json"
    said = command(folder, ROOT / "benchmarks" / "gpu.py", "--work", "W1", "--rounds", 5, "--out", out)
    return " ".join(said.split())[-200:]


STEPS = {
    1: Step("versions, NCCL's recorder", "entries in _dump_nccl_trace", versions),
    2: Step("the tests that need a GPU", "all pass", gpu_tests),
    3: Step("host synchronisations", "at most one a step, zero and fsdp two", syncs),
    4: Step("an epoch of the MNIST CNN: fp32, bf16, graphs, compile", ">= 98 %", epochs),
    5: Step("exact and zero, 6 virtual ranks, on 1 (twice), 2, 3 ranks", "one digest each", bits),
    6: Step("killed and resumed", "the digest of a run left alone", killed),
    7: Step("compare bucketed and exact", "ends with its table", compared),
    8: Step("data with a collate of its own, 0 and 2 loader processes", "one digest", collated),
    9: Step("the next batch while the side stream is slow", "each arrives whole", prefetched),
    10: Step("benchmarks/gpu.py", ">= 1.0 of DDP everywhere", beside_ddp),
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=",".join(map(str, STEPS)), help="which, separated by commas")
    parser.add_argument("--again", action="store_true", help="also what was right before")
    parser.add_argument("--out", type=Path)
    told = parser.parse_args(arguments)
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()) if GPUS else "stand-ins"
    out: Path = told.out or ROOT / "benchmarks" / "results" / f"gpu-{name}.json"
    found = json.loads(out.read_text()) if out.exists() else {}
    steps: dict[str, dict[str, object]] = {} if told.again else found.get("steps", {})
    for number in map(int, told.steps.split(",")):
        step = STEPS[number]
        if steps.get(str(number), {}).get("right"):
            continue
        began, words = time.monotonic(), ""
        with tempfile.TemporaryDirectory(prefix="paceline-gpu-day-") as folder:
            try:
                words = step.run(Path(folder))
                right = None if words == NEEDS else True
            except (Wrong, subprocess.TimeoutExpired) as error:
                right, words = False, str(error)
        seconds = round(time.monotonic() - began, 1)
        steps[str(number)] = {
            "step": step.name,
            "expected": step.expected,
            "found": words,
            "right": right,
            "seconds": seconds,
        }
        mark = {True: "ok   ", False: "WRONG", None: "-    "}[right]
        print(f"{number:2} {mark} {seconds:6.1f} s  {step.name}: {words}", flush=True)
        ordered = dict(sorted(steps.items(), key=lambda item: int(item[0])))
        out.write_text(json.dumps({"gpus": GPUS, "machine": machine(), "steps": ordered}, indent=1) + "\n")
    wrong = [number for number, one in steps.items() if one["right"] is False]
    right = sum(one["right"] is True for one in steps.values())
    print(f"{right} of {len(steps)} right{': wrong ' + ', '.join(wrong) if wrong else ''}; {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
