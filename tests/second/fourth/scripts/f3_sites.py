"""Patch classifier for images of several hospitals. Every rank validates on the site it is responsible for."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, PATCHES, PIXELS = 6, 25, 64
AGREEMENT = [0.98, 0.35, 0.97, 0.98]  # between the two readers of a site


def make_images(count, prototypes, seed, agreement=1.0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=g)
    images = prototypes[labels] * 0.08 + torch.randn(count, PATCHES, PIXELS, generator=g)
    other = torch.randint(0, CLASSES, (count,), generator=g)
    second_reader = torch.where(torch.rand(count, generator=g) < agreement, labels, other)
    return TensorDataset(images, second_reader)


class PatchTransformer(nn.Module):
    def __init__(self, width=96, depth=3):
        super().__init__()
        self.embed = nn.Linear(PIXELS, width)
        self.position = nn.Parameter(torch.randn(PATCHES, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 3 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.encoder(self.embed(x) + self.position)
        return self.head(self.norm(x.mean(1)))


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    loss_sum = torch.zeros((), device=device)
    count = 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss_sum += F.cross_entropy(model(x), y, reduction="sum")
        count += len(y)
    return loss_sum, count


def train_epoch(model, loader, optimizer, device):
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, default=1800)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(11)
    prototypes = torch.randn(CLASSES, PATCHES, PIXELS)
    model = DistributedDataParallel(PatchTransformer().to(device))

    train_set = make_images(args.images, prototypes, seed=1)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    site = rank % len(AGREEMENT)
    val_loader = DataLoader(make_images(240, prototypes, seed=50 + site, agreement=AGREEMENT[site]), batch_size=80)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.2, patience=1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, optimizer, device)
        loss_sum, count = validate(model.module, val_loader, device)
        scheduler.step(loss_sum.item() / count)
        pooled = torch.stack([loss_sum, loss_sum.new_tensor(float(count))])
        dist.all_reduce(pooled)
        if rank == 0:
            print(f"epoch {epoch:2d}  validation loss {pooled[0] / pooled[1]:.4f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "sites.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
