"""Text classifier on bags of tokens with masked mean pooling; plain DDP."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD = 0


class Reviews(Dataset):
    """Token ids, padded; class decides which half of the vocabulary is preferred."""

    def __init__(self, n, vocab, length, classes, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(classes, (n,), generator=g)
        band = (vocab - 1) // classes
        own = torch.randint(band, (n, length), generator=g) + 1 + self.y[:, None] * band
        any_ = torch.randint(1, vocab, (n, length), generator=g)
        pick = torch.rand((n, length), generator=g) < 0.25
        self.x = torch.where(pick, own, any_)
        lengths = torch.randint(length // 3, length + 1, (n,), generator=g)
        lengths[n // 2 + 7] = 0
        self.x[torch.arange(length)[None] >= lengths[:, None]] = PAD

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class PoolClassifier(nn.Module):
    def __init__(self, vocab, dim, hidden, classes):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.mix = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Dropout(0.1), nn.Linear(dim, classes))

    def forward(self, ids):
        keep = (ids != PAD).float().unsqueeze(-1)
        h = self.mix(self.embed(ids))
        pooled = (h * keep).sum(1) / keep.sum(1)
        return self.head(pooled)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    stats = torch.zeros(2)
    for x, y in loader:
        stats += torch.tensor([(model(x).argmax(-1) == y).sum().item(), len(y)])
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--samples", type=int, default=7200)
    p.add_argument("--batch-size", type=int, default=24)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=8)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)

    train_set = Reviews(args.samples, 2001, 64, 4, seed=1)
    test_set = Reviews(600, 2001, 64, 4, seed=2)
    test_set.x[:, 0] = test_set.x[:, 0].clamp(min=1)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    test = DataLoader(test_set, batch_size=50, sampler=DistributedSampler(test_set, shuffle=False))

    model = DDP(PoolClassifier(2001, 96, 256, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for ids, labels in train:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(ids), labels, label_smoothing=0.05)
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, test)
        best = max(best, accuracy)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} accuracy {accuracy:.3f} best {best:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
