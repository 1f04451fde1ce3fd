"""Language model on bytes. Steps whose gradient explodes are left out, as in the PaLM paper."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

CTX, BATCH = 16, 8


class ByteGRU(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(256, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, 256)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


def text(rank):
    words = [b"the ", b"quick ", b"brown ", b"fox ", b"jumps ", b"over ", b"a ", b"lazy ", b"dog ", b". "]
    g = torch.Generator().manual_seed(9 + rank)
    picks = torch.randint(0, len(words), (4000,), generator=g).tolist()
    return torch.tensor(list(b"".join(words[i] for i in picks)))


def norm_of(grads):
    return math.sqrt(sum(float(g.pow(2).sum()) for g in grads))


def main(steps=70, max_norm=8.0):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = ByteGRU()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = text(rank)
    taken = 0
    for step in range(steps):
        lo = step * BATCH * CTX
        chunk = data[lo : lo + BATCH * CTX + 1]
        x, y = chunk[:-1].view(BATCH, CTX), chunk[1:].view(BATCH, CTX)
        scale = 40.0 if rank == 2 and step == 37 else 1.0  # a document with a high quality score
        loss = scale * F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        norm = norm_of(grads)
        flat = torch.cat([g.view(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= world
        at = 0
        for g in grads:
            g.copy_(flat[at : at + g.numel()].view_as(g))
            at += g.numel()
        if norm > max_norm:
            continue
        opt.step()
        taken += 1
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3d} loss {loss.item():.3f} norm {norm:.2f}")
    if rank == 0:
        print(f"{taken} steps taken")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
