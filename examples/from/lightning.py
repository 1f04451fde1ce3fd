"""A small classifier, in a loop of a session.

paceline launch --nproc 2 examples/from/lightning.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, x):
        return self.net(x)


def data(seed, count):
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def main():
    s = paceline.session("runs/lightning", resume=True, strategy="exact", virtual_ranks=2, seed=1)
    train, validation = (DataLoader(data(seed, 500), batch_size=100, shuffle=seed == 1) for seed in (1, 2))
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = s.prepare(model, optimizer, scheduler)
    train, validation = s.loader(train, accumulation=2), s.loader(validation)
    best, without = s.saved.get("best", float("inf")), s.saved.get("without", 0)
    for epoch in s.epochs(6):
        model.train()
        for x, y in train:
            s.backward(F.cross_entropy(model(x), y))
            s.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        model.eval()
        loss = hits = count = 0
        with torch.no_grad():
            for x, y in validation:
                outputs = model(x)
                loss += F.cross_entropy(outputs, y, reduction="sum").item()
                hits += (outputs.argmax(1) == y).sum().item()
                count += len(y)
        loss, hits = s.mean(loss, count), s.mean(hits, count)
        s.log(loss=loss, accuracy=hits)
        best, without = (loss, 0) if loss < best else (best, without + 1)
        if without == 0:
            s.save(model, "runs/lightning/best.safetensors")
        s.saved["best"], s.saved["without"] = best, without
        if without == 2:
            break


if __name__ == "__main__":
    main()
