"""What the checks of a session cost in each step, each by itself, in the step that it is a part of.

    python benchmarks/checks.py --out benchmarks/results/checks.json

The checks are those in docs/own-loop.md that act in each step. Each call is timed; what the timing of a
call costs, that of a function that does nothing in the same step, is subtracted. Microseconds of a step: the median
over steps, with quartiles. In other steps all of them are switched off, and torch's operations are counted with and
without them: each is a kernel on a GPU, or a view.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
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
from paceline.sessions.checks import LoopChecks
from paceline.sessions.prepared import PreparedModel
from paceline.sessions.unsaved import UnsavedStateSearch
from paceline.stepping.step import Step

STEPS, WARM_UP, COUNTED, BATCH = 2000, 300, 20, 32


def _nothing(*_: Any, **__: Any) -> Any:
    return None


class Counted(TorchDispatchMode):
    """Counts torch operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


CHECKS: list[tuple[type, str, Callable[..., Any]]] = [
    (LoopChecks, "set_compared_values", _nothing),
    (LoopChecks, "_check_optimizer", _nothing),
    (PreparedModel, "check_between_micro_batches", _nothing),
    (PreparedModel, "_check_foreign_backward", _nothing),
    (PreparedModel, "_check_assigned", _nothing),
    (PreparedModel, "_note_left", _nothing),
    (LoopChecks, "check_periodically", _nothing),
    (UnsavedStateSearch, "after_step", lambda _: False),
    (PreparedModel, "check_before_update", _nothing),
    (PreparedModel, "finish_step", _nothing),
    (PreparedModel, "hide_hooks", lambda *_, **__: []),
    (PreparedModel, "restore_hooks", lambda part, _: part._last_grad.clear()),
    (Step, "_check_no_custom_gradient_code", _nothing),
]
"""(class, method, what it does when it is switched off)"""
EMPTY = "a call of nothing"


class Timed:
    """Nanoseconds of each step that calls have taken, by name."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = [Counter()]
        self.calls: list[Counter[str]] = [Counter()]

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            found = call(*args, **kwargs)
            self.steps[-1][name] += time.perf_counter_ns() - began
            self.calls[-1][name] += 1
            return found

        return timed

    def step(self) -> None:
        """Another step begins."""
        self.steps.append(Counter())
        self.calls.append(Counter())

    def microseconds(self) -> dict[str, list[float]]:
        """Of each name: quartiles over steps; `all` of them together, too."""
        overhead = median(one[EMPTY] / calls[EMPTY] for one, calls in zip(self.steps, self.calls, strict=True))
        found: dict[str, list[float]] = defaultdict(list)
        for spent, calls in zip(self.steps, self.calls, strict=True):
            own = {name: (spent[name] - overhead * calls[name]) / 1e3 for name in spent if name != EMPTY}
            for name, value in {**own, "all": sum(own.values())}.items():
                found[name].append(value)
        return {name: quantiles(values, n=4) for name, values in found.items()}


def measure() -> dict[str, Any]:
    """Of one rank: the microseconds of each check, those of a step without timing, and counts of operations."""
    checks = [(kind, name, kind.__dict__[name], off) for kind, name, off in CHECKS]
    timed, counted = Timed(), Counted()
    nothing = timed.timed(EMPTY, _nothing)
    steps: list[float] = []
    operations: dict[str, list[int]] = {"with": [], "without": []}
    with paceline.session(threads=1) as s:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(STEPS * BATCH * s.size, 64), torch.randint(0, 10, (STEPS * BATCH * s.size,)))
        sizes = [64, 256, 256, 256, 10]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        model, optimizer = s.prepare(nn.Sequential(*layers[:-1]), partial(torch.optim.AdamW, fused=True))
        began = time.perf_counter()
        for x, y in s.loader(DataLoader(data, batch_size=BATCH * s.size, shuffle=True)):
            optimizer.zero_grad()
            s.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            step = s.step
            if WARM_UP <= step < 2 * WARM_UP:
                steps.append(1e6 * (time.perf_counter() - began))
            if step == 2 * WARM_UP:
                for kind, name, check, _ in checks:
                    setattr(kind, name, timed.timed(name, check))
            if 2 * WARM_UP < step < STEPS - COUNTED:
                timed.step()
                nothing()
                nothing()
            if step >= STEPS - COUNTED:
                if step > STEPS - COUNTED:
                    counted.__exit__(None, None, None)
                    operations["with" if step % 2 else "without"].append(counted.count)
                for kind, name, check, off in checks:
                    setattr(kind, name, off if step % 2 else check)
                counted = Counted()
                counted.__enter__()
            began = time.perf_counter()
        counted.__exit__(None, None, None)
        for kind, name, check, _ in checks:
            setattr(kind, name, check)
    timed.steps, timed.calls = timed.steps[2:-1], timed.calls[2:-1]
    counts = {name: median(found) for name, found in operations.items()}
    return {"checks": timed.microseconds(), "step": quantiles(steps, n=4), "operations": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    found: dict[str, Any] = {}
    for nproc in told.nproc:
        found[f"{nproc} ranks"] = one = paceline.run(measure, nproc)[0]
        for name, (low, middle, high) in sorted(one["checks"].items(), key=lambda item: item[1][1]):
            print(f"{nproc} ranks: {name:20} {middle:5.1f} us ({low:.1f} to {high:.1f})")
        print(f"{nproc} ranks: a step takes {one['step'][1]:.0f} us; torch operations: {one['operations']}", flush=True)
    if told.out:
        told.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
