"""What must hold on a GPU. Parts a to f measure, each alone; then follow the tests 1 to 19, several at a time.

    python benchmarks/gpu_day.py                  # continues with what is open; --again begins anew
    python benchmarks/gpu_day.py --steps b,c      # only these
    python benchmarks/gpu_day.py --seconds 300    # starts no step after that, and stops the running ones

Each step has a time limit, and its result is written when it ends: a stop loses the running steps only. Parts a to f
take at most 9 minutes on one GPU, all steps about 14.

Without a GPU each step runs on the stand-ins of tests/doubles (a device in Python, a group like NCCL's), as far as they
can show it. What only a GPU can show is marked so, and counts neither as right nor as wrong.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from paceline.runs.summary import read_summary
from race.contenders import BASE
from race.figures import machine, ratios, read

ROOT = Path(__file__).parents[1]
GPUS = torch.cuda.device_count()
NEEDS = "needs a GPU"
RESULTS = ROOT / "benchmarks" / "results"
LEAST_SECONDS = 20.0  # with less, a step is not started
SLOWER = 1 if GPUS else 5  # the time limits are those of a GPU and its processors
LEAST_MFU, LEAST_SPEED = 0.4, 0.97  # of the measured matrix product; of the plain loop
SIX = ("--virtual-ranks", 6, "--batch-size", 8)


class Wrong(Exception):  # noqa: N818 - the result of a step
    """What was found is not what was expected."""


@dataclass(frozen=True)
class Step:
    """`run` returns what it found, given a new folder, or raises Wrong."""

    name: str
    expected: str
    run: Callable[[Path], str]
    seconds: float = 120.0
    """its time limit"""


deadlines = threading.local()
"""`end` is the end of the step that the thread runs."""


def seconds_left() -> float:
    return max(1.0, deadlines.end - time.monotonic())


def environment(*, in_python: bool = not GPUS) -> dict[str, str]:
    """With the code that is tested, and with the device in Python if `in_python`."""
    path = [str(ROOT / "src"), str(ROOT), *([str(ROOT / "tests" / "doubles" / "site_gpu")] if in_python else [])]
    no_peak = {"CI": "true"} if in_python else {}  # the device has no random generator to measure a peak with
    return os.environ | no_peak | {"PYTHONPATH": os.pathsep.join(path)}


def command(folder: Path, *words: object, code: int = 0, env: dict[str, str] | None = None) -> str:
    """What a command printed."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, text=True, capture_output=True, timeout=seconds_left(),
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
            folder, "tests/doubles/test_guard.py", "-k", "only_enqueued"
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


def modelled(folder: Path, *names: str) -> dict[str, Any]:
    """The record of benchmarks/gpu_models.py for these models; without a GPU, of tiny models on the CPU."""
    out = RESULTS / "gpu-models.json" if GPUS else folder / "models.json"
    quick = () if GPUS else ("--quick", "--device", "cpu")
    env = environment(in_python=False)
    command(folder, ROOT / "benchmarks" / "gpu_models.py", *names, *quick, "--out", out, env=env)
    return json.loads(out.read_text())["models"]


def beside_a_plain_loop(folder: Path, name: str, unit: str) -> str:
    found = modelled(folder, name)[name]
    speeds = [
        f"{kind} {found[kind][unit]:,.0f} {unit}, MFU {100 * found[kind]['MFU']:.1f} %" for kind in ("plain", "session")
    ]
    ratio = found["session x plain"]
    said = f"{'; '.join(speeds)} of {found['product TFLOP/s']:.0f} TFLOP/s; session x plain {ratio}"
    if not GPUS:
        return f"a tiny model on the CPU: {said}; real speeds: {NEEDS}"
    if ratio < LEAST_SPEED or (name == "gpt2" and found["session"]["MFU"] < LEAST_MFU):
        raise Wrong(f"{said}; the longest functions: {', '.join(found['functions'][:3])}")
    return said


def gpt2(folder: Path) -> str:
    return beside_a_plain_loop(folder, "gpt2", "tokens/s")


def resnet50(folder: Path) -> str:
    return beside_a_plain_loop(folder, "resnet50", "samples/s")


def beside_ddp(folder: Path) -> str:
    hosts = "; ".join(
        f"host ms in a step of {name}: plain {found['plain']['host ms']:.2f}, session {found['session']['host ms']:.2f}"
        for name, found in modelled(folder, "w1", "resnet18").items()
        if name in ("w1", "resnet18")
    )
    if not GPUS:
        return f"{hosts}; the race with DDP: {NEEDS}"
    out = RESULTS / "gpu.json"
    benchmark = (ROOT / "benchmarks" / "gpu.py", "--work", "W1", "W2", "--precision", "fp32", "--rounds", 5)
    command(folder, *benchmark, "--out", out)
    speeds = speeds_beside_ddp(out)
    said = ", ".join(f"{work} {name} {speed:.2f}" for (work, name), speed in speeds.items())
    if speeds["W1 fp32", "default"] < 1.0:
        raise Wrong(f"of DDP's speed: {said}; {hosts}")
    return f"of DDP's speed: {said}; {hosts}"


