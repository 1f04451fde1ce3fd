"""What does exactness cost, and what does it cost to keep a training's state safe? `python benchmarks/exactness.py`.

For each model one set of workers holds every strategy at once and takes steps with them in turn, A B C, B C A, ..., so
that a busy machine slows all alike. A block of steps counts by its median; a first round only warms up. Ratios are
taken round by round: of wall time, and of CPU time, which hardly feels the neighbours. Two anchors tell what a ratio
means: `ddp again` is ddp once more and shows the noise; with `no exchange` gradients stay at home: the limit.

With twice as many virtual ranks as processes every strategy takes two micro-batches a step: the same work for all.
With --out the result is written there. Checkpoints go into a folder beside it: the disk matters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.checkpoint.manager import Checkpoints, PublishClaim
from paceline.checkpoint.memory_snapshots import SnapshotWriter
from paceline.checkpoint.resume import TrainerState
from paceline.collectives.control import all_gather_object
from paceline.data.loader import LoadingOptions, load_steps
from paceline.data.plan import BatchPlan, virtual_ranks_of
from paceline.host.procfs import die_with_parent
from paceline.rank.world import World, process_group
from paceline.stepping.totals import ControlFlags
from paceline.strategies import STRATEGIES, MakeOptimizer, Strategy
from paceline.tasks.mnist import cnn, cross_entropy, dataset, resnet18
from paceline.tasks.task import Task
from paceline.train.checkpointing import CheckpointWriter
from paceline.train.consistency import check_replicas
from paceline.train.determinism import hardware_facts, use_deterministic_kernels
from paceline.train.optimizer import Schedule, optimizer_maker
from paceline.train.prepare import make_model
from paceline.train.step import fit
from paceline.train.step_record import StepRecord

LIMIT_SECONDS = 1800  # for one model: far more than a busy machine needs, but not for ever
COLLECTIVE_SECONDS = 300.0
ROUND_SECONDS = 1.0
FEWEST_STEPS = 3  # of a block: its first one finds the caches full of another strategy
SNAPSHOT_EVERY, WATCH_EVERY = 10, 100  # steps: the defaults of a run

WALL, CPU, SECONDS = "wall time of a step / ddp's", "CPU time of a step / ddp's", "ms a step"
COST = "keeping the state safe (exact)"


def mlp(width: int = 2048) -> Task:
    """5.8 million parameters, few samples: little to compute, much to exchange."""

    def make_model() -> nn.Module:
        first, second = nn.Linear(784, width), nn.Linear(width, width)
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), nn.Linear(width, 10))

    return Task(make_model, dataset, cross_entropy)


MODELS: dict[str, tuple[Callable[[], Task], int]] = {  # and the batch of each virtual rank
    "mnist-cnn": (cnn, 64),
    "mnist-resnet18": (resnet18, 32),
    "mlp": (mlp, 16),
    "tiny": (partial(mlp, 16), 4),  # to see whether the script works
}


@dataclass(frozen=True)
class Row:
    """One quantity of one model, a value for each round."""

    model: str
    virtual_ranks: int
    table: str
    name: str
    values: list[float]


@dataclass(frozen=True)
class Run:
    """What all variants compute: the same samples in the same steps."""

    model: str
    task: Task
    data: Any
    plan: BatchPlan
    world: World

    def row(self, table: str, name: str, values: Iterable[float]) -> Row:
        return Row(self.model, self.plan.virtual_ranks, table, name, [round(value, 6) for value in values])


@dataclass(frozen=True)
class Variant:
    """A strategy in training, and the kernels it trains with."""

    replica: Strategy
    records: Generator[StepRecord]
    kernels: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Block:
    """Milliseconds: a step (median), its CPU time (mean), what was done between two steps (median)."""

    step: float
    cpu: float
    between: float


def no_exchange(
    model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
) -> Strategy:
    """No training, but the least that a step can cost."""
    return Strategy(model, make_optimizer(model.parameters()), world, virtual_ranks=virtual_ranks)


def variants(run: Run) -> dict[str, Variant]:
    """All that take turns (a collective)."""
    exact, ddp = STRATEGIES["exact"], STRATEGIES["ddp"]
    chosen = {
        "ddp": (ddp, nullcontext),
        "ddp again": (ddp, nullcontext),
        "no exchange": (no_exchange, nullcontext),
        "bucketed": (STRATEGIES["bucketed"], nullcontext),
        "exact": (exact, use_deterministic_kernels),
        "exact, any kernels": (exact, nullcontext),
        "zero": (STRATEGIES["zero"], use_deterministic_kernels),
    }
    made: dict[str, Variant] = {}
    for name, (strategy, kernels) in chosen.items():
        model, maker = make_model(run.task, 0, run.world), optimizer_maker("adamw", lr=1e-3)
        own = strategy(model, maker, run.world, virtual_ranks=run.plan.virtual_ranks)
        made[name] = Variant(own, training(run, own), kernels)
    return made


def training(run: Run, own: Strategy, votes: Callable[[], ControlFlags] = ControlFlags) -> Generator[StepRecord]:
    """Steps without end."""
    share = virtual_ranks_of(run.plan.virtual_ranks, run.world.rank, run.world.size)
    steps = load_steps(run.data, run.plan, share, LoadingOptions(run.world.device), start=0, stop=sys.maxsize)
    return fit(own, steps, run.task.loss, Schedule(1e-3, 1), votes=votes)


def block(variant: Variant, steps: int, between: Callable[[], object] = lambda: None) -> Block:
    """Take so many steps, and do `between` after each (a collective)."""
    seconds: list[float] = []
    other: list[float] = []
    dist.barrier()
    cpu_began = time.process_time()
    with variant.kernels():
        for _ in range(steps):
            seconds.append(next(variant.records).seconds)
            began = time.perf_counter()
            between()
            other.append(time.perf_counter() - began)
    cpu = (time.process_time() - cpu_began) / steps
    return Block(1000 * median(seconds), 1000 * cpu, 1000 * median(other))


def step_costs(run: Run, made: dict[str, Variant], rounds: int, steps: int | None) -> list[Row]:
    """Every strategy's step against ddp's, in blocks of `steps`; by default so many that a round lasts a second."""
    warm = [block(variant, steps or FEWEST_STEPS) for variant in made.values()]
    fitting = max(FEWEST_STEPS, round(1000 * ROUND_SECONDS / sum(one.step for one in warm)))
    count: int = steps or all_gather_object(fitting, run.world)[0]
    names = list(made)
    orders = [names[first % len(names) :] + names[: first % len(names)] for first in range(rounds)]
    played = [{name: block(made[name], count) for name in order} for order in orders]
    rows = [run.row(SECONDS, name, [blocks[name].step for blocks in played]) for name in made]
    ratios = [(name, "ddp", name) for name in made if name != "ddp"]
    for name, base, shown in [*ratios, ("exact", "exact, any kernels", "exact / exact, any kernels")]:
        rows.append(run.row(WALL, shown, [blocks[name].step / blocks[base].step for blocks in played]))
        rows.append(run.row(CPU, shown, [blocks[name].cpu / blocks[base].cpu for blocks in played]))
    return rows


def memory_costs(run: Run, variant: Variant, rounds: int, steps: int) -> list[Row]:
    """A snapshot, or a look at the replicas, after every step, against neither."""
    own, world, megabytes = variant.replica, run.world, [0.0]
    files = os.memfd_create("bench-snapshot-0"), os.memfd_create("bench-snapshot-1")
    writer = SnapshotWriter(files, world.rank, world.size, 0, spared=None)

    def snapshot() -> None:
        megabytes[0] = writer.write(own.state(), 0, {}) / 1e6

    def watch() -> None:
        check_replicas(own.state(), world, 0)

    doing = (lambda: None, snapshot, watch)
    played = [[block(variant, steps, between) for between in doing] for _ in range(rounds + 1)][1:]
    both = [(kept.step + kept.between) / plain.step for plain, kept, _ in played]
    snapshots = [kept.between / plain.step / SNAPSHOT_EVERY for plain, kept, _ in played]
    watched = [look.between / plain.step / WATCH_EVERY for plain, _, look in played]
    return [
        run.row(COST, "snapshot, MB a rank", megabytes),
        run.row(COST, "snapshot, ms", [kept.between for _, kept, _ in played]),
        run.row(COST, "step with snapshot / without", both),
        run.row(COST, f"snapshot every {SNAPSHOT_EVERY} steps, %", [100 * r for r in snapshots]),
        run.row(COST, "watch, ms", [look.between for _, _, look in played]),
        run.row(COST, f"watch every {WATCH_EVERY} steps, %", [100 * r for r in watched]),
    ]


def optimizer_memory(run: Run, name: str, variant: Variant) -> Row:
    """What a rank's optimizer keeps."""
    kept = [tensor.nbytes for state in variant.replica.optimizer.state.values() for tensor in state.values()]
    return run.row(COST, f"optimizer of {name}, MB a rank", [sum(kept) / 1e6])


