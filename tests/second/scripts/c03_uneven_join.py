"""Tabular data with missing values, shards of different length: DDP's join() makes up for ranks that are done early."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class Attend(nn.Module):
    """Attention over the fields; missing ones get -inf."""

    def __init__(self, fields, d=16):
        super().__init__()
        self.value = nn.Linear(1, d)
        self.place = nn.Parameter(torch.randn(fields, d) * 0.1)
        self.score = nn.Linear(d, 1)
        self.out = nn.Linear(d, 1)
        self.spare = nn.Linear(d, 1)  # of an older version, kept for its checkpoints

    def forward(self, x):
        gone = torch.isnan(x)
        h = torch.tanh(self.value(torch.nan_to_num(x).unsqueeze(-1)) + self.place)
        s = self.score(h).squeeze(-1).masked_fill(gone, float("-inf"))
        return self.out((s.softmax(1).unsqueeze(-1) * h).sum(1)).squeeze(1)


def shard(rank):
    n = (37 * 8, 31 * 8, 34 * 8)[rank % 3]
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(n, 6, generator=g)
    y = x[:, 0] - x[:, 1]
    hole = torch.rand(n, 6, generator=g) < 0.2
    hole[:, 0] = False
    x[hole] = float("nan")
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Attend(6)
    for p in model.spare.parameters():
        p.requires_grad_(False)
    ddp = DDP(model)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.1)  # no state, so ranks that are done early lose none
    shuffle = torch.Generator().manual_seed(500 + rank)
    loader = DataLoader(shard(rank), batch_size=8, shuffle=True, generator=shuffle)
    best = float("inf")
    for epoch in range(3):
        total, steps = torch.zeros((), dtype=torch.double), 0
        with ddp.join():
            for x, y in loader:
                opt.zero_grad()
                loss = nn.functional.mse_loss(ddp(x), y)
                loss.backward()
                opt.step()
                total += loss.item() * len(y)
                steps += len(y)
                best = min(best, loss.item())
        pair = torch.stack([total, torch.tensor(float(steps), dtype=torch.double)])
        dist.all_reduce(pair)
        if rank == 0:
            print(f"epoch {epoch}: loss {pair[0] / pair[1]:.4f} over {int(pair[1])} rows")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
