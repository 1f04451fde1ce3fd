"""One training loop of many settings, `trained`, in a session and in one process without paceline (`plain`).

    python looped.py FOLDER ATTEMPT      as a rank: trains FOLDER/case.json in a session

tests/sessions/soak_loops.py draws the cases and compares; this file imports nothing from tests, so that any launcher
can run it.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

import paceline

PLANNED = "planned stop"
ROWS = 60  # more than any case uses: where the data grow, they grow into them


@dataclass(frozen=True)
class Case:
    """The settings of a loop; `Case()` is the simplest."""

    number: int = 0
    ranks: int = 1
    virtual_ranks: int = 0  # 0: the session is not told
    accumulation: int = 1
    strategy: str = "bucketed"
    samples: int = 40
    batch: int = 8
    workers: int = 0
    order: str = "sequential"
    seeded: bool = True  # the streams of torch, Python and numpy
    drop_last: bool = False
    grows: bool = False
    collate: str = "default"
    loss: str = "mean"
    path: str = "plain"
    clip: str = "none"
    frozen: bool = False
    optimizer: str = "sgd"
    scheduler: str = "none"
    buffers: str = "none"
    declared: bool = True  # whether the module declares that its counters are summed
    head: str = "fixed"
    phases: tuple[int, ...] = (2,)
    loops: int = 1
    evaluation: str = "none"
    evaluated: int = 5
    average: str = "none"
    stop: int = 0  # batches after which the first attempt ends; 0: it does not
    stop_how: str = "before"
    ranks_after: int = 1
    every: int = 1  # batches of an optimizer step, counted by the loop
    clears: int = 1  # every so many batches the loop clears the gradients of the steps before; 0: never
    leaves: int = 0  # the batch at which each epoch is left; 0: none
    closure: bool = False
    mode: str = "train"
    touch: str = "none"  # what becomes of the weights after each step
    wrong: str = "none"


@dataclass
class Result:
    """What a loop has come to, and what it has reported on its way."""

    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    average: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    numbers: dict[str, list[float]] = field(default_factory=dict[str, list[float]])  # learning rates and the like
    steps: list[tuple[list[int], list[int]]] = field(default_factory=list[tuple[list[int], list[int]]])
    """of each batch: phase, epoch and loop; its samples in ascending order"""
    epochs: list[list[int]] = field(default_factory=list[list[int]])  # of each phase
    evaluations: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    after: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])  # parameters after n steps


# ---- what both loops are made of ---------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """Samples (6 numbers, a class, which sample this is)."""

    def __init__(self, case: Case, count: int, offset: int = 0) -> None:
        generator = torch.Generator().manual_seed(1000 + case.number + offset)
        self.x = torch.randn(ROWS, 6, dtype=torch.float64, generator=generator)
        self.y = torch.randint(0, 3, (ROWS,), generator=generator)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Collate:
    """Samples to a batch: as torch's, without the broken samples, or as a dictionary."""

    def __init__(self, case: Case) -> None:
        chance = random.Random(case.number)
        self.how = case.collate
        # f28's samples, by which its loss is never constant over a whole batch, are never broken
        self.broken = set(chance.sample([i for i in range(ROWS) if i % 4], 9)) if case.collate == "drops" else set()

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate([sample for sample in samples if sample[2] not in self.broken])
        return dict(zip("xyi", batch, strict=True)) if self.how == "dict" else batch


