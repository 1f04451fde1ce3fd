"""Buffers that count, add up or keep a maximum are merged to what one process without virtual ranks computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.errors import raises
from tests.run_ranks import run_ranks
from tests.strategies.test_odd_models import Kept
from tests.strategies.test_state import opened, save
from tests.worlds import world_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from paceline.checkpoint.export import state_dict_from_source
from paceline.checkpoint.state import TensorShard
from paceline.collectives.batchnorm import SyncBatchNorm
from paceline.data.plan import MicroBatchPlan, virtual_ranks_of
from paceline.errors import ReportedByPeer, UsageError
from paceline.rank.world import World
from paceline.strategies.buffers import VirtualRankBuffers

ALONE = World(0, 1, 0, 1, torch.device("cpu"), "gloo")
V, STEPS, BATCH = 4, 3, 12
DATA = torch.randn(STEPS * BATCH, 3, generator=torch.Generator().manual_seed(1)).double()


class Counts(nn.Module):
    """(B, 3): a codebook's use, a histogram, running sums and extrema, and numbers of calls."""

    buffer_reductions: ClassVar = {
        "total": "sum",
        "top": "max",
        "low": "min",
        "cx": "mean",
        "cx_sum": "sum",
        "norms": "sum",
    }

    def __init__(self) -> None:
        super().__init__()
        zeros = {"seen": (), "codes": (5,), "histogram": (4,), "calls": (), "calls_of_one": (1,), "replaced": ()}
        for name, shape in zeros.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64))
        self.register_buffer("total", torch.tensor(0.5).double())
        self.register_buffer("norms", torch.full((3,), 2.0))
        self.register_buffer("top", torch.tensor(-9.0).double())
        self.register_buffer("low", torch.full((3,), 9.0).double())
        self.register_buffer("cx", torch.zeros((), dtype=torch.complex128))
        self.register_buffer("cx_sum", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("any", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("table", torch.arange(3.0))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.codes += torch.bincount((x[:, 0] * 7).long().abs() % 5, minlength=5)
        self.histogram += torch.histc(x, 4, -4, 4).long()
        self.calls += 1
        self.calls_of_one[0] += 1
        self.replaced = self.replaced + 1
        self.total += x.sum()
        self.norms += x.abs().sum(0).float()
        self.top.copy_(torch.maximum(self.top, x.max()))
        self.low = torch.minimum(self.low, x.amin(0))
        self.cx.mul_(0.9).add_(torch.complex(x, x * 2).mean())
        self.cx_sum += torch.complex(x, -x).sum(0)[:2]
        self.any |= (x > 2).any(0)
        return x


class Nested(nn.Module):
    """A module within another; and one that is used twice in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counts(), Counts()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[1](self.layers[0](x)) * 0.5)


def forwards(buffers: VirtualRankBuffers, model: nn.Module, share: range, steps: range, check: bool = True) -> None:
    for step in steps:
        buffers.save_copies()
        batch = DATA[step * BATCH : (step + 1) * BATCH]
        for virtual_rank in share:
            with buffers.micro_batch_context(
                MicroBatchPlan(0, step, virtual_rank, 0, torch.arange(BATCH)[virtual_rank::V])
            ):
                model(batch[virtual_rank::V])
                if check and virtual_rank == share[-1]:
                    buffers.check_mergeable()


def values(model: nn.Module) -> dict[str, Any]:
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def plain(make: Callable[[], nn.Module]) -> dict[str, Any]:
    model = make()
    for step in range(STEPS):
        model(DATA[step * BATCH : (step + 1) * BATCH])
    return values(model)


def counted(rank: int, size: int, folder: str, begin: int, end: int) -> dict[str, Any]:
    """From the state in `folder`, and what is left there."""
    model = Nested()
    if begin:  # another process may begin with other values: the saved ones count
        for buffer in model.buffers():
            buffer.add_(1) if buffer.dtype != torch.bool else buffer.fill_(True)
    buffers = VirtualRankBuffers(model, world_of(rank, size), V)
    if begin:
        buffers.load(opened(sorted(Path(folder, f"{begin}").iterdir())))
        with buffers.merged():
            assert model.layers[0].get_buffer("seen") == begin * BATCH
    forwards(buffers, model, virtual_ranks_of(V, rank, size), range(begin, end))
    save(buffers.buffer_shards(), Path(folder, f"{end}", f"{rank}"), rank, size)
    with buffers.merged():
        found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    offline = state_dict_from_source(Kept(buffers.buffer_shards()), {}, V) if size == 1 else found
    assert all(torch.equal(offline[name], found[name]) for name in found)
    return values_of(found)


def values_of(found: dict[str, Tensor]) -> dict[str, Any]:
    return {name: buffer.tolist() for name, buffer in found.items()}


@pytest.mark.ranks
def test_it_is_what_one_process_computes_at_every_world_size_with_the_same_bits_also_after_a_resume(tmp_path: Path):
    found: list[dict[str, Any]] = []
    for size, then in ((1, 2), (2, 3), (3, 1)):
        folder = tmp_path / f"{size}"
        (folder / "2").mkdir(parents=True)
        (folder / f"{STEPS}").mkdir()
        run_ranks(counted, size, tmp_path, str(folder), 0, 2)
        found += run_ranks(counted, then, tmp_path, str(folder), 2, STEPS)
    assert all(one == found[0] for one in found)
    wanted = plain(Nested)
    assert found[0].keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(torch.tensor(found[0][name]), torch.tensor(value), rtol=1e-6), name
        if "total" in name:
            assert torch.tensor(value - found[0][name]).double().abs() < 1e-13


def test_calls_and_samples_cannot_be_told_apart_with_one_sample_for_each_virtual_rank():
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.tensor(0))

        def forward(self, x: Tensor) -> None:
            self.n += 1

    for samples, wrong in ((1, True), (2, False)):
        model = Steps()
        buffers = VirtualRankBuffers(model, ALONE, 2)
        for virtual_rank in range(2):
            with buffers.micro_batch_context(MicroBatchPlan(0, 0, virtual_rank, 0, torch.arange(samples))):
                model(DATA[:samples])
        if wrong:
            with raises("buffer-count-unclear", fitting="sum"):
                buffers.check_mergeable()
        else:
            buffers.check_mergeable()
            with buffers.merged():
                assert int(model.get_buffer("n")) == 1


class Writes(nn.Module):
    """One buffer, which `write` changes in each forward."""

    def __init__(self, start: Tensor, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("own", start)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.own = self.write(self.own, x)
        return x


EQUAL = {
    "by steps": (torch.tensor(1.0), lambda own, x: own * 0.9),
    "complex": (torch.tensor(1j), lambda own, x: own * 0.9),
    "a flag": (torch.tensor(False), lambda own, x: torch.tensor(True)),
    "a number of steps": (torch.tensor(0.0), lambda own, x: own + 1),
    "a vector that follows the weights": (torch.tensor([0.1, 0.7]), lambda own, x: own.flip(0)),
}
UNKNOWN = {
    "a sum": (torch.tensor(0.0), lambda own, x: own + x.sum().float()),
    "complex": (torch.zeros(1, dtype=torch.complex128), lambda own, x: own + x.sum()),
    "the last labels": (torch.zeros(3, dtype=torch.int64), lambda own, x: (x[0] * 9).long()),
    "a flag that is taken back": (torch.ones(3, dtype=torch.bool), lambda own, x: x[0] > 0.2),
}


PER_SAMPLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "samples": lambda own, x: own + len(x),
    "elements": lambda own, x: own + x.numel(),
    "their average": lambda own, x: own * 0.9 + 0.1 * len(x),
}


@pytest.mark.parametrize("kind", PER_SAMPLE)
def test_a_float_that_may_count_samples_must_be_declared_though_all_virtual_ranks_have_equally_many(kind: str):
    model = Writes(torch.zeros(2), PER_SAMPLE[kind])
    with raises("buffer-change-unclear", leaf="own", fitting="sum"):
        forwards(VirtualRankBuffers(model, ALONE, V), model, range(V), range(1))


def test_a_float_that_begins_to_count_samples_later_is_an_error_at_the_next_merge():
    model = Writes(torch.zeros(2), lambda own, x: own)
    buffers = VirtualRankBuffers(model, ALONE, V)
    forwards(buffers, model, range(V), range(2))
    model.write = PER_SAMPLE["samples"]
    forwards(buffers, model, range(V), range(2, 3))
    with raises("buffer-change-unclear"), buffers.merged():
        pass


@pytest.mark.parametrize("kind", EQUAL)
def test_what_is_equal_on_all_virtual_ranks_needs_no_declaration(kind: str):
    start, write = EQUAL[kind]
    model, other = Writes(start.clone(), write), Writes(start.clone(), write)
    buffers = VirtualRankBuffers(model, ALONE, V)
    forwards(buffers, model, range(V), range(STEPS))
    for step in range(STEPS):
        other(DATA[step : step + 2])
    with buffers.merged():
        assert values(model) == values(other)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_nobody_knows_how_to_combine_is_an_error_before_the_first_update_and_at_a_merge(kind: str):
    start, write = UNKNOWN[kind]
    model = nn.Sequential(Writes(start.to(start.dtype), write))
    buffers = VirtualRankBuffers(model, ALONE, V)
    code = "buffer-count-unclear" if start.dtype == torch.int64 else "buffer-not-merged"
    with raises(code, leaf="own", owner="Writes"):
        forwards(buffers, model, range(V), range(1))
    with raises(code), buffers.merged():
        pass
    with raises("export-undeclared-buffer"):
        state_dict_from_source(Kept(buffers.buffer_shards()), {}, V)
    alone = nn.Sequential(Writes(start.clone(), write))
    buffers = VirtualRankBuffers(alone, ALONE, 1)
    forwards(buffers, alone, range(1), range(STEPS))
    with buffers.merged():
        pass


def test_a_buffer_that_differs_later_is_an_error_at_the_next_merge():
    model = Writes(torch.tensor(0.0), lambda own, x: own)
    buffers = VirtualRankBuffers(model, ALONE, V)
    forwards(buffers, model, range(V), range(2))
    with buffers.merged():
        pass
    model.write = lambda own, x: own + x.sum().float()
    forwards(buffers, model, range(V), range(2, 3))
    with raises("buffer-not-merged"), buffers.merged():
        pass


def told_by_one(rank: int, size: int) -> str:
    model = Writes(torch.tensor(0.0), UNKNOWN["a sum"][1])
    try:
        forwards(VirtualRankBuffers(model, world_of(rank, size), V), model, virtual_ranks_of(V, rank, size), range(1))
    except (UsageError, ReportedByPeer) as error:
        return f"{type(error).__name__} {int(error.exit_code)}"
    return ""


@pytest.mark.ranks
def test_every_rank_ends_and_one_tells_why(tmp_path: Path):
    assert run_ranks(told_by_one, 2, tmp_path) == ["UsageError 2", "ReportedByPeer 2"]


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"totl": "sum"}, "names 'totl'.*: total, flag, cx"),
        ({"total": "average"}, "'average'.*sum, mean, max, min, first"),
        ({"flag": "sum"}, "'sum'.*max, min, first"),
        ({"cx": "max"}, "'max'.*sum, mean, first"),
        (["total"], "dictionary"),
    ],
)
def test_a_wrong_declaration_is_an_error_before_the_first_step(declared: Any, words: str):
    model = nn.Module()
    for name, start in {"total": torch.zeros(2), "flag": torch.tensor(True), "cx": torch.zeros(1) * 1j}.items():
        model.register_buffer(name, start)
    vars(model)["buffer_reductions"] = declared
    with pytest.raises(UsageError, match=words):
        VirtualRankBuffers(model, ALONE, 2)


def test_the_vectors_of_spectral_norm_are_those_of_the_first_also_where_virtual_ranks_have_seen_unequal_numbers():
    for model in (parametrizations.spectral_norm(nn.Linear(3, 2)), nn.utils.spectral_norm(nn.Linear(3, 2))):
        model.double().train()
        buffers = VirtualRankBuffers(model, ALONE, 2)
        for virtual_rank in (0, 1, 0):
            with buffers.micro_batch_context(MicroBatchPlan(0, 0, virtual_rank, 0, torch.arange(2))):
                model(DATA[:2])
        buffers.check_mergeable()
        with buffers.merged():
            pass


def test_observers_keep_the_smallest_and_the_largest():
    from torch.ao.quantization.observer import MinMaxObserver

    model = nn.ModuleDict({"observer": MinMaxObserver()})
    buffers = VirtualRankBuffers(model, ALONE, V)
    forwards(buffers, model["observer"], range(V), range(STEPS))
    with buffers.merged():
        assert float(model["observer"].get_buffer("min_val")) == float(DATA.float().min())
        assert float(model["observer"].get_buffer("max_val")) == float(DATA.float().max())


@pytest.mark.parametrize("virtual_ranks", [1, 2])
@pytest.mark.parametrize(
    "write",
    [lambda own, x: torch.cat([own, x])[-10:], lambda own, x: own.resize_(len(own) + 1, 3), lambda own, x: own.float()],
    ids=["a growing bank", "in place", "type"],
)
def test_another_shape_or_type_is_an_error_in_the_forward_that_made_it(virtual_ranks: int, write: Any):
    model = nn.Sequential(Writes(torch.zeros(0, 3).double(), write))
    buffers = VirtualRankBuffers(model, ALONE, virtual_ranks)
    inside = buffers.micro_batch_context(MicroBatchPlan(0, 0, 0, 0, torch.arange(2)))
    with raises("buffer-changes-shape", leaf="own", shape=(0, 3), dtype=torch.float64), inside:
        model(DATA[:2])


def test_what_the_script_assigns_between_steps_is_that_of_all_virtual_ranks():
    """A count that begins anew in each epoch, a temperature; in place, or another tensor."""
    model = Counts()
    model.register_buffer("temperature", torch.tensor(1.0))
    model.seen.fill_(3)
    buffers = VirtualRankBuffers(model, ALONE, V)
    model.get_buffer("total").fill_(2.0)  # before the first forward
    forwards(buffers, model, range(V), range(2))
    model.seen.zero_()
    model.codes = torch.zeros(5, dtype=torch.int64)
    model.get_buffer("temperature").fill_(0.5)
    model.get_buffer("total").zero_()
    forwards(buffers, model, range(V), range(2, 3))
    last = Counts()
    last.get_buffer("total").zero_()
    last(DATA[2 * BATCH : 3 * BATCH])
    with buffers.merged():
        found = values(model)
    assert found["temperature"] == 0.5 and found["seen"] == BATCH
    assert found["codes"] == last.codes.tolist() and found["total"] == pytest.approx(float(last.get_buffer("total")))
    model.get_buffer("total").mul_(0.5)  # of which value?
    with raises("buffer-changed-between-steps"):
        buffers.save_copies()


def test_a_step_that_is_left_out_counts_nothing():
    model = Counts()
    buffers = VirtualRankBuffers(model, ALONE, V)
    forwards(buffers, model, range(V), range(1))
    with buffers.merged():
        before = values(model)
    forwards(buffers, model, range(V), range(1, 2))
    buffers.restore_copies()
    with buffers.merged():
        assert values(model) == before


class WithNorm(nn.Module):
    """Synchronised batch norm, whose ranks share one set of buffers, beside a sum."""

    buffer_reductions: ClassVar = {"total": "sum"}

    def __init__(self) -> None:
        super().__init__()
        self.norm = SyncBatchNorm(3).double()
        self.register_buffer("total", torch.tensor(0.5).double())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total += x.sum()
        return self.norm(x)


def summed_beside_norm(rank: int, size: int, folder: str, begin: int, end: int) -> float:
    model = WithNorm()
    buffers = VirtualRankBuffers(model, world_of(rank, size), V)
    if begin:
        buffers.load(opened(sorted(Path(folder, f"{begin}").iterdir())))
    share = virtual_ranks_of(V, rank, size)
    for step in range(begin, end):
        buffers.save_copies()
        batch = torch.cat([DATA[step * BATCH + v : (step + 1) * BATCH : V] for v in share])
        with buffers.micro_batch_context(MicroBatchPlan(0, step, share.start, 0, torch.arange(len(batch)))):
            model(batch)
            buffers.check_mergeable()
    save(buffers.buffer_shards(), Path(folder, f"{end}", f"{rank}"), rank, size)
    with buffers.merged():
        return float(model.get_buffer("total"))


@pytest.mark.ranks
def test_a_sum_beside_synchronised_batch_norm_is_kept_by_other_numbers_of_ranks(tmp_path: Path):
    for size, then in ((1, 2), (2, 1), (2, 3)):
        folder = tmp_path / f"{size}-{then}"
        (folder / "2").mkdir(parents=True)
        (folder / f"{STEPS}").mkdir()
        run_ranks(summed_beside_norm, size, tmp_path, str(folder), 0, 2)
        found = run_ranks(summed_beside_norm, then, tmp_path, str(folder), 2, STEPS)
        assert found == pytest.approx([0.5 + float(DATA.sum())] * then, rel=1e-12)


def test_weights_to_begin_with_are_where_sums_begin():
    model = Counts()
    buffers = VirtualRankBuffers(model, ALONE, V)
    buffers.load(
        Kept([TensorShard("buffers/total", torch.tensor(7.0).double()), TensorShard("buffers/seen", torch.tensor(9))])
    )
    forwards(buffers, model, range(V), range(1))
    with buffers.merged():
        found = values(model)
    assert found["seen"] == 9 + BATCH and found["total"] == pytest.approx(7 + float(DATA[:BATCH].sum()))
