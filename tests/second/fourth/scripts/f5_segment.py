"""Small encoder-decoder that segments discs in noisy images, with a record of how the weights develop."""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Discs(Dataset):
    def __init__(self, count, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.centres = torch.rand(count, 3, 2, generator=g) * size
        self.radii = 3 + torch.rand(count, 3, generator=g) * size / 6
        self.noise = torch.randint(0, 2**31, (count,), generator=g)
        axis = torch.arange(size).float()
        self.grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)

    def __len__(self):
        return len(self.centres)

    def __getitem__(self, i):
        distance = (self.grid[None] - self.centres[i][:, None, None]).norm(dim=-1)
        mask = (distance < self.radii[i][:, None, None]).any(0).float()[None]
        g = torch.Generator().manual_seed(int(self.noise[i]))
        return mask + 0.9 * torch.randn(mask.shape, generator=g), mask


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.a = nn.Conv2d(1, width, 3, padding=1)
        self.b = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.c = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.d = nn.Conv2d(2 * width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        fine = F.relu(self.a(x))
        coarse = F.relu(self.c(F.relu(self.b(F.max_pool2d(fine, 2)))))
        return self.out(F.relu(self.d(torch.cat([fine, self.up(coarse)], 1))))


class History:
    """Histograms of weights and gradients, for the page that plots them."""

    def __init__(self, path, bins=40):
        self.path, self.bins, self.rows = path, bins, []

    def add(self, step, model):
        row = {"step": step, "weights": {}, "gradients": {}}
        for name, p in model.named_parameters():
            row["weights"][name] = torch.histc(p.detach(), self.bins).tolist()
            row["gradients"][name] = torch.histc(p.grad, self.bins).tolist()
        self.rows.append(row)
        with open(self.path, "w") as file:
            json.dump(self.rows, file, indent=1)


def dice(model, loader, device):
    sums = torch.zeros(2, device=device)
    model.eval()
    with torch.no_grad():
        for x, mask in loader:
            guess = (model(x.to(device)) > 0).float()
            mask = mask.to(device)
            sums += torch.stack([2 * (guess * mask).sum(), guess.sum() + mask.sum()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", default="segment-run")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    os.makedirs(args.out, exist_ok=True)

    torch.manual_seed(0)
    model = DDP(Net().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = Discs(args.images, args.size, seed=1)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    held_out = Discs(128, args.size, seed=2)
    test_loader = DataLoader(held_out, batch_size=32, sampler=DistributedSampler(held_out, shuffle=False))

    history = History(os.path.join(args.out, "history.json")) if rank == 0 else None
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, mask in loader:
            loss = F.binary_cross_entropy_with_logits(model(x.to(device)), mask.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if history:
                history.add(step, model.module)
        score = dice(model, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: dice {score:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
