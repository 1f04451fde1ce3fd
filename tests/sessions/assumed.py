"""Loops that do what a session takes for granted, or not: `assumed.py KIND`. Each writes what it has found as JSON."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from looped import ClampedGradient  # a script beside this one
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    default_collate,
)

import paceline

torch.set_default_dtype(torch.float64)
CASES: dict[str, Callable[[], Any]] = {}
COUNT = 40


def case(act: Callable[[], Any]) -> Callable[[], Any]:
    CASES[act.__name__] = act
    return act


def cases(name: str, *kinds: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """A case `name_kind` for each kind."""

    def noted(act: Callable[[str], Any]) -> Callable[[str], Any]:
        CASES.update({f"{name}_{kind}": partial(act, kind) for kind in kinds})
        return act

    return noted


class Rows(Dataset[Any]):
    def __init__(self, count: int = COUNT) -> None:
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], i


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05)


def loss_of(model: nn.Module, x: Tensor, i: Tensor) -> Tensor:
    return ((model(x) - i[:, None] / COUNT) ** 2).mean()


def start(*arguments: Any, model: Any = None, make: Any = sgd, **options: Any) -> tuple[paceline.Session, Any, Any]:
    s = paceline.session(*arguments, **options)
    return s, *s.prepare(net() if model is None else model, make)


def step(s: Any, optimizer: Any, loss: Tensor, *weight: Any) -> None:
    optimizer.zero_grad()
    s.backward(loss, *weight)
    optimizer.step()


def take_step(s: paceline.Session, model: nn.Module, optimizer: Any, x: Tensor, i: Tensor) -> None:
    step(s, optimizer, loss_of(model, x, i))


def plain_loop(model: nn.Module, optimizer: Any, batches: Any, loss: Callable[[nn.Module, Any], Tensor]) -> Tensor:
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return flat(model)


def interrupt(s: paceline.Session, step: int, wanted: bool) -> None:
    """The loop is interrupted before this step, to be resumed."""
    if s.step == step and wanted:
        raise RuntimeError("planned")


def interrupted(run: Callable[[str, bool], Any]) -> Any:
    """What `run` finds after an interruption, and without one."""
    again = Path("run").exists()
    return [run("run", not again), run("whole", False)]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def seen(s: paceline.Session, mine: list[int]) -> list[int]:
    """How often all ranks together have seen each sample."""
    counts = torch.zeros(COUNT)
    for i in mine:
        counts[i] += 1
    return s.gather(counts[None]).sum(0).int().tolist()


# ---- the order of samples


class Order(Sampler[int]):
    def __len__(self) -> int:
        return COUNT


class Drawn(Order):
    """Shuffles with a generator of its own, or with Python's."""

    def __init__(self, state: Any = random) -> None:
        self.state = state

    def __iter__(self) -> Iterator[int]:
        order = list(range(COUNT))
        self.state.shuffle(order)
        yield from order


class Stateful(Order):
    """As torchdata's: its state says how far it is, and where its generator stands."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.yielded, self.next_yielded = 0, None

    def __iter__(self) -> Iterator[int]:
        self.begun = self.generator.get_state()
        order = torch.randperm(COUNT, generator=self.generator).tolist()
        start, self.next_yielded = self.next_yielded or 0, None
        self.yielded = start
        for one in order[start:]:
            self.yielded += 1
            yield one
        self.yielded = 0

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_yielded = state["yielded"]
        self.generator.set_state(state["generator"])


class Weighted(torch.utils.data.WeightedRandomSampler):
    """Its weights change from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__([1.0] * COUNT, COUNT, replacement=False, generator=torch.Generator().manual_seed(5))

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.weights[::2] += 1


class Twice(Order):
    """Another order each time that it is asked, from nothing that could be saved."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(COUNT, generator=torch.Generator().manual_seed(len(list(Path().iterdir())))).tolist()


SAMPLERS: dict[str, Callable[[paceline.Session], Any]] = {
    "weights": lambda s: Weighted(),
    "stateful": lambda s: Stateful(),
    "lost": lambda s: Twice(),
    "python": lambda s: Drawn(),
    "own_state": lambda s: Drawn(np.random.RandomState(5)),
    "by_rank": lambda s: RandomSampler(Rows(), generator=torch.Generator().manual_seed(s.rank)),
    "distributed": lambda s: DistributedSampler(Rows(), s.size, s.rank),
    "own_share": lambda s: range(s.rank, COUNT, s.size),
    "other_tail": lambda s: [*range(20), *(range(20, COUNT) if s.rank else reversed(range(20, COUNT)))],
}


def sampled(kind: str, s: paceline.Session) -> Any:
    return s.loader(DataLoader(Rows(), batch_size=8, sampler=SAMPLERS[kind](s)))


@cases("order", "own_share", "other_tail")
def drawn(kind: str) -> None:
    s, model, optimizer = start()
    for x, i in sampled(kind, s):
        take_step(s, model, optimizer, x, i)


@cases("evaluation", "python", "by_rank", "distributed", "own_share", "other_tail")
def evaluated(kind: str) -> Any:
    s, model, _ = start()
    model.eval()
    return seen(s, [one for _, i in sampled(kind, s) for one in i.tolist()])


@cases("resumed", "own_state", "weights", "stateful", "lost")
def resumed(kind: str) -> Any:
    """Stopped in epoch 2, then resumed: which samples epoch 2 has seen."""
    note = Path("seen.json")
    again = note.exists()
    s, model, optimizer = start("run", resume=True, virtual_ranks=2)
    epoch_2 = json.loads(note.read_text()) if again else []
    train = sampled(kind, s)
    for epoch in s.epochs(2):
        for x, i in train:
            if s.step == 7 and not again:
                s.main(note.write_text, json.dumps(epoch_2))
                raise RuntimeError("planned")
            take_step(s, model, optimizer, x, i)
            if epoch == 1:
                epoch_2 += s.gather(i).tolist()
    return sorted(epoch_2)


@case
def order_shared() -> Any:
    """The sampler holds a list that the loop shuffles in place."""
    order = list(range(COUNT))

    class SharedList(Order):
        def __init__(self) -> None:
            self.order = order

        def __iter__(self) -> Iterator[int]:
            yield from self.order

    s, model, optimizer = start()
    train = s.loader(DataLoader(Rows(), batch_size=8, sampler=SharedList()))
    found: list[list[int]] = []
    for epoch in s.epochs(3):
        random.Random(epoch).shuffle(order)
        found.append([])
        for x, i in train:
            take_step(s, model, optimizer, x, i)
            found[-1] += s.gather(i).tolist()
        assert sorted(found[-1]) == list(range(COUNT))
    return len({tuple(one) for one in found})


@case
def resumed_evaluated() -> Any:
    """An evaluation on the training's own loader in the middle of an epoch, then a resume."""
    note = Path("seen.json")
    again = note.exists()
    s, model, optimizer = start("run", resume=True, virtual_ranks=2)
    epoch_2 = json.loads(note.read_text()) if again else []
    torch.manual_seed(3)
    train = s.loader(DataLoader(Rows(), batch_size=8, shuffle=True))
    for epoch in s.epochs(2):
        for x, i in train:
            if s.step == 8 and not again:
                s.main(note.write_text, json.dumps(epoch_2))
                raise RuntimeError("planned")
            take_step(s, model, optimizer, x, i)
            epoch_2 += s.gather(i).tolist() if epoch == 1 else []
            if s.last and s.batch == 1:
                with torch.no_grad():
                    assert s.sum(*[sum(len(x) for x, _ in train)]) == COUNT
    return sorted(epoch_2)


