"""examples/existing_ddp.py with paceline: one session instead of process group, DDP and DistributedSampler.

    paceline launch --nproc 2 -- examples/from/ddp.py --data FOLDER --epochs 1

FOLDER holds MNIST's IDX files, gzipped (the package has them in src/paceline/data/mnist).
"""

import argparse
import gzip
import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def read_idx(path: Path, header_bytes: int) -> Tensor:
    """The bytes after the header of a gzipped IDX file."""
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[header_bytes:]), dtype=torch.uint8)


def load(folder: Path, samples: int) -> TensorDataset:
    images = read_idx(folder / "train-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)[:samples]  # (N, 1, 28, 28)
    labels = read_idx(folder / "train-labels-idx1-ubyte.gz", 8)[:samples]  # (N,)
    return TensorDataset(images.float() / 255, labels.long())


def digest(weights: dict[str, Tensor]) -> str:
    """SHA-256 over all weights and buffers."""
    total = hashlib.sha256()
    for name, tensor in weights.items():
        total.update(name.encode() + tensor.cpu().numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()

    s = paceline.session()
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = s.prepare(model, optimizer)
    dataset = load(args.data, args.samples)
    loader = s.loader(DataLoader(dataset, batch_size=args.batch_size, shuffle=True), per_rank=True)
    for epoch in s.epochs(args.epochs):
        loss = torch.zeros(())
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            s.backward(loss)
            optimizer.step()
        s.print(f"epoch {epoch} loss {s.mean(loss.item() * len(labels), len(labels)):.4f}")
    weights = s.weights(model)
    s.print(f"world size {s.size} weights {digest(weights)}")


if __name__ == "__main__":
    main()
