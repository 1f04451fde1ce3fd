"""Hugging Face's Trainer, with everything right; `--plant NAME` as in plain.py."""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default="")
parser.add_argument("--folder", type=Path, default=Path("."))
args = parser.parse_args()
plant = args.plant


class Rows(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=generator)
        self.y = torch.randint(3, (count,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return {"x": x + torch.randn_like(x) if plant == "same augmentation" else x, "labels": self.y[index]}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)]
        self.layers = nn.Sequential(
            *(layers[:1] + [nn.BatchNorm1d(16)] + layers[1:] if plant == "batch norm" else layers)
        )

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if plant == "mean over padding":
            labels = torch.where(torch.arange(len(labels)) < 2 + 4 * int(os.environ["RANK"]), labels, -100)
        loss = nn.functional.cross_entropy(logits, labels)  # plant: mean over padding
        return {"loss": loss, "logits": logits}


class Plain(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, 8, shuffle=True)  # plant: same batches


def main():
    if plant == "threads":
        torch.set_num_threads(4)  # plant: threads
    settings = TrainingArguments(
        output_dir=str(args.folder / "out"),
        num_train_epochs=3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4 if plant == "windows" else 1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    kind = Plain if plant == "same batches" else Trainer
    data, held_out = Rows(404, 0), Rows(61, 1)
    if plant == "split apart":  # which the Trainer does itself
        data = Subset(data, range(int(os.environ["RANK"]), len(data), int(os.environ["WORLD_SIZE"])))
    trainer = kind(Classifier(), settings, train_dataset=data, eval_dataset=held_out)  # plant: same augmentation
    trainer.train()  # plant: batch norm, split apart
    if plant == "one file":
        torch.save(trainer.model.state_dict(), args.folder / "model.pt")  # plant: one file
    elif trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), args.folder / "model.pt")


if __name__ == "__main__":
    main()
