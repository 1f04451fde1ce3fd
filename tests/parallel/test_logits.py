"""Scores that ranks share: the loss of one process and its gradient, for three numbers a place; else they are whole."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.parallel.models import GPT, sentences
from tests.parallel.test_tensor import world_of
from tests.run_ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.parallel.logits import ShardedLogits

pytestmark = pytest.mark.sample(2)

SUM = torch.nn.CrossEntropyLoss(reduction="sum", ignore_index=3)


def written_into(x: Tensor, y: Tensor) -> Tensor:
    """A write is seen in what is a view, and not in what is a copy, whichever of them was there first."""
    view, copy = x.view(-1, x.size(-1)), x.transpose(1, 2).contiguous()
    x[..., 3] = -5.0
    view[0] = view[0] * 2
    return F.cross_entropy(x.transpose(1, 2), y) + F.cross_entropy(view, y.view(-1)) + F.cross_entropy(copy, y)


LOSSES: dict[str, Any] = {
    "as usual": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none"),
    "flat, mean": lambda x, y: F.cross_entropy(x.view(-1, x.size(-1)), y.reshape(-1)),
    "a module, sum": lambda x, y: SUM(x.flatten(0, 1), y.view(-1)),
    "weighted": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, torch.arange(1, 33).to(x.dtype)),
    "in float32": lambda x, y: F.cross_entropy(x.float().permute(0, 2, 1), y),
    "shifted by one": lambda x, y: F.cross_entropy(x[:, :-1].transpose(1, 2), y[:, 1:]),
}
WHOLE: dict[str, Any] = {
    "smoothed": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, label_smoothing=0.1),
    "by hand": lambda x, y: -x.log_softmax(-1).gather(-1, y[..., None]).mean() + (x.argmax(-1) == y).double().mean(),
    "gathered": lambda x, y: x.gather(-1, y[..., None]).square().mean(),
    "a few of them": lambda x, y: x[..., :7].square().sum() + x[y > 3].sum(),
    "written into": written_into,
    "largest": lambda x, y: (x - x.max()).square().mean() * x.ndim,
}


class Count(TorchDispatchMode):
    """Counts what DTensor exchanges: by kind, and the bytes that this rank gives."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it calls what it is made of, and that is counted
            return NotImplemented
        if func.namespace == "_c10d_functional" and "wait" not in str(func) and "wrap" not in str(func):
            self.kinds[str(func).split(".")[1]] += 1
            self.sent += args[0].nbytes
        return func(*args, **(kwargs or {}))


def losses_on(rank: int, size: int, kind: str) -> dict[str, tuple[float, float, int]]:
    """By loss: how far it, and its gradient, are from one process's, and the bytes of what was exchanged."""
    group: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(group, "cpu")
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 5, 32, generator=random, dtype=getattr(torch, kind))
    targets = torch.randint(32, (3, 5), generator=random)
    found: dict[str, tuple[float, float, int]] = {}
    for name, loss in {**LOSSES, **WHOLE}.items():
        want_of = whole.clone().requires_grad_()
        want = loss(want_of * 1, targets)  # a model gives no leaf
        want.sum().backward()
        mine = whole.chunk(size, -1)[rank].clone().requires_grad_()
        with Count() as seen:
            got = loss(ShardedLogits.of(DTensor.from_local(mine, mesh, [Shard(2)])), targets)
        got.sum().backward()
        assert mine.grad is not None
        assert want_of.grad is not None
        assert type(got) is Tensor
        error = (mine.grad - want_of.grad.chunk(size, -1)[rank]).abs().max()
        found[name] = (float(((got - want) / want.abs().clamp(1)).abs().max()), float(error), seen.sent)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "most"), [("float64", 1e-12), ("bfloat16", 0.05)])
def test_a_loss_of_shared_scores_is_that_of_one_process(tmp_path: Path, kind: str, most: float) -> None:
    for found in run_ranks(losses_on, 2, tmp_path, kind):
        for name, (loss, gradient, sent) in found.items():
            places = 3 * (4 if name == "shifted by one" else 5)
            assert max(loss, gradient) < (1e-6 if name == "in float32" and kind == "float64" else most), name
            each = {"float64": 8, "bfloat16": 4}[kind] if name != "in float32" else 4
            assert name in WHOLE or 2.5 * places * each <= sent <= 3 * places * each, (name, sent)


