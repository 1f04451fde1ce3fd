"""No DDP: each rank has an expert and a part of a table; what all ranks have is averaged by hand."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROWS, WIDTH = 12, 8


class Exchanged(torch.autograd.Function):
    """To each rank its part of the samples; backward, their gradients come back."""

    @staticmethod
    def forward(ctx, mine):
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine.contiguous())
        return theirs

    @staticmethod
    def backward(ctx, gradient):
        back = torch.empty_like(gradient)
        dist.all_to_all_single(back, gradient.contiguous())
        return back


class Model(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.body, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 2)
        torch.manual_seed(50 + rank)
        self.expert, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(ROWS, WIDTH)

    def forward(self, x, rows):
        seen = F.relu(self.body(x)) + Exchanged.apply(self.table(rows))
        return self.head(seen + Exchanged.apply(F.relu(self.expert(Exchanged.apply(seen)))))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(600, 6)
    data = TensorDataset(x, torch.randint(0, ROWS, (600,)), (x.sum(1) > 0).long())
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 6 * world, sampler=sampler, drop_last=True)
    model = Model(rank)
    shared = [*model.body.parameters(), *model.head.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, rows, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs, rows), labels).backward()
            for parameter in shared:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