def speeds_beside_ddp(record: Path) -> dict[tuple[str, str], float]:
    """By work and contender: the median of its speed, DDP's = 1."""
    rows = read(record)
    bases = {row.work: row for row in rows if row.contender == BASE}
    return {(row.work, row.contender): median(ratios(row, bases[row.work])) for row in rows if row.contender != BASE}


def two_ranks(folder: Path) -> str:
    common = ("--strategy", "exact", *SIX, "--steps", 24)
    one, two = (trained(folder, str(ranks), *common, *shared(ranks)) for ranks in (1, 2))
    same(one["weights"], two["weights"])
    return f"{one['weights']} on 1 and 2 ranks, {one['rate']} and {two['rate']} samples/s"


SKIPPED = """
import json, sys, torch
from torch import nn
device, found = sys.argv[1], {}
def weights(make, bad_steps):
    parameter = nn.Parameter(torch.ones(1000, device=device))
    optimizer = make([parameter])
    for step in range(6):
        rubbish = [torch.full((1000,), 1e30, device=device) for _ in range(9)]
        del rubbish
        parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
        if step in bad_steps:
            parameter.grad.fill_(float("inf"))
        optimizer.found_inf = torch.tensor(float(step in bad_steps), device=device)
        if bad_steps or step not in missing:
            optimizer.step()
    return parameter.detach()
kinds = {"SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True)}
kinds["SGD with momentum"] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)
for name in ("Adam", "AdamW", "Adagrad"):
    kinds[name] = lambda p, name=name: getattr(torch.optim, name)(p, lr=0.1, fused=True)
for name, make in kinds.items():
    for when, missing in (("first", (0,)), ("later", (2, 3))):
        found[f"{name}, {when} step skipped"] = torch.equal(weights(make, missing), weights(make, ()))
print(json.dumps(found))
"""
DEFECT = "SGD with momentum, first step skipped"


def skipped(folder: Path) -> str:
    said = command(folder, "-c", SKIPPED, "cuda" if GPUS else "cpu", env=environment(in_python=False))
    found: dict[str, bool] = json.loads(said.splitlines()[-1])
    if wrong := [name for name, right in found.items() if not right and name != DEFECT]:
        raise Wrong(f"not as without the skipped step: {', '.join(wrong)}")
    momentum = "as without it" if found[DEFECT] else "undefined (a defect of torch)"
    return f"torch {torch.__version__}, {'GPU' if GPUS else 'CPU'}: SGD's momentum is {momentum}; all others are right"


LATE = """
from dataclasses import replace
import torch
from paceline.tasks.registry import load_task
task = load_task("mnist-cnn", {})
def loss(outputs, targets):
    return task.loss(outputs, targets) * torch.where(targets[0] == 7, torch.nan, 1.0)
late = replace(task, loss=loss)
at_once = replace(late, on_step=lambda moment: None)  # a callback needs the loss of its step
"""


def late(folder: Path) -> str:
    said = pytest(folder, "tests/doubles/test_late.py")
    (folder / "late.py").write_text(LATE)
    digests: list[str] = []
    for task in ("late", "at_once"):
        paceline(folder, "train", f"late.py:{task}", "--strategy", "exact", "--steps", 40, "--clip-norm", 1,
                 "--not-finite", "skip", "--run-dir", task)  # fmt: skip
        summary = read_summary(folder / task)
        digests.append(((summary and summary.weights_sha256) or "")[:16])
    same(*digests)
    waits = counted(folder) if GPUS else f"waits as CUDA counts them: {NEEDS}"
    return f"{said}; {digests[0]} with NaN in some steps; {waits}"


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
        if seen:
            raise Wrong("; ".join(found))
    return "; ".join(found)


