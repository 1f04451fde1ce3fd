"""A character model with gradient accumulation."""

import argparse
import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TEXT = (
    "the quick brown fox jumps over the lazy dog while seven wizards mix black quartz in jugs of vivid amber; "
    "nobody expects a sphinx to judge how many boxing wizards jump quickly past the old stone bridge at dawn. "
)


class Characters(Dataset):
    def __init__(self, count, length=48):
        letters = sorted(set(TEXT))
        self.vocabulary = len(letters)
        ids = torch.tensor([letters.index(c) for c in TEXT * 4])
        g = torch.Generator().manual_seed(1)
        starts = torch.randint(len(ids) - length - 1, (count,), generator=g)
        self.rows = torch.stack([ids[s : s + length + 1] for s in starts.tolist()])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i, :-1], self.rows[i, 1:]


class CharModel(nn.Module):
    def __init__(self, vocabulary, dim=64, heads=4, layers=2, length=48):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.places = nn.Parameter(torch.zeros(length, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(dim, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, ids):
        return self.out(self.layers(self.tokens(ids) + self.places, mask=self.mask))


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def train_epoch(ddp, loader, optimizer, accumulate):
    total = 0.0
    for i, (ids, targets) in enumerate(loader):
        wait = ddp.no_sync() if i % accumulate else nullcontext()
        with wait:
            logits = ddp(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / accumulate).backward()
        total += loss.item()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return total / len(loader)


def main():
    args = get_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = Characters(3840)
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    ddp = DDP(CharModel(data.vocabulary))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr, betas=(0.9, 0.95))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        mean = torch.tensor(train_epoch(ddp, loader, optimizer, args.accumulate))
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean:.3f}, perplexity {math.exp(mean):.2f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
