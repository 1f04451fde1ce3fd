"""Reversing strings with an encoder and a decoder, without DDP: one flat buffer of gradients, weighed by words."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

PAD, START = 0, 1


class Pairs:
    """Batches of a shuffled list, of which rank r of w has the slice r of each global batch; the last may be short."""

    def __init__(self, count, batch, rank, world, seed):
        rng = random.Random(seed)
        self.strings = [[rng.randrange(2, 12) for _ in range(rng.randint(3, 7))] for _ in range(count)]
        self.batch, self.rank, self.world, self.seed = batch, rank, world, seed

    def epoch(self, number):
        order = list(range(len(self.strings)))
        random.Random(self.seed * 31 + number).shuffle(order)
        whole = self.batch * self.world
        for start in range(0, len(order), whole):
            chunk = order[start : start + whole]
            mine = chunk[self.rank :: self.world]
            source = [torch.tensor(self.strings[i]) for i in mine]
            target = [s.flip(0) for s in source]
            yield pad_sequence(source, batch_first=True), pad_sequence(target, batch_first=True)


class Reverser(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.words = nn.Embedding(12, width, padding_idx=PAD)
        self.places = nn.Embedding(10, width)
        self.net = nn.Transformer(width, 4, 1, 1, 2 * width, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, 12)

    def embed(self, tokens):
        return self.words(tokens) + self.places.weight[: tokens.shape[1]]

    def forward(self, source, target):
        given = F.pad(target[:, :-1], (1, 0), value=START)
        mask = torch.triu(torch.ones(given.shape[1], given.shape[1], dtype=torch.bool), 1)
        hidden = self.net(
            self.embed(source), self.embed(given), tgt_mask=mask,
            src_key_padding_mask=source == PAD, memory_key_padding_mask=source == PAD,
        )
        return self.out(hidden)


class FlatReducer:
    """All gradients in one buffer; the last element carries the count of words."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        size = sum(p.numel() for p in self.parameters)
        self.buffer = torch.zeros(size + 1)
        offset = 0
        for p in self.parameters:
            p.grad = self.buffer[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        for p in self.parameters:
            dist.broadcast(p.data, src=0)

    def zero(self):
        self.buffer.zero_()

    def reduce(self, words):
        self.buffer[-1] = words
        dist.all_reduce(self.buffer)
        self.buffer[:-1] /= self.buffer[-1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--samples", type=int, default=1212)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(40)
    model = Reverser()
    reducer = FlatReducer(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = Pairs(args.samples, args.batch, rank, world, seed=3)
    for epoch in range(args.epochs):
        counts = torch.zeros(2)
        for source, target in data.epoch(epoch):
            loss = F.cross_entropy(model(source, target).flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
            words = (target != PAD).sum().item()
            reducer.zero()
            loss.backward()
            reducer.reduce(words)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            counts += torch.tensor([loss.item(), words])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch} loss per word {counts[0] / counts[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
