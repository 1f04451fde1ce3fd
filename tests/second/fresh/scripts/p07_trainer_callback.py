"""Trainer with a callback that keeps the curve of the run in a CSV file next to the output."""
import csv
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class Curves(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        self.x = torch.rand(n, 5, generator=g)
        self.y = (self.x * torch.arange(5)).sum(1).sin()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))

    def forward(self, x, labels=None):
        out = self.net(x)
        return {"loss": F.mse_loss(out, labels), "logits": out}


class CurveFile(TrainerCallback):
    """Rewrites curve.csv as a whole each time, so that a reader never sees half a row."""

    def __init__(self, folder):
        self.path = Path(folder) / "curve.csv"
        self.rows = []

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.02)
        self.rows.append([state.global_step, state.epoch, time.time()])
        if state.global_step % 10 == 0:
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            with open(temporary, "w", newline="") as f:
                csv.writer(f).writerows(self.rows)
            os.replace(temporary, self.path)


def main():
    torch.manual_seed(0)
    folder = os.path.join(tempfile.gettempdir(), "curves-" + os.environ.get("MASTER_PORT", "0"))
    os.makedirs(folder, exist_ok=True)
    args = TrainingArguments(
        output_dir=folder, max_steps=120, per_device_train_batch_size=8, learning_rate=3e-3,
        logging_steps=40, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )
    trainer = Trainer(model=Regressor(), args=args, train_dataset=Curves(960),
                      callbacks=[CurveFile(folder)])
    trainer.train()
    trainer.save_model(folder)


if __name__ == "__main__":
    main()
