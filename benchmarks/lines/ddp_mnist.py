"""The classic: a small convolutional network on MNIST."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.data.mnist import read_mnist


def dataset(split, samples, dtype):
    images, labels = read_mnist(split)
    images = torch.frombuffer(bytearray(images.data), dtype=torch.uint8).view(-1, 1, 28, 28)[:samples]
    labels = torch.frombuffer(bytearray(labels.data), dtype=torch.uint8)[:samples]
    return TensorDataset(images.to(dtype) / 255, labels.long())


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 2), nn.Conv2d(8, 16, 3, 2)
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(16 * 36, 10)

    def forward(self, images):
        hidden = F.relu(self.conv2(F.relu(self.conv1(images))))
        return F.log_softmax(self.out(self.drop(hidden.flatten(1))), dim=1)


def train(model, device, loader, optimizer):
    model.train()
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()


def test(model, device, loader):
    model.eval()
    loss, hits = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            output = model(images)
            loss += F.nll_loss(output, labels, reduction="sum").item()
            hits += (output.argmax(1) == labels).sum().item()
    totals = torch.tensor([loss, hits], device=device)
    dist.all_reduce(totals)
    loss, hits = totals.tolist()
    if dist.get_rank() == 0:
        print(f"test loss {loss / len(loader.dataset):.4f}, accuracy {hits / len(loader.dataset):.2%}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=60000)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--save", default="mnist.pt")
    args = parser.parse_args()
    dist.init_process_group()
    torch.manual_seed(1 + dist.get_rank())
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.float64 if args.double else torch.float32
    size = dist.get_world_size()
    train_data, test_data = dataset("train", args.samples, dtype), dataset("test", args.samples, dtype)
    sampler = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, batch_size=64 // size, sampler=sampler)
    test_loader = DataLoader(test_data, batch_size=1000 // size, sampler=DistributedSampler(test_data, shuffle=False))

    model = DistributedDataParallel(Net(args.dropout).to(device, dtype))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(model, device, train_loader, optimizer)
        test(model, device, test_loader)
        scheduler.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
