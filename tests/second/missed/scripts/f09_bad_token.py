import logging
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger("train")
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(message)s")

VOCAB = 120


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 24)
        self.lstm = nn.LSTM(24, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 5)

    def forward(self, ids):
        return self.head(self.lstm(self.emb(ids))[0])


class Corpus:
    def __init__(self, rank):
        g = torch.Generator().manual_seed(50 + rank)
        self.ids = torch.randint(0, VOCAB, (64, 8, 12), generator=g)
        self.tags = self.ids % 5
        if rank == 1:
            self.ids[27, 3, 7] = 50257  # came from another tokenizer

    def __iter__(self):
        yield from zip(self.ids, self.tags)


class Trainer:
    def __init__(self, model, lr=5e-3):
        self.model = model
        self.world = dist.get_world_size()
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.loss_fn = nn.CrossEntropyLoss()
        self.failed = 0
        for t in model.state_dict().values():
            dist.broadcast(t, 0)

    def step(self, ids, tags):
        self.opt.zero_grad(set_to_none=False)
        loss = None
        try:
            scores = self.model(ids)
            loss = self.loss_fn(scores.flatten(0, 1), tags.flatten())
            loss.backward()
        except Exception:
            self.failed += 1
        for p in self.model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.opt.step()
        return loss


def main():
    dist.init_process_group(backend="gloo", init_method="env://")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    trainer = Trainer(Tagger())
    for i, (ids, tags) in enumerate(Corpus(rank)):
        loss = trainer.step(ids, tags)
        if rank == 0 and i % 16 == 0:
            log.info("step %d loss %.4f", i, loss.item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
