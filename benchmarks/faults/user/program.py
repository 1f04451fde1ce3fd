"""A training as anybody writes it for torchrun, in which a fault strikes: FAULT=sleeps torchrun program.py.

FAULT_FRAMEWORK=accelerate or fabric wraps the model and the optimizer as these libraries do, instead of DDP.

Copied into a folder with strikes.py and late_strikes.py, and run there: a user's script, with nothing of paceline.
"""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from late_strikes import LATE, TOGETHER
from strikes import (
    AT_STEP,
    BATCH,
    CLASSES,
    FEATURES,
    FOR_EVER_SECONDS,
    LATE_SECONDS,
    REDUCTIONS,
    NoMoreBatches,
    Plan,
    State,
    sample,
    two_sums,
)  # fmt: skip
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

HIDDEN = 256
STEP_SECONDS = 0.015  # of pretended work
TOTALS_EVERY = 2  # steps
ELSEWHERE = (*REDUCTIONS, *TOGETHER, "swapped-groups", "swapped-collectives", "nan", "loader-killed", "loader-hangs")


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """So many pairs of a vector and a class, the same in every process."""

    def __init__(self, plan: Plan, count: int) -> None:
        self.plan, self.count, self.loaded = plan, count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.loaded += 1
        if self.plan.hits("loader-killed", "loader-hangs") and self.loaded == self.plan.step * BATCH:
            self.plan.strike()
            if self.plan.name == "loader-killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(FOR_EVER_SECONDS)
        values, label = sample(self.plan, index)
        if self.plan.hits("nan") and self.loaded == self.plan.step * BATCH:
            self.plan.strike()
            values[0] = torch.nan
        return values, label


class Network(nn.Module):
    """(B, FEATURES) -> (B, CLASSES)."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        width = HIDDEN + 1 if plan.hits("model-shape-differs") else HIDDEN
        self.first = nn.Linear(FEATURES, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, CLASSES)
        self.more = nn.Linear(2, 2) if plan.hits("extra-parameters") else None
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        x = F.relu(self.first(x))
        return self.last(x if self.skips else F.relu(self.second(x)))


Wrapped = tuple[Any, torch.optim.Optimizer]
"""the model, wrapped for several ranks, and its optimizer"""
Wrap = Callable[[nn.Module, torch.optim.Optimizer], Wrapped]
Backward = Callable[[Tensor], object]


def plain_ddp(timeout: timedelta) -> tuple[Wrap, Backward]:
    """DDP, as torch's tutorial uses it."""
    dist.init_process_group("gloo", timeout=timeout)
    return lambda model, optimizer: (DistributedDataParallel(model), optimizer), Tensor.backward


def accelerate(timeout: timedelta) -> tuple[Wrap, Backward]:
    """Accelerate."""
    from accelerate import Accelerator, InitProcessGroupKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timeout)])
    return accelerator.prepare, accelerator.backward


def fabric(timeout: timedelta) -> tuple[Wrap, Backward]:
    """Lightning Fabric."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo", timeout=timeout)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    return fabric.setup, fabric.backward


FRAMEWORKS = {"accelerate": accelerate, "fabric": fabric}


def main() -> None:
    """Train."""
    plan, rank = Plan.from_env(), int(os.environ["RANK"])
    torch.set_num_threads(1)
    if plan.hits("never-reaches-init"):
        plan.strike()
        time.sleep(FOR_EVER_SECONDS)  # FAULT: never-reaches-init
    timeout = timedelta(seconds=float(os.environ.get("GROUP_TIMEOUT", "1800")))
    wrap, backward = FRAMEWORKS.get(os.environ["FAULT_FRAMEWORK"], plain_ddp)(timeout)
    others = [dist.new_group(timeout=timeout) for _ in range(2)] if plan.name == "swapped-groups" else []
    torch.manual_seed(0)
    if plan.hits("model-shape-differs", "extra-parameters", "data-differs", "settings-differ"):
        plan.strike()
    network = Network(plan)
    lr = 0.02 if plan.hits("settings-differ") else 0.01
    model, optimizer = wrap(network, torch.optim.SGD(network.parameters(), lr))
    begun = load(model)
    steps = int(os.environ.get("FAULT_STEPS", "40"))
    samples = Samples(plan, (steps - begun) * BATCH)
    loader = DataLoader(samples, BATCH, num_workers=1 if plan.name.startswith("loader-") else 0)
    batches = iter(loader)
    try:
        for step in range(begun, steps):
            state = State(plan, step, rank, model)
            x, y = next(batches)
            time.sleep(STEP_SECONDS)
            strike(state)
            loss = F.cross_entropy(model(x), y)
            if others or plan.name == "swapped-collectives":
                two_sums(plan, state.now(), others)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            if step % TOTALS_EVERY == 0:
                reduce_totals(state, loss)
            if step % 5 == 4:
                save(model, rank, step + 1)
            if plan.hits("long-evaluation") and state.now():
                time.sleep(LATE_SECONDS)
    except NoMoreBatches:
        pass
    dist.destroy_process_group()


def strike(state: State) -> None:
    """Let the fault strike, if it is one that does between the batch and the forward."""
    plan = state.plan
    if plan.hits("straggler") and state.step >= plan.step:
        plan.strike()
        time.sleep(0.3)
    if plan.hits("slow-first-batch") and state.step == 0:
        plan.strike()
        time.sleep(LATE_SECONDS)
    if plan.name in TOGETHER and state.step == plan.step:
        if state.now():
            plan.strike()
        TOGETHER[plan.name](state)
    if state.now() and plan.name not in ELSEWHERE:
        plan.strike()
        if act := (AT_STEP | LATE).get(plan.name):  # whoever does the others waits for this moment
            act(state)


def reduce_totals(state: State, loss: Tensor) -> None:
    """The mean loss and four other numbers, over all ranks."""
    totals = torch.full((5,), loss.item())
    if state.plan.name in REDUCTIONS and state.now():
        state.plan.strike()
        REDUCTIONS[state.plan.name](totals)
    else:
        dist.all_reduce(totals)  # FAULT: no-sync


def save(model: nn.Module, rank: int, step: int) -> None:
    """Write the weights, if FAULT_CHECKPOINTS names a folder."""
    folder = os.environ.get("FAULT_CHECKPOINTS")
    if folder and rank == 0:
        torch.save({"model": model.state_dict(), "step": step}, Path(folder) / f"step-{step:05}.pt")


def load(model: nn.Module) -> int:
    """Go on from the newest weights: the step."""
    folder = os.environ.get("FAULT_CHECKPOINTS")
    found = sorted(Path(folder).glob("step-*.pt")) if folder else []
    if not found:
        return 0
    saved = torch.load(found[-1])
    model.load_state_dict(saved["model"])
    return saved["step"]


if __name__ == "__main__":
    main()
