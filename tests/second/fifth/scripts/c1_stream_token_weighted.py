"""Causal transformer on a stream of documents of unequal length; gradients weighted by tokens, without DDP."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

PAD = 0


class Stream(IterableDataset):
    """All processes draw the same global batch with one generator, and each keeps its own rows."""

    def __init__(self, rank, world, docs, global_batch, seed):
        self.rank, self.world, self.docs, self.global_batch, self.seed = rank, world, docs, global_batch, seed
        self.epoch = 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + 7919 * self.epoch)
        left = self.docs
        while left > 0:
            rows = min(self.global_batch, left)
            left -= rows
            lengths = torch.randint(12, 49, (rows,), generator=g)
            start = torch.randint(1, 90, (rows, 1), generator=g)
            stride = torch.randint(1, 5, (rows, 1), generator=g)
            docs = (start + stride * torch.arange(48)) % 95 + 1
            noise = torch.rand(rows, 48, generator=g) < 0.1
            docs = torch.where(noise, torch.randint(1, 96, (rows, 48), generator=g), docs)
            docs[torch.arange(48)[None] >= lengths[:, None]] = PAD
            yield docs[self.rank::self.world]


class Decoder(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.token, self.place = nn.Embedding(96, dim, padding_idx=PAD), nn.Embedding(48, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 3 * dim, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(dim, 96)

    def forward(self, ids):
        n = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        return self.out(self.blocks(self.token(ids) + self.place(torch.arange(n)), mask=mask, is_causal=True))


def sum_gradients(model):
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.view(-1) for g in grads])
    dist.all_reduce(flat)
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--docs", type=int, default=1501)
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--dim", type=int, default=96)
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Decoder(args.dim, 3)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    stream = Stream(rank, world, args.docs, args.global_batch, seed=1)
    loader = DataLoader(stream, batch_size=None)

    for epoch in range(args.epochs):
        stream.epoch = epoch
        seen = torch.zeros(2)
        for docs in loader:
            target = docs[:, 1:]
            count = (target != PAD).sum().float()
            dist.all_reduce(count)
            logits = model(docs[:, :-1])
            loss = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=PAD, reduction="sum") / count
            optimizer.zero_grad()
            loss.backward()
            sum_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seen += torch.tensor([loss.item() * count.item(), count.item() / world])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: loss per token {(seen[0] / seen[1]).item():.4f}", flush=True)
        torch.save({"rng": torch.get_rng_state(), "epoch": epoch}, f"rng-{rank}.pt")
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt.tmp")
            os.replace("last.pt.tmp", "last.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
