"""Loops that `paceline verify` must pass, and bugs planted in such loops, each with the expected cause.

paceline verify tests/lab/ranks/loops.py:metric_averaged
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import paceline
from paceline.data import plan as order_module
from paceline.sessions.prepared import PreparedModel
from paceline.stepping.step import Step
from paceline.stepping.trained_model import ModelInTraining

Loop = Callable[[], object]


@dataclass(frozen=True)
class Planted:
    """A bug, and a text in the finding that names it: a cause in brackets, or a part of the detail or error."""

    loop: Loop
    named: str
    known_from: str


BUGS: dict[str, Planted] = {}


def bug(named: str, known_from: str) -> Callable[[Loop], Loop]:
    def noted(loop: Loop) -> Loop:
        BUGS[loop.__name__] = Planted(loop, named, known_from)
        return loop

    return noted


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(60, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (60,), generator=generator))


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 3))


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9)


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def trained(s: Any, step: Callable[..., object], model: Any = None, samples: Any = None, optimizer: Any = sgd) -> Any:
    """The loop that all of them have in common; `step(model, optimizer, x, y)` is its body behind zero_grad."""
    model, optimizer = s.prepare(net() if model is None else model, optimizer)
    for _ in s.epochs(9):
        model.train()
        for x, y in s.loader(data() if samples is None else samples, global_batch=16):
            optimizer.zero_grad()
            step(model, optimizer, x, y)
    return model


def usual(s: Any) -> Callable[..., object]:
    def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
        s.backward(mean_loss(model, x, y))
        optimizer.step()

    return step


# ---- without a bug -----------------------------------------------------------------------------------------------


def right() -> None:
    """Dropout, a schedule, clipping, an evaluation."""
    with paceline.session() as s:
        model, optimizer, scheduler = s.prepare(net(nn.Dropout(0.2)), sgd, lambda o: LambdaLR(o, lambda n: 0.9**n))
        train, test = s.loader(data(), global_batch=16), s.loader(data(), global_batch=24)
        for _ in s.epochs(9):
            model.train()
            for x, y in train:
                optimizer.zero_grad()
                s.backward(mean_loss(model, x, y))
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
            model.eval()
            with torch.no_grad():
                found = [(int((model(x).argmax(1) == y).sum()), len(x)) for x, y in test]
            s.log(accuracy=s.mean(sum(hits for hits, _ in found), sum(count for _, count in found)))


def right_with_noise_and_batch_norm() -> None:
    """What it draws belongs to virtual ranks."""
    s = paceline.session("runs/never-made", resume=True, virtual_ranks=8)

    def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
        s.backward(mean_loss(model, x + 0.1 * torch.randn_like(x), y))
        optimizer.step()

    s.save(trained(s, step, net(nn.BatchNorm1d(8))), "never.pt")


def right_with_two_models() -> None:
    """A GAN, whose body each rank goes through twice; and gradients that nobody uses."""
    with paceline.session() as s:
        d, optimizer_d = s.prepare(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), sgd)
        g, optimizer_g = s.prepare(nn.Linear(6, 6), sgd)
        for _ in s.epochs(9):
            for x, _ in s.loader(data(), global_batch=16):
                d.zero_grad()
                s.backward(F.softplus(-d(x)).mean(), more=True)
                fake = g(x.flip(1))
                s.backward(F.softplus(d(fake.detach())).mean())
                optimizer_d.step()
                g.zero_grad()
                s.backward(F.softplus(-d(fake)).mean(), only=optimizer_g)
                optimizer_g.step()


def right_with_gradients_added_up() -> None:
    """Over two batches; dropout by functions."""
    with paceline.session() as s:
        model, optimizer = s.prepare(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True), sgd)
        for _ in s.epochs(9):
            for x, _ in s.loader(data(), global_batch=16):
                s.backward(F.dropout(model(x[:, None]), 0.1, training=True).square().mean() / 2)
                if (s.batch + 1) % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data())


def right_with_a_stream() -> None:
    with paceline.session() as s:
        trained(s, usual(s), samples=Stream())


class Clamp(torch.autograd.Function):
    """Clamps the gradient that flows through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.004, 0.004)


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Clamp.apply(x)


