"""Sentiment of short texts with a bag of embeddings; a warm-up and then a straight line down to zero."""
import argparse
import dataclasses

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclasses.dataclass
class Config:
    epochs: int = 8
    batch: int = 8
    peak: float = 0.02
    warmup: float = 0.1
    samples: int = 1536


class Reviews(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, 300, (count, 20), generator=g)
        self.labels = ((self.words < 140).sum(1) > (self.words >= 160).sum(1)).long()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.labels[i]


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(300, 16, mode="mean")
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 2)

    def forward(self, words):
        return self.out(self.norm(self.bag(words)))


class Plan:
    """How long the training is, and how large a step is when."""

    def __init__(self, config, data):
        self.steps_per_epoch = len(data) // config.batch
        self.total = config.epochs * self.steps_per_epoch
        self.ramp = max(1, int(config.warmup * self.total))

    def __call__(self, step):
        if step < self.ramp:
            return (step + 1) / self.ramp
        return max(0.0, (self.total - step) / (self.total - self.ramp))


def evaluate(model, data, rank, world):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        mine = range(rank, len(data), world)
        for start in range(0, len(mine), 64):
            words, labels = zip(*(data[i] for i in mine[start : start + 64]))
            hits = model(torch.stack(words)).argmax(1) == torch.stack(labels)
            counts += torch.tensor([hits.sum().item(), len(hits)])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Config):
        parser.add_argument("--" + field.name, type=field.type, default=field.default)
    config = Config(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)

    train, held_out = Reviews(config.samples, 1), Reviews(301, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=9, drop_last=True)
    loader = DataLoader(train, config.batch, sampler=sampler, drop_last=True)
    model = DDP(Bag())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.peak)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Plan(config, train))
    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        for words, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(words), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        accuracy = evaluate(model.module, held_out, rank, world)
        if rank == 0:
            print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.5f} accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