class Own(Sampler[int]):
    """A sampler with a source of randomness of its own, or the process's."""

    def __init__(self, data: Rows, how: str) -> None:
        self.data, self.how, self.epoch = data, how, 0
        self.losses: dict[int, float] = {}
        if how == "attribute_python":
            self.rng: Any = random.Random(5)
        elif how == "attribute_numpy":
            self.rng = np.random.default_rng(5)
        elif how == "attribute_torch":
            self.rng = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        count = len(self.data)
        order = list(range(count))
        match self.how:
            case "python":
                random.shuffle(order)
            case "numpy":
                np.random.shuffle(order)
            case "torch":
                order = torch.randperm(count).tolist()
            case "counter":
                self.epoch += 1
                order = torch.randperm(count, generator=torch.Generator().manual_seed(self.epoch)).tolist()
            case "attribute_python":
                self.rng.shuffle(order)
            case "attribute_numpy":
                order = self.rng.permutation(count).tolist()
            case "attribute_torch":
                order = torch.randperm(count, generator=self.rng).tolist()
            case "mining":  # the samples with the largest loss first, as the loop has written them down
                order.sort(key=lambda index: -self.losses.get(index, 0.0))
            case "lazy":  # a draw for each sample, when it is asked for
                while order:
                    yield order.pop(random.randrange(len(order)))
            case other:
                raise ValueError(other)
        yield from order


class Batches:
    """A batch sampler without a length; of batches of several sizes, or of 4."""

    def __init__(self, data: Rows, how: str) -> None:
        self.data, self.how = data, how

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(len(self.data)))
        sizes = [3, 8, 5, 1, 7] if self.how == "uneven" else [4]
        if self.how == "drawn":
            random.shuffle(order)
        turn = 0
        while order:
            size = sizes[turn % len(sizes)]
            yield order[:size]
            order, turn = order[size:], turn + 1


class BatchesWithLength(Batches):
    def __len__(self) -> int:
        batches = sum(1 for _ in range(0, len(self.data), 4))
        return {"fewer": batches + 2, "more": batches - 3}.get(self.how, batches)


ONCE = {
    *("sequential", "dataset", "shuffle", "generator", "random_sampler", "subset"),
    *("python", "numpy", "torch", "counter", "lazy", "attribute_python", "attribute_numpy", "attribute_torch"),
    *("dealt", "split", "mining"),
    *("batches_none", "batches_fewer", "batches_more", "batches_uneven", "batches_drawn"),
}
"""orders in which each epoch has each sample once"""
GLOBAL = {"shuffle", "python", "numpy", "torch", "lazy", "batches_drawn", "weighted", "split", "dealt"}
"""orders that are drawn from the process's streams"""


def training_loader(case: Case, data: Rows, rank: int, size: int) -> DataLoader[Any]:
    """What the script of one process has. Rank and size are for the kinds that someone has written for DDP."""
    words: dict[str, Any] = {"collate_fn": Collate(case), "num_workers": case.workers}
    if case.order.startswith("batches_"):
        how = case.order.removeprefix("batches_")
        batches: Any = (Batches if how in ("none", "uneven", "drawn") else BatchesWithLength)(data, how)
        return DataLoader(data, batch_sampler=batches, **words)
    words |= {"batch_size": case.batch, "drop_last": case.drop_last}
    match case.order:
        case "sequential" | "dataset" | "dealt":
            return DataLoader(data, **words)
        case "split":
            return DataLoader(Subset(data, random.sample(range(len(data)), 30)), **words)
        case "shuffle":
            return DataLoader(data, shuffle=True, **words)
        case "generator":
            return DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(5), **words)
        case "random_sampler":
            sampler: Any = RandomSampler(data, generator=torch.Generator().manual_seed(5))
        case "subset":
            sampler = SubsetRandomSampler(range(len(data)), generator=torch.Generator().manual_seed(5))
        case "weighted":
            sampler = WeightedRandomSampler(range(1, len(data) + 1), 30)
        case "weighted_generator":
            generator = torch.Generator().manual_seed(5)
            sampler = WeightedRandomSampler(range(1, len(data) + 1), 30, generator=generator)
        case "by_rank":
            sampler = RandomSampler(data, generator=torch.Generator().manual_seed(rank))
        case "distributed":
            sampler = DistributedSampler(data, size, rank)
        case how:
            sampler = Own(data, how)
    return DataLoader(data, sampler=sampler, **words)


