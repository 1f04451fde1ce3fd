"""A WeightedRandomSampler whose draws are shared out: what `--check` says to type, in a script that runs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size, seed, batch_size = dist.get_rank(), dist.get_world_size(), 0, 8
    torch.manual_seed(seed)
    labels = torch.randint(3, (405,))
    data, num_samples = TensorDataset(torch.randn(405, 8), labels), len(labels)
    weights = 1.0 / labels.bincount()[labels]
    model = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        generator = torch.Generator().manual_seed(seed + epoch)
        drawn = list(WeightedRandomSampler(weights, num_samples, generator=generator))
        drawn = drawn[: len(drawn) // world_size * world_size]
        loader = DataLoader(data, batch_size, sampler=drawn[rank::world_size])
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