def forward_gives(rank: int, size: int) -> tuple[bool, list[int], bool, bool]:
    from paceline.parallel.tensor import apply_tensor_parallel

    model = GPT()
    apply_tensor_parallel(model, world_of(rank, size, f"tensor={size}"))
    given = model(sentences("train")[:2][0])
    return isinstance(given, ShardedLogits), [*given.shard.to_local().shape], given.requires_grad, given.is_cpu


@pytest.mark.ranks
def test_a_model_cut_by_words_gives_scores_of_which_each_rank_has_its_share(tmp_path: Path) -> None:
    assert run_ranks(forward_gives, 2, tmp_path) == [(True, [2, 12, 16], True, True)] * 2


def places_seen(rank: int, size: int, sequence: bool) -> list[list[int]]:
    """(places of the whole, of this rank) at the norm of each forward."""
    from paceline.parallel.tensor import apply_tensor_parallel

    model, found = GPT(), list[list[int]]()
    apply_tensor_parallel(model, world_of(rank, size, f"tensor={size}"), sequence=sequence)
    model.norm.register_forward_pre_hook(
        lambda _, inputs: found.append([inputs[0].shape[1], getattr(inputs[0], "_local_tensor", inputs[0]).shape[1]])
    )
    model(sentences("train")[:2][0])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("sequence", "own"), [(False, 12), (True, 6)])
def test_between_two_layers_a_rank_has_all_places_or_its_part(tmp_path: Path, sequence: bool, own: int) -> None:
    assert run_ranks(places_seen, 2, tmp_path, sequence) == [[[12, own]] * 3] * 2


def outside(rank: int, size: int) -> str:
    group: Any = dist.group.WORLD
    share = torch.randn(3, 16).requires_grad_()
    scores = ShardedLogits.of(DTensor.from_local(share, DeviceMesh.from_group(group, "cpu"), [Shard(1)]))
    try:
        F.cross_entropy(scores, torch.tensor([0, -100, 32]))
    except RuntimeError as error:
        return str(error).partition("one of the ")[2]
    return ""


@pytest.mark.ranks
def test_a_target_that_is_no_class_is_an_error_on_every_rank(tmp_path: Path) -> None:
    assert run_ranks(outside, 2, tmp_path) == ["32 classes"] * 2


def exchanged(rank: int, size: int) -> list[list[int]]:
    """(reduce-scatters, all-gathers) of a forward with shared sequences, and of its backward."""
    from paceline.parallel.tensor import apply_tensor_parallel

    model, found = GPT(), list[list[int]]()
    apply_tensor_parallel(model, world_of(rank, size, "tensor=2"), sequence=True)
    words, targets = sentences("train")[:2]
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.append(F.cross_entropy(model(words).transpose(1, 2), targets))

    for step in (forward, lambda: outputs[0].backward()):
        with Count() as seen:
            step()
        found.append([seen.kinds["reduce_scatter_tensor"], seen.kinds["all_gather_into_tensor"]])
    return found


@pytest.mark.ranks
def test_what_was_fetched_in_the_forward_is_fetched_again_in_the_backward_and_not_kept(tmp_path: Path) -> None:
    forward, backward = run_ranks(exchanged, 2, tmp_path)[0]
    assert forward == [4, 4]  # summed: words, attention twice, the MLP; fetched: attention twice, the MLP, the scores
    assert backward == [4, 4 + 4 + 1]  # the gradients of these sums, what is fetched again, the gradient of places


def past_torch_function(rank: int, size: int) -> str:
    group: Any = dist.group.WORLD
    scores = ShardedLogits.of(DTensor.from_local(torch.randn(3, 16), DeviceMesh.from_group(group, "cpu"), [Shard(1)]))
    try:
        with torch._C.DisableTorchFunction():
            scores.sum()
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_what_goes_past_the_whole_ends_in_words_and_never_in_the_numbers_of_a_share(tmp_path: Path) -> None:
    assert ["`logits.clone()`" in told for told in run_ranks(past_torch_function, 2, tmp_path)] == [True] * 2
