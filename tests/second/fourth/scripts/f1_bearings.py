"""Bearing condition from vibration windows: a 1D ConvNet trained with Accelerate.

    torchrun --nproc-per-node 3 f1_bearings.py --epochs 2
"""

import argparse
import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES = 4
ADC_STEPS = 2048  # 12 bits, signed


class VibrationWindows(Dataset):
    """Windows of one accelerometer channel, as the converter delivers them."""

    def __init__(self, count, length, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, CLASSES, (count,), generator=g)
        load = torch.rand(count, 1, generator=g)
        phase = torch.rand(count, 1, generator=g) * 2 * math.pi
        t = torch.arange(length) / length
        tone = torch.sin(2 * math.pi * (9 + 4 * self.labels[:, None]) * t + phase)
        noise = 0.8 * torch.randn(count, length, generator=g).clamp(-2, 2)
        self.raw = torch.round(load * (tone + noise) * ADC_STEPS / 4).to(torch.int16)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        x = self.raw[i].float()
        x = (x - x.mean()) / x.std()
        return x[None], self.labels[i]


class ConvNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 15, stride=2, padding=7)
        self.body = nn.ModuleList(
            [
                nn.Conv1d(width, width * 2, 9, padding=4),
                nn.Conv1d(width * 2, width * 2, 9, padding=4),
                nn.Conv1d(width * 2, width * 2, 5, padding=2),
            ]
        )
        self.head = nn.Linear(width * 2, CLASSES)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for conv in self.body:
            x = F.max_pool1d(F.relu(conv(x)), 2)
        return self.head(x.mean(-1))


def evaluate(accelerator, model, loader):
    model.eval()
    hits = total = 0
    with torch.no_grad():
        for x, y in loader:
            guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            hits += (guess == y).sum().item()
            total += len(y)
    return hits / total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=5760)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(args.seed)

    train = DataLoader(
        VibrationWindows(args.windows, args.length, args.seed), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    test = DataLoader(VibrationWindows(768, args.length, args.seed + 1), batch_size=64)
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for epoch in range(args.epochs):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        accuracy = evaluate(accelerator, model, test)
        accelerator.print(f"epoch {epoch}: test accuracy {accuracy:.3f}")

    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
