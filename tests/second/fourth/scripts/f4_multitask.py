"""One text encoder, three tasks. In each step all ranks work on the same task; gradients are averaged by hand,
as a task leaves the other heads without any."""

import argparse
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TASKS = {"topic": 0.4, "sentiment": 0.4, "source": 0.2}
LABELS, VOCAB = 8, 400


class Stream:
    """The batches of one task on this rank, in the order of its file."""

    def __init__(self, batches, batch_size, length, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.batches, self.batch_size, self.length, self.at = batches, batch_size, length, 0

    def read(self):
        if self.at >= self.batches:
            return None
        self.at += 1
        labels = torch.randint(0, LABELS, (self.batch_size,), generator=self.generator)
        words = torch.randint(0, VOCAB, (self.batch_size, self.length), generator=self.generator)
        hint = torch.rand(self.batch_size, self.length, generator=self.generator) < 0.15
        return torch.where(hint, labels[:, None] * 50 + words % 10, words), labels

    def rewind(self):
        self.at = 0


class Mixer:
    """Draws the task of the next step; the seed is the same everywhere, so that all ranks draw the same."""

    def __init__(self, streams, seed):
        self.streams = streams
        self.names, self.weights = list(TASKS), list(TASKS.values())
        self.random = random.Random(seed)

    def draw(self):
        while True:
            name = self.random.choices(self.names, self.weights)[0]
            batch = self.streams[name].read()
            if batch is not None:
                return name, batch
            self.streams[name].rewind()


class MultiTask(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.heads = nn.ModuleDict({name: nn.Linear(2 * width, LABELS) for name in TASKS})

    def forward(self, words, task):
        states, _ = self.encoder(self.embed(words))
        return self.heads[task](states.mean(1))


def average_gradients(model, world):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def shard_sizes(rank):
    """How many batches of each task this rank's files have."""
    rng = random.Random(rank)
    return {name: 400 if name != "sentiment" or rank != 2 else rng.randint(34, 38) for name in TASKS}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps-per-epoch", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(5)
    model = MultiTask().to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    streams = {
        name: Stream(batches, args.batch_size, args.length, seed=1000 * rank + k)
        for k, (name, batches) in enumerate(shard_sizes(rank).items())
    }
    mixer = Mixer(streams, seed=3)
    for epoch in range(args.epochs):
        totals = torch.zeros(2, device=device)
        for _ in range(args.steps_per_epoch):
            task, (words, labels) = mixer.draw()
            words, labels = words.to(device), labels.to(device)
            logits = model(words, task)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            average_gradients(model, world)
            optimizer.step()
            totals += torch.stack([(logits.argmax(-1) == labels).sum(), torch.tensor(len(labels), device=device)])
        dist.all_reduce(totals)
        if rank == 0:
            print(f"epoch {epoch}: training accuracy {totals[0] / totals[1]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
