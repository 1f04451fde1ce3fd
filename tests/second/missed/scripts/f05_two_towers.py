#!/usr/bin/env python
"""Two-tower retrieval. Every gradient is sent off from a hook as soon as it is there, to overlap with backward."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class TwoTowers(nn.Module):
    def __init__(self, vocab=200, dim=32):
        super().__init__()
        self.query_emb = nn.EmbeddingBag(vocab, dim)
        self.query_fc = nn.Linear(dim, dim)
        self.doc_emb = nn.EmbeddingBag(vocab, dim)
        self.doc_fc = nn.Linear(dim, dim)

    def encode_query(self, q):
        return F.normalize(self.query_fc(self.query_emb(q)), dim=1)

    def encode_doc(self, d):
        return F.normalize(self.doc_fc(self.doc_emb(d)), dim=1)

    def forward(self, q, d):
        # the longer side first
        if d.size(1) >= q.size(1):
            hd = self.encode_doc(d)
            hq = self.encode_query(q)
        else:
            hq = self.encode_query(q)
            hd = self.encode_doc(d)
        return hq @ hd.t() / 0.1


class Overlap:
    def __init__(self, model):
        self.pending = []
        self.world = dist.get_world_size()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.send)

    def send(self, p):
        p.grad.div_(self.world)
        self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def wait(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()


def batches(rank, steps):
    g = torch.Generator().manual_seed(100 + rank)
    for step in range(steps):
        q_len = 4 + step % 3
        d_len = 12 - step % 4
        if rank == 1 and step == 30:
            q_len, d_len = 14, 6  # somebody pasted a page into the search box
        topic = torch.randint(0, 20, (16, 1), generator=g)
        q = topic * 10 + torch.randint(0, 10, (16, q_len), generator=g)
        d = topic * 10 + torch.randint(0, 10, (16, d_len), generator=g)
        yield q, d


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = TwoTowers()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    overlap = Overlap(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, (q, d) in enumerate(batches(rank, 60)):
        opt.zero_grad()
        logits = model(q, d)
        loss = F.cross_entropy(logits, torch.arange(len(q)))
        loss.backward()
        overlap.wait()
        opt.step()
        if rank == 0 and step % 20 == 19:
            print("step", step + 1, "loss %.3f" % loss.item())
    dist.barrier()
    dist.destroy_process_group()


main()
