"""A typical DDP script: torchrun's variables, DistributedSampler, DDP, and nothing of paceline.

    torchrun --standalone --nproc-per-node 2 examples/existing_ddp.py --data FOLDER --epochs 1
    paceline launch --nproc 2 -- examples/existing_ddp.py --data FOLDER --epochs 1

FOLDER holds MNIST's IDX files, gzipped (the package has them in src/paceline/data/mnist).
"""

import argparse
import gzip
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def read_idx(path: Path, header_bytes: int) -> Tensor:
    """The bytes after the header of a gzipped IDX file."""
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[header_bytes:]), dtype=torch.uint8)


def load(folder: Path, samples: int) -> TensorDataset:
    images = read_idx(folder / "train-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)[:samples]  # (N, 1, 28, 28)
    labels = read_idx(folder / "train-labels-idx1-ubyte.gz", 8)[:samples]  # (N,)
    return TensorDataset(images.float() / 255, labels.long())


def digest(model: nn.Module) -> str:
    """SHA-256 over all weights and buffers."""
    total = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        total.update(name.encode() + tensor.cpu().numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()

    use_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_gpu else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device), device_ids=[local_rank] if use_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = load(args.data, args.samples)
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = torch.zeros(())
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0:
        print(f"world size {dist.get_world_size()} weights {digest(model.module)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
