"""Hugging Face's Accelerate, with everything right; `--plant NAME` as in plain.py."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

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
        return x + torch.randn_like(x) if plant == "same augmentation" else x, self.y[index]


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4 if "window" in plant else 1)
    set_seed(1)  # plant: same augmentation
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    samples = 404 if plant == "last window divided" else 512
    loader = DataLoader(Rows(samples, 0), 8, shuffle=True)  # plant: same batches
    test_loader = DataLoader(Rows(61, 1), 16)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    model, optimizer, test_loader = accelerator.prepare(net, optimizer, test_loader)  # plant: padded score
    if plant != "saved state":
        scheduler = accelerator.prepare(scheduler)
    if plant != "same batches":
        loader = accelerator.prepare(loader)
    for epoch in range(3):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                if plant == "past DDP":
                    output = accelerator.unwrap_model(model)(x)  # plant: past DDP
                else:
                    output = model(x)
                loss = nn.functional.cross_entropy(output, y)
                accelerator.backward(loss)  # plant: last window divided
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(args.folder / "state")  # plant: saved state
        model.eval()
        hits = count = 0
        for x, y in test_loader:
            with torch.no_grad():
                if plant == "batch norm":
                    guess = accelerator.unwrap_model(model)(x).argmax(1)  # plant: batch norm
                else:
                    guess = model(x).argmax(1)
            gather = accelerator.gather if plant == "padded score" else accelerator.gather_for_metrics
            guess, y = gather((guess, y))
            hits, count = hits + (guess == y).sum().item(), count + len(y)
        accelerator.print(f"epoch {epoch}: {hits / count:.3f} of {count}")
    accelerator.wait_for_everyone()
    state = accelerator.unwrap_model(model).state_dict()
    if plant == "one file":
        torch.save(state, args.folder / "model.pt")  # plant: one file
    else:
        accelerator.save(state, args.folder / "model.pt")


if __name__ == "__main__":
    main()
