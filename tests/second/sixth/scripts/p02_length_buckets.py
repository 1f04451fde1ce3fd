"""Part-of-speech tags with an LSTM. Sentences of similar length share a batch."""
import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Sentences(Dataset):
    def __init__(self, count=1728, seed=0):
        rng = random.Random(seed)
        self.items = []
        for _ in range(count):
            words = [rng.randrange(1, 200) for _ in range(rng.randint(4, 20))]
            tags = [(w + (words[i - 1] if i else 0)) % 5 for i, w in enumerate(words)]
            self.items.append((torch.tensor(words), torch.tensor(tags)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class BucketBatches(Sampler):
    """Batches of one bucket, shuffled; each rank takes every world-th of them."""

    def __init__(self, lengths, batch, rank, world, seed=0, width=4):
        self.batch, self.rank, self.world, self.seed = batch, rank, world, seed
        self.epoch = 0
        self.buckets = {}
        for i, length in enumerate(lengths):
            self.buckets.setdefault(length // width, []).append(i)
        self.count = sum(len(b) // batch for b in self.buckets.values()) // world

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = random.Random(self.seed * 100003 + self.epoch)
        batches = []
        for key in sorted(self.buckets):
            members = rng.sample(self.buckets[key], len(self.buckets[key]))
            batches += [members[k : k + self.batch] for k in range(0, len(members) - self.batch + 1, self.batch)]
        rng.shuffle(batches)
        return iter(batches[self.rank : self.count * self.world : self.world])

    def __len__(self):
        return self.count


def collate(items):
    words = pad_sequence([w for w, _ in items], batch_first=True)
    tags = pad_sequence([t for _, t in items], batch_first=True, padding_value=-100)
    return words, tags


class Tagger(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(200, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, 5)

    def forward(self, words):
        return self.out(self.lstm(self.embedding(words))[0])


def token_loss(logits, tags, world):
    """The mean over all the words of all ranks; DDP divides by the world."""
    total = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100, reduction="sum")
    words = (tags != -100).sum().float()
    dist.all_reduce(words)
    return total * world / words


def start_epoch(loader, epoch):
    for owner in (loader.sampler, loader.dataset):
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    data = Sentences()
    batches = BucketBatches([len(w) for w, _ in data.items], args.batch, rank, world, seed=17)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)
    model = DistributedDataParallel(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(args.epochs):
        start_epoch(loader, epoch)
        mean = torch.zeros(2)
        for words, tags in loader:
            loss = token_loss(model(words), tags, world)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {mean[0] / mean[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
