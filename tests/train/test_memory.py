"""`--micro-batch auto`: what fits is found under a real limit, changes no bit, is written down and kept on a resume."""

import json
import re
import resource
import tomllib
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cluster import cgroups
from tests.errors import codes, ended_with, raises
from tests.run_script import run_script
from torch import nn

from paceline import ArrayDataset
from paceline.collectives.sum_tree import PartialSums
from paceline.compute.memory import MemoryMeter, SavedForBackward, _used_data_bytes
from paceline.config.settings import ComputeConfig, DataConfig, LaunchConfig, TrainConfig, check_values
from paceline.data.loader import LoadingOptions, index_of_largest_sample
from paceline.rank.world import World
from paceline.strategies import STRATEGIES
from paceline.train import memory
from paceline.train.memory import MicroBatchSearch

CPU = torch.device("cpu")
MIB = 1 << 20

TASK = """
import ctypes, os, re, resource
from pathlib import Path
import torch
from torch import nn
from paceline import ArrayDataset, Task

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(torch.relu(self.norm(self.linear(x).mT).mT))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(256, 4)

    def forward(self, x):
        x = x.expand(-1, int(os.environ.get("TOKENS", "512")), -1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")

def data(split):
    draw = torch.Generator().manual_seed(3)
    count = 64 if split == "train" else 4
    return ArrayDataset(torch.randn(count, 1, 256, generator=draw), torch.randint(0, 4, (count,), generator=draw))

def limit():
    # memory that is freed leaves the process; a variable has no effect in the forks of warm.py
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    if folder := os.environ.get("CGROUP"):  # memory that is allocated from now on counts
        Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    if bytes_more := int(os.environ.get("LIMIT", "0")):
        held = int(re.search(r"^VmData:\\s*([0-9]+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (held + bytes_more, resource.RLIM_INFINITY))

def model():
    limit()
    return Net()

task = Task(model, data, loss)
"""
LOOP = """
import sys
import torch, paceline, mine
mine.limit()
settings = {"micro_batch": "auto"} if sys.argv[1] == "auto" else {"accumulation": int(sys.argv[1])}
counted = bodies = 0
with paceline.session("run", seed=1, resume=True, strategy=sys.argv[3] if len(sys.argv) > 3 else "bucketed") as s:
    model, optimizer = s.prepare(mine.Net(), lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    train = s.loader(mine.data("train"), global_batch=64, **settings)
    for epoch in s.epochs(int(sys.argv[2])):
        for x, y in train:
            counted, bodies = counted + s.samples, bodies + (s.samples > 0)
            optimizer.zero_grad()
            s.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        s.log(epoch=epoch)
print("counted", counted, "bodies", bodies, "accumulation", train.plan.accumulation)
"""


@pytest.fixture
def cgroup() -> Generator[Path]:
    """A memory cgroup, whose limit the kernel enforces."""
    if "memory" not in cgroups.controllers():
        pytest.skip("no memory controller of version 1")
    (folder,) = [folder for folder in cgroups.make("memory") if folder.parent.name == "memory"]
    yield folder
    cgroups.remove()


def limited(cgroup: Path, mib: int) -> dict[str, str]:
    (cgroup / "memory.limit_in_bytes").write_text(str(mib * MIB))
    return {"CGROUP": str(cgroup)}


def train(folder: Path, name: str, *options: str, ranks: int = 1, env: dict[str, str] | None = None) -> Any:
    (folder / "mine.py").write_text(TASK)
    command = ["-m", "paceline", "train", "mine.py:task", "--global-batch", "64", "--run-dir", name, *options]
    return run_script(ranks, *command, cwd=folder, env=env)


def digest(run: Path) -> str:
    return json.loads((run / "summary.json").read_text())["weights_sha256"]


def accumulation(run: Path) -> int:
    return tomllib.loads((run / "config.toml").read_text())["data"]["accumulation"]


