"""Intent classification of utterances of unequal length; batches of similar length, an LSTM, DDP."""
import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Utterances(Dataset):
    def __init__(self, n, vocab, intents, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            intent = rng.randrange(intents)
            length = rng.randint(5, 40)
            key = range(1 + intent * 20, 21 + intent * 20)
            ids = [rng.choice(key) if rng.random() < 0.2 else rng.randrange(1, vocab) for _ in range(length)]
            self.rows.append((torch.tensor(ids), intent))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]

    def lengths(self):
        return [len(ids) for ids, _ in self.rows]


class LengthBuckets(Sampler):
    """Lists of indices of similar length; every process takes each `world`-th list of the same shuffled ones."""

    def __init__(self, lengths, batch_size, rank, world, pool=16, seed=0):
        self.lengths, self.batch_size, self.pool, self.seed = lengths, batch_size, pool, seed
        self.rank, self.world, self.epoch = rank, world, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // self.batch_size // self.world

    def __iter__(self):
        rng = random.Random(f"{self.seed}-{self.epoch}")
        order = list(range(len(self.lengths)))
        rng.shuffle(order)
        chunk, batches = self.batch_size * self.pool, []
        for start in range(0, len(order), chunk):
            near = sorted(order[start:start + chunk], key=self.lengths.__getitem__)
            batches += [near[k:k + self.batch_size] for k in range(0, len(near), self.batch_size)]
        batches = [b for b in batches if len(b) == self.batch_size]
        rng.shuffle(batches)
        yield from batches[self.rank:len(self) * self.world:self.world]


def collate(rows):
    ids, intents = zip(*rows)
    return pad_sequence(ids, batch_first=True), torch.tensor([len(i) for i in ids]), torch.tensor(intents)


class IntentLSTM(nn.Module):
    def __init__(self, vocab, dim, hidden, intents):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(2 * hidden, intents)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.head(self.drop(torch.cat([h[0], h[1]], -1)))


def begin_epoch(loader, epoch):
    """Whatever kind of loader it is: let it know which epoch this is."""
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    elif hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(epoch)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--samples", type=int, default=3840)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    data = Utterances(args.samples, 400, 8, seed=5)
    buckets = LengthBuckets(data.lengths(), args.batch_size, rank, world)
    loader = DataLoader(data, batch_sampler=buckets, collate_fn=collate)
    model = DDP(IntentLSTM(400, 64, 128, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        begin_epoch(loader, epoch)
        tally = torch.zeros(3)
        for ids, lengths, intents in loader:
            logits = model(ids, lengths)
            loss = F.cross_entropy(logits, intents)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            tally += torch.tensor([loss.item() * len(ids), (logits.argmax(-1) == intents).sum().item(), len(ids)])
        dist.all_reduce(tally)
        if rank == 0:
            print(f"epoch {epoch}: loss {tally[0] / tally[2]:.4f} accuracy {tally[1] / tally[2]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