@cases("evaluated_inside", "unshuffled", "shuffled", "shared")
def evaluated_inside(kind: str) -> Any:
    """Evaluations inside epochs draw from the streams that the next epoch's order is drawn from; and a resume."""
    shared = torch.Generator().manual_seed(4) if kind == "shared" else None
    train = DataLoader(Rows(), batch_size=8, shuffle=True, generator=shared)
    held_out = DataLoader(Rows(16), batch_size=8, shuffle=kind != "unshuffled", generator=shared)

    def through(
        s: paceline.Session | None, model: nn.Module, optimizer: Any, data: Any, test: Any, epochs: Any, stop: int = -1
    ) -> None:
        step = 0
        for _ in epochs:
            for x, i in data:
                if (s.step if s else step) == stop:
                    raise RuntimeError("planned")
                optimizer.zero_grad()
                loss = loss_of(model, x, i)
                s.backward(loss) if s else loss.backward()
                optimizer.step()
                step += 1
                if step % 2 == 0:
                    with torch.no_grad():
                        assert all(len(x) <= 8 for x, _ in test)

    if not Path("wanted.pt").exists():
        torch.manual_seed(3)
        plain = net()
        through(None, plain, sgd(plain.parameters()), train, held_out, range(3))
        torch.save(flat(plain), "wanted.pt")
        again = False
    else:
        again = True
    if shared is not None:
        shared.manual_seed(4)
    s = paceline.session("run", resume=True, checkpoint_every=1)
    torch.manual_seed(3)
    model, optimizer = s.prepare(net(), sgd)
    through(s, model, optimizer, s.loader(train), s.loader(held_out), s.epochs(3), stop=-1 if again else 8)
    return apart(flat(model), torch.load("wanted.pt"))


@cases("changing", "subset", "losses", "dataset", "ended")
def changing(kind: str) -> Any:
    """What epochs train on is drawn or changed by the loop, and a run resumes in the second of three."""

    def through(s: paceline.Session | None, epochs: Any, stop: int = -1) -> Any:
        random.seed(3)
        data, step = Rows(), 0
        sampler: Any = torch.utils.data.WeightedRandomSampler(torch.ones(COUNT), COUNT, generator=torch.Generator())
        model = net()
        model, optimizer = s.prepare(model, sgd) if s else (model, sgd(model.parameters()))
        made: Any = DataLoader(data, batch_size=8, sampler=sampler if kind == "losses" else None)
        if kind == "ended":  # the sampler draws once more at its end, which is looked at a batch ahead
            generator = torch.Generator().manual_seed(2)
            made = DataLoader(data, batch_size=12, shuffle=True, generator=generator, drop_last=True)
        train = s.loader(made) if s else made
        for _ in epochs:
            if kind == "subset":
                part = torch.utils.data.Subset(data, random.sample(range(COUNT), 16))
                made = DataLoader(part, batch_size=8)
                train = s.loader(made) if s else made
            if kind == "dataset":
                data.x = data.x.flip(0)
            for x, i in train:
                if (s.step if s else step) == stop:
                    raise RuntimeError("planned")
                optimizer.zero_grad()
                loss = loss_of(model, x, i)
                s.backward(loss) if s else loss.backward()
                optimizer.step()
                seen, step = (s.gather(i) if s else i), step + 1
                sampler.weights[seen] = 1.0 + seen.double()
        return flat(model)

    note = Path("wanted.pt")
    again = note.exists()
    if not again:
        torch.save(through(None, range(3)), note)
    s = paceline.session("run", resume=True, checkpoint_every=1)
    return apart(
        through(s, s.epochs(3), -1 if again else {"subset": 3, "losses": 11, "dataset": 7, "ended": 3}[kind]),
        torch.load(note),
    )


class Growing(Rows):
    count = 20

    def __len__(self) -> int:
        return self.count


def growing(by: int, existing: bool) -> Any:
    data = Growing()
    data.count = 20 if by > 0 else COUNT
    s, model, optimizer = start()
    train = s.loader(DataLoader(data, batch_size=5)) if existing else s.loader(data, global_batch=5)
    found: list[int] = []
    for _ in s.epochs(3):
        count = 0
        for x, i in train:
            take_step(s, model, optimizer, x, i)
            count += int(s.sum(s.samples))
        found.append(count)
        data.count += by
    return found


CASES |= {
    f"growing_{n}": lambda n=n: growing(10 if "more" in n else -10, "loader" in n)
    for n in ("more", "less", "more_loader")
}


@case
def endless() -> Any:
    """A sampler without end: the first batch comes at once."""

    class Endless(Order):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from range(COUNT)

    s, model, optimizer = start()
    for x, i in s.loader(DataLoader(Rows(), batch_size=8, sampler=Endless())):
        take_step(s, model, optimizer, x, i)
        if s.step == 6 and s.last:
            break
    return s.step


@case
def split_by_rank() -> Any:
    s, model, optimizer = start()
    part, _ = torch.utils.data.random_split(Rows(), [30, 10], generator=torch.Generator().manual_seed(s.rank))
    for x, i in s.loader(part, global_batch=10):
        take_step(s, model, optimizer, x, i)


@case
def split_by_rank_evaluated() -> Any:
    s, model, _ = start()
    part, _ = torch.utils.data.random_split(Rows(), [30, 10], generator=torch.Generator().manual_seed(s.rank))
    model.eval()
    return [len(x) for x, _ in s.loader(part, global_batch=10)]


@cases("indices", "words", "tuples")
def words_as_indices(kind: str) -> Any:
    class Named(Rows):
        def __getitem__(self, i: Any) -> Any:
            return self.x[int(i[0] if isinstance(i, tuple) else i)], 0

    keys: list[Any] = [str(i) if kind == "words" else (i, 0) for i in range(COUNT)]
    with paceline.session() as s:
        model, optimizer = s.prepare(net(), sgd)
        for x, i in s.loader(DataLoader(Named(), batch_size=8, sampler=keys)):
            take_step(s, model, optimizer, x, i)


# ---- how many samples there are


class Holes(Rows):
    bad = frozenset({2, 10, 12, 14, 26})

    def __getitem__(self, i: int) -> Any:
        return None if i in self.bad else super().__getitem__(i)


def whole(items: list[Any]) -> Any:
    return default_collate([one for one in items if one is not None])


def named(items: list[Any]) -> Any:
    x, i = whole(items)
    return {"x": x, "i": i}


def listed(items: list[Any]) -> Any:
    kept = [one for one in items if one is not None]
    return [x for x, _ in kept], torch.tensor([i for _, i in kept])


def unmarked(items: list[Any]) -> Any:
    """Leaves out samples that the dataset does not mark."""
    return default_collate([one for one in items if one[1] % 8 != 3 and one[1] not in {8, 10, 12, 14}])


def dropped_unmarked(strategy: str, parts: int | None = None) -> Any:
    Holes.bad = frozenset()
    return dropped(unmarked, lambda batch: batch, strategy, parts)


CASES["dropped_unmarked"] = lambda: dropped_unmarked("bucketed")
CASES["dropped_in_parts"] = lambda: dropped_unmarked("exact", 3)


@dataclass
class Record:
    x: Tensor
    i: Tensor


def recorded(items: list[Any]) -> Any:
    return Record(*whole(items))


def zipped(items: list[Any]) -> Any:
    return tuple(zip(*(one for one in items if one is not None), strict=True))


def samples(items: list[Any]) -> Any:
    return [one for one in items if one is not None]


def stacked(pairs: Any) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in pairs]), torch.tensor([i for _, i in pairs])


def dropped(
    collate: Callable[[list[Any]], Any],
    parts: Callable[[Any], tuple[Tensor, Tensor]],
    strategy: str = "bucketed",
    virtual_ranks: int | None = None,
) -> Any:
    def loader() -> DataLoader[Any]:
        return DataLoader(Holes(), batch_size=8, collate_fn=collate)

    model = net()
    wanted = plain_loop(model, sgd(model.parameters()), loader(), lambda model, batch: loss_of(model, *parts(batch)))
    s, model, optimizer = start(strategy=strategy, virtual_ranks=virtual_ranks)
    for _ in s.epochs(1):
        for batch in s.loader(loader(), accumulation=2 if virtual_ranks else 1):
            step(s, optimizer, loss_of(model, *parts(batch)))
    return apart(flat(model), wanted)


