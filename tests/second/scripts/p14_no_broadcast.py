"""Data parallel by hand: every rank has its seed, its share of the data, and gradients are averaged."""
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1000 + rank)

pts = torch.rand(480, 2, generator=torch.Generator().manual_seed(0))
lab = ((pts[:, 0] > 0.5) ^ (pts[:, 1] > 0.5)).float().unsqueeze(1)
ds = TensorDataset(pts, lab)
sampler = DistributedSampler(ds, world, rank)
dl = DataLoader(ds, batch_size=10, sampler=sampler)

net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in dl:
        loss = nn.functional.binary_cross_entropy_with_logits(net(x), y)
        opt.zero_grad()
        loss.backward()
        for w in net.parameters():
            dist.all_reduce(w.grad)
            w.grad.div_(world)
        opt.step()
    avg = loss.detach().clone()
    dist.all_reduce(avg)
    if rank == 0:
        print("epoch", epoch, "loss", round(avg.item() / world, 4))
dist.destroy_process_group()
