"""Language model on sentences of very different lengths; padding is ignored by the loss."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

IGNORE = -100


class Sentences(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(0)
        lengths = torch.where(torch.rand(n, generator=g) < 0.15, 60, 4)
        self.items = []
        for length in lengths.tolist():
            start = int(torch.randint(0, 40, (1,), generator=g))
            self.items.append((start + 3 * torch.arange(length)) % 40)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    x = pad_sequence([i[:-1] for i in items], batch_first=True, padding_value=0)
    y = pad_sequence([i[1:] for i in items], batch_first=True, padding_value=IGNORE)
    return x, y


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(40, 24)
        self.gru = nn.GRU(24, 24, batch_first=True)
        self.out = nn.Linear(24, 40)

    def forward(self, x):
        return self.out(self.gru(self.emb(x))[0])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Sentences()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    model = DDP(LM())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


main()