def disk_costs(run: Run, variant: Variant, rounds: int, steps: int, folder: Path) -> list[Row]:
    """Checkpoints, each written while steps go on, against the steps before it (a collective)."""
    checkpoints, claim, world = Checkpoints(folder / "checkpoints"), PublishClaim(1, 0), run.world
    if world.rank == 0:
        checkpoints.claim_publishing(*claim)
    saver = CheckpointWriter(
        checkpoints, world, run.plan.virtual_ranks, claim, keep=2, flush_events=lambda: None, say=print
    )
    voting = replace(
        variant, records=training(run, variant.replica, lambda: ControlFlags(0.0, *saver.shard_write_status()))
    )
    slower: list[float] = []
    for number in range(rounds + 1):
        plain = block(voting, steps)
        during, votes = list[float](), ControlFlags()
        with variant.kernels():
            saver.begin(variant.replica.state(), number, TrainerState(0, {}, {}))
            while votes.shard_written + votes.shard_failed < world.size:  # until all ranks have written
                record = next(voting.records)
                votes = record.result.votes
                during.append(1000 * record.seconds)
        slower.append(median(during) / plain.step)
        saver.wait()
    done = saver.take_done()[1:]
    if any(one.failure for one in done):
        raise SystemExit(f"a checkpoint could not be written: {[one.failure for one in done]}")
    return [
        run.row(COST, "checkpoint, MB of all ranks", [one.size_bytes / 1e6 for one in done[:1]]),
        run.row(COST, "checkpoint, ms of standstill", [1000 * one.stall_seconds for one in done]),
        run.row(COST, "checkpoint, ms in the background", [1000 * one.write_seconds for one in done]),
        run.row(COST, "step during a checkpoint / without", slower[1:]),
    ]


