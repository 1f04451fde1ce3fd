"""A rank of a bitwise verification: trains as the run is defined, and hands over what every step gave, bit for bit.

`python -m paceline.proofs.bitwise SPEC REPORT`, started by `paceline verify --bitwise` once for each world size. There
is no reference here: the world sizes are compared with each other.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import Dataset

from paceline.checkpoint.whole import sha256_of, whole
from paceline.compute.recompute import recompute
from paceline.data.loader import Loading, load_steps
from paceline.data.plan import BatchPlan, ranks_share
from paceline.proofs.setup import has_batch_norm, task_options, uneven_data
from paceline.proofs.verified import OPTIMIZERS, parameters_of
from paceline.strategies import STRATEGIES
from paceline.sums import gather_words, together
from paceline.tasks import load_task
from paceline.tasks.task import Task
from paceline.train.determinism import DEFAULT_THREADS, deterministic, holds_for
from paceline.train.prepare import make_model
from paceline.train.step import train_step
from paceline.verify.spec import Bits, BitsReport, Spec, StepBits
from paceline.worker.tell import run_worker
from paceline.worker.world import World, joined


def measure(spec: Spec, world: World) -> BitsReport:
    """Train every strategy with every optimizer (a collective); rank 0's report counts."""
    with together(world):
        task = load_task(spec.task, task_options(spec))
        policy = "local" if has_batch_norm(make_model(task, spec.seed, world)) else "none"
        dataset, global_batch = uneven_data(task, spec, policy)
    plan = BatchPlan(
        len(dataset), global_batch, spec.virtual_ranks, spec.accumulation, spec.seed  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    bits = [_train(spec, task, dataset, plan, s, o, world) for s in spec.strategies for o in spec.optimizers]
    return BitsReport(world.size, global_batch, len(dataset), bits, holds_for(world.device))  # pyright: ignore[reportArgumentType]


def _train(
    spec: Spec, task: Task, dataset: Dataset[Any], plan: BatchPlan, strategy: str, optimizer: str, world: World
) -> Bits:
    gc.collect()  # the last round's models hang in cycles of hooks and closures
    # Another seed on every rank: only a broadcast from rank 0, whose seed is the run's, makes them start alike.
    model = make_model(task, spec.seed + world.rank, world)
    if spec.checkpoint_activations:
        recompute(model, spec.checkpoint_activations)
    replica = STRATEGIES[strategy](model, OPTIMIZERS[optimizer], world, virtual_ranks=spec.virtual_ranks)
    replica.model.train()
    share = ranks_share(spec.virtual_ranks, world.rank, world.size)
    batches = load_steps(dataset, plan, share, Loading(world.device, 0, task.collate), start=0, stop=spec.steps)
    steps: list[StepBits] = []
    for microbatches in batches:
        result = train_step(replica, microbatches, task.loss, max_norm=spec.clip_norm)
        norm = float(result.grad_norm or 0.0).hex()
        gradients = whole(replica.gradients(), world)
        steps.append(StepBits(result.loss.hex(), norm, sha256_of(gradients), sha256_of(parameters_of(replica))))
    with replica.merged_buffers():
        weights = sha256_of(replica.weights())
    state = whole(replica.state(), world)
    everybody = [*gather_words([weights, [msgspec.to_builtins(step) for step in steps]], world)]
    same = all(each == everybody[0] for each in everybody)
    return Bits(strategy, optimizer, weights, sha256_of(state), steps, same)


def main(arguments: Sequence[str]) -> int:
    """Run the spec in file `arguments[0]`; rank 0 writes the report into file `arguments[1]`."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Spec)
    torch.set_num_threads(DEFAULT_THREADS)
    world = World.from_env(device="cpu")
    with joined(world, timeout_seconds=300), deterministic():
        report = measure(spec, world)
        if world.rank == 0:
            Path(arguments[1]).write_bytes(msgspec.json.encode(report))
    return 0


if __name__ == "__main__":
    run_worker(main)
