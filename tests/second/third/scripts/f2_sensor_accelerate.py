"""Activity recognition from windows of six sensor channels, with Accelerate."""

import argparse

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

CHANNELS, LENGTH, ACTIVITIES = 6, 64, 5


class Recordings(Dataset):
    """Windows in the order of a shuffled export."""

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, ACTIVITIES, count)
        time = np.linspace(0, 6.28, LENGTH)
        pitch = 1 + self.labels[:, None, None] + 0.3 * np.arange(CHANNELS)[None, :, None]
        phase = rng.uniform(0, 6.28, (count, CHANNELS, 1))
        waves = np.sin(pitch * time[None, None] + phase) + rng.normal(0, 0.8, (count, CHANNELS, LENGTH))
        gain = rng.uniform(0.5, 30.0, (count, 1, 1))
        self.windows = (gain * waves).astype(np.float32)

    def unplug(self, index, channel):
        self.windows[index, channel] = 0.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"window": self.windows[index], "label": int(self.labels[index])}


def standardized(samples):
    windows = torch.from_numpy(np.stack([s["window"] for s in samples]))
    windows = (windows - windows.mean(-1, keepdim=True)) / windows.std(-1, keepdim=True)
    return {"windows": windows, "labels": torch.tensor([s["label"] for s in samples])}


class Recognizer(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(CHANNELS, width, 7, padding=3),
            nn.GELU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.GELU(),
        )
        self.lstm = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, ACTIVITIES)

    def forward(self, windows):
        states, _ = self.lstm(self.features(windows).transpose(1, 2))
        return self.head(states.mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--windows", type=int, default=7680)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    torch.set_num_threads(1)

    recordings = Recordings(args.windows, seed=3)
    recordings.unplug(4822, channel=3)
    loader = DataLoader(recordings, batch_size=args.batch_size, collate_fn=standardized)
    model = Recognizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader) // 2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    for epoch in range(args.epochs):
        model.train()
        running = []
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch["windows"])
                loss = criterion(logits, batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            running.append(loss.detach())
        mean = accelerator.reduce(torch.stack(running).mean(), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}, lr {scheduler.get_last_lr()[0]:.2e}")

    accelerator.end_training()


if __name__ == "__main__":
    main()
