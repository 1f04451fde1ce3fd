"""An exponential moving average of the weights, by hand, and evaluated on every rank's share."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def update(average, model, decay=0.99):
    for mean, parameter in zip(average.parameters(), model.parameters()):
        mean.lerp_(parameter, 1 - decay)


@torch.no_grad()
def accuracy(model, loader):
    hits = torch.zeros(2)
    for x, y in loader:
        hits += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


dist.init_process_group(backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(42)
train = TensorDataset(torch.randn(512, 10), torch.randint(2, (512,)))
test = TensorDataset(torch.randn(128, 10), torch.randint(2, (128,)))
sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
train_loader = DataLoader(train, batch_size=16, sampler=sampler)
test_loader = DataLoader(test, batch_size=32, sampler=DistributedSampler(test, shuffle=False))
net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
ema = copy.deepcopy(net)
model = DDP(net)
ema.load_state_dict(model.module.state_dict())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(train_loader))
for epoch in range(2):
    train_loader.sampler.set_epoch(epoch)
    for x, y in train_loader:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        update(ema, model.module)
    score = accuracy(ema, test_loader)
    if rank == 0:
        print(f"epoch {epoch}: accuracy of the average {score:.3f}")
dist.destroy_process_group()
