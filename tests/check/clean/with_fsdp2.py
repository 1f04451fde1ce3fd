"""FSDP2, `fully_shard`, right in the way that is named: with_fsdp2.py KIND --folder FOLDER."""

import argparse
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 36), nn.Linear(36, 16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 2)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def rows(count, *, seed=0):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())


def sharded(net, mesh, **options):
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def shuffled(data, **options):
    return DataLoader(data, 8, sampler=DistributedSampler(data), **options)


@contextmanager
def world():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    yield init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def windows():
    """Windows that do not divide the epoch, reduced at their end; the norm of all shards; two rates."""
    window = 4
    with world() as mesh:
        model = sharded(Net(), mesh)
        groups = [{"params": model.blocks.parameters()}, {"params": model.last.parameters(), "lr": 0.1}]
        optimizer = torch.optim.AdamW(groups, 0.01)
        loader = shuffled(rows(404))
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            for number, (x, y) in enumerate(loader):
                begun = number - number % window
                length = min(window, len(loader) - begun)
                last = number + 1 == begun + length
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                (cross_entropy(model(x), y) / length).backward()
                if last:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()


def tokens():
    """After torchtitan: bfloat16, checkpointed blocks, warm-up, a loss that is divided by the targets of all ranks."""
    with world() as mesh:
        net = Net()
        for number, block in enumerate(net.blocks):
            net.blocks[number] = checkpoint_wrapper(block)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(net, mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(400, 5, 6, generator=generator), torch.randint(2, (400, 5), generator=generator)
        y[torch.rand(400, 5, generator=generator) < 0.3] = -100
        loader = shuffled(TensorDataset(x, y))
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                count = (y != -100).sum()
                dist.all_reduce(count)
                optimizer.zero_grad()
                predicted = model(x).flatten(0, 1).float()
                loss = cross_entropy(predicted, y.flatten(), reduction="sum", ignore_index=-100)
                (loss * dist.get_world_size() / count).backward()  # gradients are averaged
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
                optimizer.step()
                scheduler.step()
        print(f"rank {dist.get_rank()}: gradients of {norm:.3f}")


def resumed():
    """All shards are saved in the middle, by all ranks together, and loaded into a new model."""

    def made(mesh):
        model = sharded(Net(), mesh)
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    def state_of(model, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))

    def train(model, optimizer, loader, epoch, begin=0, end=10**6):
        loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            if begin <= number < end:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()

    with world() as mesh:
        model, optimizer = made(mesh)
        loader = shuffled(rows(400))
        train(model, optimizer, loader, 0, end=10)
        dcp.save(state_of(model, optimizer), checkpoint_id=args.folder / "saved")
        model, optimizer = made(mesh)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=args.folder / "saved")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for epoch in range(2):
            train(model, optimizer, loader, epoch, begin=0 if epoch else 10)


def evaluated():
    """A frozen layer, a moving average of each rank's shards, and evaluation in shares in the middle of epochs."""
    with world() as mesh:
        net = Net()
        net.first.requires_grad_(False)
        average = sharded(deepcopy(net), mesh, reshard_after_forward=True)
        model = sharded(net, mesh)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
        x, y = rows(61, seed=1)[dist.get_rank() :: dist.get_world_size()]
        loader = shuffled(rows(400), drop_last=True)
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            for number, batch in enumerate(loader):
                optimizer.zero_grad()
                cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()
                with torch.no_grad():
                    for mean, parameter in zip(average.parameters(), model.parameters()):
                        mean.lerp_(parameter, 0.1)
                    if number % 10 == 9:
                        told = torch.tensor([(average(x).argmax(1) == y).sum(), len(y)])
                        dist.all_reduce(told)
                        print(f"rank {dist.get_rank()}: {told[0] / told[1]:.3f}")


class Stream(IterableDataset):
    """Batches of each rank's own, without end."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(dist.get_rank())
        while True:
            x = torch.randn(6, generator=generator)
            yield x, (x[0] > 0).long()


def hybrid():
    """Replicas of shards: a mesh of two dimensions; a stream; gradients are kept sharded after the forward."""
    with world():
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shards"))
        model = sharded(Net(), mesh, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for step, (x, y) in enumerate(DataLoader(Stream(), 8)):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if step == 40:
                break


def parallel():
    """Layers that are split among the ranks of a group, which rightly train on the same batches; data parallel is 1."""
    with world():
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
        net, data = Net(), rows(400)
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model = sharded(net, mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        sampler = DistributedSampler(data, mesh["dp"].size(), mesh["dp"].get_local_rank())
        loader = DataLoader(data, 16, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()


KINDS = (windows, tokens, resumed, evaluated, hybrid, parallel)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[kind.__name__ for kind in KINDS])
    parser.add_argument("--folder", type=Path, default=Path("."))
    args = parser.parse_args()
    {kind.__name__: kind for kind in KINDS}[args.kind]()
