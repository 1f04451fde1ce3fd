"""Loops that a session must not change: each runs on one device without any paceline, and on ranks in a session.

python loops.py FOLDER     as a rank: runs every loop in sessions of several kinds, rank 0 writes their weights
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, StackDataset, TensorDataset

import paceline
from paceline.data.plan import BatchPlan

N, GLOBAL = 85, 16  # a tail of 5 samples
EPOCHS = 2


class Plain:
    """One device, no paceline: what a session promises to equal. Its order of samples is the plan's."""

    last, rank, epoch = True, 0, 0

    def prepare(self, model: nn.Module, optimizer: Any, scheduler: Any = None) -> Any:
        made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(model.parameters())
        return (model, made) if scheduler is None else (model, made, scheduler(made))

    def loader(self, data: Any, *, global_batch: int = 0, accumulation: int = 1) -> Any:
        if isinstance(data, DataLoader):
            return data
        plain, plan = self, BatchPlan(len(data), global_batch)

        class Batches:
            def __len__(self) -> int:
                return plan.steps_per_epoch

            def __iter__(self) -> Iterator[Any]:
                for step in range(plan.steps_per_epoch):
                    indices = plan.global_indices(plain.epoch, step)
                    yield [tensor[indices] for tensor in data.tensors]
                plain.epoch += 1

        return Batches()

    def epochs(self, count: int) -> range:
        return range(count)

    def backward(self, loss: Tensor, weight: Any = None, **_: Any) -> None:
        (loss.mean() if loss.ndim else loss).backward()

    def mean(self, total: float, count: float) -> float:
        return float(total / count)

    def gather(self, values: Tensor) -> Tensor:
        return values


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(N, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (N,), generator=generator))


