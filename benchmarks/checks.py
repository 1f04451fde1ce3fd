"""What the checks of a session cost in each step: the same loop with and without them, in turn, in the same ranks.

    python benchmarks/checks.py --out benchmarks/results/checks.json

The checks are those of `paceline.sessions.assumptions` that act in each step. They are switched off and on between
steps. Microseconds of a rank's processor time: the lower quartile of each block, then median and quartiles over blocks.
Torch operations of a step are counted, too: each is a kernel on a GPU, or a view.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.sessions.loader import Loader
from paceline.sessions.loop import Loop
from paceline.sessions.prepared import Prepared
from paceline.sessions.registered import Registered
from paceline.stepping.steps import Steps
from paceline.stepping.trainee import Trainee

BLOCK, BLOCKS, BATCH = 100, 20, 32


def _nothing(*_: Any, **__: Any) -> Any:
    return None


class Counted(TorchDispatchMode):
    """Counts torch operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


CHECKS: list[tuple[type, str, Callable[..., Any]]] = [
    (Loop, "_compare_place", _nothing),
    (Loop, "_check_optimizer", _nothing),
    (Loader, "order_hash", lambda *_: 0),
    (Prepared, "check_between", _nothing),
    (Prepared, "_check_received", _nothing),
    (Prepared, "_check_assigned", _nothing),
    (Prepared, "_note_left", _nothing),
    (Loop, "_look_at_leaves", _nothing),
    (Registered, "step_ended", lambda _: False),
    (Prepared, "before_update", _nothing),
    (Prepared, "stepped", _nothing),
    (Trainee, "hide_hooks", lambda *_, **__: []),
    (Trainee, "show_hooks", _nothing),
    (Steps, "_check_linear", _nothing),
]
"""(class, method, what it does when it is switched off)"""


def measure() -> dict[str, Any]:
    """Microseconds of processor time of a step, with and without the checks, one number for each block."""
    checks = [(kind, name, kind.__dict__[name], off) for kind, name, off in CHECKS]
    spent: dict[bool, list[float]] = {True: [], False: []}
    operations: dict[bool, list[int]] = {True: [], False: []}
    with paceline.session(threads=1) as s:
        torch.manual_seed(0)
        size = BLOCK * (BLOCKS + 1) * BATCH * s.size
        data = TensorDataset(torch.randn(size, 64), torch.randint(0, 10, (size,)))
        sizes = [64, 256, 256, 256, 10]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        model, optimizer = s.prepare(nn.Sequential(*layers[:-1]), partial(torch.optim.AdamW, fused=True))
        times: dict[bool, list[float]] = {True: [], False: []}
        began, is_on, counted = 0.0, True, Counted()
        for x, y in s.loader(DataLoader(data, batch_size=BATCH * s.size, shuffle=True)):
            optimizer.zero_grad()
            s.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            now = time.thread_time()
            if s.step > 3 * BLOCK and s.step <= 3 * BLOCK + 20:
                counted.__exit__(None, None, None)
                operations[is_on].append(counted.count)
            elif s.step > 2:
                times[is_on].append(now - began)
            if len(times[False]) == BLOCK:
                if s.step > 3 * BLOCK:  # the first is a warm-up
                    for on, found in times.items():
                        spent[on].append(1e6 * quantiles(found, n=4)[0])
                times = {True: [], False: []}
            is_on = not is_on or s.step < 2
            for kind, name, check, off in checks:
                setattr(kind, name, check if is_on else off)
            if s.step >= 3 * BLOCK and s.step < 3 * BLOCK + 20:
                counted = Counted()
                counted.__enter__()
            began = time.thread_time()
        for kind, name, check, _ in checks:
            setattr(kind, name, check)
    counts = {name: median(operations[on]) for name, on in (("with", True), ("without", False))}
    return {"with": spent[True], "without": spent[False], "operations": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    found: dict[str, Any] = {}
    for nproc in told.nproc:
        times = paceline.run(measure, nproc)[0]
        more = [on - off for on, off in zip(times["with"], times["without"], strict=True)]
        low, _, high = quantiles(more, n=4)
        whole = median(times["with"])
        found[f"{nproc} ranks"] = {**times, "step": whole, "checks": median(more), "quartiles": [low, high]}
        print(f"{nproc} ranks: {median(more):.1f} us ({low:.1f} to {high:.1f}) of a step of {whole:.0f} us", flush=True)
        print(f"{nproc} ranks, torch operations: {times['operations']}", flush=True)
    if told.out:
        told.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