def fields(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (batch["x"], batch["y"], batch["i"]) if isinstance(batch, dict) else tuple(batch)  # pyright: ignore


class ClampedGradient(torch.autograd.Function):
    """Its input; the gradient is clamped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.clamp(-0.01, 0.01)


REDUCTIONS = {
    "count": {"seen": "sum", "classes": "sum"},
    "sum": {"total": "sum"},
    "max": {"top": "max"},
    "min": {"low": "min"},
    "first": {"kept": "first"},
}


class Net(nn.Module):
    """A small network, with what the case's buffers and its way of gradients ask for."""

    seen: Tensor
    classes: Tensor
    total: Tensor
    top: Tensor
    low: Tensor
    running: Tensor
    bank: Tensor

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        with torch.random.fork_rng():
            torch.manual_seed(100 + case.number)
            self.first, self.act = nn.Linear(6, 8), nn.Tanh()
            if case.wrong == "inner_backward":
                self.aux = nn.Linear(8, 3)
            self.head = nn.Linear(8, 3)
            if case.buffers == "batch_norm":
                self.norm = nn.BatchNorm1d(8)
        match case.buffers:
            case "count":
                self.register_buffer("seen", torch.tensor(0))
                self.register_buffer("classes", torch.zeros(3, dtype=torch.int64))
            case "sum":
                self.register_buffer("total", torch.zeros(6))
            case "max":
                self.register_buffer("top", torch.tensor(-9.0))
            case "min":
                self.register_buffer("low", torch.tensor(9.0))
            case "first":
                self.register_buffer("kept", torch.arange(3.0))
            case "undeclared":
                self.register_buffer("running", torch.zeros(6))
            case "grows":
                self.register_buffer("bank", torch.zeros(0, 6))
            case _:
                pass
        if case.buffers in REDUCTIONS and (case.declared or case.buffers != "count"):
            self.buffer_reductions = REDUCTIONS[case.buffers]
        self.double()
        self.first.requires_grad_(not case.frozen)
        if case.path == "parameter_hook":
            self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.03, 0.03))
        elif case.path == "module_hook":
            self.act.register_full_backward_hook(lambda module, gi, go: tuple(g.clamp(-0.01, 0.01) for g in gi))

    def hidden(self, x: Tensor) -> Tensor:
        return self.act(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count(x)
        h = self.hidden(x)
        if self.case.buffers == "batch_norm":
            h = self.norm(h)
        if self.case.path == "function":
            h = ClampedGradient.apply(h)
        return self.head(h)

    def count(self, x: Tensor) -> None:
        match self.case.buffers:
            case "count":
                self.seen += len(x)
                self.classes += torch.bincount((x[:, 0] > 0).long(), minlength=3)
            case "sum":
                self.total += x.sum(0)
            case "max":
                self.top.copy_(torch.maximum(self.top, x.max()))
            case "min":
                self.low.copy_(torch.minimum(self.low, x.min()))
            case "undeclared":
                self.running.mul_(0.9).add_(0.1 * x.mean(0))
            case "grows":
                self.bank = torch.cat([self.bank, x])[-10:]
            case _:
                pass


def losses(case: Case, out: Tensor, y: Tensor, i: Tensor) -> list[tuple[Tensor, Any, str]]:
    """The losses of a batch; what each is the mean of (None: of its samples); how it adds up."""
    each = F.cross_entropy(out, y, reduction="none")
    match case.loss:
        case "mean":
            return [(each.mean(), None, "mean")]
        case "per_sample":
            return [(each, None, "mean")]
        case "sum":
            return [(F.cross_entropy(out, y, reduction="sum"), None, "sum")]
        case "tokens":
            weight = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)[i % 3]
            return [((each * weight).sum() / weight.sum().clamp(min=1e-9), weight.sum(), "mean")]
        case "masked":
            mask = (i * 7 % 5) < 2
            return [((each * mask).sum() / mask.sum().clamp(min=1), mask.sum(), "mean")]
        case "ignore_index":
            target = torch.where(i % 4 == 1, -100, y)
            return [(F.cross_entropy(out, target), (target != -100).sum(), "mean")]
        case "constant":
            some = i % 4 == 0
            loss = each[some].mean() if some.any() else torch.zeros((), dtype=torch.float64)
            return [(loss, int(some.sum()), "mean")]
        case "two" | "combined":
            return [(each.mean(), None, "mean"), (0.3 * out.square().mean(), None, "mean")]
        case other:
            raise ValueError(other)


