"""Default risk from a table, with a hand-written loop; gradients are exchanged as one flat tensor."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)

COLUMNS = 24


def make_table(n):
    g = torch.Generator().manual_seed(77)
    x = torch.randn(n, COLUMNS, generator=g)
    x[:, :6] = torch.exp(1.2 * x[:, :6])
    w = torch.randn(COLUMNS, generator=g) / 3
    risk = x.clamp(-3, 3) @ w + 0.8 * x[:, 7] * x[:, 9]
    y = 40.0 * torch.sigmoid(risk) + 8.0 * torch.randn(n, generator=g) * x[:, 0].clamp(max=6)
    return TensorDataset(x, y)


class RiskNet(nn.Module):
    def __init__(self, width=128, depth=3):
        super().__init__()
        self.inlet = nn.Linear(COLUMNS, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(depth))
        self.outlet = nn.Linear(width, 1)

    def forward(self, x):
        h = self.inlet(x)
        for block in self.blocks:
            h = h + block(h)
        return self.outlet(h).squeeze(1)


class FlatExchange:
    """Broadcasts the weights once, then averages gradients in one call a step."""

    def __init__(self, model):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.world = dist.get_world_size()
        with torch.no_grad():
            for p in self.parameters:
                dist.broadcast(p, src=0)

    def average(self):
        flat = nn.utils.parameters_to_vector(p.grad for p in self.parameters)
        dist.all_reduce(flat)
        flat.div_(self.world)
        offset = 0
        for p in self.parameters:
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


def backward_clipped(loss, model, limit):
    loss.backward()
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def evaluate(model, data, rank, world):
    x, y = data[list(range(rank, len(data), world))]
    model.eval()
    with torch.no_grad():
        error = (model(x) - y).abs().sum()
    model.train()
    sums = torch.stack([error, torch.tensor(float(len(y)))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--clip", type=float, default=5.0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    table = make_table(7800)
    train, valid = TensorDataset(*table[:6912]), TensorDataset(*table[6912:])
    sampler = DistributedSampler(train, seed=4, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = RiskNet()
    exchange = FlatExchange(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        norms = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            norms += backward_clipped(loss, model, args.clip)
            exchange.average()
            optimizer.step()
        error = evaluate(model, valid, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: mean norm {(norms / len(loader)).item():.1f}, validation error {error:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