@pytest.mark.root
def test_what_fits_into_a_container_is_found_kept_and_changes_no_bit(tmp_path, cgroup):
    env = limited(cgroup, 500)
    steps = ("--steps", "2", "--checkpoint-every", "1")
    done = train(tmp_path, "auto", "--micro-batch", "auto", *steps, env=env)
    found = accumulation(tmp_path / "auto")
    assert done.returncode == 0 and 1 < found < 32, done.stderr
    assert train(tmp_path, "given", "--accumulation", str(found), *steps, env=env).returncode == 0
    assert digest(tmp_path / "auto") == digest(tmp_path / "given")

    longer = ("--resume", "auto", "--micro-batch", "auto", "--steps", "4", "--allow-change")
    assert train(tmp_path, "auto", *longer, "steps").returncode == 0  # without a limit: more would fit
    assert accumulation(tmp_path / "auto") == found
    assert train(tmp_path, "given", *longer, "steps,accumulation").returncode == 0
    assert accumulation(tmp_path / "given") == 1


@pytest.mark.root
def test_the_rank_with_the_least_memory_decides(tmp_path, cgroup):
    env = limited(cgroup, 700)
    (tmp_path / "mine.py").write_text(
        TASK.replace('get("CGROUP")', 'get("CGROUP" if os.environ["RANK"] == "1" else "")')
    )
    command = ["-m", "paceline", "train", "mine.py:task", "--global-batch", "64", "--steps", "1"]
    done = run_script(2, *command, "--run-dir", "auto", "--micro-batch", "auto", cwd=tmp_path, env=env)
    assert done.returncode == 0 and accumulation(tmp_path / "auto") > 1, done.stderr
    again = ("--accumulation", str(accumulation(tmp_path / "auto")))
    assert run_script(2, *command, "--run-dir", "given", *again, cwd=tmp_path, env=env).returncode == 0
    assert digest(tmp_path / "auto") == digest(tmp_path / "given")


@pytest.mark.root
def test_a_sample_that_does_not_fit_is_reported_before_the_first_step(tmp_path, cgroup):
    env = {**limited(cgroup, 500), "TOKENS": "60000"}
    done = train(tmp_path, "auto", "--micro-batch", "auto", "--steps", "1", env=env)
    ended_with(done, "micro-batch-of-one")
    (tmp_path / "loop.py").write_text(LOOP)
    done = run_script(1, "loop.py", "auto", "1", cwd=tmp_path, env=env)
    ended_with(done, "micro-batch-of-one")