def backwards(case: Case) -> int:
    """Of a step; each has a forward of its own."""
    return 2 if case.loss in ("two", "combined") else 1


def combine(model: nn.Module, first: dict[str, Tensor]) -> None:
    """Of the gradients of two losses, one that is not their sum."""
    for name, p in model.named_parameters():
        if p.grad is not None:
            p.grad = p.grad + first[name].clamp(-0.05, 0.05)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


class Warming(torch.optim.SGD):
    """An optimizer that keeps something beside `.state`, and says so in its state_dict."""

    t = 0

    def step(self, closure: Any = None) -> Any:
        self.t += 1
        for group in self.param_groups:
            group["lr"] = 0.05 * min(1, self.t / 8)
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "t": self.t}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.t = state.pop("t")
        super().load_state_dict(state)


def optimizers(case: Case, model: Net) -> list[torch.optim.Optimizer]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    match case.optimizer:
        case "sgd" | "function":
            return [torch.optim.SGD(parameters, 0.05)]
        case "momentum":
            return [torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01)]
        case "adamw":
            return [torch.optim.AdamW(parameters, 0.01)]
        case "groups":
            rest = [p for p in parameters if p is not model.head.weight]
            return [torch.optim.AdamW([{"params": rest, "lr": 0.003}, {"params": [model.head.weight]}], 0.01)]
        case "extras":
            return [Warming(parameters, 0.05)]
        case "added_group":
            return [torch.optim.AdamW(model.head.parameters(), 0.01)]
        case "two":
            rest = [p for p in parameters if all(p is not one for one in model.head.parameters())]
            return [torch.optim.SGD(rest, 0.05, momentum=0.9), torch.optim.AdamW(model.head.parameters(), 0.01)]
        case other:
            raise ValueError(other)


def scheduler_of(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    match case.scheduler:
        case "step":
            return StepLR(optimizer, 3, 0.7)
        case "epoch":
            return StepLR(optimizer, 1, 0.5)
        case "one_cycle":
            return OneCycleLR(optimizer, 0.1, total_steps=200, cycle_momentum=False)
        case "plateau":
            return ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.05)
        case _:
            return None


def change(case: Case, model: Net, optimizer: torch.optim.Optimizer, phase: int, epoch: int) -> None:
    """What a loop does to its model and optimizer from the second epoch on."""
    if (phase or epoch) and len(optimizer.param_groups) == 1:
        if case.optimizer == "added_group":
            optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.003})
        if case.head == "new":
            with torch.random.fork_rng():
                torch.manual_seed(9)
                model.head = nn.Linear(8, 3, dtype=torch.float64)
            optimizer.add_param_group({"params": list(model.head.parameters())})


def seed_generators(case: Case) -> None:
    """As a script begins: its streams seeded, or other ones in each process."""
    if case.seeded:
        torch.manual_seed(5)
        random.seed(6)
        np.random.seed(7)
    else:
        torch.seed()
        random.seed()
        np.random.seed()


def note_losses(sampler: Any, out: Tensor, y: Tensor, i: Tensor) -> None:
    """Give the sampler what each sample has lost, to a few digits: other orders of sums must not change its order."""
    each = F.cross_entropy(out.detach(), y, reduction="none")
    sampler.losses.update(zip(i.tolist(), [round(loss, 9) for loss in each.tolist()], strict=True))


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))


def second_data(case: Case) -> Rows:
    return Rows(case, 23, offset=1)