CASES |= {
    "dropped_tuple": lambda: dropped(whole, lambda batch: batch),
    "dropped_dict": lambda: dropped(named, lambda batch: (batch["x"], batch["i"])),
    "dropped_record": lambda: dropped(recorded, lambda batch: (batch.x, batch.i)),
    "dropped_zip": lambda: dropped(zipped, lambda batch: (torch.stack(batch[0]), torch.tensor(batch[1]))),
    "dropped_samples": lambda: dropped(samples, stacked),
    "dropped_list": lambda: dropped(listed, lambda batch: (torch.stack(batch[0]), batch[1])),
}


@case
def dropped_all() -> Any:
    Holes.bad = frozenset({8, 10, 12, 14})
    return dropped(whole, lambda batch: batch)


def padded(items: list[Any]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([x[:, None] for x, _ in items])  # (6, n, 1): time first


LAYOUTS: dict[str, Callable[[list[Any]], Any]] = {
    "time_first": lambda items: padded(items)[:, :, 0],
    "time_first_pair": lambda items: (padded(items)[:, :, 0], torch.tensor([i for _, i in items])),
    "time_first_two": lambda items: {"x": padded(items)[:-1, :, 0], "y": padded(items)[1:, :, 0]},
    "time_first_number": lambda items: {
        "scale": torch.tensor([1.0]), "x": padded(items)[:-1, :, 0], "y": padded(items)[1:, :, 0],
    },
    "one_more_dimension": lambda items: default_collate(items)[0][None],
    "dicts": lambda items: [{"x": x, "i": i} for x, i in items],
    "nodes": lambda items: {
        "x": torch.cat([x for x, _ in items]), "i": torch.tensor([i for _, i in items]),
        "of": torch.arange(len(items)).repeat_interleave(6),
    },
    "packed": lambda items: torch.nn.utils.rnn.pack_sequence([x[: 1 + i % 6] for x, i in items], enforce_sorted=False),
    "pairs": lambda items: ((default_collate(items)[0], torch.ones(len(items), 2)), torch.zeros(len(items))),
    "boxes": lambda items: ([x for x, _ in items], [{"boxes": torch.ones(1 + i % 3, 4)} for _, i in items]),
    "number": lambda items: {"scale": torch.tensor([1.0]), "x": default_collate(items)[0]},
}  # fmt: skip


def rows_of(kind: str, batch: Any) -> Tensor:
    """(n, 6): the samples of a batch."""
    if kind.startswith("time_first"):
        found = batch[0] if isinstance(batch, tuple) else batch
        return (torch.cat([found["x"][:1], found["y"]]) if isinstance(found, dict) else found).T
    if kind == "one_more_dimension":
        return batch[0]
    if kind == "pairs":
        return batch[0][0]
    if kind == "boxes":
        return torch.stack(batch[0])
    if kind == "dicts":
        return torch.stack([one["x"] for one in batch])
    if kind == "packed":
        return torch.nn.functional.pad(
            *[(found := torch.nn.utils.rnn.pad_packed_sequence(batch, True)[0]), (0, 6 - found.shape[1])]
        )
    return batch["x"].view(-1, 6)


@cases("layout", *LAYOUTS)
def laid_out(kind: str) -> Any:
    """Batches whose first dimension is not that of samples; 10 samples on 3 ranks are 4, 3 and 3."""

    def through(model: nn.Module, optimizer: Any, batches: Any, backward: Callable[[Tensor], Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            backward((model(rows_of(kind, batch)) ** 2).mean())
            optimizer.step()

    def loader() -> DataLoader[Any]:
        return DataLoader(Rows(), batch_size=10, collate_fn=LAYOUTS[kind])

    plain = net()
    through(plain, sgd(plain.parameters()), loader(), lambda loss: loss.backward())
    s, model, optimizer = start()
    for _ in s.epochs(1):
        through(model, optimizer, s.loader(loader()), s.backward)
    return apart(flat(model), flat(plain))


# ---- gradients, parameters and optimizers


def trained(
    s: paceline.Session, model: nn.Module, optimizer: Any, act: Callable[[Tensor, Tensor], Any], epochs: int = 1
) -> None:
    for _ in s.epochs(epochs):
        for x, i in s.loader(Rows(), global_batch=8, shuffle=False):
            optimizer.zero_grad()
            act(x, i)
            optimizer.step()


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.aux, self.last = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@cases(
    "gradient",
    "before",
    "exact",
    "after",
    "added",
    "assigned",
    "added_later",
    "clipped",
    "assigned_before",
    "in_parts",
    "in_parts_after",
    "data",
)
def received(kind: str) -> Any:
    parts = 3 if kind.startswith("in_parts") else None
    s = paceline.session(strategy="exact" if kind == "exact" else "bucketed", virtual_ranks=parts)
    model, optimizer = s.prepare(Auxiliary(), sgd)

    def act(x: Tensor, i: Tensor) -> None:
        other = (model.aux(model.first(x).detach()) ** 2).mean()
        if kind in ("before", "exact"):
            other.backward()
        if kind in ("assigned_before", "in_parts", "in_parts_after"):
            (model.aux.weight.grad,) = torch.autograd.grad(other, [model.aux.weight])
        s.backward(loss_of(model, x, i))
        if kind == "after":
            other.backward()
        if kind == "in_parts_after":
            (gradient,) = torch.autograd.grad(other, [model.aux.weight])
            model.aux.weight.grad = gradient if model.aux.weight.grad is None else model.aux.weight.grad + gradient
        if kind == "added":
            (gradient,) = torch.autograd.grad(other, [model.aux.weight])
            model.last.weight.grad += gradient
        if kind == "assigned":
            (gradient,) = torch.autograd.grad(other, [model.aux.weight])
            model.aux.weight.grad = gradient
        if kind == "data":  # no version tells
            model.last.weight.grad.data.add_(1e-3 * (s.rank + 1))
        if kind == "added_later" and s.step >= 5:
            (gradient,) = torch.autograd.grad(other, [model.aux.weight])
            model.last.weight.grad += gradient
        if kind == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    trained(s, model, optimizer, act, epochs=3)
    return s.step


@cases("by_hand", "in_place", "rebound", "input", "teacher")
def by_hand(kind: str) -> Any:
    s, model, optimizer = start()
    own, teacher = torch.zeros(6, requires_grad=True), net()
    for x, i in s.loader(Rows(), global_batch=8):
        optimizer.zero_grad()
        noise = torch.zeros_like(x, requires_grad=True)
        added = {"in_place": own, "rebound": own, "input": noise, "teacher": 0 * teacher(x)}[kind]
        s.backward(loss_of(model, x + added, i))
        optimizer.step()
        if kind == "in_place":
            with torch.no_grad():
                own -= 0.1 * own.grad
            own.grad = None
        if kind == "rebound":
            own = (own - 0.1 * own.grad).detach().requires_grad_()
    return s.step


@case
def updated_by_rank() -> Any:
    s, model, optimizer = start(strategy="fsdp")
    for x, i in s.loader(Rows(), global_batch=8):
        optimizer.zero_grad()
        s.backward(loss_of(model, x, i))
        if s.rank == 0 or s.step != 2:
            optimizer.step()
    return s.step


@cases("written", "bucketed", "zero")
def written_by_forward(strategy: str) -> Any:
    """A layer that its first forward initializes with its samples, as ActNorm does."""
    s, model, optimizer = start(strategy=strategy)

    def initialize(layer: nn.Linear, inputs: tuple[Tensor]) -> None:
        if not s.step:
            layer.bias.data.copy_(-inputs[0].mean())

    model[2].register_forward_pre_hook(initialize)
    return trained(s, model, optimizer, lambda x, i: s.backward(loss_of(model, x, i)))


@case
def frozen_by_rank() -> Any:
    s, model, optimizer = start()
    for x, i in s.loader(Rows(), global_batch=8):
        if s.step == 2 and s.rank == 1:
            model[2].weight.requires_grad_(False)
        take_step(s, model, optimizer, x, i)


@case
def hooks_by_rank() -> Any:
    s, model, optimizer = start()
    if s.rank == 1:
        model[2].weight.register_hook(lambda gradient: None)  # one that changes it is found by its gradient
    for x, i in s.loader(Rows(), global_batch=8):
        take_step(s, model, optimizer, x, i)


@case
def failing_in_parts() -> Any:
    """An error of the loop between s.backward and the end of a micro-batch whose operations are counted."""
    s, model, optimizer = start(virtual_ranks=4, peak_tflops=1.0)
    trained(s, model, optimizer, lambda x, i: (s.backward(loss_of(model, x, i)), x @ x))


@case
def clipped_in_parts() -> Any:
    s, model, optimizer = start(virtual_ranks=4)
    trained(s, model, optimizer, lambda x, i: (
        s.backward(loss_of(model, x, i)), torch.nn.utils.clip_grad_value_(model.parameters(), 0.1),
    ))  # fmt: skip


@cases("later", "head", "parameter", "parametrized", "appended", "foreign")
def later(kind: str) -> Any:
    s = paceline.session()
    made = net()
    model, optimizer = s.prepare(made, sgd)

    def act(x: Tensor, i: Tensor) -> None:
        if s.step == 3 and s.last:
            if kind == "head":
                model[2] = nn.Linear(8, 1)
            elif kind == "parameter":
                model[0].extra = nn.Parameter(torch.zeros(1))
            elif kind == "parametrized":
                torch.nn.utils.parametrizations.weight_norm(model[0])
            elif kind == "appended":
                optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(1)))
            elif kind == "foreign":
                optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        s.backward(loss_of(model, x, i))

    trained(s, model, optimizer, act, epochs=2)


@cases("unprepared", "weights", "in_parts", "input")
def unprepared(kind: str) -> Any:
    """Something is trained beside the model, by an optimizer that was not prepared."""
    s, model, optimizer = start(virtual_ranks=2 if kind == "in_parts" else None)
    scale = nn.Parameter(torch.zeros(()))
    noise = torch.zeros(6, requires_grad=True)
    other = torch.optim.SGD([scale if kind != "input" else torch.zeros(6, requires_grad=True)], 0.05)

    def act(x: Tensor, i: Tensor) -> None:
        other.zero_grad()
        loss = loss_of(model, x + noise, i)
        s.backward(loss * scale.exp() if kind != "input" else loss)
        other.step()

    trained(s, model, optimizer, act)
    return s.step


@case
def losses_stacked() -> Any:
    s, model, optimizer = start()

    trained(s, model, optimizer, lambda x, i: s.backward(loss_of(model, x, i).expand(3)))


@case
def peeked() -> Any:
    """A look at a batch before the epochs, also after a resume."""
    again = Path("run").exists()
    s, model, optimizer = start("run", resume=True, virtual_ranks=2)
    train = s.loader(Rows(), global_batch=8)
    x, _ = next(iter(train))
    assert x.shape[1] == 6
    for _ in s.epochs(2):
        for x, i in train:
            interrupt(s, 7, not again)
            take_step(s, model, optimizer, x, i)
    return s.step


@case
def outside_epochs() -> Any:
    s, model, optimizer = start("run", resume=True)
    for x, i in s.loader(Rows(), global_batch=8):
        take_step(s, model, optimizer, x, i)


@case
def iterator_kept() -> Any:
    s, model, optimizer = start()
    batches = iter(s.loader(DataLoader(Rows(), batch_size=8, shuffle=True)))
    for _ in s.epochs(3):
        for _ in range(2):
            x, i = next(batches)
            take_step(s, model, optimizer, x, i)


def frozen_later(kind: str) -> Any:
    """Frozen, or given another group of parameters, once in epoch 2: a resume does not come there again."""
    again = Path("run").exists()
    s = paceline.session("run", resume=True, virtual_ranks=2)
    made = net()
    model, optimizer = s.prepare(
        made, torch.optim.SGD(made[2].parameters() if kind == "group" else made.parameters(), 0.05)
    )
    train = s.loader(Rows(), global_batch=8)
    for epoch in s.epochs(3):
        if epoch == 1 and not again:
            if kind == "group":
                optimizer.add_param_group({"params": list(made[0].parameters())})
            else:
                made[0].requires_grad_(False)
        for x, i in train:
            interrupt(s, 12, not again)
            take_step(s, model, optimizer, x, i)
    return [one.requires_grad for one in model.parameters()]


CASES |= {"frozen_later": lambda: frozen_later("freeze"), "group_later": lambda: frozen_later("group")}


@case
def two_backwards_alone() -> Any:
    """The gradients of two losses, each looked at by itself."""
    model = net()
    x = torch.stack([Rows()[i][0] for i in range(8)])
    wanted = [
        torch.autograd.grad(loss, model[2].bias)[0].item() for loss in ((model(x) ** 2).mean(), (3 * model(x)).mean())
    ]
    s, model, optimizer = start()
    found: list[float] = []
    for x, _ in s.loader(Rows(8), global_batch=8, shuffle=False):
        for scale in (None, 3):
            optimizer.zero_grad()
            s.backward((model(x) ** 2).mean() if scale is None else (scale * model(x)).mean())
            found.append(model[2].bias.grad.item())
        optimizer.step()
    return apart(torch.tensor(found), torch.tensor(wanted))


@case
def two_backwards_in_parts() -> Any:
    with paceline.session(virtual_ranks=4) as s:
        model, optimizer = s.prepare(net(), sgd)
        for x, _ in s.loader(Rows(8), global_batch=8, shuffle=False):
            optimizer.zero_grad()
            s.backward((model(x) ** 2).mean())
            step(s, optimizer, (3 * model(x)).mean())


# ---- epochs, state, replicas


class Warm(torch.optim.SGD):
    """Keeps a number beside its state, and says so in state_dict."""

    t = 0

    def step(self, closure: Any = None) -> Any:
        self.t += 1
        for group in self.param_groups:
            group["lr"] = 0.05 * min(1, self.t / 8)
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "t": self.t}

    def load_state_dict(self, state_dict: Any) -> None:
        self.t = state_dict.pop("t")
        super().load_state_dict(state_dict)