def right_with_averages_of_the_model() -> None:
    """One copied before `s.prepare`, one after it; and a metric that the loop adds up itself, in float32."""
    with paceline.session() as s:
        plain = net()
        before = AveragedModel(plain)
        model, optimizer = s.prepare(plain, sgd)
        averages = [before, AveragedModel(model)]
        for number, average in enumerate(averages):
            s.register(f"average {number}", average)
        for _ in s.epochs(9):
            for x, y in s.loader(data(), global_batch=16):
                optimizer.zero_grad()
                s.backward(mean_loss(model, x, y))
                optimizer.step()
                if s.last:
                    for average in averages:
                        average.update_parameters(model)
            total, count = 0.0, 0
            with torch.no_grad():
                for x, y in s.loader(data(), global_batch=24):
                    total += F.cross_entropy(before(x), y, reduction="sum").item()
                    count += len(x)
            s.log(loss=s.mean(total, count))


def right_with_a_clamp() -> None:
    """An autograd function that is not linear."""
    with paceline.session() as s:
        trained(s, usual(s), net(Clamped()))


def right_with_a_clamp_and_weights() -> None:
    with paceline.session() as s:

        def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            mask = y != 2
            losses = F.cross_entropy(model(x), y, reduction="none") * mask
            s.backward(losses.sum() / mask.sum().clamp(min=1), weight=mask.sum())
            optimizer.step()

        trained(s, step, net(Clamped()))


def right_with_a_clamp_and_losses_of_each_sample() -> None:
    with paceline.session() as s:

        def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            s.backward(F.cross_entropy(model(x), y, reduction="none"), 1.0 + y)
            optimizer.step()

        trained(s, step, net(Clamped()))


def right_with_a_module_hook() -> None:
    with paceline.session() as s:
        model = net()
        model[0].register_full_backward_hook(lambda _, __, given: None)
        model[2].register_full_backward_hook(lambda _, given, __: tuple(g.clamp(-0.004, 0.004) for g in given))
        trained(s, usual(s), model)


def right_with_parameter_hooks() -> None:
    """Each clips by the norm of the whole gradient of its parameter."""
    with paceline.session() as s:
        model = net()
        for parameter in model.parameters():
            parameter.register_hook(lambda g: g * (0.05 / g.norm().clamp(min=1e-12)).clamp(max=1.0))
        trained(s, usual(s), model)


def right_with_micro_batches_of_the_loaders_own() -> None:
    with paceline.session() as s:
        model, optimizer = s.prepare(net(Clamped()), sgd)
        for _ in s.epochs(9):
            for x, y in s.loader(data(), batch_size=3, accumulation=2):
                optimizer.zero_grad()
                s.backward(mean_loss(model, x, y))
                optimizer.step()


class OwnOrder(Sampler[int]):
    """Draws from Python's stream, which another seed on each rank makes another order on each."""

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[int]:
        order = [*range(60)]
        random.shuffle(order)
        return iter(order)


def right_with_an_order_from_pythons_stream() -> None:
    with paceline.session() as s:
        trained_from(s, DataLoader(data(), batch_size=16, sampler=OwnOrder()))


def trained_from(s: Any, loader: DataLoader[Any], step: Callable[..., object] | None = None, model: Any = None) -> Any:
    """As `trained`, from a DataLoader of the loop's own."""
    model, optimizer = s.prepare(net() if model is None else model, sgd)
    samples = s.loader(loader)
    for _ in s.epochs(9):
        for x, y in samples:
            optimizer.zero_grad()
            (step or usual(s))(model, optimizer, x, y)
    return model


