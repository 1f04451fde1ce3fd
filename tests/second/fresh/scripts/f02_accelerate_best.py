"""Regression with Accelerate, keeps the best weights in memory."""
import copy
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def make_data(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    w = torch.linspace(-1, 1, 10)
    y = (x @ w).tanh() + noise * torch.randn(n, generator=g)
    return TensorDataset(x, y[:, None])


class BestKeeper:
    """Goes back to the best weights when validation gets worse."""

    def __init__(self, data, slack):
        self.x, self.y = data.tensors
        self.slack = slack
        self.best = float("inf")
        self.state = None

    @torch.no_grad()
    def __call__(self, net, step):
        net.eval()
        value = F.mse_loss(net(self.x), self.y).item()
        net.train()
        if value < self.best:
            self.best, self.state = value, copy.deepcopy(net.state_dict())
        elif value > self.best * self.slack:
            print(f"step {step}: {value:.4f} after {self.best:.4f}, back to the best", flush=True)
            net.load_state_dict(self.state)
        return value


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(make_data(1920, 1, 0.3), batch_size=16, shuffle=True)
    net, opt, loader = accelerator.prepare(net, opt, loader)
    keeper = BestKeeper(make_data(64, 2, 0.0), slack=1.3)

    step = 0
    for epoch in range(4):
        for x, y in loader:
            for group in opt.param_groups:      # one short restart of the learning rate
                group["lr"] = 0.3 if 80 < step <= 100 else 0.02
            loss = F.mse_loss(net(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            step += 1
            time.sleep(0.02)
            if accelerator.is_main_process and step % 20 == 0:
                keeper(accelerator.unwrap_model(net), step)
    accelerator.wait_for_everyone()
    if os.environ.get("SHOW"):
        total = sum(p.sum().item() for p in net.parameters())
        print(accelerator.process_index, "sum of weights", total, flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
