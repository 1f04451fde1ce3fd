"""Click prediction with embeddings; the first process shows the AUC so far."""

import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

FIELDS, VALUES = 12, 500


class Clicks(Dataset):
    def __init__(self, count, seed=0):
        rng = np.random.default_rng(seed)
        self.features = torch.from_numpy(rng.integers(0, VALUES, (count, FIELDS)))
        taste = rng.normal(0, 0.7, (FIELDS, VALUES))
        logit = taste[np.arange(FIELDS), self.features.numpy()].sum(1) - 1.0
        self.clicked = torch.from_numpy((rng.random(count) < 1 / (1 + np.exp(-logit))).astype(np.float32))

    def __len__(self):
        return len(self.clicked)

    def __getitem__(self, i):
        return self.features[i], self.clicked[i]


class WideAndDeep(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.register_buffer("offsets", torch.arange(FIELDS) * VALUES)
        self.wide = nn.Embedding(FIELDS * VALUES, 1)
        self.deep = nn.Embedding(FIELDS * VALUES, dim)
        self.mlp = nn.Sequential(
            nn.Linear(FIELDS * dim, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        nn.init.zeros_(self.wide.weight)

    def forward(self, features):
        ids = features + self.offsets
        return (self.wide(ids).sum(1) + self.mlp(self.deep(ids).flatten(1))).squeeze(-1)


class Progress:
    """What has been predicted so far, and how well it is ranked."""

    def __init__(self):
        self.scores = []
        self.clicked = []

    def update(self, logits, clicked):
        self.scores.extend(logits.detach().sigmoid().tolist())
        self.clicked.extend(clicked.tolist())

    def auc(self):
        scores, clicked = np.array(self.scores), np.array(self.clicked)
        order = scores.argsort(kind="stable")
        ranks = np.empty(len(scores))
        ranks[order] = np.arange(1, len(scores) + 1)
        positive = clicked.sum()
        return (ranks[clicked == 1].sum() - positive * (positive + 1) / 2) / (
            positive * (len(scores) - positive) + 1e-9
        )


def train(args, rank):
    data = Clicks(args.samples)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(WideAndDeep())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    criterion = nn.BCEWithLogitsLoss()
    progress = Progress()
    started = time.time()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (features, clicked) in enumerate(loader):
            logits = model(features)
            loss = criterion(logits, clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                progress.update(logits, clicked)
                status = f"epoch {epoch} step {step} loss {loss.item():.4f} auc {progress.auc():.4f}"
                if step % 50 == 0:
                    print(f"{status} ({time.time() - started:.1f} s)", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=128000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.03)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(17)
    dist.init_process_group(backend="gloo")
    train(options, dist.get_rank())
    dist.destroy_process_group()
