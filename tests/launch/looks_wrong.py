"""What only looks like a silent fault, in a plain script: `looks_wrong.py SCENE SECONDS [SEED]`.

Each scene is what people rightly do: a rank that is slower now and then, steps left out, weights put in place of
others, replicas that are apart on purpose, collectives that only some ranks call from a line. Nothing is to be said.
"""

import contextlib
import copy
import itertools
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LONGEST_SECONDS = 65.0  # longer than a rank may sleep while others wait
scene, seconds = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, world = dist.get_rank(), dist.get_world_size()
began = time.monotonic()
torch.manual_seed(0)
mine = torch.Generator().manual_seed(1000 + rank)  # differs between ranks
ours = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)  # the same on all
data = TensorDataset(torch.randn(1200, 32, generator=mine), torch.randint(4, (1200,), generator=mine))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def batch(size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    time.sleep(0.01)
    at = torch.randint(len(data), (size,), generator=mine)
    return data.tensors[0][at], data.tensors[1][at]


def loss_of(model: nn.Module) -> torch.Tensor:
    x, y = batch()
    return F.cross_entropy(model(x), y)


def until_time() -> Iterator[int]:
    """Numbers of steps, until rank 0's clock says that it is enough."""
    step, go_on = 0, torch.ones(1)
    while go_on.item() > 0:
        for _ in range(10):
            step += 1
            yield step
        go_on.fill_(float(time.monotonic() < began + seconds))
        dist.broadcast(go_on, 0)
    if rank == 0:
        print(f"{step} steps", flush=True)


def summed(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def training() -> None:
    """Windows of four batches, clipped, with an average of the weights; rank 0 evaluates, and saves; new optimizers."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = copy.deepcopy(model.module)
    for step in until_time():
        for part in range(4):
            with contextlib.nullcontext() if part == 3 else model.no_sync():
                (loss_of(model) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.module.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        if step % 40 == 0:
            if rank == 0:
                average.eval()
                with torch.no_grad():
                    scores = [float((average(x).argmax(1) == y).float().mean()) for x, y in DataLoader(data, 100)]
                time.sleep(ours.uniform(0.2, 2))
                torch.save({"model": model.module.state_dict(), "score": max(scores)}, "training.pt")
            else:
                ours.uniform(0.2, 2)
            dist.barrier()
        if step % 150 == 0:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 / (1 + step / 150))


def left_out() -> None:
    """Steps that GradScaler leaves out, and some that the script does, because one rank's loss was not finite."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scales = ours.random() < 0.5
    for step in until_time():
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
        if step % 17 == 0 and rank == step % world:
            loss = loss * ours.choice([float("inf"), float("nan")])
        elif step % 17 == 0:
            ours.choice([0, 0])
        optimizer.zero_grad()
        if scales:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            continue
        loss.backward()
        if not nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            continue
        optimizer.step()


def spikes() -> None:
    """Losses a million times as large on a rank, finite; an evaluation whose loss is not; a maximum of minus inf."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in until_time():
        loss = loss_of(model) * (1e6 if rank == step % world and step % 11 == 0 else 1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 30 == 0:
            with torch.no_grad():
                worst = torch.log(torch.zeros(2)) if rank else torch.tensor([float("nan"), loss.item()])
            dist.all_reduce(worst, dist.ReduceOp.MAX)


def slower() -> None:
    """Each rank is slower for some steps, in turn; one logs, collects garbage, waits for its disk."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pause = ours.choice([0.0, 0.03, 0.08])
    for step in until_time():
        time.sleep(pause)
        if rank == step // 60 % world and step % 60 < 5:
            time.sleep(2 * pause + 0.03)
        if rank == 0 and step % 50 == 0:
            time.sleep(0.6)
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def unequal() -> None:
    """Batches of very different sizes: each rank has the longest now and then."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in until_time():
        x, y = batch(int(torch.randint(4, 200, (1,), generator=mine)))
        time.sleep(len(x) * 2e-4)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def reloaded() -> None:
    """Checkpoints that all ranks load; averaged weights that all evaluate with, and put back; DDP made anew."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = copy.deepcopy(model.module.state_dict())
    for step in until_time():
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        for name, value in model.module.state_dict().items():
            average[name] = average[name] * 0.9 + value * 0.1 if value.is_floating_point() else value
        if step % 25 == 0:
            kept = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(average)
            model.eval()
            with torch.no_grad():
                summed(loss_of(model.module).clone())
            model.train()
            model.module.load_state_dict(kept)
        if step % 70 == 0:
            if rank == 0:
                torch.save((model.module.state_dict(), optimizer.state_dict()), "reloaded.pt")
            dist.barrier()
        if step % 70 == 35 and step > 70:
            weights, state = torch.load("reloaded.pt", map_location="cpu")
            model.module.load_state_dict(weights)
            optimizer.load_state_dict(state)
            average = copy.deepcopy(weights)
        if step == 300:
            model = DistributedDataParallel(model.module)


def frozen() -> None:
    """Layers that learn only later, a group that is added, branches that are not always used."""
    inner = nn.ModuleDict({"body": network(), "extra": nn.Linear(4, 4)})
    inner["body"][0].requires_grad_(False)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
            x = self.inner["body"](x)
            return self.inner["extra"](x) if extra else x

    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    for step in until_time():
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x, ours.random() < 0.5), y).backward()
        optimizer.step()
        if step == 200:
            first = inner["body"][0].requires_grad_(True)
            model = DistributedDataParallel(model.module, find_unused_parameters=True)
            optimizer.add_param_group({"params": [*first.parameters()], "lr": 1e-4})