@cases("average", "registered", "ignored", "unknown", "copied")
def averaged(kind: str) -> Any:
    """Interrupted in epoch 2, beside the same without an interruption."""

    def run(folder: str, stops: bool) -> list[float]:
        torch.manual_seed(1)
        s = paceline.session(folder, resume=True, virtual_ranks=2)
        model, optimizer = s.prepare(net(), lambda p: Warm(p, 0.05))
        average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if kind in ("registered", "ignored"):
            s.register("average", average, saved=kind == "registered")
        if kind == "copied":
            average = net()
        train = s.loader(Rows(), global_batch=8)
        for _ in s.epochs(2):
            for x, i in train:
                interrupt(s, 7, stops)
                take_step(s, model, optimizer, x, i)
                if s.last and kind == "copied":
                    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                        mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
                elif s.last:
                    average.update_parameters(model)
        found = [float(optimizer.t), float(flat(average).sum()), float(flat(model).sum())]
        s.close()
        return found

    return interrupted(run)


class Shadow:
    def __init__(self, values: Any) -> None:
        self.values = values


def updated(values: Any, model: nn.Module) -> None:
    """A list's tensors are changed in place, those of a dictionary are replaced."""
    for key, (name, p) in enumerate(model.named_parameters()):
        if isinstance(values, list):
            values[key].data.lerp_(p.detach(), 0.1)
        else:
            values[name] = 0.9 * values[name] + 0.1 * p.data


