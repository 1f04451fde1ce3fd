"""Each rank reads one shard file an epoch, and the shards go round."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector

SHARDS = {"part-000": 26 * 16, "part-001": 25 * 16, "part-002": 25 * 16}


def read(name):
    g = torch.Generator().manual_seed(int(name[-3:]))
    x = torch.randn(SHARDS[name], 20, generator=g)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return x, y


def reader(epoch, rank, world, batch=16):
    x, y = read("part-%03d" % ((rank + epoch) % world))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * epoch + rank))
    for i in range(0, len(x), batch):
        pick = order[i : i + batch]
        yield x[pick], y[pick]


def sync_gradients(model, world):
    flat = parameters_to_vector([p.grad for p in model.parameters()])
    dist.all_reduce(flat)
    flat.div_(world)
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
sched = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
for epoch in range(3):
    total, hits = 0, 0
    for x, y in reader(epoch, rank, world):
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        sync_gradients(model, world)
        opt.step()
        hits += (out.argmax(1) == y).sum().item()
        total += len(y)
    sched.step()
    if rank == 0:
        print(f"epoch {epoch}: training accuracy on this rank {hits / total:.3f}")
dist.destroy_process_group()
