"""A masked autoencoder for sensor panels with Accelerate; gradients are summed over several micro-batches."""
import argparse
import contextlib

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset


class Panels(Dataset):
    """24 sensors that follow 4 causes. Which of them are hidden is fixed for each panel."""

    def __init__(self, count):
        g = torch.Generator().manual_seed(77)
        causes = torch.randn(count, 4, generator=g)
        self.values = causes @ torch.randn(4, 24, generator=g) * 0.5 + 0.1 * torch.randn(count, 24, generator=g)
        self.hidden = torch.rand(count, 24, generator=g).argsort(1) < 6

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        return {"values": self.values[i], "hidden": self.hidden[i]}


class Filler(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(48, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 24))

    def forward(self, values, hidden):
        filled = self.net(torch.cat([values.masked_fill(hidden, 0.0), hidden.float()], -1))
        return (filled - values)[hidden].square().mean()


class Stepper:
    """Collects the gradients of `window` micro-batches before the optimizer moves."""

    def __init__(self, accelerator, model, optimizer, window):
        self.accelerator, self.model, self.optimizer, self.window = accelerator, model, optimizer, window
        self.pending = 0

    def micro(self, batch, last):
        closing = last or self.pending + 1 == self.window
        quiet = contextlib.nullcontext() if closing else self.accelerator.no_sync(self.model)
        with quiet:
            loss = self.model(**batch)
            self.accelerator.backward(loss)
        self.pending += 1
        if closing:
            self.close()
        return loss.detach()

    def close(self):
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, self.window)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 2.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.pending = 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    set_seed(31)
    # 1,200 panels over two processes are 75 micro-batches each
    loader = DataLoader(Panels(1200), batch_size=args.batch, shuffle=True, drop_last=True)
    model = Filler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    stepper = Stepper(accelerator, model, optimizer, args.window)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for i, batch in enumerate(loader):
            total += stepper.micro(batch, last=i + 1 == len(loader))
        mean = accelerator.reduce(total / len(loader), "mean")
        accelerator.print(f"epoch {epoch} loss {mean.item():.4f}", flush=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "/tmp/fourth_filler.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