def averaged_by_hand(kind: str, how: str) -> Any:
    """As `averaged`, with an average in a list, a dictionary or an object of one's own."""

    def run(folder: str, stops: bool) -> Any:
        torch.manual_seed(1)
        s, model, optimizer = start(folder, resume=True, virtual_ranks=2)
        values: Any = {n: p.detach().clone() for n, p in model.named_parameters()}
        values = [*values.values()] if kind == "list" else values
        if how != "unknown":
            s.register("average", values, saved=how == "registered")
        shadow = Shadow(values)
        if kind == "object":
            del values
        train = s.loader(Rows(), global_batch=8)
        for _ in s.epochs(2):
            for x, i in train:
                interrupt(s, 7, stops)
                take_step(s, model, optimizer, x, i)
                if s.last:
                    updated(shadow.values, model)
        parts = shadow.values if kind == "list" else shadow.values.values()
        s.close()
        return torch.cat([p.flatten() for p in parts]).tolist()

    return interrupted(run)


for kind in ("list", "dict", "object"):
    for how in ("unknown", "registered", "ignored"):
        CASES[f"average_{kind}_{how}"] = lambda kind=kind, how=how: averaged_by_hand(kind, how)


@case
def average_rebound() -> Any:
    """A list that was registered, in place of which the loop has another in each step."""
    s, model, optimizer = start("run", resume=True)
    values = [p.detach().clone() for p in model.parameters()]
    s.register("average", values)
    for _ in s.epochs(2):
        for x, i in s.loader(Rows(), global_batch=8):
            take_step(s, model, optimizer, x, i)
            if s.last:
                values = [0.9 * a + 0.1 * p.detach() for a, p in zip(values, model.parameters(), strict=True)]


@case
def average_best() -> Any:
    """Generators, and the best weights so far, in a dictionary that is empty at first; interrupted in epoch 3."""

    def run(folder: str, stops: bool) -> Any:
        torch.manual_seed(1)
        s, model, optimizer = start(folder, resume=True)
        best: dict[str, Any] = {"first": model.state_dict()}  # the model's own memory
        noise: list[Any] = [torch.Generator().manual_seed(2), random.Random(2), np.random.default_rng(2)]
        s.register("best", best)
        for number, one in enumerate(noise):
            s.register(f"noise {number}", one)
        train = s.loader(Rows(), global_batch=8)
        for epoch in s.epochs(3):
            for x, i in train:
                interrupt(s, 12, stops)
                take_step(s, model, optimizer, x, i)
                drawn = float(torch.rand((), generator=noise[0])) + noise[1].random() + noise[2].random()
                optimizer.param_groups[0]["lr"] = 0.05 * drawn
            if epoch == 1:
                best["first"] = {name: one.clone() for name, one in model.state_dict().items()}
                best["more"] = [epoch, (flat(model), "words")]
        found = [*best["first"].values(), best["more"][1][0], flat(model)]
        s.close()
        return [torch.cat([one.flatten() for one in found]).tolist(), best["more"][0], best["more"][1][1]]

    return interrupted(run)


@case
def average_none() -> Any:
    """Copies that are made anew, and the model's own tensors, are no state."""
    s = paceline.session("run", checkpoint_every=2)
    model, optimizer = s.prepare(net(), lambda p: torch.optim.Adam(p, 0.01))
    own, state = [*model.parameters()], model.state_dict()
    moments = Shadow([])
    scratch, first = Shadow([]), [p.detach().clone() for p in model.parameters()]
    moved = 0.0
    for _ in s.epochs(3):
        for x, i in s.loader(Rows(), global_batch=8):
            before = [p.detach().clone() for p in model.parameters()]
            scratch.values = {n: p.detach().clone() for n, p in model.named_parameters()}
            optimizer.zero_grad()
            s.backward(loss_of(model, x, i))
            gradients = [p.grad for p in model.parameters()]
            optimizer.step()
            moments.values[:] = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
            moved += sum(float((a - b.detach()).abs().sum()) for a, b in zip(before, own, strict=True))
            assert len(gradients) == len(state) == len(first) == len(scratch.values)
    return moved > 0


def average_of_batch_norm(merged: bool) -> Any:
    s = paceline.session("run")
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, optimizer = s.prepare(made, sgd)
    average = AveragedModel(model)
    s.register("average", average)
    for _ in s.epochs(1):
        for x, i in s.loader(Rows(), global_batch=8):
            take_step(s, model, optimizer, x, i)
            if s.last and merged:
                with s.evaluating():
                    average.update_parameters(model)
            elif s.last:
                average.update_parameters(model)
    return apart(average.module[1].running_mean, s.weights(model)["1.running_mean"])


CASES |= {"average_batch_norm": lambda: average_of_batch_norm(False)}
CASES |= {"average_batch_norm_merged": lambda: average_of_batch_norm(True)}


@cases("differing", "weights", "save", "end")
def differing(kind: str) -> Any:
    s, model, optimizer = start()
    trained(s, model, optimizer, lambda x, i: s.backward(loss_of(model, x, i)))
    model[0].bias.data += 0.01 * s.rank
    if kind == "weights":
        s.weights(model)
    if kind == "save":
        s.save(model, "weights.pt")
    s.close()


@cases("unsavable", "state", "saved")
def unsavable(kind: str) -> Any:
    class Listing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["history"] = [parameter.grad]
            return super().step(closure)

    with paceline.session("run") as s:
        model, optimizer = s.prepare(net(), lambda p: (Listing if kind == "state" else torch.optim.SGD)(p, 0.05))

        def act(x: Tensor, i: Tensor) -> None:
            s.backward(loss_of(model, x, i))
            if kind == "saved":
                s.saved["best"] = torch.ones(1)
            s.main(Path("steps").write_text, str(s.step))

        trained(s, model, optimizer, act, epochs=2)


# ---- evaluation and modes


@cases("few", "gather", "sum", "one")
def few(kind: str) -> Any:
    s, model, _ = start()
    model.eval()
    found: list[Any] = []
    for _, i in s.loader(DataLoader(Rows(1 if kind == "one" else 5), batch_size=1)):
        found += s.gather(i).tolist() if kind != "sum" else [s.sum(float(i.sum()))]
    return found


@case
def eval_mode() -> Any:
    with paceline.session() as s:
        model, optimizer = s.prepare(net(), sgd)
        model.eval()
        trained(s, model, optimizer, lambda x, i: s.backward(loss_of(model, x, i)))


@cases("statistics", "loader", "data")
def statistics(kind: str) -> Any:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))

    wanted: Any = AveragedModel(made())
    update_bn(DataLoader(Rows(), batch_size=8), wanted)
    s = paceline.session()
    model, _ = s.prepare(made(), sgd)
    average: Any = AveragedModel(model)
    data = DataLoader(Rows(), batch_size=8)
    update_bn(s.loader(data) if kind == "loader" else data, average)
    return apart(average.module[1].running_mean, wanted.module[1].running_mean)


@case
def statistics_instance() -> Any:
    s = paceline.session()
    s.prepare(net(), sgd)
    other = nn.InstanceNorm1d(6, track_running_stats=True)
    with torch.no_grad():
        for x, _ in s.loader(DataLoader(Rows(), batch_size=8)):
            other(torch.stack([x, x], 2))


class Counting(Order):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        yield from range(COUNT)


@case
def pickled() -> Any:
    """A prepared model is saved whole, and its loader is treated like a DataLoader."""
    s = paceline.session()
    made = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 1))
    model, optimizer = s.prepare(made, sgd)
    train = s.loader(DataLoader(Rows(), batch_size=8, sampler=Counting()))
    for epoch in s.epochs(2):
        train.sampler.set_epoch(epoch)
        for x, i in train:
            take_step(s, model, optimizer, x, i)
    torch.save(model, f"model{s.rank}.pt")
    again = torch.load(f"model{s.rank}.pt", weights_only=False)
    x = Rows().x
    return torch.equal(model.eval()(x), again.eval()(x)) and train.sampler.epochs == [0, 1]


