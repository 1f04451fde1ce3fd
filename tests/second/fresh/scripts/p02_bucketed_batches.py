"""Sequence tagging; batches come from a batch sampler that the loader is given."""
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler


class Tagged(Dataset):
    def __init__(self, n=800):
        g = torch.Generator().manual_seed(21)
        lengths = torch.randint(3, 12, (n,), generator=g)
        self.items = [torch.randint(1, 40, (int(l),), generator=g) for l in lengths]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i], self.items[i] % 3


def pad(batch):
    width = max(len(x) for x, _ in batch)
    x = torch.stack([F.pad(a, (0, width - len(a))) for a, _ in batch])
    y = torch.stack([F.pad(b, (0, width - len(b)), value=-100) for _, b in batch])
    return x, y


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(40, 12, padding_idx=0)
        self.rnn = nn.GRU(12, 16, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def new_epoch(loader, epoch):
    """Tells whoever shuffles that a new epoch begins."""
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Tagged()
    batches = BatchSampler(DistributedSampler(data, shuffle=True), batch_size=10, drop_last=True)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=pad)
    model = DDP(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(4):
        new_epoch(loader, epoch)
        right = torch.zeros(2)
        for x, y in loader:
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
            opt.zero_grad()
            loss.backward()
            opt.step()
            mask = y != -100
            right += torch.tensor([(logits.argmax(-1) == y)[mask].sum(), mask.sum()])
            time.sleep(0.02)
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: train accuracy {(right[0] / right[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
