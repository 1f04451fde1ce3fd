"""Loops with Muon for the hidden matrices and AdamW for the rest, under every strategy: `muon.py FOLDER`.

Rank 0 saves the weights of each loop. With one rank, also those of a loop without paceline.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LinearLR
from torch.utils.data import Subset, TensorDataset

import paceline
from paceline.errors import UsageError

STRATEGIES = ("manual", "bucketed", "ddp", "exact", "zero", "fsdp")
RESUMED = (("bucketed", "zero"), ("zero", "fsdp"), ("fsdp", "exact"), ("exact", "bucketed"))
GLOBAL, EPOCHS = 12, 2


def net() -> nn.Module:
    torch.manual_seed(0)
    sizes = ((6, 9), (9, 9), (9, 14), (14, 3))
    return nn.Sequential(*(layer for a, b in sizes for layer in (nn.Linear(a, b), nn.Tanh()))).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 6, dtype=torch.float64, generator=generator), torch.arange(48) % 3)


def optimizers_to_verify(model: Any) -> list[Optimizer]:
    hidden = [model[2].weight, model[4].weight]
    rest = [p for p in model.parameters() if all(p is not other for other in hidden)]
    return [Muon(hidden, lr=0.02), AdamW(rest, lr=0.01)]


def schedulers_of(optimizers: list[Optimizer]) -> list[Any]:
    return [ExponentialLR(optimizers[0], 0.9), LinearLR(optimizers[1], 0.5, 1.0, total_iters=4)]


def train(model: nn.Module, optimizers: list[Optimizer], schedulers: list[Any], batches: Any, backward: Any) -> None:
    """One epoch. Each optimizer clears its gradients after its step: the other one still needs its own."""
    for x, y in batches:
        backward(F.cross_entropy(model(x), y))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()


def alone() -> dict[str, Tensor]:
    model = net()
    optimizers = optimizers_to_verify(model)
    schedulers = schedulers_of(optimizers)
    inputs, targets = data().tensors
    for _ in range(EPOCHS):
        batches = zip(inputs.split(GLOBAL), targets.split(GLOBAL), strict=True)
        train(model, optimizers, schedulers, batches, lambda loss: loss.backward())
    return model.state_dict()


def in_session(strategy: str, folder: Path | None = None, *, epochs: int = EPOCHS) -> dict[str, Tensor]:
    with paceline.session(folder, strategy=strategy, virtual_ranks=3, device="cpu", resume=folder is not None) as s:
        model = net()
        given = optimizers_to_verify(model)
        model, optimizers, schedulers = s.prepare(model, given, schedulers_of(given))
        assert optimizers == given and [type(one) for one in optimizers] == [Muon, AdamW]
        loader = s.loader(data(), global_batch=GLOBAL, shuffle=False)
        for _ in s.epochs(epochs):
            train(model, optimizers, schedulers, loader, s.backward)
        return dict(s.weights(model))


def cleared_by_one(number: int, folder: Path, epochs: int) -> dict[str, Tensor]:
    """A loop that clears the gradients of one optimizer only: those of the other one add up. An epoch is a step."""
    with paceline.session(folder, strategy="exact", virtual_ranks=3, device="cpu", resume=True) as s:
        model = net()
        model, optimizers = s.prepare(model, optimizers_to_verify(model))
        loader = s.loader(Subset(data(), range(GLOBAL)), global_batch=GLOBAL, shuffle=False)
        for _ in s.epochs(epochs):
            for x, y in loader:
                optimizers[number].zero_grad()
                s.backward(F.cross_entropy(model(x), y))
                for optimizer in optimizers:
                    optimizer.step()
        return dict(s.weights(model))


def refused(act: Any) -> str:
    try:
        with paceline.session(strategy="zero", device="cpu") as s:
            act(s, net())
    except UsageError as error:
        return error.code
    return "nothing"


def added_later(s: Any, model: Any) -> None:
    muon, adamw = optimizers_to_verify(model)
    s.prepare(model, muon)
    s.prepare(model, adamw)


def trained_twice(s: Any, model: Any) -> None:
    s.prepare(model, [AdamW(model.parameters()), AdamW(model[0].parameters())])


def one_scheduler(s: Any, model: Any) -> None:
    given = optimizers_to_verify(model)
    s.prepare(model, given, schedulers_of(given)[:1])


class Experts(nn.Module):
    """Each batch uses one of four blocks. One is frozen in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 6)
        self.double()

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.head(self.experts[number](torch.tanh(self.first(x))))


