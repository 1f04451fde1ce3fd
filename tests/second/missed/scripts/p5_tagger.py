"""Tags for the words of sentences of very different lengths."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, TAGS = 300, 9


@dataclass
class Batch:
    words: Tensor
    tags: Tensor
    mask: Tensor


class Sentences(Dataset):
    def __init__(self, count: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        lengths = (4 + 56 * torch.rand(count, generator=g) ** 3).long()
        self.items = []
        for length in lengths.tolist():
            words = torch.randint(1, WORDS, (length,), generator=g)
            before = torch.cat([words.new_zeros(1), words[:-1]])
            self.items.append((words, (words + 2 * (before % 3)) % TAGS))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.items[index]


def collate(items: list[tuple[Tensor, Tensor]]) -> Batch:
    words = pad_sequence([w for w, _ in items], batch_first=True)
    tags = pad_sequence([t for _, t in items], batch_first=True)
    lengths = torch.tensor([len(w) for w, _ in items])
    return Batch(words, tags, torch.arange(words.shape[1])[None] < lengths[:, None])


class Tagger(nn.Module):
    def __init__(self, dim: int = 64):
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, TAGS)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(words))[0])


def tag_loss(logits: Tensor, batch: Batch) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), batch.tags, reduction="none")
    return (each * batch.mask).sum() / batch.mask.sum()


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    counts = torch.zeros(2, dtype=torch.long)
    model.eval()
    with torch.inference_mode():
        for batch in loader:
            right = (model(batch.words).argmax(-1) == batch.tags) & batch.mask
            counts += torch.stack([right.sum(), batch.mask.sum()])
    model.train()
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(99)

    train_set, test_set = Sentences(3840, seed=1), Sentences(512, seed=2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, args.batch, sampler=sampler, collate_fn=collate)
    share = torch.utils.data.Subset(test_set, range(rank, len(test_set), world))
    test_loader = DataLoader(share, 32, collate_fn=collate)
    model = DistributedDataParallel(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in train_loader:
            loss = tag_loss(model(batch.words), batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        score = accuracy(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {score:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