def page_locked(folder: Path) -> str:
    if not GPUS:
        return NEEDS
    code = (
        "import os, torch; from paceline.checkpoint import memory_snapshots as s\n"
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
            cwd=folder, env=environment(), text=True, capture_output=True, timeout=seconds_left(), check=False,
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


MEASURED = {
    "f": Step("fused optimizers whose first or later steps are skipped", "as without these steps", skipped, 40),
    "b": Step("GPT-2 124M: bf16, compiled, fused AdamW", "MFU >= 40 %, >= 0.97 of a plain loop", gpt2, 150),
    "c": Step("ResNet-50: bf16, channels last", ">= 0.97 of a plain loop", resnet50, 80),
    "a": Step("W1 and ResNet18 beside DDP, profiled", "W1: >= 1.0 of DDP", beside_ddp, 180),
    "d": Step("two ranks over gloo on one GPU", "the digest of one rank", two_ranks, 50),
    "e": Step("numbers that are read one step later", "the bits of reading at once, no wait", late, 120),
}
"""in this order, each alone"""
TESTS = {
    "1": Step("versions, NCCL's recorder", "entries in _dump_nccl_trace", versions),
    "2": Step("the tests that need a GPU", "all pass", gpu_tests),
    "3": Step("host synchronisations", "at most one a step, zero and fsdp two", syncs),
    "4": Step("an epoch of the MNIST CNN: fp32, bf16, graphs, compile", ">= 98 %", epochs, 150),
    "5": Step("exact and zero, 6 virtual ranks, on 1 (twice), 2, 3 ranks", "one digest each", bits, 200),
    "6": Step("killed and resumed", "the digest of a run left alone", killed),
    "7": Step("compare bucketed and exact", "ends with its table", compared),
    "8": Step("data with a collate of its own, 0 and 2 loader processes", "one digest", collated),
    "9": Step("the next batch while the side stream is slow", "each arrives whole", prefetched),
    "12": Step("memory of snapshots", "page-locked", page_locked),
    "13": Step("doctor", "exit code 0", doctor),
    "14": Step("verify, --bitwise", "equal, bit-identical", verified),
    "15": Step("a model cut along tensor and pipeline", "one loss", meshes),
    "16": Step("a rank that sleeps", "named, exit code 3", held_up),
    "17": Step("a plain DDP script under launch", "silent when clean; NaN and drift named", scripts),
    "18": Step("local steps, fp16, average of weights, DDP, synchronised batch norm", "exit code 0", others),
    "19": Step("a kernel without end", "named, exit code 3", endless),
}


class Day:
    """The results so far, in a file that is written after each step."""

    def __init__(self, out: Path, seconds: float, *, again: bool = False) -> None:
        self.out, self._end, self._one_writes = out, time.monotonic() + seconds, threading.Lock()
        kept = json.loads(out.read_text()) if out.exists() and not again else {}
        self.results: dict[str, dict[str, object]] = kept.get("steps", {})

    def run(self, key: str, step: Step) -> None:
        began = time.monotonic()
        if self._end - began < LEAST_SECONDS:
            return
        deadlines.end = min(began + step.seconds * SLOWER, self._end)
        with tempfile.TemporaryDirectory(prefix="paceline-gpu-day-") as folder:
            try:
                found = step.run(Path(folder))
                right = None if found == NEEDS else True
            except Wrong as error:
                right, found = False, str(error)
            except subprocess.TimeoutExpired:
                right, found = False, f"stopped at the limit of {deadlines.end - began:.0f} s"
        self._keep(key, step, found, right, round(time.monotonic() - began, 1))

    def _keep(self, key: str, step: Step, found: str, right: bool | None, seconds: float) -> None:
        mark = {True: "ok   ", False: "WRONG", None: "-    "}[right]
        with self._one_writes:
            self.results[key] = {
                "step": step.name, "expected": step.expected, "found": found, "right": right, "seconds": seconds,
            }  # fmt: skip
            print(f"{key:>2} {mark} {seconds:6.1f} s  {step.name}: {found}", flush=True)
            ordered = dict(sorted(self.results.items(), key=lambda item: (len(item[0].strip("abcdef")), item[0])))
            self.out.write_text(json.dumps({"gpus": GPUS, "machine": machine(), "steps": ordered}, indent=1) + "\n")

    def open_ones(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if not self.results.get(key, {}).get("right")]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=",".join([*MEASURED, *TESTS]), help="which, separated by commas")
    parser.add_argument("--seconds", type=float, default=570.0 * SLOWER, help="for all")
    parser.add_argument("--again", action="store_true", help="also what was right before")
    parser.add_argument("--jobs", type=int, default=3, help="tests at a time")
    parser.add_argument("--out", type=Path)
    told = parser.parse_args(arguments)
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()) if GPUS else "stand-ins"
    day = Day(told.out or RESULTS / f"gpu-{name}.json", told.seconds, again=told.again)
    keys: list[str] = told.steps.split(",")
    wanted = day.open_ones(keys)
    for key in [key for key in MEASURED if key in wanted]:
        day.run(key, MEASURED[key])
    with ThreadPoolExecutor(told.jobs) as pool:
        for done in [pool.submit(day.run, key, TESTS[key]) for key in TESTS if key in wanted]:
            done.result()
    wrong = [key for key, one in day.results.items() if one["right"] is False]
    right = sum(one["right"] is True for one in day.results.values())
    left = [key for key in keys if key not in day.results]
    print(f"{right} of {len(day.results)} right{': wrong ' + ', '.join(wrong) if wrong else ''}; {day.out}")
    if left:
        print(f"not run, as the time was over: {', '.join(left)}. Run it again")
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
