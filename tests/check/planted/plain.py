"""A DDP script that does everything right; with `--plant NAME,...` not so at the lines marked `plant: NAME`.

What is wrong because a line is missing is marked where that line is missed.
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, WeightedRandomSampler

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default="")
parser.add_argument("--folder", type=Path, default=Path("."))
parser.add_argument("--samples", type=int, default=400)
args = parser.parse_args()
planted = {*args.plant.split(",")}
WINDOW, BATCH = 4, 8


class Images(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 1, 8, 8, generator=generator)
        self.y = torch.randint(5, (count,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        if planted & {"same augmentation", "same augmentation in workers"}:
            x = x + 0.1 * torch.randn_like(x)
        return x, self.y[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 36, 5)

    def forward(self, x):
        return self.fc(torch.flatten(F.relu(self.norm(self.conv(x))), 1))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if "threads" in planted:
    torch.set_num_threads(4)  # plant: threads
torch.manual_seed(rank if "different start" in planted else 0)  # plant: same augmentation, same noise
data, held_out = Images(args.samples, 1), Images(61, 2)
shared = Subset(held_out, range(rank, len(held_out), world))
sampler = DistributedSampler(data)
if "same batches" in planted:
    loader = DataLoader(data, BATCH, shuffle=True)  # plant: same batches
elif "own seeds" in planted:
    sampler = DistributedSampler(data, seed=rank)
    loader = DataLoader(data, BATCH, sampler=sampler)  # plant: own seeds
elif "uneven steps" in planted:
    start = 0 if rank == 0 else 220
    own = Subset(data, range(start, 220 if rank == 0 else len(data)))
    loader = DataLoader(own, BATCH)  # plant: uneven steps
elif "unequal shares" in planted:
    size = 8 if rank == 0 else 4
    own = Subset(data, range(240) if rank == 0 else range(240, 360))
    loader = DataLoader(own, size)  # plant: unequal shares
elif "split apart" in planted:
    torch.manual_seed(rank)
    data, _ = torch.utils.data.random_split(data, [300, 100])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler)  # plant: split apart
elif "same augmentation in workers" in planted:
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=1)
elif "weighted sampler" in planted:
    rare = WeightedRandomSampler(1.0 + data.y, len(data))
    loader = DataLoader(data, BATCH, sampler=rare)  # plant: weighted sampler
elif "batch shrinks" in planted:
    size = 2 * BATCH // world
    loader = DataLoader(data, size, sampler=sampler)  # plant: batch shrinks
else:
    loader = DataLoader(data, BATCH, sampler=sampler)
test_loader = DataLoader(shared, 16)
if "mean of means" in planted:
    test_loader = DataLoader(Subset(held_out, range(20) if rank == 0 else range(20, 61)), 16)
if "padded score" in planted:
    test_loader = DataLoader(held_out, 16, sampler=DistributedSampler(held_out))  # plant: padded score
net = Net()
if planted & {"not wrapped", "different start", "summed", "clipped first"}:
    model = net
elif "unused parameters" in planted:
    model = DDP(net, find_unused_parameters=True)  # plant: unused parameters
elif "no init sync" in planted:
    torch.manual_seed(rank)
    model = DDP(Net(), init_sync=False)  # plant: no init sync
else:
    model = DDP(net)
if "renamed" in planted:
    part = args.folder / f"part-{rank}"
    torch.save(net.state_dict(), part)
    part.replace(args.folder / "first.pt")  # plant: renamed
noise = torch.Generator().manual_seed(7)
module = getattr(model, "module", model)
rate = 0.01 * (1 + rank) if "own learning rate" in planted else 0.01
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
total = 3 * (len(data) // BATCH if "schedule of one process" in planted else len(loader))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))


def average():
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if "summed" not in planted:
            parameter.grad /= world


def train_epoch(epoch):
    model.train()
    if "same order" not in planted:
        sampler.set_epoch(epoch)
    for x, y in loader:  # plant: same order, same order anew, same noise of its own
        optimizer.zero_grad()
        if "same noise" in planted:
            x = x + 0.1 * torch.randn_like(x)
        if "same noise of its own" in planted:
            x = x + 0.1 * torch.randn(x.shape, generator=noise)
        if "past DDP" in planted:
            output = model.module(x)  # plant: past DDP
        else:
            output = model(x)
        if "mean over padding" in planted:
            y = torch.where(torch.arange(len(y)) < 2 + 4 * rank, y, -100)
            loss = F.cross_entropy(output, y)  # plant: mean over padding
        else:
            loss = F.cross_entropy(output, y)
        loss.backward()
        if "clipped first" in planted:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # plant: clipped first
        if planted & {"different start", "summed", "clipped first"}:
            average()
        if "own gradient" in planted and rank == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()  # plant: not wrapped, own gradient, different start, summed, own learning rate, own weights
        if "own weights" in planted and rank == 0:
            with torch.no_grad():
                module.fc.weight.add_(1e-3)
        if "own plateau" not in planted:
            schedule.step()  # plant: schedule of one process
    if "own plateau" in planted:
        plateau.step(epoch if rank == 0 else -epoch)  # plant: own plateau
    print(f"rank {rank}: epoch {epoch} loss {loss.item():.3f}")
    if "fails" in planted and epoch == 1 and rank == 1:
        raise RuntimeError("a fault of the script's own")


def train_in_windows(epoch):
    model.train()
    sampler.set_epoch(epoch)
    if "last window carried" not in planted:
        optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        window = min(WINDOW, len(loader) - (i - i % WINDOW))
        last = (i + 1) % WINDOW == 0 or i + 1 == len(loader)
        inside = not last
        if "cleared in windows" in planted:
            optimizer.zero_grad()  # plant: cleared in windows
        if planted & {"last window dropped", "last window carried"}:
            last = (i + 1) % WINDOW == 0
            inside = not last
        if "no sync" in planted:
            inside = True
        if "last window divided" in planted:
            window = WINDOW
        if "last window scaled" in planted:
            window = 1
        with model.no_sync() if inside else nullcontext():  # plant: no sync
            loss = F.cross_entropy(model(x), y) / window
            loss.backward()  # plant: last window divided
        if last and "last window scaled" in planted:
            for parameter in model.parameters():
                parameter.grad.mul_(1 / WINDOW)
        if last:
            optimizer.step()  # plant: last window dropped, last window carried, last window scaled
            optimizer.zero_grad()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for x, y in loader:  # plant: evaluation alone, score of a share
        if "evaluation alone" in planted:
            time.sleep(0.4)
        output = model(x)  # plant: batch norm
        counts += torch.tensor([float((output.argmax(1) == y).sum()), len(y)])
    return counts


for epoch in range(3):
    if "same order anew" in planted:
        loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    if planted & {"windows", "no sync", "cleared in windows"} or any("last window" in plant for plant in planted):
        train_in_windows(epoch)
    else:
        train_epoch(epoch)
    if "evaluation alone" in planted:
        if rank == 0:
            hits, count = evaluate(module, DataLoader(held_out, 16))
        dist.barrier()
    elif "batch norm" in planted:
        counts = evaluate(model.module, test_loader)
        dist.all_reduce(counts)
        hits, count = counts
    else:
        counts = evaluate(model, test_loader)
        if "mean of means" in planted:
            counts = counts / counts[1]
            dist.all_reduce(counts)  # plant: mean of means
        elif "score of a share" not in planted:
            dist.all_reduce(counts)
        hits, count = counts
    if rank == 0:
        print(f"epoch {epoch}: accuracy {hits / count:.3f}")
state = {"model": module.state_dict(), "epoch": epoch}
if "one file" in planted:
    torch.save(state, args.folder / "model.pt")  # plant: one file
elif rank == 0:
    torch.save(state, args.folder / "model.pt")
if "one log" in planted:
    with open(args.folder / "log.txt", "w") as file:  # plant: one log
        file.write(f"rank {rank} has ended")
dist.barrier()
dist.destroy_process_group()
