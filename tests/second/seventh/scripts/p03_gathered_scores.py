"""Classifier with DDP; after each epoch all predictions are brought to rank 0, which makes the confusion matrix."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

CLASSES = 5


def make_data():
    g = torch.Generator().manual_seed(19)
    centers = 1.2 * torch.randn(CLASSES, 20, generator=g)
    y = torch.randint(CLASSES, (7003,), generator=g)
    x = centers[y] + 1.5 * torch.randn(7003, 20, generator=g)
    return random_split(TensorDataset(x, y), [6144, 859], generator=torch.Generator().manual_seed(1))


def loader_of(data, training):
    sampler = DistributedSampler(data, shuffle=training, drop_last=training)
    return DataLoader(data, batch_size=32, sampler=sampler, drop_last=training), sampler


@torch.no_grad()
def predict(model, loader):
    model.eval()
    guesses, truths = [], []
    for x, y in loader:
        guesses += model(x).argmax(1).tolist()
        truths += y.tolist()
    model.train()
    return guesses, truths


def confusion(parts):
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
    for guesses, truths in parts:
        for guess, truth in zip(guesses, truths):
            matrix[truth, guess] += 1
    return matrix


def report(matrix):
    recall = matrix.diag() / matrix.sum(1)
    precision = matrix.diag() / matrix.sum(0).clamp(min=1)
    f1 = (2 * precision * recall / (precision + recall).clamp(min=1e-9)).mean()
    return f"accuracy {matrix.diag().sum() / matrix.sum():.4f}  macro-F1 {f1:.4f}"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(40)
    net = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    train, test = make_data()
    train_loader, train_sampler = loader_of(train, training=True)
    test_loader, _ = loader_of(test, training=False)
    for epoch in range(8):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        parts = [None] * world if rank == 0 else None
        dist.gather_object(predict(model, test_loader), parts)
        if rank == 0:
            print(f"epoch {epoch}  {report(confusion(parts))}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
