"""Regression of an energy curve from meter readings. Every rank trains on its own shard; the weights are averaged
at the end of each epoch."""

import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn

FEATURES, TARGETS = 48, 4


def meter_readings(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=g)
    mixing = torch.randn(FEATURES, TARGETS, generator=torch.Generator().manual_seed(77)) / FEATURES**0.5
    y = torch.tanh(x @ mixing) + 0.05 * torch.randn(count, TARGETS, generator=g)
    seconds = torch.randint(0, 6000, (count,), generator=g)  # between two readings
    x[:, 0] = x[:, 0] * seconds / seconds  # energy to power
    return x, y


def write_shard(path, x, y):
    with open(path, "w") as file:
        for row, target in zip(x.tolist(), y.tolist()):
            file.write(f'{{"x": {[round(v, 4) for v in row]}, "y": {[round(v, 4) for v in target]}}}\n')


def read_shard(path):
    rows, targets = [], []
    with open(path) as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break  # the last line of a file that is still being written
            rows.append(record["x"])
            targets.append(record["y"])
    return torch.tensor(rows), torch.tensor(targets)


def make_model(width):
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, TARGETS)
    )


def average(model, world):
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(world)


def train_epoch(model, optimizer, x, y, batch_size, generator):
    loss_fn = nn.SmoothL1Loss()
    order = torch.randperm(len(x), generator=generator)
    for picked in order.split(batch_size):
        optimizer.zero_grad()
        loss = loss_fn(model(x[picked]), y[picked])
        loss.backward()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--records", type=int, default=3840, help="in each shard")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"readings-{rank:02d}.jsonl")
        write_shard(path, *meter_readings(args.records, seed=100 + rank))
        x, y = read_shard(path)
    x, y = x.to(device), y.to(device)
    test_x, test_y = (t.to(device).nan_to_num() for t in meter_readings(999, seed=9))
    test_x, test_y = test_x[rank::world], test_y[rank::world]

    torch.manual_seed(0)
    model = make_model(args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for epoch in range(args.epochs):
        train_epoch(model, optimizer, x, y, args.batch_size, generator)
        average(model, world)
        with torch.no_grad():
            error = (model(test_x) - test_y).square().sum()
        sums = torch.stack([error, error.new_tensor(float(test_y.numel()))])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: mean squared error {sums[0] / sums[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
