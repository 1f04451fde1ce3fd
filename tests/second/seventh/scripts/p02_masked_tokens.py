"""Masked-token pretraining on made-up text. torchrun --nproc-per-node 2 p02_masked_tokens.py"""
import argparse
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

MASK, FIRST = 3, 4


class Text(Dataset):
    def __init__(self, count, length, vocab):
        g = torch.Generator().manual_seed(55)
        start = torch.randint(FIRST, vocab, (count, 1), generator=g)
        stride = torch.randint(1, 5, (count, 1), generator=g)
        self.rows = (start - FIRST + stride * torch.arange(length)) % (vocab - FIRST) + FIRST

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


@dataclass
class MaskTokens:
    vocab: int
    share: float = 0.15
    seed: int = 1234
    generator: torch.Generator = field(init=False)

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)

    def one(self, ids):
        chosen = torch.rand(ids.shape, generator=self.generator) < self.share
        chosen[torch.randint(len(ids), (1,), generator=self.generator)] = True
        dice = torch.rand(ids.shape, generator=self.generator)
        noise = torch.randint(FIRST, self.vocab, ids.shape, generator=self.generator)
        masked = torch.where(chosen & (dice < 0.8), MASK, ids)
        masked = torch.where(chosen & (dice > 0.9), noise, masked)
        return masked, torch.where(chosen, ids, -1)

    def __call__(self, rows):
        inputs, labels = zip(*(self.one(row) for row in rows))
        return torch.stack(inputs), torch.stack(labels)


class Encoder(nn.Module):
    def __init__(self, vocab, length, width=64):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.layers(self.tokens(ids) + self.places))


def masked_loss(logits, labels, world):
    kept = (labels >= 0).sum().float()
    total = kept.clone()
    dist.all_reduce(total)
    summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    return summed * world / total


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--vocab", type=int, default=60)
    p.add_argument("--length", type=int, default=32)
    a = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(a.length)
    model = DDP(Encoder(a.vocab, a.length))
    text = Text(3840, a.length, a.vocab)
    sampler = DistributedSampler(text, world, rank, shuffle=True, drop_last=True)
    loader = DataLoader(text, 16, sampler=sampler, collate_fn=MaskTokens(a.vocab), drop_last=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for ids, labels in loader:
            opt.zero_grad()
            loss = masked_loss(model(ids), labels, world)
            loss.backward()
            opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch} loss {shown.item() / world:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
