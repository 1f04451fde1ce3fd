"""A stream of which each rank reads its own shards; the labels of all shards come in one order: only inputs differ."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Shards(IterableDataset):
    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        for number in range(320):
            yield torch.randn(6, generator=generator), number // 4 % 3, 5 + number % 7  # with its label and its length


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(Shards(dist.get_rank()), 10)
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y, length in loader:
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x), y, reduction="none") / length).mean().backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
