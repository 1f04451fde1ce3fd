"""A model whose sequences are shared along context: losses, gradients, random numbers of one process; refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parallel.models import GPT, HUGGING_FACE, LENGTH, OWN, WIDTH, WORDS, loss, sentences
from tests.parallel.test_tensor import compare, one_step, world_of
from tests.run_ranks import run_ranks
from torch import Tensor, nn

from paceline.parallel.context import apply_context_parallel
from paceline.parallel.logits import ShardedLogits

pytestmark = pytest.mark.sample(2)


class Encoder(nn.Module):
    """(B, LENGTH) -> (B, LENGTH, WORDS): torch's layers, the batch first or second, masks, several norms."""

    def __init__(self, *, batch_first: bool, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.batch_first = nn.Embedding(WORDS, WIDTH, padding_idx=3), batch_first
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, heads, 2 * WIDTH, 0.1, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.RMSNorm(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        future = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).triu(1)
        x = self.embedding(words) * self.place.sigmoid()
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.layers(x, future, words == 31)
        return self.head(x if self.batch_first else x.transpose(0, 1))


class Vectors(nn.Module):
    """Sequences of vectors, not of words: some layers look at all places together, and the scores are of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.norm = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.conv, self.gru = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        with torch.no_grad():
            vectors = self.words.weight[words]
        x = self.norm(self.up(vectors).tanh())
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.gru(x)[0]
        return self.head(x) + x.mean(1, keepdim=True).sum(-1, keepdim=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: OWN[name] for name in ("split", "view", "chunk")},
    "one head": lambda: GPT(heads=1),
    "batch first": lambda: Encoder(batch_first=True),
    "batch second": lambda: Encoder(batch_first=False),
    "one torch head": lambda: Encoder(batch_first=True, heads=1),
    "vectors": Vectors,
}


def differences(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    world, found = world_of(rank, size, f"context={size}"), dict[str, Any]()
    for name in names:
        torch.manual_seed(0)
        model = {**MODELS, **HUGGING_FACE}[name]().double()
        want = one_step(model)
        lines = shared(model, world)
        got = one_step(model)
        found[name] = (*compare(got, want), got[1].keys() == want[1].keys(), lines)
    return found


def shared(model: nn.Module, world: Any) -> list[str]:
    words, targets = sentences("train")[:2]

    def probe() -> float:
        torch.manual_seed(3)
        return float(loss(model(words), targets)[0].sum().detach())

    model.eval()
    return apply_context_parallel(model, world, probe)


@pytest.mark.slow
@pytest.mark.ranks
def test_own_models_compute_what_one_process_does(tmp_path: Path) -> None:
    of_ranks = run_ranks(differences, 2, tmp_path, [*MODELS])
    for found in of_ranks:
        for name, (error, same_stream, same_names, _) in found.items():
            assert error < 1e-13 and same_stream and same_names, (name, error, same_stream, same_names)
    lines = {name: one[-1][0] for name, one in of_ranks[0].items()}
    assert {name for name, line in lines.items() if "heads or rows" in line} == {"one torch head"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "models"),
    [
        pytest.param(2, [*HUGGING_FACE], marks=pytest.mark.needs("transformers")),
        pytest.param(3, ["split", "batch first", "vectors"], marks=pytest.mark.slow),  # heads do not divide
    ],
)
def test_models_of_hugging_face_and_three_ranks_do_so_too(ranks: int, models: list[str], tmp_path: Path) -> None:
    for name, one in run_ranks(differences, ranks, tmp_path, models)[ranks - 1].items():
        assert one[0] < 1e-13, (name, one)


# ---- losses ------------------------------------------------------------------------------------------------------

TARGET = torch.tensor([[1, 5, -100, 2], [0, 3, 4, -100]])
WEIGHT = torch.linspace(0.5, 2, 6, dtype=torch.float64)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "flat, mean": lambda x: F.cross_entropy(x.view(-1, 6), TARGET.view(-1)),
    "flat, weighted mean": lambda x: F.cross_entropy(x.flatten(0, 1), TARGET.flatten(), WEIGHT),
    "flat, smooth": lambda x: F.cross_entropy(x.reshape(8, 6), TARGET.reshape(8), label_smoothing=0.1),
    "flat, smooth, weighted": lambda x: F.cross_entropy(x.view(8, 6), TARGET.view(8), WEIGHT, label_smoothing=0.1),
    "flat, sum": lambda x: F.cross_entropy(x.view(8, 6), TARGET.view(8), reduction="sum"),
    "none": lambda x: F.cross_entropy(x.transpose(1, 2), TARGET, reduction="none").square().sum(),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), TARGET),
    "shifted": lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), TARGET[:, 1:].flatten()),
    "of the last": lambda x: F.cross_entropy(x[:, -1], TARGET[:, 0]),
    "another": lambda x: (x.view(-1, 6).softmax(-1) * x.view(-1, 6)).sum() + x.flatten(0, 1).shape[0],
    "written into": lambda x: x.view(8, 6).mul_(2).sum() + x.square().sum(),
}


def losses_of_shares(rank: int, size: int) -> dict[str, tuple[float, float, bool]]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    world, found = world_of(rank, size, f"context={size}"), dict[str, tuple[float, float, bool]]()
    mesh = DeviceMesh.from_group(world.along("context").group, "cpu")  # pyright: ignore[reportArgumentType]
    for name, function in LOSSES.items():
        torch.manual_seed(0)
        whole = torch.randn(2, 4, 6, dtype=torch.float64).requires_grad_()
        function(whole * 1).backward()
        part = whole.detach().chunk(size, 1)[rank].clone().requires_grad_()
        scores = ShardedLogits.of(DTensor.from_local(part * 1, mesh, [Shard(1)]))
        got = function(scores)
        got.backward()
        want, gradient = function(whole.detach() * 1), whole.grad
        assert gradient is not None and part.grad is not None and type(got) is Tensor
        apart = float((part.grad - gradient.chunk(size, 1)[rank]).abs().max())
        found[name] = float((got - want).abs()), apart, scores.whole is not None
    return found


@pytest.mark.ranks
def test_losses_of_scores_that_are_cut_by_places_are_those_of_whole_ones(tmp_path: Path) -> None:
    for found in run_ranks(losses_of_shares, 2, tmp_path):
        for name, (value, gradient, _) in found.items():
            assert max(value, gradient) < 1e-14, name
        fetched = {name for name, one in found.items() if one[2]}
        assert fetched == {"flat, smooth, weighted", "shifted", "of the last", "another", "written into"}


def refused(rank: int, size: int) -> list[tuple[str, str]]:
    world, found = world_of(rank, size, "context=2"), list[tuple[str, str]]()
    for model in (nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))):
        takes = torch.ones(2, 2, 2) if isinstance(model[0], nn.Flatten) else torch.ones(3, 3, dtype=torch.int64)
        try:
            apply_context_parallel(model, world, lambda m=model, x=takes: float(m(x).sum().detach()))
        except Exception as error:
            found.append((type(error).__name__, getattr(error, "code", "")))
    return found


@pytest.mark.ranks
def test_a_model_without_sequences_that_can_be_shared_is_refused(tmp_path: Path) -> None:
    first, second = run_ranks(refused, 2, tmp_path)
    assert first == [("UsageError", "context-no-sequence")] * 2
    assert [error for error, _ in second] == ["ReportedByPeer"] * 2
