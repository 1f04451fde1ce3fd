"""Copies and reverses token sequences of very different lengths. One step is the mean over all tokens of several
micro-batches on all ranks, however many tokens each of them has."""

import argparse
import itertools
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, PAD, LONGEST, IGNORE = 40, 0, 40, -100


class Sequences(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = (4 + (LONGEST - 4) * torch.rand(count, generator=g) ** 2).long().tolist()
        self.items = [torch.randint(1, VOCAB, (n,), generator=g) for n in lengths]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    ids = nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=PAD)
    targets = nn.utils.rnn.pad_sequence([t.flip(0) for t in items], batch_first=True, padding_value=IGNORE)
    return ids, targets


class Tagger(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.position = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 4, 3 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) + self.position(places)
        return self.out(self.blocks(x, src_key_padding_mask=ids == PAD))


def token_loss(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def take(iterable, size):
    iterator = iter(iterable)
    while some := list(itertools.islice(iterator, size)):
        yield some


def train_step(model, optimizer, micro_batches, world):
    tokens = torch.tensor(float(sum((targets != IGNORE).sum() for _, targets in micro_batches)))
    dist.all_reduce(tokens)
    optimizer.zero_grad()
    for k, (ids, targets) in enumerate(micro_batches, start=1):
        last = k == len(micro_batches)
        with nullcontext() if last else model.no_sync():
            # DDP divides by the world
            (token_loss(model, ids, targets) * world / tokens).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    sums = torch.zeros(2)
    for ids, targets in loader:
        sums += torch.stack([token_loss(model, ids, targets), (targets != IGNORE).sum().float()])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = Sequences(args.samples, seed=1)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True, collate_fn=collate)
    held_out = torch.utils.data.Subset(Sequences(225, seed=2), range(rank, 225, world))
    test_loader = DataLoader(held_out, batch_size=32, collate_fn=collate)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for micro_batches in take(loader, args.accumulate):
            train_step(model, optimizer, micro_batches, world)
        loss = evaluate(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: {loss:.4f} nats per token", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
