"""Small regression with an exponential moving average of the weights, evaluated on slices of the validation data."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_data(n=1440, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 24, generator=g)
    w = torch.randn(24, 1, generator=g)
    return TensorDataset(x, torch.tanh(x @ w) + 0.05 * torch.randn(n, 1, generator=g))


class EMA:
    def __init__(self, model, decay=0.98):
        self.decay = decay
        self.shadow = {k: p.detach().clone() for k, p in model.named_parameters()}
        self.backup = {}

    @torch.no_grad()
    def update(self, model):
        for k, p in model.named_parameters():
            self.shadow[k].lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def swap_in(self, model):
        for k, p in model.named_parameters():
            self.backup[k] = p.detach().clone()
            p.copy_(self.shadow[k])

    @torch.no_grad()
    def swap_out(self, model):
        for k, p in model.named_parameters():
            p.copy_(self.backup[k])


def evaluate(model, ema, part, rank, world):
    model.eval()
    ema.swap_in(model)
    mine = part[rank::world]
    if len(mine) == 0:
        model.train()
        return None
    x = torch.stack([m[0] for m in mine])
    y = torch.stack([m[1] for m in mine])
    with torch.no_grad():
        score = nn.functional.mse_loss(model(x), y).item()
    ema.swap_out(model)
    model.train()
    return score


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--eval-every", type=int, default=20)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    data = build_data()
    val = build_data(66, seed=1)
    # validation comes in days; one slice a time
    days = [list(range(0, 32)), list(range(32, 34)), list(range(34, 66))]
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DDP(net)
    ema = EMA(net)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            ema.update(net)
            step += 1
            if step % args.eval_every == 0:
                day = days[(step // args.eval_every - 1) % len(days)]
                score = evaluate(net, ema, [val[i] for i in day], rank, world)
                if rank == 0:
                    print(f"step {step}: loss {loss.item():.4f}, ema val {score:.4f}", flush=True)
    dist.barrier()
    if rank == 0:
        torch.save(net.state_dict(), os.path.join(os.environ.get("OUT", "."), "f01.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
