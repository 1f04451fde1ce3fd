"""Mixed precision: autocast and a GradScaler, which skips a step whose gradients overflow; gradients are clipped."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(600, 12, generator=generator), torch.randn(600, 1, generator=generator))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=10)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total, count = torch.zeros(()), 0
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
                loss = F.mse_loss(out.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
            count += 1
        mean = total / count
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