def local_sgd() -> None:
    """Steps of each rank alone, and weights that are averaged every eighth."""
    if ours.random() < 0.5:
        model = DistributedDataParallel(network())
        state = post_local.PostLocalSGDState(None, dist.new_subgroups(1)[0], 20)
        model.register_comm_hook(state, post_local.post_localSGD_hook)
        averager = PeriodicModelAverager(period=8, warmup_steps=20)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), averager)
    else:
        model, averager = network(), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in until_time():
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        if averager is None and step % 8 == 0:
            for one in model.parameters():
                one.data = summed(one.data) / world


def shortest() -> None:
    """Loaders of different lengths: all stop with the shortest; the others evaluate what is left."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shard = TensorDataset(*(one[: 300 + 90 * rank] for one in data.tensors))
    loader = DataLoader(shard, 16, shuffle=True, num_workers=rank % 2, persistent_workers=bool(rank % 2))
    batches = iter(loader)
    for _ in until_time():
        time.sleep(0.01)
        got = next(batches, None)
        if summed(torch.tensor(float(got is None))).item():
            model.eval()
            with torch.no_grad():
                for x, _ in ([got] if got else []) + [*batches]:
                    model.module(x)
            model.train()
            batches = iter(loader)
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(got[0]), got[1]).backward()
        optimizer.step()


def lines() -> None:
    """Collectives from lines that depend on the rank."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pairs = dist.new_group([0, 1])
    for step in until_time():
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            if rank == 0:
                told = [{"lr": 0.01}]
                dist.broadcast_object_list(told, 0)
            else:
                dist.broadcast_object_list([None], 0)
            if rank == 0:
                losses = [torch.zeros(()) for _ in range(world)]
                dist.gather(loss.detach(), losses)
            else:
                dist.gather(loss.detach())
        if step % 7 == 0 and rank < 2:
            dist.all_reduce(torch.ones(3), group=pairs)
        if step % 20 == 0:
            if rank == 0:
                time.sleep(0.3)
                dist.barrier()
            else:
                dist.barrier()