def with_experts(strategy: Any) -> dict[str, Tensor]:
    with paceline.session(strategy=strategy, virtual_ranks=3, device="cpu") as s:
        model: Any = Experts()
        weights = [expert.weight for expert in model.experts]
        rest = [p for p in model.parameters() if all(p is not weight for weight in weights)]
        model, optimizers = s.prepare(model, [Muon(weights, lr=0.02), AdamW(rest, lr=0.01)])
        for _ in s.epochs(EPOCHS):
            for x, y in s.loader(data(), global_batch=GLOBAL, shuffle=False):
                s.backward(F.cross_entropy(model(x, s.batch % 4), y))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            model.experts[0].requires_grad_(False)
        return dict(s.weights(model))


def resumed_with(act: Any, folder: Path) -> str:
    """The error if the run of `folder` resumes with other optimizers."""
    try:
        with paceline.session(folder, strategy="exact", virtual_ranks=3, device="cpu", resume=True) as s:
            model = net()
            given = act(model)
            own = [ExponentialLR(given[0], 0.9), *(LinearLR(one, 0.5, 1.0, total_iters=4) for one in given[1:])]
            model, optimizers, _ = s.prepare(model, given, own)
            loader = s.loader(data(), global_batch=GLOBAL, shuffle=False)
            for _ in s.epochs(EPOCHS):
                train(model, optimizers, [], loader, s.backward)
    except UsageError as error:
        return error.code
    return "nothing"


def closures() -> str:
    with paceline.session(device="cpu") as s:
        model, losses = net(), list[Any]()
        model, optimizers = s.prepare(model, optimizers_to_verify(model))
        for x, y in s.loader(data(), global_batch=GLOBAL):
            s.backward(F.cross_entropy(model(x), y))
            losses = [optimizer.step(lambda: 3) for optimizer in optimizers]
            for optimizer in optimizers:
                optimizer.zero_grad()
    return f"losses {losses}"


class WithBlocks(nn.Module):
    """A model as the documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def documentation() -> None:
    """Run the code of docs/own-loop.md."""
    page = (Path(__file__).parents[2] / "docs" / "own-loop.md").read_text()
    (code,) = (block.split("```")[0] for block in page.split("runs this code -->\n```python\n")[1:])
    model = WithBlocks()
    before = [p.detach().clone() for p in model.parameters()]
    with paceline.session(device="cpu") as s:
        x = torch.randn(16, 6)
        train = s.loader(TensorDataset(x, x.sum(1, keepdim=True)), global_batch=8)
        names: dict[str, Any] = {"torch": torch, "F": F, "model": model, "s": s, "train": train}
        exec(code, names)
    (steps,) = {scheduler.last_epoch for scheduler in names["schedulers"]}
    changed = not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    print(f"documentation: {steps} steps, all weights changed: {changed}")


if __name__ == "__main__":
    into, found = Path(sys.argv[1]), dict[str, dict[str, Tensor]]()
    for name in STRATEGIES:
        found[name] = in_session(name)
    for first, second in RESUMED:
        run = into / f"run-{first}-{second}"
        in_session(first, run, epochs=1)
        found[f"{first} {second}"] = in_session(second, run)
    for strategy in ("exact", "zero", "fsdp"):
        found[f"experts {strategy}"] = with_experts(strategy)
    for number in (0, 1):
        for stop in (1, 2, 3):
            run = into / f"run-cleared-{number}-{stop}"
            cleared_by_one(number, run, stop)
            found[f"cleared {number} {stop}"] = cleared_by_one(number, run, 3)
    with paceline.session(device="cpu") as session:
        rank, size = session.rank, session.size
    if size == 1:
        found["alone"] = alone()
        documentation()
        print("refused", *map(refused, (added_later, trained_twice, one_scheduler)))
        run = into / "run-other"
        in_session("exact", run, epochs=1)
        swapped = resumed_with(lambda model: optimizers_to_verify(model)[::-1], run)
        print("resumed", swapped, resumed_with(lambda model: optimizers_to_verify(model)[:1], run))
        print(closures())
    for name, weights in found.items() if rank == 0 else ():
        save_file({key: value.contiguous() for key, value in weights.items()}, into / f"{name} {size}")
