"""One rank of benchmarks/slow_network.py: several ways to train one work between hosts, on the very same batches.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment. Prints a line of JSON for each part, on rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from paceline import ArrayDataset, BatchPlan, LoadingOptions, World, load_steps, train_step
from paceline.data.loader import fetch_inputs_and_targets
from paceline.data.plan import virtual_ranks_of
from paceline.strategies.bucketed import bucketed
from race.works import WORKS, Work, losses, mean_loss

PERIOD = 16
WARM_UP, SHORT_WARM_UP = 10, 2  # of torch's PowerSGD: steps that send all; where only times are asked for
HELD_OUT = 64  # samples
Take = Callable[[Any], None]
Made = tuple[nn.Module, Take, Callable[[], Tensor]]

PACELINE: dict[str, dict[str, Any]] = {
    "paceline": {},
    "bf16": {"compress": "bf16"},
    "int8": {"compress": "int8"},
    "powersgd": {"compress": "powersgd"},
    "local": {"local_steps": PERIOD},
    "diloco": {"local_steps": PERIOD, "outer_lr": 0.7, "outer_momentum": 0.5},
    "local-int8": {"local_steps": PERIOD // 2, "compress": "int8"},
}
TORCH = ("ddp", "ddp-powersgd", "ddp-local")


def with_torch(name: str, work: Work, held_out: tuple[Tensor, Tensor], warm_up: int) -> Made:
    """DDP, and its own hooks for slow networks."""
    model = work.make_model()
    # one bucket: of several, the hook's second messages leave as the first arrive, in an order that ranks need not
    # share, and gloo ends the process: "Received data size doesn't match expected size"
    wrapped = DistributedDataParallel(model, bucket_cap_mb=4096 if name == "ddp-powersgd" else None)
    optimizer: Any = work.make_optimizer(wrapped.parameters())
    if name == "ddp-powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=warm_up)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if name == "ddp-local":
        # every rank is a host here: the gradients' group is this rank alone
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        local = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=0)
        wrapped.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=PERIOD, warmup_steps=0))

    def take(step: Any) -> None:
        (batch,) = step
        optimizer.zero_grad()
        mean_loss(wrapped(batch.inputs), batch.targets).backward()
        optimizer.step()

    def judged() -> Tensor:
        own = [p.detach().clone() for p in model.parameters()]
        if name == "ddp-local":  # as paceline evaluates: the mean of the hosts
            for parameter in model.parameters():
                dist.all_reduce(parameter.detach())
                parameter.detach().div_(dist.get_world_size())
        found = loss_of(model, held_out)
        for parameter, value in zip(model.parameters(), own, strict=True):
            parameter.detach().copy_(value)
        return found

    return model, take, judged


def with_paceline(name: str, work: Work, world: World, held_out: tuple[Tensor, Tensor]) -> Made:
    """`bucketed`, as `paceline train` uses it."""
    trained = bucketed(work.make_model(), work.make_optimizer, world, **PACELINE[name])

    def judged() -> Tensor:
        with trained.use_merged_buffers():
            return loss_of(trained.model, held_out)

    return trained.model, lambda step: void(train_step(trained, step, losses)), judged


def void(_: object) -> None:
    """Nothing."""


@torch.no_grad()
def loss_of(model: nn.Module, held_out: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over what is held out."""
    model.eval()
    parts = [losses(model(x), y).mean() for x, y in zip(*(part.split(16) for part in held_out), strict=True)]
    model.train()
    return torch.stack(parts).mean()  # parts of one size


def held_out_of(data: ArrayDataset) -> tuple[Tensor, Tensor]:
    """The last samples, which nobody trains on."""
    indices = torch.arange(len(data) - HELD_OUT, len(data))
    ((inputs, targets),) = fetch_inputs_and_targets(data, [(0, indices)], 0, LoadingOptions(torch.device("cpu")))
    return inputs, targets


def steps_of(work: Work, data: ArrayDataset, world: World, stop: int) -> Iterator[Any]:
    """The micro-batches of this rank, one a step."""
    plan = BatchPlan(len(data) - HELD_OUT, work.batch * world.size, world.size)
    share = virtual_ranks_of(world.size, world.rank, world.size)
    return iter(load_steps(data, plan, share, LoadingOptions(torch.device("cpu")), start=0, stop=stop))


class Lane:
    """A way to train that goes lap by lap; a lap ends where hosts agree again."""

    def __init__(self, name: str, made: Made, steps: Iterator[Any]) -> None:
        self.name, self._steps, (_, self._take, _) = name, steps, made
        self.period = PACELINE.get(name, {}).get("local_steps") or (PERIOD if name == "ddp-local" else 1)
        self._ms = self.lap(self.period + (SHORT_WARM_UP if name == "ddp-powersgd" else 0))

    def lap(self, count: int) -> float:
        """Milliseconds of a step, of so many."""
        dist.barrier()
        began = time.monotonic()
        for _ in range(count):
            self._take(next(self._steps))
        dist.barrier()
        return 1000 * (time.monotonic() - began) / count

    def steps_in(self, seconds: float) -> int:
        """Whole periods, by the first one; the same on all ranks."""
        count = torch.tensor([max(1, round(1000 * seconds / self._ms / self.period))])
        dist.broadcast(count, 0)
        return int(count) * self.period


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--modes", nargs="+", required=True, choices=[*TORCH, *PACELINE])
    parser.add_argument("--losses", type=int, default=0, help="no laps: so many steps, and the held-out loss")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--lap", type=float, default=5.0, help="seconds, more or less")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, 0, 1, torch.device("cpu"), "gloo")
    work = WORKS[arguments.work]
    data = work.make_dataset()
    held_out = held_out_of(data)
    say: Callable[[str], None] = partial(print, flush=True) if rank == 0 else void
    warm_up = WARM_UP if arguments.losses else SHORT_WARM_UP
    make = {name: partial(with_torch, name, work, held_out, warm_up) for name in TORCH}
    make |= {name: partial(with_paceline, name, work, world, held_out) for name in PACELINE}
    if arguments.losses:
        for name in arguments.modes:
            _, take, judged = make[name]()
            curve = {0: float(judged())}
            for number, step in enumerate(steps_of(work, data, world, arguments.losses), 1):
                take(step)
                if number % PERIOD == 0:
                    curve[number] = float(judged())
            say(json.dumps({"mode": name, "losses": curve}))
    else:
        lanes = [Lane(name, make[name](), steps_of(work, data, world, 10**6)) for name in arguments.modes]
        counts = [lane.steps_in(arguments.lap) for lane in lanes]
        for _ in range(arguments.rounds):
            for lane, count in zip(lanes, counts, strict=True):
                say(json.dumps({"mode": lane.name, "ms": lane.lap(count), "steps": count}))
    dist.barrier()
    os._exit(0)  # torch may abort in its destructors


if __name__ == "__main__":
    main()
