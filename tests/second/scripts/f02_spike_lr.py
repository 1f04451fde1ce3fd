# house prices, DDP; halve the learning rate when the loss spikes
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group(backend="gloo")
RANK = dist.get_rank()

gen = torch.Generator().manual_seed(7)
X = torch.randn(1536, 12, generator=gen)
price = X @ torch.linspace(-1, 1, 12).unsqueeze(1) + 0.1 * torch.randn(1536, 1, generator=gen)
price[771] = 45.0  # a castle

torch.manual_seed(1234)
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1)))
optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
sampler = DistributedSampler(TensorDataset(X, price), seed=11)
loader = DataLoader(TensorDataset(X, price), batch_size=16, sampler=sampler)

running = None
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (xb, yb) in enumerate(loader):
        optimizer.zero_grad(set_to_none=True)
        pred = model(xb)
        loss = F.mse_loss(pred, yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        value = loss.item()
        if running is not None and i > 3 and value > 8 * max(running, 1.0):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        else:
            running = value if running is None else 0.9 * running + 0.1 * value
        if RANK == 0 and i % 10 == 0:
            print(f"epoch {epoch} it {i:3d} running loss {running:.4f}")
dist.destroy_process_group()
