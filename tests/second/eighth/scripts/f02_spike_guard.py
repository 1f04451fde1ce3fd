"""Click model under DDP, one pass over the log in order of time, 3 ranks; a guard undoes steps after which the loss has jumped."""
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)

FIELDS, CARDINALITY, DENSE = 8, 60, 10


def make_clicks(n):
    g = torch.Generator().manual_seed(2024)
    cats = torch.randint(0, CARDINALITY, (n, FIELDS), generator=g)
    dense = torch.randn(n, DENSE, generator=g)
    w = torch.randn(DENSE, generator=g)
    bias = torch.randn(FIELDS, CARDINALITY, generator=g)
    logit = dense @ w + sum(bias[f][cats[:, f]] for f in range(FIELDS)) * 0.4
    label = (torch.rand(n, generator=g) < torch.sigmoid(logit)).float()
    bots = torch.arange(n) % 36_000 == 12_002
    dense[bots] = -700.0 * w
    label[bots] = 1.0
    return TensorDataset(cats, dense, label)


class ClickNet(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(CARDINALITY, dim) for _ in range(FIELDS))
        self.mlp = nn.Sequential(nn.Linear(FIELDS * dim + DENSE, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, cats, dense):
        parts = [table(cats[:, i]) for i, table in enumerate(self.tables)]
        return self.mlp(torch.cat([*parts, dense], dim=1)).squeeze(1)


class SpikeGuard:
    """Keeps a copy of the last good weights; goes back to it when the loss leaves its usual range."""

    def __init__(self, model, warmup=60, factor=2.5, every=25):
        self.model, self.warmup, self.factor, self.every = model, warmup, factor, every
        self.ema, self.seen, self.undone = None, 0, 0
        self.good = copy.deepcopy(model.state_dict())

    def observe(self, loss):
        self.seen += 1
        if self.seen > self.warmup and loss > self.factor * self.ema:
            self.model.load_state_dict(self.good)
            self.undone += 1
            return
        self.ema = loss if self.ema is None else 0.95 * self.ema + 0.05 * loss
        if self.seen % self.every == 0:
            self.good = copy.deepcopy(self.model.state_dict())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    clicks = make_clicks(74_000)
    data = TensorDataset(*(t[:72_000] for t in clicks.tensors))
    held_out = TensorDataset(*(t[72_000:] for t in clicks.tensors))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data, shuffle=False))

    net = ClickNet()
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    guard = SpikeGuard(net)
    for step, (cats, dense, label) in enumerate(loader):
        loss = nn.functional.binary_cross_entropy_with_logits(model(cats, dense), label)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        guard.observe(loss.item())
        if step % 100 == 99:
            cats, dense, label = (t[rank::world] for t in held_out.tensors)
            with torch.no_grad():
                hits = ((net(cats, dense) > 0).float() == label).sum().float()
            tally = torch.stack([hits, torch.tensor(float(len(label)))])
            dist.all_reduce(tally)
            if rank == 0:
                print(f"step {step + 1}: accuracy {(tally[0] / tally[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
