"""A custom loop with bf16, gradient accumulation, gradient clipping, a weight average (EMA) and early stopping.

python examples/recipes.py                                  # a single process
paceline launch --nproc 2 examples/recipes.py               # two ranks, the same result
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import paceline


def evaluate(s: paceline.Session, model: nn.Module, data: TensorDataset) -> float:
    """The mean loss over all ranks."""
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in s.loader(data, global_batch=256):
            total += F.mse_loss(model(x), y, reduction="sum").item()
            count += len(x)
    return s.mean(total, count)


def train(s: paceline.Session, net: nn.Module, data: TensorDataset, args: argparse.Namespace) -> None:
    model, optimizer = s.prepare(net, lambda p: torch.optim.AdamW(p, lr=0.01))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    s.register("average", average)  # saved and restored with the model
    loader = s.loader(data, global_batch=64, accumulation=4)  # 4 micro-batches in each step
    for _ in s.epochs(args.epochs):
        for x, y in loader:
            s.backward(F.mse_loss(model(x), y))
            s.clip_grad_norm(1.0)  # acts in the last micro-batch of a step
            optimizer.step()  # this, too
            optimizer.zero_grad()
            if s.last:
                average.update_parameters(model)
        loss = evaluate(s, average, data)
        s.log(loss=loss)
        if stop_early(s, model, loss, args.patience):
            break
    s.print(f"best {s.saved['best']:.6f} after {s.saved['epochs']} epochs")


def stop_early(s: paceline.Session, model: nn.Module, loss: float, patience: int) -> bool:
    """Whether the loss has not improved for `patience` evaluations. `loss` is the same on all ranks."""
    s.saved["epochs"] = s.saved.get("epochs", 0) + 1
    if loss < s.saved.get("best", float("inf")) - 1e-3:
        s.saved["best"], s.saved["without"] = loss, 0
        s.save(model, "best.safetensors")
    else:
        s.saved["without"] += 1
    return s.saved["without"] >= patience


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--precision")
    parser.add_argument("--strategy", default="bucketed")
    parser.add_argument("--run-dir")
    args = parser.parse_args()
    torch.manual_seed(0)
    inputs: Tensor = torch.randn(512, 20)
    data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    settings: Any = {"strategy": args.strategy, "precision": args.precision, "resume": args.run_dir is not None}
    with paceline.session(args.run_dir, virtual_ranks=2, **settings) as s:
        train(s, net, data, args)


if __name__ == "__main__":
    main()