class Language(nn.Module):
    """Its scores are in `dtype`, as those of many Hugging Face models are in float32."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype, self.embed, self.head = dtype, nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(self.embed(x).cumsum(1).tanh())
        return scores if self.dtype is None else scores.to(self.dtype)


def padded(rows: list[Tensor]) -> list[Tensor]:
    """To the longest sample of the micro-batch: its inputs, and its targets."""
    width = max(map(len, rows))
    return [torch.stack([F.pad(row, (0, width - len(row)), value=pad) for row in rows]) for pad in (9, -100)]


def train_on_texts(dtype: torch.dtype | None = None, *, weighted: bool = True) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 12, (60,), generator=generator).tolist()
    texts = [torch.randint(9, (length,), generator=generator) for length in lengths]
    with paceline.session() as s:
        model, optimizer = s.prepare(Language(dtype), lambda p: AdamW(p, lr=1e-2))
        for _ in s.epochs(9):
            for x, y in s.loader(texts, global_batch=16, collate=padded):
                optimizer.zero_grad()
                count = (y != -100).sum()
                loss = F.cross_entropy(model(x).transpose(1, 2), y, reduction="sum") / count
                s.backward(loss, weight=count if weighted else None)
                optimizer.step()


padded_in_float32, padded_in_bfloat16 = partial(train_on_texts, torch.float32), partial(train_on_texts, torch.bfloat16)
padded_without_weights = partial(train_on_texts, weighted=False)
padded_without_weights_in_float32 = partial(train_on_texts, torch.float32, weighted=False)


# ---- with one ----------------------------------------------------------------------------------------------------


@bug("[refused]", "transformers before 4.46: a mean of token means")
def weight_forgotten() -> None:
    with paceline.session() as s:

        def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            mask = y != 2
            losses = F.cross_entropy(model(x), y, reduction="none") * mask
            s.backward(losses.sum() / mask.sum().clamp(min=1))  # lacks weight=mask.sum()
            optimizer.step()

        trained(s, step)


@bug("[number]", "Lightning's sync_dist=True: a mean of means")
def metric_averaged() -> None:
    with paceline.session() as s:
        model = trained(s, usual(s))
        model.eval()
        hits = count = 0
        with torch.no_grad():
            for x, y in s.loader(data(), global_batch=24):
                hits, count = hits + (model(x).argmax(1) == y).sum(), count + len(x)
        s.log(accuracy=s.sum(hits / count) / s.size)


@bug("[own number]", "a loss logged as every rank has it")
def own_loss_logged() -> None:
    with paceline.session() as s:
        seen = []

        def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            loss = mean_loss(model, x, y)
            s.backward(loss)
            optimizer.step()
            seen.append(float(loss))

        trained(s, step)
        s.log(loss=seen[-1])


@bug("without zero_grad", "the most common bug of all")
def no_zero_grad() -> None:
    with paceline.session() as s:
        model, optimizer = s.prepare(net(), sgd)
        for x, y in s.loader(data(), global_batch=16):
            s.backward(mean_loss(model, x, y))
            optimizer.step()


@bug("evaluated in training mode", "model.eval() forgotten")
def evaluated_in_training_mode() -> None:
    with paceline.session() as s:
        model = trained(s, usual(s), net(nn.Dropout(0.5)))
        with torch.no_grad():
            outputs = [(model(x).sum(), len(x)) for x, _ in s.loader(data(), global_batch=24)]
        s.log(output=s.mean(sum(total for total, _ in outputs), sum(count for _, count in outputs)))


@bug("the ranks have different data", "a dataset cut by hand, beside a sampler that cuts")
def data_cut_by_rank() -> None:
    with paceline.session() as s:
        inputs, labels = data().tensors
        trained(s, usual(s), samples=TensorDataset(inputs[s.rank :: s.size], labels[s.rank :: s.size]))


@bug("[start]", "a seed that depends on the rank, where no broadcast helps")
def constant_by_rank() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = net(), random.random()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale

    with paceline.session() as s:
        trained(s, usual(s), Scaled())


@bug("[settings]", "goyal et al.'s rule for a batch that has grown; here it has not")
def lr_by_number_of_ranks() -> None:
    with paceline.session() as s:
        trained(s, usual(s), optimizer=lambda p: SGD(p, lr=0.1 * s.size))


@bug("the learning rate changes between the micro-batches", "warm-up counted by each rank's own samples")
def lr_by_rank() -> None:
    with paceline.session() as s:

        def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            s.backward(mean_loss(model, x, y))
            optimizer.param_groups[0]["lr"] *= 1 + 0.1 * s.rank
            optimizer.step()

        trained(s, step)


@bug("[input]", "random.Random(rank) in the loop")
def augmented_by_rank() -> None:
    with paceline.session() as s:
        own = random.Random(s.rank)

        def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            s.backward(mean_loss(model, x + own.random(), y))
            optimizer.step()

        trained(s, step)


class Noisy(Dataset[Any]):
    """Noise from a generator of its own, seeded by the time."""

    def __init__(self) -> None:
        self.whole, self.noise = data(), np.random.default_rng(time.time_ns())

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.whole[index]
        return x + torch.from_numpy(self.noise.normal(size=6)).to(x), y


@bug("[input]", "numpy's default_rng() in a dataset")
def augmented_by_time() -> None:
    with paceline.session() as s:
        trained(s, usual(s), samples=Noisy())


@bug("s.any(flag)", "patience counted by each rank")
def stopped_by_one_rank() -> None:
    with paceline.session() as s:
        model, optimizer = s.prepare(net(), sgd)
        for x, y in s.loader(data(), global_batch=16):
            optimizer.zero_grad()
            s.backward(mean_loss(model, x, y))
            optimizer.step()
            if s.last and s.batch == 1 and s.rank == s.size - 1 > 0:
                break
        s.log(batches=s.mean(s.batch, 1))


@bug("Use s.backward(loss)", "the line that was not changed")
def torchs_own_backward() -> None:
    with paceline.session() as s:

        def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            mean_loss(model, x, y).backward()
            optimizer.step()

        trained(s, step)


@bug("[changed]", "clipping by what one rank has")
def clipped_by_own_norm() -> None:
    with paceline.session() as s:

        def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            loss = mean_loss(model, x, y)
            own = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)])
            s.backward(loss)
            for parameter in model.parameters() if s.last else ():
                assert parameter.grad is not None
                parameter.grad.mul_((0.1 / own.norm()).clamp(max=1.0))
            optimizer.step()

        trained(s, step)


@bug("[outside]", "a weight set by rank 0 alone")
def weights_changed_on_rank_0() -> None:
    with paceline.session() as s:

        def step(model: Any, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            s.backward(mean_loss(model, x, y))
            optimizer.step()
            if s.rank == 0 and s.last:
                with torch.no_grad():
                    model[0].weight.clamp_(-0.2, 0.2)

        trained(s, step)


@bug("[weights]", "a loss divided by the number of ranks, as for DDP's sum")
def loss_divided_by_ranks() -> None:
    with paceline.session() as s:

        def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            s.backward(mean_loss(model, x, y) / s.size)
            optimizer.step()

        trained(s, step)


@bug("[refused]", "reduction='sum' that nobody told of")
def sum_taken_for_a_mean() -> None:
    with paceline.session() as s:

        def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            s.backward(F.cross_entropy(model(x), y, reduction="sum"))
            optimizer.step()

        trained(s, step)


@bug("[output]", "dropout of one's own, by a generator of one's own")
def output_by_rank() -> None:
    with paceline.session() as s:

        class Shifted(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + 0.01 * s.rank

        trained(s, usual(s), net(Shifted(8, 8)))


@bug(
    "Use s.backward(loss, more=True) in all but the last",
    "two losses: right up to rounding, and refused where every bit counts",
)
def two_backwards_for_the_same_bits() -> None:
    with paceline.session() as s:

        def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            s.backward(mean_loss(model, x, y))
            s.backward(model(x).square().mean())
            optimizer.step()

        trained(s, step)


@bug("[scale]", "gradients normalized by a hook: it sees the rows of one micro-batch")
def gradient_normalized_by_a_hook() -> None:
    with paceline.session() as s:
        model = net()
        model[2].register_full_backward_hook(lambda _, given, __: tuple(g / g.norm() for g in given))
        trained(s, usual(s), model)


@bug("[scale]", "planted in the step: sums are back-propagated, and divided afterwards")
def sum_back_propagated() -> None:
    backward, synchronise = ModelInTraining.backward, ModelInTraining.sync_gradients

    def larger(self: ModelInTraining, loss: Tensor, **options: Any) -> None:
        backward(self, loss * 16, **options)

    def divided(self: ModelInTraining, divisor: Tensor, **options: Any) -> Any:
        return synchronise(self, divisor * 16, **options)

    with patch.object(ModelInTraining, "backward", larger), patch.object(ModelInTraining, "sync_gradients", divided):
        right_with_a_clamp()


@bug("[scale]", "planted in the step: hooks on parameters run before the sum over ranks")
def hooks_before_the_sum() -> None:
    with patch.object(ModelInTraining, "hide_hooks", lambda self, alone, counted=True: []):
        right_with_parameter_hooks()


@bug("every gradient is 2 x", "planted in the step: accumulated losses that are not divided")
def gradient_doubled() -> None:
    synchronise = ModelInTraining.sync_gradients

    def halved(self: ModelInTraining, divisor: Tensor, **options: Any) -> Any:
        return synchronise(self, divisor / 2, **options)

    with patch.object(ModelInTraining, "sync_gradients", halved), paceline.session() as s:
        trained(s, usual(s))


@bug("[order]", "planted in the plan: each rank draws the order from a seed of its own")
def order_seeded_by_rank() -> None:
    with paceline.session() as s:
        original = order_module._shuffled_order
        own = lambda samples, seed, epoch: original(samples, seed + s.rank, epoch)  # noqa: E731
        with patch.object(order_module, "_shuffled_order", own):
            trained(s, usual(s))


@bug("the ranks draw different samples", "a generator that is seeded by rank")
def order_from_a_generator_seeded_by_rank() -> None:
    class ByRank(Sampler[int]):
        def __len__(self) -> int:
            return 60

        def __iter__(self) -> Iterator[int]:
            return iter(np.random.default_rng(s.rank).permutation(60).tolist())

    with paceline.session() as s:
        trained_from(s, DataLoader(data(), batch_size=16, sampler=ByRank()))


class WithAuxiliaryHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.auxiliary, self.head = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


@bug("a gradient did not come from s.backward", "a loss of its own for an auxiliary head")
def second_backward_of_another_head() -> None:
    with paceline.session() as s:

        def step(model: Any, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            model.auxiliary(model.body(x).detach()).square().mean().backward()
            s.backward(mean_loss(model, x, y))
            optimizer.step()

        trained(s, step, WithAuxiliaryHead())


@bug("the ranks have different gradients", "a penalty's gradient added by hand")
def gradient_added_by_hand() -> None:
    with paceline.session() as s:

        def step(model: Any, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            s.backward(mean_loss(model, x, y))
            weight = model.body.weight
            penalty = torch.autograd.grad(model(x).square().mean(), weight)[0]
            if s.last:
                weight.grad += penalty
            optimizer.step()

        trained(s, step, WithAuxiliaryHead())


@bug("two backwards of one model in one step", "PCGrad, GradNorm: two losses whose gradients are combined by hand")
def gradients_combined_by_hand() -> None:
    with paceline.session() as s:

        def step(model: Any, optimizer: SGD, x: Tensor, y: Tensor) -> None:
            s.backward(mean_loss(model, x, y), more=False)
            first = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad()
            s.backward(model(x).square().mean())
            for parameter, gradient in zip(model.parameters(), first, strict=True):
                if parameter.grad is not None and gradient is not None:
                    parameter.grad += gradient
            optimizer.step()

        trained(s, step)


@bug("[beside]", "planted in the session: nothing is said of a second backward")
def second_backward_unchecked() -> None:
    unseen = property(lambda self: [], lambda self, _: None)
    with (
        patch.object(PreparedModel, "last_gradient", unseen, create=True),
        patch.object(PreparedModel, "_check_assigned", lambda self, *_: None),
    ):
        second_backward_of_another_head()


@bug("[beside]", "planted in the session: changed gradients are not compared over ranks")
def gradient_added_by_hand_unchecked() -> None:
    with patch.object(PreparedModel, "check_before_update", PreparedModel.current_gradients):
        gradient_added_by_hand()


@bug("[between]", "planted in the step: a second sum over micro-batches is not refused")
def gradients_combined_by_hand_unchecked() -> None:
    with patch.object(Step, "_check_summed_once", lambda self, reached: None):
        gradients_combined_by_hand()


def trains_nothing() -> None:
    paceline.session()
