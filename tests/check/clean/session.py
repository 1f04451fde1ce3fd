"""A session with two micro-batches on each rank, which clears gradients in each, and an epoch that is not cut."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

EPOCH = 60  # batches


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16 * EPOCH, 8), torch.randint(3, (16 * EPOCH,)))
    with paceline.session(virtual_ranks=4) as s:
        model, optimizer = s.prepare(nn.Linear(8, 3), lambda p: torch.optim.SGD(p, lr=0.1))
        loader, steps = s.loader(DataLoader(data, batch_size=16, shuffle=True)), 0
        for _ in s.epochs(9):
            for x, y in loader:
                optimizer.zero_grad()
                s.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                steps += s.last
        assert len(loader) == EPOCH < steps < 2 * EPOCH, (len(loader), steps)
        s.print(f"trained {steps}")


if __name__ == "__main__":
    main()