@pytest.mark.root
def test_a_loop_finds_what_fits_keeps_it_and_counts_no_trial(tmp_path, cgroup):
    env = limited(cgroup, 500)
    found = "auto"
    for name in ("auto", "given"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(TASK)
        (tmp_path / name / "loop.py").write_text(LOOP)
        done = run_script(1, "loop.py", found, "2", cwd=tmp_path / name, env=env)
        end = re.search(r"counted (\d+) bodies (\d+) accumulation (\d+)", done.stdout)
        assert end, done.stdout + done.stderr
        counted, bodies, found = end.groups()
        assert int(counted) == 2 * 64 and 1 < int(found) < 32, done.stdout + done.stderr
        assert int(bodies) == 2 * int(found)
    assert digest(tmp_path / "auto" / "run") == digest(tmp_path / "given" / "run")
    done = run_script(1, "loop.py", "auto", "3", cwd=tmp_path / "auto")
    assert f"counted 64 bodies {found} accumulation {found}" in done.stdout, done.stdout + done.stderr


COUNTING = {
    "number": ("counted, bodies = counted + s.samples, bodies + (s.samples > 0)", "counted += 1"),
    "enumerate": ("for x, y in train:", "for i, (x, y) in enumerate(train):"),
    "enumerate generator": ("for x, y in train:", "for i, (x, y) in enumerate(__import__('heapq').merge(train)):"),
    "islice": ("for x, y in train:", "for x, y in __import__('itertools').islice(train, 2):"),
    "break": ("optimizer.step()", "optimizer.step(); break"),
    "scheduler": (
        "    train = s.loader(",
        "    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=1)\n    train = s.loader(",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", COUNTING)
def test_a_loop_that_counts_trials_is_an_error_with_the_result(tmp_path, name):
    (tmp_path / "mine.py").write_text(TASK)
    before, after = COUNTING[name]
    assert before in LOOP
    text = LOOP.replace(before, after)
    if name == "scheduler":
        text = text.replace("optimizer.step()", "optimizer.step(); schedule.step()")
    (tmp_path / "loop.py").write_text(text)
    done = run_script(1, "loop.py", "auto", "2", cwd=tmp_path)
    code = {
        "enumerate": "micro-batch-in-iterator",
        "enumerate generator": "micro-batch-in-iterator",
        "islice": "micro-batch-in-iterator",
        "break": "micro-batch-trial-left",
    }
    ended_with(done, code.get(name, "micro-batch-trial-counted"))
    assert ("accumulation=1" in done.stderr) != (name in code)


@pytest.mark.sample(4)
@pytest.mark.parametrize("strategy", ["bucketed", "ddp", "exact", "zero", "fsdp"])
def test_a_trial_changes_no_state_of_a_strategy(tmp_path, strategy):
    for name, options in (("auto", ("--micro-batch", "auto")), ("given", ("--accumulation", "1"))):
        done = train(tmp_path, name, *options, "--steps", "2", "--strategy", strategy, ranks=2)
        assert done.returncode == 0, done.stderr
    assert accumulation(tmp_path / "auto") == 1
    assert digest(tmp_path / "auto") == digest(tmp_path / "given")


@pytest.mark.sample(4)
@pytest.mark.parametrize("strategy", ["bucketed", "ddp", "zero", "fsdp"])
def test_a_trial_changes_no_state_of_a_loop(tmp_path, strategy):
    for name in ("auto", "1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(TASK)
        (tmp_path / name / "loop.py").write_text(LOOP)
        done = run_script(2, "loop.py", name, "2", strategy, cwd=tmp_path / name)
        assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "auto" / "run") == digest(tmp_path / "1" / "run")


def test_a_step_without_memory_names_what_would_have_fitted(tmp_path):
    env = {"LIMIT": str(700 * MIB), "TOKENS": "2048"}
    done = train(tmp_path, "run", "--accumulation", "1", "--steps", "1", "--allocator", "system", env=env)
    assert (done.returncode, codes(done.stderr)) == (1, ["out-of-memory"]), done.stderr
    (fits,) = re.findall(r"--batch-size (\d+)", done.stderr)
    assert 1 <= int(fits) < 64
    fitting = ("--batch-size", fits, "--steps", "1", "--allocator", "system")
    assert train(tmp_path, "fits", *fitting, env=env).returncode == 0


BODY = "s.backward(torch.nn.functional.cross_entropy(model(x), y))"
FAILING_BODY = """outputs = model(x.double().float())
            if sys.argv[4] == "view":
                outputs = outputs[:]
            loss = torch.nn.functional.cross_entropy(outputs, y)
            if sys.argv[4] != "forward":
                raise MemoryError
            s.backward(loss)"""


@pytest.mark.parametrize(
    ("fails_in", "mib", "code", "least"),
    [
        ("forward", 400, "out-of-memory", 1),
        ("loss", 750, "out-of-memory", 32),  # the graph of 64 samples and one of 32 do not fit
        ("function", 750, "out-of-memory", 32),
        ("view", 750, "out-of-memory-not-measured", 0),  # nobody can release its graph
    ],
)
def test_a_loop_without_memory_names_what_would_have_fitted(tmp_path, fails_in, mib, code, least):
    loop = LOOP.replace(BODY, FAILING_BODY)
    if fails_in == "function":
        loop = f"import sys\ndef main():\n{indent(loop, '    ')}\nmain()\n"
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "loop.py").write_text(loop)
    env = {"LIMIT": str(mib * MIB)}
    done = run_script(1, "loop.py", "1", "1", "bucketed", fails_in, cwd=tmp_path, env=env)
    assert (done.returncode, codes(done.stderr)) == (1, [code]), done.stdout + done.stderr
    fits = re.findall(r"fit with (\d+) samples", done.stderr)
    assert [least <= int(number) < 64 for number in fits] == [True] * (code == "out-of-memory"), done.stderr


EVALUATION = """            break
        model.eval()
        with torch.no_grad():
            for x, y in s.loader(mine.data("train"), global_batch=64):
                model(x)
                raise MemoryError
        s.log(epoch=epoch)"""


def test_an_evaluation_without_memory_is_no_step_that_a_break_has_left(tmp_path):
    loop = LOOP.replace("        s.log(epoch=epoch)", EVALUATION)
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "loop.py").write_text(loop)
    done = run_script(1, "loop.py", "1", "1", cwd=tmp_path)
    assert done.returncode == 1 and "MemoryError" in done.stderr and codes(done.stderr) == [], done.stderr


def test_settings_that_contradict_a_search():
    for settings in ({"accumulation": 2}, {"batch_size": 8}):
        with raises("micro-batch-set"):
            check_values(TrainConfig(data=DataConfig(micro_batch="auto", **settings)))
    with raises("micro-batch-with-cuda-graphs"):
        check_values(TrainConfig(data=DataConfig(micro_batch="auto"), compute=ComputeConfig(cuda_graphs=True)))
    with raises("micro-batch-on-mesh"):
        check_values(TrainConfig(data=DataConfig(micro_batch="auto"), launch=LaunchConfig(mesh="tensor=2")))


@pytest.mark.parametrize(
    ("strategy", "virtual_ranks", "mib"),
    [("exact", 16, 3 + 14), ("zero", 31, 4 + 28), ("bucketed", 16, 14), ("exact", 2, 0), ("ddp", 16, 0)],
)  # 1 MiB of parameters and 1 MiB of buffers
def test_one_virtual_rank_saves_sums_and_buffers(strategy, virtual_ranks, mib):
    model = nn.Module()
    model.weight, model.table = nn.Parameter(torch.zeros(MIB // 4)), nn.Buffer(torch.zeros(MIB // 4))
    module, sums = (
        (object() if strategy == "ddp" else model),
        getattr(STRATEGIES[strategy], "keeps_partial_sums", False),
    )
    replica = SimpleNamespace(
        world=World(0, 2, 0, 2, CPU, "gloo"), virtual_ranks=virtual_ranks, parts=None, in_lockstep=False, model=model,
        module=module, parameters=[model.weight], keeps_partial_sums=sums,
    )  # fmt: skip
    assert memory.extra_virtual_rank_bytes(replica) == mib * MIB


def test_a_rank_keeps_from_log2_to_2_log2_sums_more_than_with_one_virtual_rank():
    found: dict[int, set[int]] = {}
    for leaves in range(1, 40):
        for owned in combinations(range(leaves + 1), 2):
            sums, most = PartialSums[int](owned, leaves, lambda left, right: 0), 0
            for leaf in range(*owned):
                most = max(most, len(sums._sums))  # and the gradient that follows
                sums.add(leaf, 0)
            found.setdefault(owned[1] - owned[0], set()).add(max(most, len(sums.finish()) - 1))
    for count, extra in found.items():
        assert count.bit_length() - 1 <= min(extra) and max(extra) <= 2 * (count.bit_length() - 1)


@pytest.mark.parametrize(
    ("strategy", "device", "usable", "most"),  # MiB after a peak of 10 MiB
    [
        ("exact", "cpu", 23.5, 12),  # 2 * 3 - 3 sums of 1 MiB, 2 * 4 copies of 1 MiB, and 12 in a checkpoint
        ("bucketed", "cpu", 23.5, 13),
        ("zero", "cuda", 20.5, 15),
        ("zero", "cuda", 21.5, 16),  # with one more virtual rank two sums more
        ("zero", "cuda", 500, 16),
        ("exact", "cpu", -50, 8),  # the present number
    ],
)
def test_the_memory_after_the_first_step_limits_the_virtual_ranks(monkeypatch, strategy, device, usable, most):
    model = nn.Module()
    model.weight, model.table = nn.Parameter(torch.zeros(MIB // 4)), nn.Buffer(torch.zeros(MIB // 4))
    replica = SimpleNamespace(
        model=model, parameters=[model.weight], gradients=list, optimizers=[],
        keeps_partial_sums=strategy != "bucketed",
    )  # fmt: skip
    # of the free memory 0.65, without 65 MiB for a checkpoint; of that of a GPU 0.9
    free = (usable + 10) / 0.65 + 64 + 1 if device == "cpu" else (usable + 10) / 0.9
    meter = SimpleNamespace(free_bytes=int(free * MIB), peak=lambda: 10 * MIB)
    monkeypatch.setattr(memory, "MemoryMeter", lambda *_: meter)
    assert memory.max_virtual_ranks([replica], World(0, 2, 0, 2, torch.device(device), "gloo"), 16) == most


def test_without_a_start_the_peak_of_the_process_is_beyond_what_it_holds(monkeypatch):
    fields = {"VmRSS": 30, "VmHWM": 70}
    monkeypatch.setattr("paceline.compute.memory.read_process_memory_field", fields.get)
    monkeypatch.setattr("paceline.compute.memory.peak_resident_memory", lambda: fields["VmHWM"])
    monkeypatch.setattr(MemoryMeter, "__init__", lambda self: vars(self).update(_gpu=False, _held_bytes=None))
    assert MemoryMeter().peak() == 40


class Gpu:
    """Stands in for torch's counters of a GPU, which this machine does not have, and for its error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, needed: Callable[[int], int]) -> None:
        self.free, self.needed, self.peak, self.tried = free, needed, 0, list[int]()
        module = SimpleNamespace(mem_get_info=lambda _: (free, free))
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        for name, value in (("empty_cache", None), ("memory_allocated", 0), ("reset_peak_memory_stats", None)):
            monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda _: self.peak)

    def find(self, portion: int, other_rank: int = 10**9, *, norm: bool = False) -> MicroBatchSearch:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.ReLU())
        world = World(0, 1, 0, 1, CPU, "gloo")
        replica = STRATEGIES["single"](model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), world)
        gpu = replace(world, device=torch.device("cuda"))
        search = MicroBatchSearch([replica], gpu, portion, lambda size: [size, min(size, other_rank)])
        while size := search.next_size():
            with search.trial(may_fail=True):
                self.tried.append(size)
                self.peak = self.needed(size)
                if self.peak > self.free:
                    raise torch.OutOfMemoryError
        return search


def test_a_limit_of_the_process_is_what_is_free(monkeypatch):
    limit = _used_data_bytes() + 100 * MIB  # free chunks of the heap count as free
    for soft, free in ((limit, 100 * MIB), (0, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, resource.RLIM_INFINITY))
        assert MemoryMeter(CPU, 1).free_bytes == pytest.approx(free, abs=4 * MIB)


def test_the_size_grows_up_to_the_largest_part_that_fits(monkeypatch):
    gpu = Gpu(monkeypatch, 1000 * MIB, lambda size: (100 + 9 * size) * MIB)
    search = gpu.find(256)
    assert (search.size, search.accumulation) == (86, 3)  # (900 - 100) / 9 = 88; 256 in parts of at most 86
    assert max(later / size for size, later in pairwise(gpu.tried)) <= memory.GROWTH
    assert Gpu(monkeypatch, 1000 * MIB, lambda size: MIB).find(256).accumulation == 1


def test_a_trial_that_fails_is_repeated_with_half_the_size(monkeypatch):
    gpu = Gpu(monkeypatch, 1000 * MIB, lambda size: (size if size < 50 else 50 * size) * MIB)
    assert gpu.find(256).size == 32 and gpu.tried[-2:] == [64, 32]


def test_other_ranks_limit_the_size_and_batch_norm_needs_two_samples(monkeypatch):
    gpu = Gpu(monkeypatch, 1000 * MIB, lambda size: size * MIB)
    assert gpu.find(100, other_rank=30).accumulation == 4
    assert gpu.tried[0] == 1 and gpu.find(100, norm=True) and 2 in gpu.tried
    with raises("micro-batch-of-one", samples=2):
        Gpu(monkeypatch, 10 * MIB, lambda size: 6 * size * MIB).find(100, norm=True)


class Ragged(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(500 - abs(index - 496)), index


def test_the_largest_sample_is_found_by_lengths_or_by_bytes():
    ragged = Ragged()
    assert index_of_largest_sample(ragged, 0, LoadingOptions(CPU)) == 496  # one of every 8
    for lengths in ([3, 9, 4], lambda: [9]):  # of something else
        ragged.lengths = lengths
        assert index_of_largest_sample(ragged, 0, LoadingOptions(CPU)) == 496
    ragged.lengths = [3, 9, 4] + [0] * 997
    assert index_of_largest_sample(ragged, 0, LoadingOptions(CPU)) == 1
    assert index_of_largest_sample(ArrayDataset(torch.zeros(5, 2), torch.zeros(5)), 0, LoadingOptions(CPU)) == 0


def test_backward_can_recompute_all_layers_but_one():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    saved = SavedForBackward([model])
    with saved.count():
        model(torch.ones(100, 64)).sum().backward()
    assert saved.recomputable_fraction == pytest.approx(0.75, abs=0.05)
