"""Bags of words of very different sizes; each rank has a share of a common order, and may have none for a step."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.rnn import pad_sequence

torch.set_num_threads(1)
EPOCHS, GLOBAL_BATCH, ROWS, VOCAB = 20, 48, 3089, 300


def make_rows():
    g = torch.Generator().manual_seed(3)
    topic = torch.randint(0, 6, (ROWS,), generator=g)
    sizes = torch.randint(1, 30, (ROWS,), generator=g).tolist()
    bags = [torch.randint(1, 51, (n,), generator=g) + 49 * t for n, t in zip(sizes, topic.tolist())]
    return bags, topic


class BagModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 6))

    def forward(self, ids):
        mask = (ids > 0).unsqueeze(-1)
        return self.body((self.embed(ids) * mask).sum(1) / mask.sum(1))


def share_of_step(order, step, rank, world):
    rows = order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
    return rows[rank::world]


def pad(bags, mine):
    return pad_sequence([bags[i] for i in mine], batch_first=True) if mine else torch.zeros(0, 1, dtype=torch.long)


def train_step(model, optimizer, bags, topics, mine):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(pad(bags, mine)), topics[mine], reduction="sum")
    loss.backward()
    grads = parameters_to_vector([p.grad for p in model.parameters()])
    packed = torch.cat([grads, torch.stack([loss.detach(), torch.tensor(float(len(mine)))])])
    dist.all_reduce(packed)
    loss, rows = packed[-2:].tolist()
    at = 0
    for p in model.parameters():
        p.grad = (packed[at : at + p.numel()] / rows).view_as(p)
        at += p.numel()
    optimizer.step()
    return loss, rows


@torch.no_grad()
def accuracy(model, bags, topics, rank, world):
    mine = range(len(bags) - 400 + rank, len(bags), world)
    hits = (model(pad(bags, mine)).argmax(1) == topics[list(mine)]).sum()
    counts = torch.stack([hits, torch.tensor(len(mine))])
    dist.reduce(counts, dst=0)
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    bags, topics = make_rows()
    torch.manual_seed(rank)
    model = BagModel()
    start = parameters_to_vector(model.parameters()).detach()
    dist.broadcast(start, src=world - 1)
    vector_to_parameters(start, model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = ROWS - 400
    for epoch in range(EPOCHS):
        order = torch.randperm(training, generator=torch.Generator().manual_seed(epoch)).tolist()
        total, count = 0.0, 0.0
        for step in range((training + GLOBAL_BATCH - 1) // GLOBAL_BATCH):
            mine = share_of_step(order, step, rank, world)
            loss, rows = train_step(model, optimizer, bags, topics, mine)
            total, count = total + loss, count + rows
        score = accuracy(model, bags, topics, rank, world)
        if rank == 0:
            print(f"epoch {epoch:2d} loss {total / count:.4f} accuracy {score:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
