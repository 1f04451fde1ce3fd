"""Lightning Fabric, as its guide converts a PyTorch loop; started by torchrun.

torchrun --nproc-per-node=2 with_fabric.py WORK
"""

from __future__ import annotations

import os
import sys

from lightning_fabric import Fabric
from torch.utils.data import DataLoader

from race.gate import Gate
from race.samples import for_peers
from race.works import WORKS, mean_loss


def main() -> None:
    work, gate = WORKS[sys.argv[1]], Gate()
    world_size = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp")
    fabric.launch()
    model = gate.hold(work.make_model())
    optimizer = work.make_optimizer(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    criterion = gate.hear(mean_loss)
    dataset = for_peers(work, fabric.global_rank, world_size)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=work.batch, shuffle=True))
    model.train()
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