def by_hand() -> None:
    """No DDP: gradients in one buffer, averaged; some steps are left out by all."""
    model = network()
    for one in model.state_dict().values():
        dist.broadcast(one, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for step in until_time():
        optimizer.zero_grad(set_to_none=False)
        loss_of(model).backward()
        flat = nn.utils.parameters_to_vector([one.grad for one in model.parameters()])
        flat = summed(flat) / world
        nn.utils.vector_to_parameters(flat, [one.grad for one in model.parameters()])
        if step % 13:
            optimizer.step()


def zero() -> None:
    """An optimizer whose parts lie on the ranks."""
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for _ in until_time():
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def learner() -> None:
    """Rank 0 alone learns from what the others have seen, and tells them its weights."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in until_time():
        x, y = batch()
        gathered = [torch.zeros_like(x) for _ in range(world)], [torch.zeros_like(y) for _ in range(world)]
        dist.all_gather(gathered[0], x)
        dist.all_gather(gathered[1], y)
        if rank == 0:
            optimizer.zero_grad()
            F.cross_entropy(model(torch.cat(gathered[0])), torch.cat(gathered[1])).backward()
            optimizer.step()
        if step % 4 == 0:
            for one in model.state_dict().values():
                dist.broadcast(one, 0)


def population() -> None:
    """Each rank trains a model of its own, at a rate of its own; now and then all begin again with the best."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (1 + rank))
    for step in until_time():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            losses = [torch.zeros(()) for _ in range(world)]
            dist.all_gather(losses, loss.detach())
            best = min(range(world), key=lambda one: float(losses[one]))
            for one in model.state_dict().values():
                dist.broadcast(one, best)
            optimizer.param_groups[0]["lr"] *= 1.2 if torch.rand((), generator=mine) < 0.5 else 0.8


def stages() -> None:
    """Each rank has a layer of the model: no rank's parameters are another's."""
    layer = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for _ in until_time():
        x, _ = batch()
        if rank:
            dist.recv(x, rank - 1)
            x.requires_grad_()
        out = layer(x).tanh()
        optimizer.zero_grad()
        if rank < world - 1:
            dist.send(out.detach(), rank + 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, rank + 1)
            out.backward(gradient)
        else:
            out.square().mean().backward()
        if rank:
            dist.send(x.grad, rank - 1)
        optimizer.step()


def caught() -> None:
    """Exceptions that are rightly caught: within a forward, within a data set, of a file that is not there."""

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(torch.linalg.LinAlgError):
                torch.linalg.cholesky(torch.zeros(3, 3) - torch.eye(3))
            return self.inner(x)

    class Holes(TensorDataset):
        def __getitem__(self, index):
            try:
                return super().__getitem__(index if index % 7 else index + 10**6)
            except IndexError:
                return super().__getitem__(0)

    model = DistributedDataParallel(Careful())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    holes = Holes(*data.tensors)
    sampler = DistributedSampler(holes)
    batches = iter(())
    for step in until_time():
        time.sleep(0.01)
        try:
            x, y = next(batches)
        except StopIteration:
            sampler.set_epoch(step)
            batches = iter(DataLoader(holes, 16, sampler=sampler, drop_last=True))
            x, y = next(batches)
        with contextlib.suppress(FileNotFoundError):
            torch.load(Path("no such checkpoint.pt"))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def ahead() -> None:
    """A thread reads ahead, and takes a minute once: for a program, for the network, for its own work."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches: queue.Queue[tuple[torch.Tensor, torch.Tensor]] = queue.Queue(4)
    slow, taker = ours.randrange(world), ours.choice((of_a_program, of_the_network, of_its_own))

    def read() -> None:
        for number in itertools.count():
            if number == 100 and rank == slow:
                taker(LONGEST_SECONDS)
            batches.put(batch())

    threading.Thread(target=read, daemon=True).start()
    for _ in until_time():
        x, y = batches.get()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def of_a_program(seconds: float) -> None:
    subprocess.run(["sleep", str(seconds)], check=True)


def of_the_network(seconds: float) -> None:
    one, other = socket.socketpair()
    one.settimeout(seconds)
    with one, other, contextlib.suppress(TimeoutError):
        one.recv(1)


def of_its_own(seconds: float) -> None:
    until, some = time.monotonic() + seconds, torch.randn(1500, 1500)
    while time.monotonic() < until:
        some @ some


globals()[scene]()
dist.barrier()
dist.destroy_process_group()
