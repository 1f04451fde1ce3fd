"""Your own training loop on any number of processes, made of paceline's parts.

python examples/own_loop.py                                 # a world of one
torchrun --nproc-per-node 2 examples/own_loop.py            # two ranks, the same result
"""

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paceline
from paceline import BatchPlan, Loading, World, joined, load_steps, ranks_share, train_step

EPOCHS = 20


def main() -> None:
    with joined(World.from_env()) as world:
        torch.manual_seed(0)
        inputs = torch.randn(1000, 20)
        dataset = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)).to(world.device)

        # The only lines that deal with ranks: a strategy, and a plan for a global batch of 64.
        replica = paceline.STRATEGIES["bucketed"](model, lambda p: SGD(p, lr=0.05, momentum=0.9), world)
        plan = BatchPlan(num_samples=len(dataset), global_batch=64, virtual_ranks=world.size)
        mine = ranks_share(plan.virtual_ranks, world.rank, world.size)

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return (outputs - targets).square().mean(1)  # (B,): one value per sample, not their mean

        steps = load_steps(dataset, plan, mine, Loading(world.device), start=0, stop=EPOCHS * plan.steps_per_epoch)
        for number, microbatches in enumerate(steps, 1):
            result = train_step(replica, microbatches, loss)
            if world.rank == 0 and number % plan.steps_per_epoch == 0:
                print(f"epoch {number // plan.steps_per_epoch}: loss {result.loss:.6f}")
        scores = paceline.evaluate(replica, dataset, loss, {}, Loading(world.device))
        if world.rank == 0:
            print(f"mean loss over all samples: {scores['loss']:.6f}")


if __name__ == "__main__":
    main()