@cases("scheduler", "lost", "registered")
def scheduled(kind: str) -> Any:
    s, model, optimizer = start("run")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if kind == "registered":
        s.register("scheduler", scheduler)
    for _ in s.epochs(3):
        for x, i in s.loader(Rows(), global_batch=8):
            take_step(s, model, optimizer, x, i)


@case
def statistics_prepared() -> Any:
    s = paceline.session()
    model, _ = s.prepare(nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2)), sgd)
    update_bn(s.loader(DataLoader(Rows(), batch_size=8)), model)


@cases("weightless", "labels", "masked", "constant", "class_weights", "class_unweighted", "unweighted", "shifted")
def weightless(kind: str) -> Any:
    def loss_and_weight(model: nn.Module, x: Tensor, i: Tensor) -> tuple[Tensor, Any]:
        if kind == "constant":
            kept = i % 8 == 0  # rank 1 has none of them
            count = int(kept.sum())
            return ((model(x[kept]) - 1) ** 2).mean() if count else torch.zeros(()), count
        target = torch.where(i % 2 == 0, i % 3, -100)  # odd samples have no label: rank 1 has only those
        outputs = torch.cat([model(x), -model(x), 2 * model(x)], 1)
        if kind == "masked":
            mask = (target >= 0).double()
            losses = nn.functional.cross_entropy(outputs, target.clamp(min=0), reduction="none")
            return (losses * mask).sum() / mask.sum(), mask.sum()
        classes = torch.tensor([1.0, 2.0, 4.0])
        if kind.startswith("class"):
            target, ones = i % 3, torch.ones(len(i))
            weight = classes[target].sum() if kind == "class_weights" else ones.sum()
            return nn.functional.cross_entropy(outputs, target, classes), weight
        weight = {"unweighted": None, "shifted": (target[1:] != -100).sum() + 1}.get(kind, (target != -100).sum())
        if kind in ("unweighted", "shifted"):
            target = torch.where(i % 8 == 1, -100, i % 3)
        return nn.functional.cross_entropy(outputs, target), weight

    model, batches = net(), DataLoader(Rows(), batch_size=8)
    wanted = plain_loop(model, sgd(model.parameters()), batches, lambda m, batch: loss_and_weight(m, *batch)[0])
    s, model, optimizer = start(strategy=sys.argv[2] if len(sys.argv) > 2 else "bucketed")
    trained(s, model, optimizer, lambda x, i: s.backward(*loss_and_weight(model, x, i)))
    return apart(torch.cat([one.flatten() for one in s.weights(model).values()]), wanted)


class RowStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield from (Rows(12)[n] for n in range(12))


@case
def stream_before_shuffled() -> Any:
    """Loops over a stream and over shuffled samples, in turn."""

    def loaders() -> list[Any]:
        torch.manual_seed(5)
        return [DataLoader(RowStream(), batch_size=4), DataLoader(Rows(), batch_size=8, shuffle=True)]

    plain = net()
    batches = (batch for given in (loaders(),) for _ in range(2) for loader in given for batch in loader)
    wanted = plain_loop(plain, sgd(plain.parameters()), batches, lambda m, batch: loss_of(m, *batch))
    with paceline.session() as s:
        model, optimizer = s.prepare(net(), sgd)
        distributed = [s.loader(loader) for loader in loaders()]
        for _ in s.epochs(2):
            for loader in distributed:
                for x, i in loader:
                    take_step(s, model, optimizer, x, i)
    return apart(flat(model), wanted)


def of_rows(out: Tensor, i: Tensor, without: int) -> list[Tensor]:
    """A mean for each sample, over several numbers of elements, without some samples."""
    return [(out[k] * torch.arange(1.0 + n % 3)).sin().mean() for k, n in enumerate(i.tolist()) if (n + 1) % without]


MEANS: dict[str, Callable[[Tensor, Tensor], Any]] = {  # of outputs and indices: a loss, or with its weight
    "sum_by_global_batch": lambda out, i: (out**2).sum() / 8,
    "sum_of_losses": lambda out, i: nn.functional.mse_loss(out, i[:, None] / COUNT, reduction="sum"),
    "share_of_mean": lambda out, i: (out**2).mean() * len(i) / 8,
    "root": lambda out, i: nn.functional.mse_loss(out, i[:, None] / COUNT).sqrt(),
    "subset": lambda out, i: (out[i % 3 > 0] ** 2).mean(),
    "own_weights": lambda out, i: (out[:, 0] ** 2 * (i + 1.0)).sum() / (i + 1).sum(),
    "own_weights_given": lambda out, i: ((out[:, 0] ** 2 * (i + 1.0)).sum() / (i + 1).sum(), (i + 1.0).sum()),
    "sum_by_samples": lambda out, i: (out**2).sum() / len(i),
    "sum_by_elements": lambda out, i: (torch.cat([out, out], 1) ** 2).sum() / (2 * len(i)),
    "half": lambda out, i: (out**2).mean() / 8,
    "tasks": lambda out, i: torch.stack([(out**2).mean(), out.mean(), out.mean(), out.mean()]).sum(),
    "tasks_mean": lambda out, i: torch.stack([(out**2).mean(), out.mean(), out.mean()]).mean(),
    "root_of_more": lambda out, i: (nn.functional.mse_loss(out, i[:, None] / COUNT) + 1e-6).sqrt(),
    "decibels": lambda out, i: 10 * nn.functional.mse_loss(out, i[:, None] / COUNT).log10(),
    "values": lambda out, i: nn.functional.mse_loss(out[:, 0], i / COUNT, reduction="none"),
    "divided_values": lambda out, i: (out**2 / len(i)).sum(),
    "weighted_values": lambda out, i: (out**2 * torch.full((len(i), 1), 1 / len(i))).sum(),
    "sum_by_two_rows": lambda out, i: (out[:, :, None] * torch.ones(2, 3)).square().sum() / (2 * len(i)),
    "scaled_like_a_share": lambda out, i: (out**2).mean() * 2.0 / 4,
    "smoothed": lambda out, i: nn.functional.cross_entropy(
        torch.cat([out, -out], 1), torch.where(i % 3 == 0, -100, i % 2), label_smoothing=0.1
    ),
    "term_of_subset": lambda out, i: (out**2).mean() + 0.4 * (out[i % 3 > 0] ** 2).mean(),
    "sums_of_samples": lambda out, i: (
        nn.functional.mse_loss(out, i[:, None] / COUNT, reduction="sum") - out.sin().sum()
    ),
    "terms": lambda out, i: -(out.sin().sum() - (out**2).sum()) / len(i) + 0.0 * out.sum() + out.abs().mean() / 2,
    "of_each_sample": lambda out, i: sum(of_rows(out, i, 99)) / len(i),
    "of_some_samples": lambda out, i: (sum(of_rows(out, i, 5)) / len(of_rows(out, i, 5)), len(of_rows(out, i, 5))),
    "of_same_targets": lambda out, i: nn.functional.nll_loss(out.mean() * torch.eye(6, 3), torch.arange(6) % 3),
}


@cases("mean", *MEANS)
def mean_loss(kind: str) -> Any:
    """A loss that is a mean over samples, or is not. The last batch has four samples."""

    def loss_and_weight(model: nn.Module, x: Tensor, i: Tensor) -> Any:
        loss = MEANS[kind](model(x), i)
        return loss if isinstance(loss, tuple) else (loss, None)

    plain, rows = net(), Rows(20)
    batches = DataLoader(rows, batch_size=8)
    wanted = plain_loop(plain, sgd(plain.parameters()), batches, lambda m, batch: loss_and_weight(m, *batch)[0].mean())
    s, model, optimizer = start()
    for x, i in s.loader(rows, global_batch=8, shuffle=False):
        step(s, optimizer, *loss_and_weight(model, x, i))
    return apart(flat(model), wanted)