def work(model: str, folder: Path, rounds: int, steps: int | None) -> None:
    """One rank; rank 0 leaves what it has measured in `folder`."""
    die_with_parent(os.getppid())  # torchrun leaves its workers behind when it is killed
    torch.set_num_threads(1)
    make_task, batch = MODELS[model]
    task = make_task()
    data, rows = task.make_dataset("train"), list[Row]()
    with process_group(World.from_env(device="cpu"), timeout_seconds=COLLECTIVE_SECONDS) as world:
        for virtual_ranks in (world.size, 2 * world.size):
            plan = BatchPlan(num_samples=60000, global_batch=batch * virtual_ranks, virtual_ranks=virtual_ranks)
            run = Run(model, task, data, plan, world)
            made = variants(run)
            rows += step_costs(run, made, rounds, steps)
            if virtual_ranks == world.size:
                few = -(-rounds // 2)
                rows += [optimizer_memory(run, name, made[name]) for name in ("exact", "zero")]
                rows += memory_costs(run, made["exact"], few, steps or FEWEST_STEPS)
                rows += disk_costs(run, made["exact"], few, steps or FEWEST_STEPS, folder)
    if world.rank == 0:
        (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))


def measure(model: str, nproc: int, options: Sequence[str], folder: Path) -> list[Row]:
    """Let the ranks for one model measure it."""
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", __file__,
         *options, "--worker", model, str(folder)],
        check=True, timeout=LIMIT_SECONDS, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    return [Row(**row) for row in json.loads((folder / "rows.json").read_text())]


def table(title: str, rows: Sequence[Row]) -> str:
    """Lines: names; columns: models and their virtual ranks; in each place the median (and the extremes)."""
    chosen = [row for row in rows if row.table == title]
    columns = list(dict.fromkeys((row.model, row.virtual_ranks) for row in chosen))
    places = {(row.name, row.model, row.virtual_ranks): _cell(row.values) for row in chosen}
    lines = [f"{title[:35]:36}" + "".join(f"{f'{model} V={v}':>22}" for model, v in columns)]
    for name in dict.fromkeys(row.name for row in chosen):
        lines.append(f"  {name:34}" + "".join(f"{places[name, *column]:>22}" for column in columns))
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    low, middle, high = (f"{v:.0f}" if v >= 100 else f"{v:.2f}" for v in (min(values), median(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low}-{high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mnist-cnn", "mnist-resnet18", "mlp"])
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds of 2 steps: does it work?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds, steps, models = (2, 2, ["tiny"]) if arguments.quick else (arguments.rounds, None, arguments.models)
    if arguments.worker:
        model, folder = arguments.worker
        work(model, Path(folder), rounds, steps)
        return
    # Only these: torchrun would take --nproc, wherever it stands, for its own.
    options = ["--rounds", str(rounds), *(["--quick"] if arguments.quick else [])]
    rows: list[Row] = []
    for model in models:
        print(f"measuring {model}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=arguments.out.parent if arguments.out else Path()) as folder:
            rows += measure(model, arguments.nproc, options, Path(folder))
    for title in dict.fromkeys(row.table for row in rows):
        print(table(title, rows), end="\n\n")
    if arguments.out:
        machine = {"cores": os.cpu_count(), **hardware_facts(torch.device("cpu")), "load": os.getloadavg()}
        about = {"machine": machine, "nproc": arguments.nproc, "threads_per_rank": 1, "rounds": rounds}
        lines = ",\n".join(json.dumps(asdict(row)) for row in rows)  # a line for each: a change shows as one
        arguments.out.write_text(json.dumps(about)[:-1] + f', "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
