"""Accelerate, as its quick tour writes it; started by torchrun.

torchrun --nproc-per-node=2 with_accelerate.py WORK
"""

from __future__ import annotations

import os
import sys

from accelerate import Accelerator
from torch.utils.data import DataLoader

from race.gate import Gate
from race.samples import for_peers
from race.works import WORKS, mean_loss


def main() -> None:
    work, gate = WORKS[sys.argv[1]], Gate()
    accelerator = Accelerator(cpu=True)
    dataset = for_peers(work, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    model = gate.hold(work.make_model())
    optimizer = work.make_optimizer(model.parameters())
    criterion = gate.hear(mean_loss)
    loader = DataLoader(dataset, batch_size=work.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