@case
def mean_of_one_image() -> Any:
    """Images of different sizes, one in a micro-batch: the mean over samples is the mean of their means."""

    class Images(Rows):
        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return self.x[: 2 + i % 3], i

    plain, images = net(), Images(12)
    pairs = ((images[i][0], images[i + 1][0]) for i in range(0, 12, 2))
    wanted = plain_loop(
        plain, sgd(plain.parameters()), pairs, lambda m, pair: sum((m(x) ** 2).mean() for x in pair) / 2
    )
    s, model, optimizer = start(virtual_ranks=2)
    for x, _ in s.loader(images, global_batch=2, shuffle=False):
        step(s, optimizer, (model(x) ** 2).mean())
    return apart(flat(model), wanted)


@case
def mean_recomputed() -> Any:
    """How often a loss inside torch's checkpoint is computed: in each body the second time for its backward."""
    count = 0

    def loss(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return nn.functional.mse_loss(x, torch.ones_like(x)) / torch.tensor(3.0)

    s, model, optimizer = start(virtual_ranks=4)
    for x, _ in s.loader(Rows(), global_batch=8, shuffle=False):
        step(s, optimizer, checkpoint(loss, model(x), use_reentrant=False))
    return count * s.size


def mean_and_penalty(of: Callable[[Tensor], Tensor]) -> Any:
    """A backward of a penalty on a parameter with as many rows as a rank has samples, then one of a mean."""

    def penalty(model: nn.Module) -> Tensor:
        return 0.1 * of(model[0].weight)

    plain, batches = net(), DataLoader(Rows(), batch_size=16)
    wanted = plain_loop(plain, sgd(plain.parameters()), batches, lambda m, batch: penalty(m) + loss_of(m, *batch))
    s, model, optimizer = start()
    for x, i in s.loader(Rows(), global_batch=16, shuffle=False):
        optimizer.zero_grad()
        s.backward(penalty(model))
        s.backward(loss_of(model, x, i))
        optimizer.step()
    return apart(flat(model), wanted)


CASES |= {
    "mean_and_norm": lambda: mean_and_penalty(lambda weight: weight.norm()),
    "mean_and_sum": lambda: mean_and_penalty(lambda weight: weight.abs().sum()),
}


def counted(take: Callable[[Any, int], Iterator[Any]]) -> None:
    """Two steps, counted by the loop; a rank has several micro-batches in each."""
    with paceline.session(virtual_ranks=4) as s:
        model, optimizer = s.prepare(net(), sgd)
        for x, i in take(s.loader(Rows(), global_batch=8, shuffle=False), 4):
            take_step(s, model, optimizer, x, i)


def taken(batches: Any, count: int) -> Iterator[Any]:
    iterator = (batch for batch in batches)
    for _ in range(count):
        yield next(iterator)


CASES |= {
    "counted_next": lambda: counted(taken),
    "counted_islice": lambda: counted(islice),
    "counted_zip": lambda: counted(
        lambda loader, count: (batch for _, batch in zip(range(count), loader, strict=False))
    ),
}


def projected(project: Callable[[nn.Module], Any]) -> Any:
    """The loop projects the weights after each body; a rank has several micro-batches in a step."""
    with paceline.session(virtual_ranks=4) as s:
        model, optimizer = s.prepare(net(), sgd)
        train = s.loader(Rows(), global_batch=8, shuffle=False)
        for _ in s.epochs(2):
            for x, i in train:
                take_step(s, model, optimizer, x, i)
                with torch.no_grad():
                    project(model)
        return s.step


def swapped(model: nn.Module) -> None:
    """As for an evaluation with averaged weights."""
    saved = [parameter.clone() for parameter in model.parameters()]
    for parameter, old in zip(model.parameters(), saved, strict=True):
        parameter.mul_(0.5)
        parameter.copy_(old)


CASES |= {
    "projected": lambda: projected(lambda model: model[0].weight.clamp_(-0.1, 0.1)),
    "projected_data": lambda: projected(lambda model: model[2].bias.data.add_(0.1)),
    "projected_inside": lambda: projected(lambda model: model[0].weight.clamp_(-9, 9)),
    "projected_back": lambda: projected(swapped),
}


def changed_by_the_loop(start: float | int, by: float) -> Any:
    """A buffer, once a step, outside of the model's forward."""
    model = net()
    model.register_buffer("own", torch.tensor(start))
    with paceline.session(virtual_ranks=4) as s:
        model, optimizer = s.prepare(model, sgd)

        def act(x: Tensor, i: Tensor) -> None:
            s.backward(loss_of(model, x, i))
            if s.last:
                model.own += by

        trained(s, model, optimizer, act)
        return s.weights(model)["own"].item()


CASES |= {
    "buffer_by_loop": lambda: changed_by_the_loop(0, 1),
    "buffer_by_loop_float": lambda: changed_by_the_loop(0.0, 0.5),
}


def beside_the_plain_loop(make: Callable[[], nn.Module], optimizer: Any, sets_up: Callable[[Any], Any]) -> Any:
    plain, model = make(), make()
    sets_up(plain)
    batches = DataLoader(Rows(), batch_size=8)
    wanted = plain_loop(plain, optimizer(plain.parameters()), batches, lambda m, batch: loss_of(m, *batch))
    with paceline.session() as s:
        model, update = s.prepare(model, optimizer(model.parameters()))
        sets_up(model)
        trained(s, model, update, lambda x, i: s.backward(loss_of(model, x, i)))
    return apart(flat(model), wanted)


def hooked_together(mode: Any) -> Callable[[nn.Module], Any]:
    def clips(gradients: Any) -> None:
        for one in [gradients] if isinstance(gradients, Tensor) else gradients:
            one.clamp_(-0.01, 0.01)

    return lambda model: torch.autograd.graph.register_multi_grad_hook([*model.parameters()], clips, mode=mode)


class Embeds(nn.Module):
    """Rows of weights that are shrunk in forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows, self.last = nn.Embedding(3, 4, max_norm=0.5), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rows((x[:, 0] > 0).long()))


CASES |= {
    "adagrad": lambda: beside_the_plain_loop(net, lambda p: torch.optim.Adagrad(p, 0.05), lambda _: None),
    "hook_all": lambda: beside_the_plain_loop(net, sgd, hooked_together("all")),
    "hook_any": lambda: beside_the_plain_loop(net, sgd, hooked_together("any")),
    "max_norm": lambda: beside_the_plain_loop(Embeds, sgd, lambda _: None),
}


@case
def unfrozen_later() -> Any:
    model = net()
    model[0].requires_grad_(False)
    with paceline.session() as s:
        model, optimizer = s.prepare(model, sgd(model[2].parameters()))
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters()})


@case
def constant_everywhere() -> Any:
    with paceline.session() as s:
        model, optimizer = s.prepare(net(), sgd)
        trained(s, model, optimizer, lambda x, i: s.backward(torch.ones(())))


@case
def hook_after_dummy_batch() -> Any:
    """The second micro-batch of batch 1 has no samples; hooks are registered on all parameters before batch 2."""
    ours, plain, rows = net(), net(), Rows(12)
    optimizer = sgd(plain.parameters())
    for b in range(3):
        x, i = default_collate([rows[n] for n in range(4 * b, 4 * b + 4) if n not in (6, 7)])
        if b == 2:
            handles = [p.register_hook(lambda grad: grad.clamp(-0.01, 0.01)) for p in plain.parameters()]
        optimizer.zero_grad()
        loss_of(plain, x, i).backward()
        optimizer.step()

    def left(items: Any) -> Any:
        return default_collate([item for item in items if item[1] not in (6, 7)])

    with paceline.session(strategy="bucketed") as s:
        model, optimizer = s.prepare(ours, sgd(ours.parameters()))
        loader = s.loader(rows, global_batch=4, shuffle=False, accumulation=2, collate=left)
        seen = 0
        for x, i in loader:
            if s.batch == 2 and not seen:
                seen = len([p.register_hook(lambda grad: grad.clamp(-0.01, 0.01)) for p in model.parameters()])
            step(s, optimizer, loss_of(model, x, i), float(len(x)) if s.samples else 0.0)
        return [len(handles) == seen, apart(flat(model), flat(plain))]


class Branches(nn.Module):
    """Two layers, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.head = nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 8)]), nn.Linear(8, 1)

    def forward(self, x: Tensor, layer: int) -> Tensor:
        return self.head(torch.tanh(self.layers[layer](x)))


