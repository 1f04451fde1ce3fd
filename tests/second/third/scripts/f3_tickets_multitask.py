"""Two heads over one trunk: the intent of a ticket (a class) and its urgency (a number)."""

import argparse
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS, INTENTS = 160, 7


class Tickets(nn.Module):
    def __init__(self, hidden=256):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WORDS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.intent = nn.Linear(hidden, INTENTS)
        self.urgency = nn.Linear(hidden, 1)

    def forward(self, words):
        h = self.trunk(words)
        return {"intent": self.intent(h), "urgency": self.urgency(h).squeeze(-1)}


class Hits:
    """Right answers, and how many there were."""

    def __init__(self):
        self.total = torch.zeros(2, dtype=torch.int64)

    def add(self, output, target):
        self.total += torch.tensor([(output.argmax(-1) == target).sum().item(), len(target)])


class SquaredError:
    """The sum of squared errors, and how many there were."""

    def __init__(self):
        self.total = torch.zeros(2, dtype=torch.float64)

    def add(self, output, target):
        error = (output - target).square().sum().item()
        self.total += torch.tensor([error, len(target)], dtype=torch.float64)


METERS = {"intent": Hits, "urgency": SquaredError}


@dataclass
class Scores:
    meters: dict = field(default_factory=dict)

    def add(self, task, output, target):
        if task not in self.meters:
            self.meters[task] = METERS[task]()
        self.meters[task].add(output, target)

    def over_all_ranks(self):
        result = {}
        for task, meter in self.meters.items():
            dist.all_reduce(meter.total)
            result[task] = meter.total[0].item() / max(1, meter.total[1].item())
        return result


def make_tickets(count, seed):
    g = torch.Generator().manual_seed(seed)
    topics = torch.randn(INTENTS, WORDS, generator=torch.Generator().manual_seed(1))
    intent = torch.randint(INTENTS, (count,), generator=g)
    words = topics[intent] + 2.5 * torch.randn(count, WORDS, generator=g)
    return words, intent, words[:, :8].mean(1)


def validation_batches(rank, world, batches=18, size=32):
    words, intent, urgency = make_tickets(batches * size, seed=9)
    kinds = torch.rand(batches, generator=torch.Generator().manual_seed(2)) < 0.55
    for i in range(rank, batches, world):
        rows = slice(i * size, (i + 1) * size)
        task = "intent" if kinds[i] else "urgency"
        yield task, words[rows], intent[rows] if kinds[i] else urgency[rows]


@torch.no_grad()
def evaluate(model, rank, world):
    model.eval()
    scores = Scores()
    for task, words, target in validation_batches(rank, world):
        scores.add(task, model(words)[task], target)
    model.train()
    return scores.over_all_ranks()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--eval-every", type=int, default=40)
    parser.add_argument("--urgency-weight", type=float, default=0.5)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(5)

    train_set = TensorDataset(*make_tickets(15000, seed=8))
    sampler = DistributedSampler(train_set, seed=5)
    loader = DataLoader(train_set, batch_size=25, sampler=sampler)
    model = DistributedDataParallel(Tickets())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for words, intent, urgency in loader:
            out = model(words)
            loss = nn.functional.cross_entropy(out["intent"], intent)
            loss = loss + args.urgency_weight * nn.functional.mse_loss(out["urgency"], urgency)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.eval_every == 0:
                scores = evaluate(model, rank, world)
                if rank == 0:
                    shown = ", ".join(f"{k} {v:.3g}" for k, v in sorted(scores.items()))
                    print(f"step {step}: loss {loss.item():.3f}, {shown}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
