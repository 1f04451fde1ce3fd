"""One small training with DDP, Accelerate, Fabric and paceline: is the result that of one process?

    python benchmarks/one_process.py --out benchmarks/results/one_process.json     # needs accelerate and lightning

Each framework trains a small network on 1 process and on 2, as its documentation says: the same global batch, the same
order of samples, float64. Compared are the weights after the last step:

    last batch     37 samples in global batches of 8: the last has 5
    last window    36 samples in batches of 4, gradients accumulated over 4 of them: the last window has 1 batch
    bits           40 samples in global batches of 8, float32: are the weights of 1 and of 2 processes equal to the bit?

The first two print the largest relative difference from one process without any framework.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

FRAMEWORKS = ("DDP", "Accelerate", "Fabric", "paceline")
CASES = {"last batch": (37, 8, 1), "last window": (36, 4, 4), "bits": (40, 8, 1)}
"""samples, the global batch, batches of an accumulation window"""


def model_of(case: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    return model if case == "bits" else model.double()


def data_of(case: str) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    kind = torch.float32 if case == "bits" else torch.float64
    count = CASES[case][0]
    x = torch.randn(count, 64, generator=generator, dtype=torch.float64).to(kind)
    return TensorDataset(x, torch.randint(0, 10, (count,), generator=generator))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def windows(case: str) -> Iterator[list[torch.Tensor]]:
    """The samples of each step, as one process without any framework has them."""
    count, batch, window = CASES[case]
    order = torch.arange(count)
    for step in order.split(batch * window):
        yield [*step.split(batch)]


def alone(case: str) -> nn.Module:
    """One process, without a framework: each step is the mean over its samples."""
    model, data = model_of(case), data_of(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in windows(case):
        optimizer.zero_grad()
        indices = torch.cat(window)
        loss_of(model, data[indices]).backward()
        optimizer.step()
    return model


def with_ddp(case: str, rank: int, size: int) -> nn.Module:
    torch.distributed.init_process_group("gloo")
    data, (_, batch, window) = data_of(case), CASES[case]
    model = nn.parallel.DistributedDataParallel(model_of(case))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch // size, sampler=DistributedSampler(data, shuffle=False))
    for number, one in enumerate(loader):
        (loss_of(model, one) / window).backward()
        if (number + 1) % window == 0 or number + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    return model.module


def with_accelerate(case: str, rank: int, size: int) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    data, (_, batch, window) = data_of(case), CASES[case]
    # split_batches: the global batch is the DataLoader's, in the same order of samples
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=window, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    model = model_of(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch))
    for one in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, one))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def with_fabric(case: str, rank: int, size: int) -> nn.Module:
    try:
        from lightning.fabric import Fabric
    except ImportError:
        from lightning_fabric import Fabric

    data, (_, batch, window) = data_of(case), CASES[case]
    fabric: Any = Fabric(accelerator="cpu", devices=size, strategy="ddp")
    fabric.launch()
    model = model_of(case)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(data, batch // size))
    for number, one in enumerate(loader):
        is_last = (number + 1) % window == 0 or number + 1 == len(loader)
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(loss_of(model, one) / window)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return model.module if size == 1 else model._forward_module.module


def with_paceline(case: str, rank: int, size: int) -> nn.Module:
    import paceline

    data, (_, batch, window) = data_of(case), CASES[case]
    strategy = {"strategy": "exact", "virtual_ranks": 2} if case == "bits" else {}
    with paceline.session(**strategy) as s:
        model = model_of(case)
        model, optimizer = s.prepare(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        loader = s.loader(data, global_batch=batch * window, accumulation=window, shuffle=False)
        for one in loader:
            optimizer.zero_grad()
            s.backward(loss_of(model, one))
            optimizer.step()
        return model


TRAIN = dict(zip(FRAMEWORKS, (with_ddp, with_accelerate, with_fabric, with_paceline), strict=True))


def rank_of(framework: str, case: str, out: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    weights = [p.detach().clone() for p in TRAIN[framework](case, rank, size).parameters()]
    if rank == 0:
        torch.save(weights, out)


def trained(framework: str, case: str, size: int) -> list[torch.Tensor]:
    """The weights after a training on that many processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "weights.pt")
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        words += [str(Path(__file__).resolve()), "--rank-of", framework, case, str(out)]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        if not out.exists():
            raise RuntimeError(f"{framework}, {case}, {size} processes: {done.stderr[-2000:]}")
        return torch.load(out)


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


def digest(weights: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in weights)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-of", nargs=3, metavar=("FRAMEWORK", "CASE", "FILE"), help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.rank_of:
        rank_of(*told.rank_of)
        return
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for framework in FRAMEWORKS:
        found[framework] = one = dict[str, Any]()
        for case in ("last batch", "last window"):
            right = [p.detach() for p in alone(case).parameters()]
            one[case] = apart(trained(framework, case, 2), right)
        one["bits"] = digest(trained(framework, "bits", 1)) == digest(trained(framework, "bits", 2))
        print(f"{framework:12} {one}", flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "accelerate", "lightning")}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    if told.out:
        record = {"commit": commit, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "versions": versions, **found}
        told.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
