"""PyTorch-Ignite, as its distributed tutorial writes it; started by torchrun.

torchrun --nproc-per-node=2 with_ignite.py WORK
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
from ignite.engine import create_supervised_trainer

from race.gate import Gate
from race.samples import for_peers
from race.works import WORKS, mean_loss


def training(_local_rank: int, name: str) -> None:
    work, gate = WORKS[name], Gate()
    dataset = for_peers(work, idist.get_rank(), idist.get_world_size())
    # of all ranks together: auto_dataloader divides it
    loader = idist.auto_dataloader(dataset, batch_size=work.batch * idist.get_world_size(), shuffle=True)
    model = idist.auto_model(gate.hold(work.make_model()))
    optimizer = idist.auto_optim(work.make_optimizer(model.parameters()))
    trainer = create_supervised_trainer(model, optimizer, gate.hear(mean_loss), idist.device())
    trainer.run(loader, max_epochs=10**6)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training, sys.argv[1])
