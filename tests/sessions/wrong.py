"""What users write into a loop, and a session refuses: as it would be typed, on one rank with two virtual ones.

python wrong.py FILE       writes the code and the text of each error, as JSON
"""

import json
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import paceline
from paceline.errors import PacelineError, UsageError

DATA = TensorDataset(torch.ones(24, 3), torch.zeros(24, dtype=torch.int64))
Case = Callable[[Any], object]
CASES: dict[str, tuple[Case, tuple[str, str], dict[str, Any]]] = {}


def case(code: str, words: str = "", **settings: Any) -> Callable[[Case], Case]:
    """A loop that ends with the error `code`, whose text contains `words`; without a code, the words that it tells."""

    def noted(loop: Case) -> Case:
        CASES[loop.__name__] = (loop, (code, words), {"virtual_ranks": 2, **settings})
        return loop

    return noted


def ready(s: Any, **loading: Any) -> tuple[Any, Any, Any]:
    model = nn.Linear(3, 2)
    model, optimizer = s.prepare(model, SGD(model.parameters(), lr=0.1))
    return model, optimizer, s.loader(DATA, global_batch=4, **loading)


def step(s: Any, optimizer: Any, loss: torch.Tensor, *weight: Any) -> None:
    optimizer.zero_grad()
    s.backward(loss, *weight)
    optimizer.step()


@case("torch-backward", "s.backward(loss)")
def torchs_own_backward(s: Any) -> None:
    model, optimizer, train = ready(s)
    for x, y in train:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@case("no-backward")
def no_backward(s: Any) -> None:
    _, optimizer, train = ready(s)
    for _ in train:
        optimizer.step()


@case("bodies-differ")
def batches_counted_by_bodies(s: Any) -> None:
    model, optimizer, train = ready(s)
    for i, (x, y) in enumerate(train):
        s.backward(F.cross_entropy(model(x), y))
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


@case("learning-rate-in-step")
def scheduler_not_prepared(s: Any) -> None:
    model, optimizer, train = ready(s)
    scheduler = StepLR(optimizer, 1, 0.5)
    for x, y in train:
        step(s, optimizer, F.cross_entropy(model(x), y))
        scheduler.step()


class Twice(SGD):
    """It might call a closure at two places."""


@case("closure-called-several-times", "Twice")
def closure(s: Any) -> None:
    _, _, train = ready(s)
    other = nn.Linear(3, 2)
    model, optimizer = s.prepare(other, Twice(other.parameters(), lr=0.1))
    for x, y in train:
        s.backward(F.cross_entropy(model(x), y))
        optimizer.step(lambda: None)


@case("optimizer-needs-closure")
def lbfgs(s: Any) -> None:
    model = nn.Linear(3, 2)
    s.prepare(model, LBFGS(model.parameters()))


@case("two-backwards", strategy="exact")
def two_backwards_under_exact(s: Any) -> None:
    model, optimizer, train = ready(s)
    for x, y in train:
        optimizer.zero_grad()
        s.backward(F.cross_entropy(model(x), y))
        s.backward(model(x).square().mean())
        optimizer.step()


@case("weights-differ", " 2 and 5")
def other_weights_in_one_step(s: Any) -> None:
    model, optimizer, train = ready(s)
    for x, y in train:
        optimizer.zero_grad()
        s.backward(F.cross_entropy(model(x), y), more=True)
        s.backward(model(x).square().mean(), weight=5)
        optimizer.step()


@case("step-before-last-backward")
def step_before_the_last_backward(s: Any) -> None:
    model, optimizer, train = ready(s)
    for x, y in train:
        optimizer.zero_grad()
        s.backward(F.cross_entropy(model(x), y), more=True)
        optimizer.step()


@case("backward-after-step")
def into_a_model_that_has_stepped(s: Any) -> None:
    d, optimizer_d, train = ready(s)
    g = nn.Linear(3, 3)
    g, optimizer_g = s.prepare(g, SGD(g.parameters(), lr=0.1))
    for x, _ in train:
        d.zero_grad()
        s.backward(d(g(x).detach()).mean())
        optimizer_d.step()
        g.zero_grad()
        s.backward(d(g(x)).mean())
        optimizer_g.step()