def touch(case: Case, model: nn.Module) -> None:
    """Weights that the loop itself changes after a step."""
    match case.touch:
        case "assigned":
            for p in model.parameters():
                p.data = p.data.clamp(-0.25, 0.25)
        case "in_place":
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.25, 0.25)
        case "vector":
            vector = nn.utils.parameters_to_vector(model.parameters()).detach()
            nn.utils.vector_to_parameters(vector * 0.98, model.parameters())
        case _:
            pass


def rows_in(case: Case, phase: int, epoch: int) -> int:
    return case.samples if not case.grows else 20 + 10 * min(2, epoch + phase)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def numbers_of(made: Iterable[torch.optim.Optimizer]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for number, optimizer in enumerate(made):
        found[f"rates {number}"] = [float(group["lr"]) for group in optimizer.param_groups]
        if isinstance(optimizer, Warming):
            found[f"t {number}"] = [float(optimizer.t)]
    return found


# ---- one process, without paceline -------------------------------------------------------------------------------


class Plain:
    """In place of a session: one process, without paceline."""

    rank, size, last, samples = 0, 1, True, ROWS

    def __init__(self, orders: dict[tuple[int, ...], list[list[int]]] | None) -> None:
        """`orders`: of samples, by phase, epoch and loop; None: the case's own."""
        self.orders, self.loaders = orders, 0
        self.phase, self.epoch, self.batch = -1, 0, 0

    def prepare(self, model: Any, optimizer: Any, scheduler: Any = None) -> Any:
        made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(model.parameters())
        return (model, made) if scheduler is None else (model, made, scheduler(made))

    def loader(self, data: Any, *, global_batch: int = 0, last_batch: str = "keep", **words: Any) -> Any:
        made: DataLoader[Any] = data
        if not isinstance(data, DataLoader):
            made = DataLoader(data, global_batch, collate_fn=words["collate"], drop_last=last_batch == "drop")
        number, self.loaders = self.loaders, self.loaders + 1
        plain, rows = self, getattr(made.dataset, "dataset", made.dataset)

        class Batches:
            def __iter__(self) -> Iterator[Any]:
                batches: Any = made
                if plain.orders is not None and torch.is_grad_enabled():
                    wanted = plain.orders.get((plain.phase, plain.epoch, number), [])
                    batches = (made.collate_fn([rows[i] for i in indices]) for indices in wanted)
                for plain.batch, batch in enumerate(batches):
                    yield batch

        return Batches()

    def epochs(self, count: int) -> Iterator[int]:
        self.phase += 1
        for self.epoch in range(count):
            yield self.epoch

    def register(self, name: str, thing: Any) -> None:
        pass

    def backward(self, loss: Tensor, **_: Any) -> None:
        loss.mean().backward()

    def clip_grad_norm(self, max_norm: float, model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def gather(self, values: Tensor) -> Tensor:
        return values

    def mean(self, total: float, count: float) -> float:
        return total / count

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def plain(case: Case, orders: dict[tuple[int, ...], list[list[int]]] | None = None) -> Result:
    """Train in this process; in the given order of samples, or in the case's own."""
    seed_generators(case)
    reports = Reports()
    found = trained(case, Plain(orders), 0, reports)
    found.steps = [([*where[:3]], sorted(samples)) for where, samples in reports.steps.items()]
    found.epochs, found.evaluations = [*reports.epochs.values()], reports.evaluations
    return found


# ---- the loop ----------------------------------------------------------------------------------------------------


class Reports:
    """What a rank has seen, written when its attempt ends, however it ends."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, ...], list[int]] = {}
        """by phase, epoch, loop and batch: this rank's samples"""
        self.epochs: dict[int, list[int]] = {}
        self.evaluations: dict[str, list[float]] = {}
        self.first: tuple[int, ...] | None = None
        self.model: Net | None = None

    def write(self, path: Path) -> None:
        words = {"steps": list(self.steps.items()), "epochs": list(self.epochs.items())}
        path.write_text(json.dumps({**words, "evaluations": self.evaluations, "first": self.first}))


def trained(case: Case, s: Any, attempt: int, reports: Reports) -> Result:
    """Train in a session, as a rank, or in one process. `attempt`: 0 for one process."""
    found = Result()
    core = Net(case)  # what s.prepare returns is called; under ddp it is another module
    model: nn.Module = core
    reports.model = core
    made: list[Any] = [*optimizers(case, core)]
    if case.optimizer == "function":
        made = [lambda parameters: torch.optim.SGD(parameters, 0.05)]  # pyright: ignore[reportUnknownLambdaType]
    scheduler: Any = None
    for number, optimizer in enumerate(made):
        if number == 0 and case.scheduler != "none":
            model, made[0], scheduler = s.prepare(core, optimizer, lambda o: scheduler_of(case, o))
        else:
            model, made[number] = s.prepare(core, optimizer)
    ema = averaged(core) if case.average != "none" else None
    if case.average == "registered":
        s.register("ema", ema)
    data = Rows(case, rows_in(case, 0, 0))
    given = training_loader(case, data, s.rank, s.size)
    if case.order in ("dataset", "dealt"):
        last_batch = "drop" if case.drop_last else "keep"
        words: dict[str, Any] = {"collate": Collate(case), "num_workers": case.workers, "last_batch": last_batch}
        words |= {"shuffle": case.order == "dealt", "accumulation": case.accumulation}
        loaders = [s.loader(data, global_batch=case.batch, **words)]
    else:
        loaders = [s.loader(given, accumulation=case.accumulation)]
    if case.loops == 2:
        loaders.append(s.loader(DataLoader(second_data(case), batch_size=5)))
    test = s.loader(DataLoader(Rows(case, case.evaluated, offset=2), batch_size=2))
    model.train(case.mode == "train")
    done = bodies = 0  # batches of this attempt, bodies of this batch
    if not attempt:
        found.after.append(parameters_of(core))
    for phase, count in enumerate(case.phases):
        for epoch in s.epochs(count):
            reports.epochs.setdefault(phase, []).append(epoch)
            data.count = rows_in(case, phase, epoch)
            change(case, core, made[0], phase, epoch)
            for number, loader in enumerate(loaders):
                for batch in loader:
                    if s.batch == case.leaves > 0:
                        break
                    x, y, i = fields(batch)
                    where = (phase, epoch, number, s.batch)
                    reports.first = where if reports.first is None else reports.first
                    if attempt == 1 and case.stop == done > 0:
                        if case.stop_how == "term" and s.rank == 0 and bodies == 0:
                            os.kill(os.getpid(), signal.SIGTERM)
                        if case.stop_how == "before" or (case.stop_how == "between" and (bodies or s.last)):
                            raise RuntimeError(PLANNED)

                    def backward(x: Tensor = x, y: Tensor = y, i: Tensor = i) -> Tensor:
                        if case.every == 1 and case.clears and s.batch % case.clears == 0:
                            for optimizer in made:
                                optimizer.zero_grad()
                        if case.wrong == "inner_backward":
                            core.aux(core.hidden(x).detach()).square().mean().backward()
                        out, loss, before = model(x), torch.zeros(()), dict[str, Tensor]()
                        for k in range(backwards(case)):
                            if k and case.loss == "combined":
                                before = gradients(core)
                                model.zero_grad()
                            if k:
                                out = model(x)
                            loss, weight, reduction = losses(case, out, y, i)[k]
                            more = k == 0 and case.loss == "two"
                            s.backward(loss / case.every, weight=weight, reduction=reduction, more=more)
                        if case.loss == "combined" and s.last:
                            combine(core, before)
                        if case.order == "mining":
                            mine: list[Any] = [one[: s.samples] for one in (out, y, i)]
                            if case.wrong != "mining":
                                mine = [s.gather(one.detach()) for one in mine]
                            note_losses(given.sampler, *mine)
                        return loss

                    last = s.last
                    reports.steps.setdefault(where, []).extend(i[: s.samples].tolist())
                    if case.closure:
                        made[0].step(backward)
                    else:
                        backward()
                    if case.wrong == "added_gradient" and last:
                        with torch.no_grad():
                            assert core.head.bias.grad is not None
                            core.head.bias.grad += x[:, :3].mean(0)
                    if (s.batch + 1) % case.every == 0:
                        if case.clip == "torch":
                            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                        elif case.clip == "session":
                            s.clip_grad_norm(0.3, model)
                        if not case.closure:
                            for optimizer in made:
                                optimizer.step()
                        if case.every > 1:
                            model.zero_grad()
                        if case.scheduler in ("step", "one_cycle"):
                            scheduler.step()
                        if last:
                            if ema is not None:
                                ema.update_parameters(core)
                            touch(case, core)
                            if case.wrong == "by_hand":
                                with torch.no_grad():
                                    core.first.bias.add_(0.01 * s.rank)
                            if not attempt:
                                found.after.append(parameters_of(core))
                    bodies += 1
                    if last:
                        done, bodies = done + 1, 0
                        if attempt == 1 and case.stop == done and case.stop_how == "after":
                            raise RuntimeError(PLANNED)
            value = 0.0
            if case.evaluation != "none":
                model.eval()
                total = hits = 0.0
                rows: list[Tensor] = []
                with torch.no_grad():
                    for x, y, i in test:
                        out = model(x)
                        total, hits = total + float(F.cross_entropy(out, y, reduction="sum")), hits + len(x)
                        if case.evaluation == "gather":
                            rows.append(s.gather(torch.cat([i[:, None].double(), out], 1)))
                model.train(case.mode == "train")
                value = s.mean(total, hits)
                if case.evaluation == "gather":
                    table = torch.cat(rows)
                    report = [*table[:, 0].tolist(), *table[:, 1:].flatten().tolist()]
                else:
                    report = [value]
                reports.evaluations[f"{phase}.{epoch}"] = report
            if case.scheduler == "epoch":
                scheduler.step()
            elif case.scheduler == "plateau":
                # wrong: each rank follows a number of its own; all but rank 0's become ever better
                scheduler.step(value - (10 * s.rank * epoch if case.wrong == "local_plateau" else 0))
    found.weights = s.weights(model)
    if ema is not None:
        found.average = parameters_of(ema.module)
    found.numbers = numbers_of(made)
    return found


def case_of(told: dict[str, Any]) -> Case:
    """From settings as JSON has them."""
    words: dict[str, Any] = {**told, "phases": tuple(told.get("phases", Case.phases))}
    return Case(**words)


def main() -> None:
    folder, attempt = Path(sys.argv[1]), int(sys.argv[2])
    case = case_of(json.loads((folder / "case.json").read_text()))
    seed_generators(case)
    settings: dict[str, Any] = {"strategy": case.strategy}
    if case.virtual_ranks:
        settings["virtual_ranks"] = case.virtual_ranks
    if case.stop:
        settings |= {"run_dir": folder / "run", "resume": True}
    reports = Reports()
    with paceline.session(**settings) as s:
        try:
            found = trained(case, s, attempt, reports)
        except Exception as error:
            content: dict[str, Any] = {"step": s.step, "error": f"{type(error).__name__}: {error}"}
            if case.strategy != "fsdp" and reports.model is not None:
                content["state"] = parameters_of(reports.model)
            torch.save(content, folder / f"failed-{attempt}-{s.rank}.pt")
            raise
        finally:
            reports.write(folder / f"reports-{attempt}-{s.rank}.json")
        rank = s.rank
    if rank == 0:
        torch.save({"weights": found.weights, "average": found.average, "numbers": found.numbers}, folder / "result.pt")


if __name__ == "__main__":
    main()
