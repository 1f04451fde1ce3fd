"""The classic: a small convolutional network on MNIST."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data.mnist import read_mnist

s = paceline.session()


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
        s.backward(loss)
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
    loss, hits = s.sum(loss, hits)
    s.print(f"test loss {loss / len(loader.dataset):.4f}, accuracy {hits / len(loader.dataset):.2%}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=60000)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--save", default="mnist.pt")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float64 if args.double else torch.float32
    train_loader = DataLoader(dataset("train", args.samples, dtype), batch_size=64, shuffle=True)
    test_loader = DataLoader(dataset("test", args.samples, dtype), batch_size=1000)

    model = Net(args.dropout).to(device, dtype)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    model, optimizer, scheduler = s.prepare(model, optimizer, scheduler)
    train_loader, test_loader = s.loader(train_loader), s.loader(test_loader)
    for _ in range(args.epochs):
        train(model, device, train_loader, optimizer)
        test(model, device, test_loader)
        scheduler.step()
    s.save(model, args.save)


if __name__ == "__main__":
    main()