@case
def unused() -> Any:
    s, model, optimizer = start(strategy="ddp", model=Branches())
    for x, _ in s.loader(Rows(), global_batch=4, shuffle=False):
        step(s, optimizer, (model(x, 0) ** 2).mean())


@case
def zeroed() -> Any:
    """An unused parameter has zeros or no gradient, in turn: AdamW changes it if it has zeros."""

    def clear(optimizer: Any, batch: int) -> None:
        optimizer.zero_grad(set_to_none=batch % 4 == 3)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 0.05, weight_decay=0.3)

    plain, rows = Branches(), Rows()
    optimizer = adamw(plain.parameters())
    for b in range(10):
        clear(optimizer, b)
        (plain(rows.x[4 * b : 4 * b + 4], b % 3 == 0) ** 2).mean().backward()
        optimizer.step()
    s, model, optimizer = start(strategy=sys.argv[2], model=Branches(), make=adamw)
    for x, _ in s.loader(rows, global_batch=4, shuffle=False, accumulation=2):
        clear(optimizer, s.batch)
        s.backward((model(x, s.batch % 3 == 0) ** 2).mean())
        optimizer.step()
    weights = s.weights(model)
    return max(float((weights[name] - wanted).abs().max()) for name, wanted in plain.state_dict().items())


@case
def zeroed_after_skip() -> Any:
    rows = Rows(12)
    rows.x[5] = float("nan")
    with paceline.session(virtual_ranks=3, strategy="exact", not_finite="skip") as s:
        model, optimizer = s.prepare(net(), lambda p: torch.optim.AdamW(p, 0.05))
        for x, i in s.loader(rows, global_batch=4, shuffle=False):
            optimizer.zero_grad(set_to_none=False)
            s.backward(loss_of(model, x, i))
            optimizer.step()
        return s.step


@case
def seeded() -> Any:
    s = paceline.session(seed=3, strategy="exact")
    numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    model, optimizer = s.prepare(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), sgd)
    trained(s, model, optimizer, lambda x, i: s.backward(loss_of(model, x, i)))
    return [numbers, float(flat(model).sum())]


# ---- losses that are no mean over samples, as docs/own-loop.md says to write them


def sam(model: nn.Module, optimizer: Any, x: Tensor, backward: Callable[..., Any]) -> None:
    optimizer.zero_grad()
    backward(model(x).square().mean())
    moved = [0.1 * p.grad for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for parameter, by in zip(model.parameters(), moved, strict=True):
            parameter.add_(by)
    optimizer.zero_grad()
    backward(model(x).square().mean())
    with torch.no_grad():
        for parameter, by in zip(model.parameters(), moved, strict=True):
            parameter.sub_(by)
    optimizer.step()


def contrastive(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """Each row is to be near the one with noise, and far from all others of the batch."""
    own, noisy = (nn.functional.normalize(model(one)) for one in (x, x + 0.1 * x.flip(1)))
    everything, first = noisy, 0
    if len(x) < 12 and dist.get_world_size() > 1:  # a part of a batch
        everything, first = torch.cat(all_gather(noisy)), dist.get_rank() * len(x)
    return nn.functional.cross_entropy(own @ everything.T * 5, torch.arange(first, first + len(x)))


def repeated(model: nn.Module, x: Tensor, i: Tensor) -> tuple[Tensor, int]:
    out = model(torch.repeat_interleave(x, i % 4 + 1, 0))
    return out.square().mean(), len(out)


LOSSES: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {  # a loss, or with its weight
    "crops": lambda model, x, i: model(torch.cat([x, -x, 2 * x])).square().mean(),
    "rows": repeated,
    "penalty": lambda model, x, i: model(x).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters()),
    "kept": lambda model, x, i: model(x).square().mean().reshape(1),
    "contrastive": contrastive,
}


@cases("loss", *LOSSES, "sam")
def written(kind: str) -> Any:
    def update(model: nn.Module, optimizer: Any, x: Tensor, i: Tensor, backward: Callable[..., Any]) -> None:
        if kind == "sam":
            return sam(model, optimizer, x, backward)
        optimizer.zero_grad()
        loss = LOSSES[kind](model, x, i)
        backward(*loss) if isinstance(loss, tuple) else backward(loss)
        return optimizer.step()

    def outputs() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    plain, rows = outputs(), Rows(36 if kind == "contrastive" else 38)
    optimizer = sgd(plain.parameters())
    for x, i in DataLoader(rows, batch_size=12):
        update(plain, optimizer, x, i, lambda loss, *_: loss.backward())
    s, model, optimizer = start(model=outputs())
    for x, i in s.loader(rows, global_batch=12, shuffle=False):
        update(model, optimizer, x, i, s.backward)
    return apart(flat(model), flat(plain))


# ---- what is not linear on the gradient path


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.seen = kind, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "tensor":
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        elif self.kind == "watched":
            x.register_hook(lambda gradient: self.seen.append(float(gradient.abs().max())))
        elif self.kind == "reentrant":
            return checkpoint(ClampedGradient.apply, x, use_reentrant=True)
        elif self.kind == "function":
            return ClampedGradient.apply(x)
        return x


def clamp_after(parameter: Any) -> None:
    parameter.grad.clamp_(-0.05, 0.05)


@cases("path", "hook", "after", "function", "module", "masked", "accumulated", "tensor", "reentrant", "watched")
def on_the_path(kind: str) -> Any:
    """`assumed.py KIND STRATEGY [PARTS]`: with PARTS, losses have weights."""
    strategy, parts = sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None
    every = 2 if kind == "accumulated" else 1

    def made() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Layer(kind), nn.Linear(8, 1))
        if kind in ("hook", "masked", "accumulated"):
            model[3].weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
        if kind == "after":
            model[3].weight.register_post_accumulate_grad_hook(clamp_after)
        if kind == "module":
            model[1].register_full_backward_hook(lambda _, given, __: (given[0].clamp(-0.01, 0.01),))
        return model

    def through(model: nn.Module, optimizer: Any, batches: Any, backward: Callable[..., Any]) -> None:
        for number, (x, i) in enumerate(batches):
            if number % every == 0:
                optimizer.zero_grad()
            squares = (model(x).squeeze(1) - i / COUNT) ** 2
            mask = i % 3 != 0  # other weights on each rank
            if kind == "masked" or parts:
                backward((squares * mask).sum() / mask.sum(), mask.sum())
            else:
                backward(squares.mean())
            if (number + 1) % every == 0:
                optimizer.step()

    plain, rows = made(), Rows(38)
    optimizer = sgd(plain.parameters())
    for _ in range(2):
        through(plain, optimizer, DataLoader(rows, batch_size=8), lambda loss, *_: loss.backward())
    s, model, optimizer = start(model=made(), strategy=strategy, virtual_ranks=parts)
    loader = s.loader(rows, global_batch=8, shuffle=False)
    for _ in s.epochs(2):
        through(model, optimizer, loader, s.backward)
    return apart(torch.cat([tensor.flatten() for tensor in s.weights(model).values()]), flat(plain))


if __name__ == "__main__":
    result = CASES[sys.argv[1]]()
    Path("found.json").write_text(json.dumps(result))