@case("loop-left-in-step", "epoch 1, batch 1")
def left_in_the_middle_of_a_step(s: Any) -> None:
    model, optimizer, train = ready(s)
    for x, y in train:
        optimizer.zero_grad()
        s.backward(F.cross_entropy(model(x), y))
        break
    for _ in train:
        pass


@case("two-loops-at-once")
def two_loops_at_once(s: Any) -> None:
    _, _, train = ready(s)
    for _ in zip(train, train, strict=True):
        pass


@case("evaluation-inside-step")
def evaluation_before_the_last_micro_batch(s: Any) -> None:
    model, _, train = ready(s)
    for x, y in train:
        s.backward(F.cross_entropy(model(x), y))
        with torch.no_grad():
            for _ in s.loader(DATA, global_batch=8):
                pass


@case("evaluated-with-buffers-of-one")
def evaluated_with_the_buffers_of_one(s: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model, optimizer = s.prepare(model, SGD(model.parameters(), lr=0.1))
    for x, y in s.loader(DATA, global_batch=8):
        step(s, optimizer, F.cross_entropy(model(x), y))
    model.eval()
    model(DATA.tensors[0])


@case("sharded-gradient-used", "s.clip_grad_norm(max_norm)", strategy="zero")
def clipped_where_gradients_are_cut(s: Any) -> None:
    model, optimizer, train = ready(s)
    for x, y in train:
        optimizer.zero_grad()
        s.backward(F.cross_entropy(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@case("nothing-to-train")
def nothing_to_train(s: Any) -> None:
    s.prepare(nn.Flatten(), lambda p: SGD(p, lr=0.1))


@case("prepared-too-late")
def a_model_too_late(s: Any) -> None:
    model, _, train = ready(s)
    for x, y in train:
        s.backward(F.cross_entropy(model(x), y))
        ready(s)


@case("loss-not-a-tensor", "float")
def not_a_loss(s: Any) -> None:
    model, _, train = ready(s)
    for x, y in train:
        s.backward(F.cross_entropy(model(x), y).item())


@case("model-not-prepared")
def a_model_that_was_not_prepared(s: Any) -> None:
    ready(s)
    s.weights(nn.Linear(3, 2))


@case("model-not-named", " 2 prepared models")
def one_of_two_models(s: Any) -> None:
    ready(s)
    ready(s)
    s.weights()


@case("backward-outside-loop")
def outside_a_loop(s: Any) -> None:
    model, _, _ = ready(s)
    s.backward(model(torch.ones(2, 3)).sum())


class Stream(IterableDataset[Any]):
    num_shards = 1

    def __iter__(self) -> Any:
        return iter([DATA[i] for i in range(9)])

    def shard(self, num_shards: int, index: int) -> Any:
        raise NotImplementedError


class WithState(Stream):
    def state_dict(self) -> Any:
        return {"shuffling": torch.ones(2)}

    def load_state_dict(self, state: Any) -> None:
        pass


def trained_on(s: Any, stream: Any, epochs: int = 1) -> None:
    model, optimizer, _ = ready(s)
    train = s.loader(stream, global_batch=4)
    for _ in s.epochs(epochs):
        for x, y in train:
            step(s, optimizer, F.cross_entropy(model(x), y))


@case("stream-shuffled")
def a_stream_to_be_shuffled(s: Any) -> None:
    s.loader(Stream(), global_batch=4, shuffle=True)


@case("stream-padded")
def a_stream_to_be_padded(s: Any) -> None:
    s.loader(Stream(), global_batch=4, last_batch="pad")


@case("stream-in-processes", "num_workers=4")
def a_stream_in_four_processes(s: Any) -> None:
    s.loader(DataLoader(Stream(), batch_size=2, num_workers=4), split=True)


@case("stream-without-shards")
def a_stream_without_shards(s: Any) -> None:
    trained_on_parts(s, iter(()))


@case("too-few-shards", " 1 shards")
def a_stream_of_few_shards(s: Any) -> None:
    trained_on_parts(s, Stream())


@case("split-without-virtual-ranks", virtual_ranks=None)
def split_for_nobody_knows_how_many(s: Any) -> None:
    s.loader(Stream(), global_batch=4, split=True)


@case("samples-split")
def samples_that_are_split(s: Any) -> None:
    s.loader(DATA, global_batch=4, split=True)


@case("not-data", "int")
def no_data(s: Any) -> None:
    s.loader(5, global_batch=4)


@case("stream-gives-nothing", "epoch 1")
def an_empty_stream(s: Any) -> None:
    trained_on(s, iter(()))


@case("stream-gives-nothing", "epoch 2")
def an_iterator_in_two_epochs(s: Any) -> None:
    trained_on(s, iter(Stream()), epochs=2)


@case("state-not-plain", "Tensor")
def a_state_that_cannot_be_saved(s: Any) -> None:
    trained_on(s, WithState())


@case("", "has no length")
def the_length_of_a_stream(s: Any) -> None:
    try:
        len(s.loader(Stream(), global_batch=4))
    except TypeError as error:
        raise PacelineError(str(error)) from error


@case("stream-read-twice")
def a_stream_read_twice_at_once(s: Any) -> None:
    model, optimizer, _ = ready(s)
    train = s.loader(Stream(), global_batch=2)
    for x, y in train:
        step(s, optimizer, F.cross_entropy(model(x), y))
        with torch.no_grad():
            for _ in train if s.last else ():
                pass


def trained_on_parts(s: Any, stream: Any) -> None:
    ready(s)
    for _ in s.loader(stream, global_batch=4, split=True):
        pass


@case("loader-not-taken-over", "in_order=False")
def batches_out_of_order(s: Any) -> None:
    s.loader(DataLoader(DATA, batch_size=2, num_workers=1, in_order=False))


@case("loader-not-taken-over", "batch_size=None")
def whole_batches(s: Any) -> None:
    s.loader(DataLoader(DATA, batch_size=None))


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


@case("loader-not-taken-over", "__iter__ of a OwnIteration")
def an_iteration_of_its_own(s: Any) -> None:
    s.loader(OwnIteration(DATA, batch_size=2))


class DifferentSamples(Stream):
    def __iter__(self) -> Any:
        return iter([(torch.full((3,), float(i)), 0) for i in range(9)])


@case("stream-repeated-by-processes", "2 loader processes")
def a_stream_that_each_process_reads(s: Any) -> None:
    ready(s)
    for _ in s.loader(DataLoader(DifferentSamples(), batch_size=2, num_workers=2)):
        pass


class OwnGenerator(Dataset[Any]):
    dice = random.Random(1)

    def __getitem__(self, number: int) -> Any:
        return torch.full((3,), self.dice.random()), 0

    def __len__(self) -> int:
        return 8


@case("samples-change", "OwnGenerator", strategy="exact")
def a_generator_of_its_own(s: Any) -> None:
    ready(s)
    for _ in s.loader(OwnGenerator(), global_batch=4):
        pass


@case("said-twice", "global_batch=")
def said_twice(s: Any) -> None:
    s.loader(DataLoader(DATA, batch_size=2), global_batch=4)


@case("no-batch-size")
def no_batch_size(s: Any) -> None:
    s.loader(DATA)


@case("not-finite", "epoch 1, batch 1; rank 0: among samples")
def not_finite(s: Any) -> None:
    model, optimizer, train = ready(s)
    for x, y in train:
        step(s, optimizer, F.cross_entropy(model(x), y) * float("nan"))


@case("not-finite", "epoch 1, batch 2; rank 0: samples 5")
def not_finite_for_one_sample(s: Any) -> None:
    model, optimizer, _ = ready(s)
    numbered = TensorDataset(torch.arange(24.0)[:, None].expand(24, 3), torch.zeros(24, dtype=torch.int64))
    for x, y in s.loader(numbered, global_batch=4, shuffle=False):
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x), y, reduction="none")
        s.backward(torch.where(x[:, 0] == 5, torch.inf, losses))
        optimizer.step()


@case("not-finite", "all 2 parameters")
def not_finite_in_a_gradient(s: Any) -> None:
    model, optimizer, train = ready(s)
    for x, _ in train:
        step(s, optimizer, (model(x) * 0).sqrt().mean())


@case("optimizer-as-scheduler")
def an_optimizer_as_scheduler(s: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    s.prepare(model, optimizer, optimizer)


@case("unknown-name", "'fdsp'", strategy="fdsp")
def another_strategy(s: Any) -> None:
    pass


@case("argument-of-another-strategy", "fsdp_wrap='Block'", fsdp_wrap="Block")
def blocks_for_another_strategy(s: Any) -> None:
    pass


@case("no-such-module", "fsdp_wrap Block: ", strategy="fsdp", fsdp_wrap="Block")
def blocks_that_are_not_there(s: Any) -> None:
    ready(s)


@case("sharded-model-copied", strategy="fsdp")
def cut_and_copied(s: Any) -> None:
    AveragedModel(ready(s)[0])


@case("sharded-model-outside-loop", "with s.evaluating()", strategy="fsdp")
def cut_and_called_outside_a_loop(s: Any) -> None:
    ready(s)[0](torch.ones(2, 3))


@case("torch-backward", "s.backward(loss)", strategy="fsdp")
def cut_and_torchs_own_backward(s: Any) -> None:
    torchs_own_backward(s)


@case("torch-backward", "gradient penalty", strategy="fsdp")
def cut_and_a_gradient_penalty(s: Any) -> None:
    model, _, train = ready(s)
    for x, _ in train:
        x.requires_grad_()
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


@case("replaced-parameter-used", ".grad", strategy="fsdp")
def cut_after_its_parameters_were_taken(s: Any) -> None:
    model = nn.Linear(3, 2)
    before = [*model.parameters()]
    model, optimizer = s.prepare(model, SGD(before, lr=0.1))
    for x, y in s.loader(DATA, global_batch=4):
        optimizer.zero_grad()
        s.backward(F.cross_entropy(model(x), y))
        nn.utils.clip_grad_norm_(before, 1.0)


@case("parameters-differ", strategy="fsdp")
def cut_and_assigned(s: Any) -> None:
    model, optimizer, train = ready(s)
    for x, y in train:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        step(s, optimizer, F.cross_entropy(model(x), y))


@case("replaced-parameter-used", "lerp_.Scalar", strategy="fsdp")
def cut_after_its_parameters_were_looked_at(s: Any) -> None:
    model = nn.Linear(3, 2)
    before = model.weight
    s.prepare(model, SGD(model.parameters(), lr=0.1))
    torch.zeros(2, 3).lerp_(before, 0.1)


@case("sharded-weights-used", "session(fsdp_wrap='Block')", strategy="fsdp")
def cut_and_used_outside_of_its_block(s: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    s.prepare(model, SGD(model.parameters(), lr=0.1))
    torch.ones(2, 3) @ model[0].weight.t()


@case("gradients-not-cleared", strategy="zero")
def not_cleared_where_gradients_are_cut(s: Any) -> None:
    model, optimizer, train = ready(s)
    for x, y in train:
        s.backward(F.cross_entropy(model(x), y))
        optimizer.step()


@case("", "without zero_grad()", strategy="fsdp")
def not_cleared_where_the_model_is_cut(s: Any) -> None:
    not_cleared(s)


@case("", "nothing", strategy="zero", seed=0)
def zeroed_where_gradients_are_cut(s: Any) -> None:
    not_cleared(s, lambda model, optimizer: optimizer.zero_grad(set_to_none=False))


@case("sharded-gradient-used", "optimizer.zero_grad()", strategy="zero")
def zeroed_by_the_model_where_gradients_are_cut(s: Any) -> None:
    not_cleared(s, lambda model, optimizer: model.zero_grad(set_to_none=False))


@case("", "nothing", strategy="fsdp")
def zeroed_where_the_model_is_cut(s: Any) -> None:
    not_cleared(s, lambda model, optimizer: model.zero_grad(set_to_none=False))


@case("session-resume-without-folder", resume=True)
def resume_without_a_folder(s: Any) -> None:
    pass


@case("run-dir-not-empty", "folder used", run_dir="used")
def a_folder_that_is_used(s: Any) -> None:
    pass


@case("", "enough", run_dir="run", resume=True)
def begun(s: Any) -> None:
    model, optimizer, train = ready(s)
    for _ in s.epochs(2):
        for x, y in train:
            s.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        raise UsageError("enough")


@case("another-run-for-good", "global_batch: 4", run_dir="run", resume=True)
def gone_on_with_another_batch(s: Any) -> None:
    ready(s)
    for _ in s.epochs(2):
        for _ in s.loader(DATA, global_batch=6):
            pass


@case("unknown-name", "'tpu'", virtual_ranks=2, device="tpu")
def another_device(s: Any) -> None:
    pass


class MadeLate(nn.Linear):
    mean: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.mean(0))
        return super().forward(x - self.mean)


@case("buffer-made-in-first-forward", "mean")
def a_buffer_made_in_the_first_forward(s: Any) -> None:
    model = MadeLate(3, 2)
    model, optimizer = s.prepare(model, SGD(model.parameters(), lr=0.1))
    for x, y in s.loader(DATA, global_batch=4):
        s.backward(F.cross_entropy(model(x), y))
        optimizer.step()


@case("", "NOTE: optimizer.step() was called twice without zero_grad(): the gradients of older")
def not_cleared(s: Any, clear: Callable[[Any, Any], None] = lambda model, optimizer: None) -> None:
    """No error: said once."""
    words: list[str] = []
    s._run.print = words.append
    model, optimizer, train = ready(s)
    for x, y in train:
        s.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        clear(model, optimizer)
    raise UsageError("; ".join(word for word in words if "NOTE" in word) or "nothing")


@case("", "nothing")
def cleared_in_other_ways(s: Any) -> None:
    """Nothing to be said: a GAN's, and gradients added up over batches."""
    words: list[str] = []
    s._run.print = words.append
    model, optimizer, _ = ready(s)
    other = nn.Linear(3, 3)
    other, optimizer_other = s.prepare(other, SGD(other.parameters(), lr=0.1))
    for x, y in s.loader(DATA, global_batch=4):
        model.zero_grad(set_to_none=bool(s.batch % 2))
        s.backward(F.cross_entropy(model(other(x).detach()), y), only=optimizer)
        optimizer.step()
        other.zero_grad()
        s.backward(F.cross_entropy(model(other(x)), y), only=optimizer_other)
        optimizer_other.step()
    raise UsageError("; ".join(word for word in words if "NOTE" in word) or "nothing")


@case("", "NOTE: a model is evaluated in training mode")
def evaluated_in_training_mode(s: Any) -> None:
    words: list[str] = []
    s._run.print = words.append
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    model, _ = s.prepare(model, SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        for x, _ in s.loader(DATA, global_batch=8):
            model(x)
    raise UsageError("; ".join(words))


def main() -> None:
    Path("used").mkdir()
    Path("used", "notes.txt").write_text("of somebody")
    warnings.simplefilter("ignore")
    told: dict[str, tuple[str, str]] = {}
    for name, (loop, _, settings) in CASES.items():
        try:
            with paceline.session(**settings) as s:
                s._run.print = lambda *_: None
                loop(s)
            told[name] = ("", "nothing")
        except PacelineError as error:
            told[name] = (error.code, str(error))
    Path(sys.argv[1]).write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
