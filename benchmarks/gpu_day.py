"""The first day on a GPU: what must hold there, at most 10 minutes on one GPU, 20 on several.

    python benchmarks/gpu_day.py                  # goes on where it ended; --again begins anew, --steps 4,5 only these
    python benchmarks/gpu_day.py --jobs 4         # four steps at a time; the race beside DDP still runs alone, at last

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
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.runs.summary import read_summary
from race.figures import machine

ROOT = Path(__file__).parents[1]
GPUS = torch.cuda.device_count()
NEEDS = "needs a GPU"
LIMIT_SECONDS = 300
RACE = 10  # the step that is measured, and therefore runs alone
SIX = ("--virtual-ranks", 6, "--batch-size", 8)


class Wrong(Exception):  # noqa: N818 - the result of a step
    """What was found is not what was expected."""


@dataclass(frozen=True)
class Step:
    """One of the ten. `run` says what it found in a folder of its own, or raises Wrong."""

    name: str
    expected: str
    run: Callable[[Path], str]


def environment() -> dict[str, str]:
    """With what is tried, and where there is no GPU, with the one in Python."""
    path = [str(ROOT / "src"), str(ROOT), *([] if GPUS else [str(ROOT / "tests" / "doubles" / "site_gpu")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def command(folder: Path, *words: object, code: int = 0, env: dict[str, str] | None = None) -> str:
    """What a command printed."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, text=True, capture_output=True, timeout=LIMIT_SECONDS,
        env=environment() | (env or {}), check=False,
    )  # fmt: skip
    if done.returncode != code:
        print(f"--- {' '.join(map(str, words))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}", file=sys.stderr)
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise Wrong(f"{' '.join(map(str, words[2:]))[:80]}: exit code {done.returncode}: {' '.join(last)[:200]}")
    return done.stdout + (done.stderr if code else "")


def paceline(folder: Path, *words: object, code: int = 0) -> str:
    """What a command of paceline's printed."""
    return command(folder, "-m", "paceline", *words, code=code)


def pytest(folder: Path, *words: str) -> str:
    """The last line of some tests."""
    tests = [str(ROOT / word) if word.startswith("tests/") else word for word in words]
    done = command(ROOT, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
                   "-W", "ignore:This process:DeprecationWarning", *tests,  # Python 3.12 on forks beside threads
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
    files = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if "@pytest.mark.gpu\n" in file.read_text()]
    return pytest(folder, *files, "-m", "gpu") if GPUS else pytest(folder, "tests/doubles/test_gpu.py")


def syncs(folder: Path) -> str:
    from torch.distributed.fsdp import FSDPModule

    old = [] if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else ["-k", "not fsdp"]  # refused there
    return pytest(folder, "tests/doubles/test_syncs.py", *old)


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
            common = ("--strategy", strategy, *SIX, "--steps", 12, "--precision", precision)
            digests = [
                trained(folder, f"{strategy}-{precision}-{number}", *common, *shared(ranks))["weights"]
                for number, ranks in enumerate((1, 1, 2, 3))
            ]
            same(*digests)
            found.append(f"{strategy} {precision} {digests[0]}")
    return "; ".join(found) + ("" if GPUS else f"; bf16 and NCCL: {NEEDS}")


def killed(folder: Path) -> str:
    common = ("--strategy", "exact", *SIX, "--checkpoint-every", 4, "--keep-checkpoints", 99)
    whole = trained(folder, "whole", *common, "--steps", 24, *shared(2))["weights"]
    words = ["train", "mnist-cnn", *common, "--steps", 24, *shared(2), "--run-dir", "killed"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *map(str, words)], cwd=folder, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    while process.poll() is None and not any((folder / "killed" / "checkpoints").glob("step-*8")):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(5)  # its agent ends the ranks
    said = paceline(folder, "train", "--resume", "auto", "--run-dir", "killed", "--nproc", 1)
    after = re.search(r"resumes after step (\d+)", said)
    summary = read_summary(folder / "killed")
    same(whole, ((summary and summary.weights_sha256) or "")[:16])
    return f"killed, resumed after step {after[1] if after else '?'} on another number of ranks: {whole}"


