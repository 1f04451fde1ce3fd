"""How fast does a session train GPT-2 124M and ResNet-50 on a GPU, beside a plain loop?

    python benchmarks/gpu_models.py gpt2 resnet50 --out benchmarks/results/gpu-models.json

The plain loop and the session train equal models in one process, and take turns. Both have bf16 by autocast and a fused
optimizer; GPT-2 is compiled, ResNet-50 is channels last, and the data lie on the device. MFU is the share of the rate
of a large matrix product, which is measured in the same process. The FLOPs are those that `paceline` counts.

    host ms      the time of a step in Python and in launches, without the reads that wait for the device
    functions    of the session's step, by the time inside them (cProfile)
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import paceline
from paceline.compute.flops import FlopCounter
from paceline.tasks.mnist import CNN, ResNet18
from race.figures import machine
from race.gpt import GPT
from race.resnet import resnet50

MANY_STEPS = 1_000_000
SIDE, PRODUCTS = 8192, 20  # of the matrices; timed products
WAITS = ("method 'tolist'", "method 'item'", "method 'cpu'", "synchronize")
SHOWN_FUNCTIONS = 12


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a sample: tokens, or an image
    batch: int
    classes: int
    optimizer: Callable[..., Optimizer]
    half: bool = True  # bf16
    is_compiled: bool = False
    channels_last: bool = False

    @property
    def tokens(self) -> int:
        """Of a sample; 0 for an image."""
        return self.shape[0] if len(self.shape) == 1 else 0

    def data(self, device: torch.device, batches: int) -> tuple[Tensor, Tensor]:
        count, targets = self.batch * batches, self.shape if self.tokens else ()
        if self.tokens:
            inputs = torch.randint(self.classes, (count, *self.shape), device=device)
        else:
            inputs = torch.randn(count, *self.shape, device=device)
        return inputs, torch.randint(self.classes, (count, *targets), device=device)

    def prepared(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().to(device)
        model = model.to(memory_format=torch.channels_last) if self.channels_last else model
        if self.is_compiled:
            model.compile()
        return model

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.half):
            logits = model(inputs)
            return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def flops(self) -> float:
        """Of a sample, forward and backward."""
        with torch.device("meta"):
            model, count = self.make(), FlopCounter()
            inputs, targets = self.data(torch.device("meta"), 1)
            with count.count_flops(self.batch):
                F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
                count.mark_backward_end()
        return count.per_sample


ADAMW = partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-5)
MODELS = {
    "gpt2": Model(
        partial(GPT, layers=12, width=768, heads=12, vocabulary=50304, longest=1024),
        (1024,), 32, 50304, ADAMW, is_compiled=True,
    ),
    "resnet50": Model(resnet50, (3, 224, 224), 256, 1000, SGD, channels_last=True),
    "w1": Model(CNN, (1, 28, 28), 128, 10, ADAMW, half=False),
    "resnet18": Model(partial(ResNet18, channels=1, num_classes=10), (1, 28, 28), 128, 10, ADAMW, half=False),
}  # fmt: skip
SMALL = {
    "gpt2": Model(partial(GPT, layers=1, width=16, heads=2, vocabulary=32, longest=8), (8,), 2, 32, ADAMW),
    "resnet50": Model(partial(resnet50, (1, 1), 8, 10), (3, 32, 32), 2, 10, SGD, half=False, channels_last=True),
    "w1": replace(MODELS["w1"], batch=2),
    "resnet18": replace(MODELS["resnet18"], batch=2),
}


def plain_loop(model: Model, device: torch.device, batches: int) -> Generator[Tensor]:
    module = model.prepared(device)
    optimizer = model.optimizer(module.parameters(), fused=True)
    inputs, targets = model.data(device, batches)
    while True:
        for batch in torch.randperm(len(inputs)).to(device).split(model.batch):
            optimizer.zero_grad()
            loss = model.loss(module, inputs[batch], targets[batch])
            loss.backward()
            optimizer.step()
            yield loss


def session_loop(model: Model, device: torch.device, batches: int) -> Generator[Tensor]:
    with paceline.session(device=device.type) as s:
        module = model.prepared(device)
        module, optimizer = s.prepare(module, model.optimizer(module.parameters(), fused=True))
        loader = s.loader(TensorDataset(*model.data(device, batches)), global_batch=model.batch)
        for _ in s.epochs(MANY_STEPS):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = model.loss(module, inputs, targets)
                s.backward(loss)
                optimizer.step()
                yield loss


def await_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def lap(loop: Generator[Tensor], steps: int, device: torch.device) -> float:
    """Milliseconds of a step."""
    await_device(device)
    began = time.perf_counter()
    for _ in range(steps):
        next(loop)
    await_device(device)
    return 1000 * (time.perf_counter() - began) / steps


def product_tflops(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Of matrix products: the rate that a model can reach at most."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    await_device(device)
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        a @ b
    await_device(device)
    return 2 * side**3 * PRODUCTS / (time.perf_counter() - began) / 1e12


def profile(loop: Generator[Tensor], steps: int, device: torch.device) -> tuple[float, list[str]]:
    """Milliseconds of the host in a step, and the functions with the most time inside."""
    await_device(device)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        next(loop)
    profiler.disable()
    found: dict[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # pyright: ignore[reportAttributeAccessIssue]
    own = {where: inside for where, (_, _, inside, *_) in found.items() if not any(w in where[2] for w in WAITS)}
    longest = sorted(own, key=lambda where: -own[where])[:SHOWN_FUNCTIONS]
    shown = [f"{1e6 * own[w] / steps:.0f} us {Path(w[0]).name}:{w[1]} {w[2]}" for w in longest]
    return 1000 * sum(own.values()) / steps, shown


def measured(model: Model, device: torch.device, steps: int, rounds: int, batches: int, side: int) -> dict[str, Any]:
    loops = {"plain": plain_loop(model, device, batches), "session": session_loop(model, device, batches)}
    try:
        for loop in loops.values():
            lap(loop, max(3, steps // 4), device)
        names, laps = [*loops], {name: list[float]() for name in loops}
        for number in range(rounds):
            for name in names if number % 2 else names[::-1]:
                laps[name].append(lap(loops[name], steps, device))
        hosts = {name: profile(loop, steps, device) for name, loop in loops.items()}
    finally:
        for loop in loops.values():
            loop.close()
    ceiling = product_tflops(device, torch.bfloat16 if model.half else torch.float32, side)
    flops, found = model.flops(), dict[str, Any]()
    for name in loops:
        rate = 1000 * model.batch / median(laps[name])
        found[name] = {"ms": [round(ms, 4) for ms in laps[name]], "samples/s": round(rate, 1)}
        found[name] |= {"tokens/s": round(rate * model.tokens)} if model.tokens else {}
        found[name] |= {"MFU": round(rate * flops / ceiling / 1e12, 4), "host ms": round(hosts[name][0], 4)}
    pairs = zip(laps["plain"], laps["session"], strict=True)
    return found | {
        "session x plain": round(median(plain / own for plain, own in pairs), 4), "gflop_a_sample": flops / 1e9,
        "product TFLOP/s": round(ceiling, 3), "functions": hosts["session"][1],
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--steps", type=int, default=20, help="of a lap")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny models, 2 rounds of 2 steps: does it work?")
    parser.add_argument("--out", type=Path)
    told = parser.parse_args(arguments)
    device = torch.device(told.device)
    if device.type == "cpu" and not told.quick:
        print(f"no CUDA device: torch {torch.__version__} sees none. --quick trains tiny models.", file=sys.stderr)
        return 2
    steps, rounds, batches, side = (2, 2, 2, 256) if told.quick else (told.steps, told.rounds, 4, SIDE)
    kept = json.loads(told.out.read_text()) if told.out and told.out.exists() else {}
    found: dict[str, Any] = kept.get("models", {})
    for name in told.models:
        found[name] = measured((SMALL if told.quick else MODELS)[name], device, steps, rounds, batches, side)
        values = {key: value for key, value in found[name].items() if key != "functions"}
        print(name, json.dumps(values), *found[name]["functions"], sep="\n  ", flush=True)
        if told.out:  # after each model: a stop loses one
            told.out.write_text(json.dumps({"machine": machine(), "models": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