def net(*sizes: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def step(s: Any, optimizer: Any, loss: Tensor, *weight: Any) -> None:
    optimizer.zero_grad()
    s.backward(loss, *weight)
    optimizer.step()


def train(s: Any, optimizer: Any, backward: Callable[..., Any], loader: Any = None) -> None:
    """A loop with one call of `backward` for each batch."""
    loader = s.loader(data(), global_batch=GLOBAL) if loader is None else loader
    for _ in s.epochs(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            backward(*batch)
            optimizer.step()


def classic(s: Any) -> nn.Module:
    model, optimizer, scheduler = s.prepare(net(6, 8, 3), adam, lambda o: StepLR(o, 3, 0.8))
    train = s.loader(data(), global_batch=GLOBAL)
    for _ in s.epochs(EPOCHS):
        for x, y in train:
            step(s, optimizer, F.cross_entropy(model(x), y))
            scheduler.step()
    return model


def clear_at_the_end(s: Any) -> nn.Module:
    model, optimizer = s.prepare(net(6, 8, 3), adam)
    for _ in s.epochs(EPOCHS):
        for x, y in s.loader(data(), global_batch=GLOBAL):  # made anew in each epoch
            s.backward(F.cross_entropy(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # torch's own
            optimizer.step()
            model.zero_grad()
    return model


def tokens(s: Any) -> nn.Module:
    """A mean over what a mask leaves: each rank's share has another number of these."""
    model, optimizer = s.prepare(net(6, 8, 3), adam)

    def backward(x: Tensor, y: Tensor) -> None:
        mask = y != 2
        loss = (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)
        s.backward(loss, weight=mask.sum())

    train(s, optimizer, backward)
    return model


def two_losses(s: Any, more: bool = True) -> nn.Module:
    model, optimizer = s.prepare(net(6, 8, 3), adam)

    def backward(x: Tensor, y: Tensor) -> None:
        s.backward(F.cross_entropy(model(x), y), more=more)
        s.backward(model(x).square().mean())

    train(s, optimizer, backward)
    return model


def two_rounds(s: Any) -> nn.Module:
    return two_losses(s, more=False)


def gan(s: Any, plain: bool = False) -> nn.Module:
    """Two models and optimizers, as DCGAN has them: real, fake, and through the one into the other."""
    d, optimizer_d = s.prepare(net(6, 8, 1), adam)
    g, optimizer_g = s.prepare(net(6, 8, 6, seed=1), adam)
    for _ in s.epochs(EPOCHS):
        for x, _ in s.loader(data(), global_batch=GLOBAL):
            d.zero_grad()
            s.backward(F.softplus(-d(x)).mean(), **({} if plain else {"more": True}))
            fake = g(x.flip(1))
            s.backward(F.softplus(d(fake.detach())).mean())
            optimizer_d.step()
            g.zero_grad()
            s.backward(F.softplus(-d(fake)).mean(), **({} if plain else {"only": optimizer_g}))
            optimizer_g.step()
    return nn.ModuleList([d, g])


def gan_as_it_was(s: Any) -> nn.Module:
    """The same without arguments about the gradients."""
    return gan(s, plain=True)


def penalty(s: Any) -> nn.Module:
    """A gradient penalty: a gradient of a gradient."""
    model, optimizer = s.prepare(net(6, 8, 1), adam)
    for _ in s.epochs(EPOCHS):
        for x, _ in s.loader(data(), global_batch=GLOBAL):
            x.requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            step(s, optimizer, (model(x).square().mean(1) + (slope.norm(dim=1) - 1).square()).mean())
    return model


def streamed(s: Any) -> nn.Module:
    """A stream, which nobody asks for a sample by its number."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return zip(*data().tensors, strict=True)

    model, optimizer = s.prepare(net(6, 8, 3), adam)
    loader = s.loader(DataLoader(Stream(), batch_size=GLOBAL))
    train(s, optimizer, lambda x, y: s.backward(F.cross_entropy(model(x), y)), loader)
    return model


def averaged_by_hand(s: Any) -> nn.Module:
    """The same, over whatever model.parameters() are; the average ends up in the model."""
    model, optimizer = s.prepare(net(6, 8, 3), adam)
    average = [p.detach().clone() for p in model.parameters()]
    for _ in s.epochs(EPOCHS):
        for x, y in s.loader(data(), global_batch=GLOBAL):
            step(s, optimizer, F.cross_entropy(model(x), y))
            if s.last:
                for kept, p in zip(average, model.parameters(), strict=True):
                    kept.mul_(0.9).add_(p.detach(), alpha=0.1)
    with torch.no_grad():
        for kept, p in zip(average, model.parameters(), strict=True):
            p.copy_(kept)
    return model


class Parts(nn.Module):
    """A model whose parts are called one by one, never as a whole; one twice before its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = net(6, 8, 4), net(4, 3, seed=1)


def part_by_part(s: Any) -> nn.Module:
    model, optimizer = s.prepare(Parts(), adam)

    def backward(x: Tensor, y: Tensor) -> None:
        code = model.encoder(x) - model.encoder(x.flip(1))
        s.backward(F.cross_entropy(model.decoder(code), y))

    train(s, optimizer, backward)
    return model


def paired(s: Any) -> nn.Module:
    """What two zipped loops are for: labelled and unlabelled samples side by side."""
    model, optimizer = s.prepare(net(6, 8, 3), adam)
    unlabelled = TensorDataset(data().tensors[0].flip(0))
    train = s.loader(DataLoader(StackDataset(data(), unlabelled), batch_size=GLOBAL))
    for _ in s.epochs(EPOCHS):
        for (x, y), (u,) in train:
            step(s, optimizer, F.cross_entropy(model(x), y) + 0.1 * (model(u) - model(-u)).square().mean())
    return model


Loop = Callable[[Any], nn.Module]
EVERYWHERE: tuple[Loop, ...] = (
    classic, clear_at_the_end, tokens, two_losses, gan, penalty, streamed, averaged_by_hand, part_by_part, paired,
)  # fmt: skip
"""right for any number of virtual ranks, and the same bits under `exact`"""
ONE_BODY: tuple[Loop, ...] = (two_rounds, gan_as_it_was)
"""right where each rank runs its body once for each batch"""
DEALT: tuple[Loop, ...] = (classic, clear_at_the_end, gan)
CUT: tuple[Loop, ...] = (classic, tokens, two_losses, averaged_by_hand, part_by_part, two_rounds, gan_as_it_was)
"""right under `fsdp`, as all but `penalty` are; each shows something else"""
VIRTUAL_RANKS = 5  # 2 and 3 for two ranks


def noisy(s: Any) -> nn.Module:
    """Batch norm and dropout: what makes bits depend on who computes what."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).double()
    model, optimizer = s.prepare(model, adam)
    for _ in s.epochs(EPOCHS):
        for x, y in s.loader(TensorDataset(*(t[:80] for t in data().tensors)), global_batch=16):
            step(s, optimizer, F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y))
        model.eval()
        hits = seen = 0
        gathered = torch.empty(0, 6, dtype=torch.float64)
        with torch.no_grad():
            for x, y in s.loader(data(), global_batch=28):  # the last batch is 1 sample
                found = model(x).argmax(1)
                hits, seen = hits + int((found == y).sum()), seen + len(y)
                gathered = torch.cat([gathered, s.gather(x)])
        model.train()
        assert torch.equal(gathered, data().tensors[0][torch.cat([order(28, i) for i in range(4)])])
        assert 0 < s.mean(hits, seen) < 1
    return model


def order(batch: int, step: int) -> Tensor:
    """Of an evaluation over a dataset: the first epoch's."""
    return BatchPlan(N, batch).global_indices(0, step)


def where(folder: Any, kind: str, loop: Loop, size: int) -> str:
    """The file with the weights that a loop has come to."""
    return f"{folder}/{kind}-{loop.__name__}-{size}.safetensors"


@contextmanager
def quietly(**settings: Any) -> Iterator[Any]:
    with paceline.session(**settings) as s:
        s._run.print = lambda *_: None
        yield s


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}


def main() -> None:
    (folder,) = sys.argv[1:]
    kinds: list[tuple[str, tuple[Loop, ...], dict[str, Any]]] = [
        ("plain", EVERYWHERE + ONE_BODY, {}),
        ("dealt", DEALT, {"virtual_ranks": VIRTUAL_RANKS}),
        ("dealt-unevenly", (gan,), {"virtual_ranks": 3}),  # on two ranks, one goes through each body once
        ("exact", (*EVERYWHERE, noisy), {"strategy": "exact", "virtual_ranks": VIRTUAL_RANKS}),
        ("zero", (classic, tokens, two_losses, noisy), {"strategy": "zero", "virtual_ranks": VIRTUAL_RANKS}),
        ("ddp", (classic,), {"strategy": "ddp"}),
        ("fsdp", CUT, {"strategy": "fsdp"}),
        ("fsdp-dealt", DEALT, {"strategy": "fsdp", "virtual_ranks": VIRTUAL_RANKS}),
        ("ddp-dealt", (classic, noisy), {"strategy": "ddp", "virtual_ranks": VIRTUAL_RANKS}),
    ]
    for kind, loops, settings in kinds:
        for loop in loops:
            cut = settings.get("strategy") == "fsdp" and loop is part_by_part
            with quietly(**settings, **({"fsdp_wrap": "encoder,decoder"} if cut else {})) as s:
                loop(s)
                parts = [part.replica.model for part in s._state.models]
                whole = {f"{i}.{name}": t for i, part in enumerate(parts) for name, t in s.weights(part).items()}
                prefix = "0." if len(parts) == 1 else ""
                if s.rank == 0:
                    save_file({n.removeprefix(prefix): t for n, t in whole.items()}, where(folder, kind, loop, s.size))
    if kinds and s.size == 1:  # here, not in the test's own process: some of it sets environment variables
        for loop in EVERYWHERE + ONE_BODY:
            save_file(state(loop(Plain())), where(folder, "original", loop, 1))
    print("done", flush=True)


if __name__ == "__main__":
    main()