def compared(folder: Path) -> str:
    short = ("--nproc", max(GPUS, 1), "--steps", 5, "--rounds", 1, "--device", "auto")
    said = paceline(folder, "compare", "mnist-cnn", "--strategies", "bucketed,exact", *short)
    return " ".join(said.strip().splitlines()[-1].split())[:160]


def collated(folder: Path) -> str:
    (folder / "mine.py").write_text(
        "from paceline.tasks.registry import load_task\nfrom dataclasses import replace\n"
        "from torch.utils.data import default_collate\n"
        "task = replace(load_task('mnist-cnn', {}), collate=lambda samples: default_collate(samples))\n"
    )
    digests = []
    for workers in (0, 2):
        paceline(folder, "train", "mine.py:task", "--steps", 12, "--strategy", "exact",
                 "--num-workers", workers, "--run-dir", workers)  # fmt: skip
        summary = read_summary(folder / str(workers))
        digests.append(((summary and summary.weights_sha256) or "")[:16])
    same(*digests)
    return f"0 and 2 loader processes: {digests[0]}"


def prefetched(folder: Path) -> str:
    if not GPUS:
        return pytest(folder, "tests/doubles", "-k", "stream or ahead") + f"; the race itself: {NEEDS}"
    code = (
        "import torch; from paceline.data.loader import prefetch_to_device\n"
        "def slow():\n"
        "  for i in range(50):\n"
        "    torch.cuda._sleep(20_000_000)\n"
        "    yield torch.full((1 << 20,), float(i)).pin_memory()\n"
        "for i, batch in enumerate(prefetch_to_device(slow(), torch.device('cuda', 0))):\n"
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


IN_A_TASK = """
import json, os, time, warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
import torch
from paceline.tasks.registry import load_task
task, calls, seen = load_task("mnist-cnn", {}), 0, Counter()
def loss(outputs, targets):
    global calls
    calls += 1
    act(calls)
    return task_loss(outputs, targets)
task_loss = task.loss
task = replace(task, loss=loss)
"""


def counted(folder: Path) -> str:
    if not GPUS:
        return NEEDS
    (folder / "mine.py").write_text(IN_A_TASK + (
        "def note(message, category, filename, lineno, *_):\n"
        "    if filename != torch.cuda.__file__:  # it is told of the very first call\n"
        "        seen[f'{Path(filename).name}:{lineno}'] += 1\n"
        "def act(call):\n"
        "    if call == 20:\n"
        "        warnings.simplefilter('always'); warnings.showwarning = note\n"
        "        torch.cuda.set_sync_debug_mode('warn')\n"
        "    if call == 40:\n"
        "        torch.cuda.set_sync_debug_mode('default')\n"
        "        Path('seen.json').write_text(json.dumps(seen))\n"
    ))  # fmt: skip
    found: list[str] = []
    for flags in ((), ("--clip-norm", 1), ("--strategy", "exact")):
        paceline(folder, "train", "mine.py:task", "--steps", 60, *flags, "--check-replicas-every", 1000,
                 "--snapshot-every", 1000, "--run-dir", f"run{len(found)}")  # fmt: skip
        seen = json.loads((folder / "seen.json").read_text())
        found.append(f"{' '.join(map(str, flags)) or 'plain'}: {seen or 0} in 20 steps")
        if sum(seen.values()) > 20:
            raise Wrong("; ".join(found))
    return "; ".join(found)


def page_locked(folder: Path) -> str:
    if not GPUS:
        return NEEDS
    code = (
        "import os, torch; from paceline.checkpoint import snapshots as s\n"
        "fd = os.memfd_create('x'); w = s.SnapshotWriter((fd, fd), 0, 1, 0, spared=None)\n"
        "b = w._buffer(fd, 1 << 28, True); assert w._locked and b.is_pinned()\n"
        "g = torch.ones(1 << 28, dtype=torch.uint8, device='cuda'); b.copy_(g, non_blocking=True)\n"
        "torch.cuda.synchronize(); e = [torch.cuda.Event(enable_timing=True) for _ in 'ab']\n"
        "e[0].record(); b.copy_(g, non_blocking=True); e[1].record(); torch.cuda.synchronize()\n"
        "p = torch.empty(1 << 28, dtype=torch.uint8); p.copy_(g)\n"
        "import time; t = time.perf_counter(); p.copy_(g); t = time.perf_counter() - t\n"
        "print(f'locked; {0.268 / e[0].elapsed_time(e[1]) * 1000:.1f} GB/s, not locked {0.268 / t:.1f}')\n"
        "w._buffer(fd, 1 << 20, True)\n"
    )
    return command(folder, "-c", code).strip()


def doctor(folder: Path) -> str:
    said = paceline(folder, "doctor", "mnist-cnn", "--nproc", max(GPUS, 1), "--device", "auto")
    return " ".join(said.strip().splitlines()[-1].split())[:200]


def verified(folder: Path) -> str:
    common = ("verify", "mnist-cnn", "--ranks", "1,2", "--device", "auto", "--steps", 2)
    equal = paceline(folder, *common, "--strategies", "bucketed,zero", "--optimizers", "adamw")
    bits = paceline(folder, *common, "--bitwise", "--optimizers", "adamw")
    return "; ".join(re.findall(r".*equal one process.*|.*bit-identical.*", said)[-1][:120] for said in (equal, bits))


def meshes(folder: Path) -> str:
    if not GPUS:
        return NEEDS  # the device in Python has no DTensor
    task = f"{ROOT / 'examples' / 'own_transformer.py'}:task"
    losses: list[str] = []
    for mesh in ("", "tensor=2", "pipeline=2") if GPUS > 1 else ("",):
        flags = ("--mesh", mesh, *shared(2)) if mesh else ("--nproc", 1)
        said = paceline(folder, "train", task, "--steps", 8, *flags, "--run-dir", mesh or "one")
        losses.append(re.findall(r"loss ([0-9.]+)", said)[-1])
    same(*losses)
    if GPUS > 1:
        return f"one, tensor=2, pipeline=2: test loss {losses[0]}"
    for mesh in ("tensor=2", "pipeline=2"):  # over gloo the ranks would end with SIGSEGV
        said = paceline(folder, "train", task, "--steps", 8, "--mesh", mesh, *shared(2), "--run-dir", mesh, code=2)
        if "over gloo" not in said:
            raise Wrong(said[-300:])
    return f"one rank: {losses[0]}; on one GPU, over gloo, refused; more: {NEEDS.replace('a GPU', 'two GPUs')}"


def held_up(folder: Path) -> str:
    return _stalled(folder, 2, "time.sleep(1000)") if GPUS else NEEDS


def endless(folder: Path) -> str:
    return _stalled(folder, 1, "torch.cuda._sleep(1 << 50); torch.zeros(1, device='cuda').item()") if GPUS else NEEDS


def _stalled(folder: Path, ranks: int, what: str) -> str:
    (folder / "mine.py").write_text(
        IN_A_TASK + f"def act(call):\n    if call == 30 and os.environ['RANK'] == '{ranks - 1}':\n        {what}\n"
    )
    began = time.monotonic()
    said = paceline(folder, "train", "mine.py:task", "--steps", 60, *shared(ranks), "--hang-timeout", "5",
                    "--run-dir", "run", code=3)  # fmt: skip
    if f"rank {ranks - 1}" not in said or "mine.py:" not in said:
        raise Wrong(said[-600:])
    return f"named with its line, ended after {time.monotonic() - began:.0f} s"


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl" if os.environ["WORLD_SIZE"] == "1" else "gloo")
torch.cuda.set_device(0)
rank = dist.get_rank()
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)]
model = DistributedDataParallel(torch.nn.Sequential(*layers).cuda())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
for step in range(300):
    inputs = torch.randn(32, 64, device="cuda")
    if sys.argv[1:] == ["nan"] and step == 100 and rank == dist.get_world_size() - 1:
        inputs[3] = float("nan")
    if sys.argv[1:] == ["drift"] and step == 100 and rank == 1:
        with torch.no_grad():
            next(model.parameters()).add_(1e-3)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def scripts(folder: Path) -> str:
    if not GPUS:
        return NEEDS
    (folder / "script.py").write_text(SCRIPT)
    found: list[str] = []
    for fault, ranks in (("", 1), ("", 2), ("nan", 1), ("nan", 2), ("drift", 2)):
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "launch", "--nproc", str(ranks), "script.py", *fault.split()],
            cwd=folder, env=environment(), text=True, capture_output=True, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        word = {"": "", "nan": "NaN", "drift": "differs"}[fault]
        if (done.returncode == 0) != (not fault) or word not in said:
            raise Wrong(f"{fault or 'clean'} on {ranks}: exit code {done.returncode}: {said[-800:]}")
        found.append(f"{fault or 'clean'} on {ranks}: exit code {done.returncode}")
    checked = paceline(folder, "launch", "--check", "--nproc", 2, "script.py")
    return "; ".join(found) + "; --check: " + " ".join(checked.strip().splitlines()[-1].split())[:120]


