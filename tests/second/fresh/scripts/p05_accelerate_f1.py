"""Defect detection with Accelerate; reports recall and precision after each epoch."""
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def parts(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 9, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0.5).long())


class Confusion:
    """Counts hits, misses and false alarms of a set, of all ranks together."""

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.reset()

    def reset(self):
        self.table = torch.zeros(2, 2)

    def add(self, predicted, wanted):
        predicted, wanted = self.accelerator.gather((predicted, wanted))
        self.table.index_put_((wanted, predicted), torch.ones(len(wanted)), accumulate=True)

    def summary(self):
        hits = self.table[1, 1]
        recall = hits / self.table[1].sum().clamp(min=1)
        precision = hits / self.table[:, 1].sum().clamp(min=1)
        return f"recall {recall:.3f} precision {precision:.3f} of {int(self.table.sum())} parts"


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = DataLoader(parts(640, 1), batch_size=8, shuffle=True, drop_last=True)
    test = DataLoader(parts(101, 2), batch_size=8)
    model, opt, train, test = accelerator.prepare(model, opt, train, test)
    scores = Confusion(accelerator)
    for epoch in range(4):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            accelerator.backward(loss)
            opt.step()
            time.sleep(0.02)
        model.eval()
        scores.reset()
        with torch.no_grad():
            for x, y in test:
                scores.add(model(x).argmax(1), y)
        accelerator.print(f"epoch {epoch}: {scores.summary()}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