def others(folder: Path) -> str:
    if not GPUS:
        return NEEDS
    found: list[str] = []
    for task, *flags in (
        ("mnist-cnn", "--local-steps", 4), ("mnist-cnn", "--precision", "fp16"), ("mnist-cnn", "--ema", 0.9),
        ("mnist-cnn", "--strategy", "ddp"), ("mnist-resnet18", "--batchnorm", "sync"),
    ):  # fmt: skip
        paceline(folder, "train", task, "--steps", 8, *flags, *shared(2), "--run-dir", f"run{len(found)}")
        found.append(" ".join(map(str, flags)))
    return "end with code 0 on 2 ranks: " + ", ".join(found)


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
    11: Step("synchronisations as CUDA counts them", "at most one a step", counted),
    12: Step("memory of snapshots", "page-locked", page_locked),
    13: Step("doctor", "exit code 0", doctor),
    14: Step("verify, --bitwise", "equal, bit-identical", verified),
    15: Step("a model cut along tensor and pipeline", "one loss", meshes),
    16: Step("a rank that sleeps", "named, exit code 3", held_up),
    17: Step("a plain DDP script under launch", "silent when clean; NaN and drift named", scripts),
    18: Step("local steps, fp16, average of weights, DDP, synchronised batch norm", "exit code 0", others),
    19: Step("a kernel without end", "named, exit code 3", endless),
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=",".join(map(str, STEPS)), help="which, separated by commas")
    parser.add_argument("--again", action="store_true", help="also what was right before")
    parser.add_argument("--jobs", type=int, default=1, help="steps at a time")
    parser.add_argument("--out", type=Path)
    told = parser.parse_args(arguments)
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()) if GPUS else "stand-ins"
    out: Path = told.out or ROOT / "benchmarks" / "results" / f"gpu-{name}.json"
    found = json.loads(out.read_text()) if out.exists() else {}
    steps: dict[str, dict[str, object]] = {} if told.again else found.get("steps", {})
    one_writes = threading.Lock()

    def run(number: int) -> None:
        step, began = STEPS[number], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="paceline-gpu-day-") as folder:
            try:
                words = step.run(Path(folder))
                right = None if words == NEEDS else True
            except (Wrong, subprocess.TimeoutExpired) as error:
                right, words = False, str(error)
        seconds = round(time.monotonic() - began, 1)
        mark = {True: "ok   ", False: "WRONG", None: "-    "}[right]
        with one_writes:
            steps[str(number)] = {
                "step": step.name, "expected": step.expected, "found": words, "right": right, "seconds": seconds,
            }  # fmt: skip
            print(f"{number:2} {mark} {seconds:6.1f} s  {step.name}: {words}", flush=True)
            ordered = dict(sorted(steps.items(), key=lambda item: int(item[0])))
            out.write_text(json.dumps({"gpus": GPUS, "machine": machine(), "steps": ordered}, indent=1) + "\n")

    open_ones = [n for n in map(int, told.steps.split(",")) if not steps.get(str(n), {}).get("right")]
    with ThreadPoolExecutor(told.jobs) as pool:
        for done in [pool.submit(run, number) for number in open_ones if number != RACE]:
            done.result()
    if RACE in open_ones:
        run(RACE)
    wrong = [number for number, one in steps.items() if one["right"] is False]
    right = sum(one["right"] is True for one in steps.values())
    print(f"{right} of {len(steps)} right{': wrong ' + ', '.join(wrong) if wrong else ''}; {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
