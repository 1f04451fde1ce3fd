"""SyncBatchNorm on W ranks equals torch's BatchNorm on the union of their inputs, in float64 to 1e-13."""

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.run_ranks import run_ranks
from torch import Tensor, nn

from paceline.collectives.batchnorm import Moments, SyncBatchNorm, convert_sync_batchnorm, merge_moments

CHANNELS = 3
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@dataclass(frozen=True)
class Case:
    kind: type[BatchNorm]
    rest: tuple[int, ...]  # the dimensions after (N, C)
    counts: tuple[tuple[int, ...], ...]  # per step, per rank: samples
    momentum: float | None = 0.1
    affine: bool = True
    tracked: bool = True


CASES = [
    Case(nn.BatchNorm1d, (), ((5, 2, 4), (1, 3, 1))),
    Case(nn.BatchNorm1d, (6,), ((2, 0, 1), (0, 3, 0)), momentum=None),
    Case(nn.BatchNorm2d, (4, 3), ((3, 1, 2), (2, 1, 0)), affine=False),
    Case(nn.BatchNorm2d, (2, 2), ((3, 1, 2),), tracked=False),
    Case(nn.BatchNorm3d, (2, 3, 2), ((1, 2, 1), (4, 0, 1)), momentum=0.7),
]


def relative(mine: Tensor, wanted: Tensor) -> float:
    assert mine.shape == wanted.shape
    assert mine.dtype == wanted.dtype
    if wanted.numel() == 0:
        return 0.0
    return float((mine - wanted).abs().max() / wanted.abs().max())


def layers(case: Case, group: dist.ProcessGroup | None, dtype: torch.dtype) -> tuple[BatchNorm, SyncBatchNorm]:
    torch.manual_seed(5)
    plain = case.kind(
        CHANNELS, momentum=case.momentum, affine=case.affine, track_running_stats=case.tracked, dtype=dtype
    )
    if case.affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    ours = convert_sync_batchnorm(copy.deepcopy(plain), group)
    assert isinstance(ours, SyncBatchNorm)
    return plain, ours


def both(
    plain: BatchNorm, ours: SyncBatchNorm, union: Tensor, share: Tensor, mine: slice
) -> list[tuple[Tensor, Tensor]]:
    whole, part = union.clone().requires_grad_(), share.clone().requires_grad_()
    plain.zero_grad()
    ours.zero_grad()
    wanted, output = plain(whole), ours(part)
    upstream = torch.randn_like(union)
    (wanted * upstream).sum().backward()
    (output * upstream[mine]).sum().backward()
    assert whole.grad is not None and part.grad is not None
    return [(output, wanted[mine]), (part.grad, whole.grad[mine])]


def assert_equal_layers(plain: BatchNorm, ours: SyncBatchNorm, group: dist.ProcessGroup) -> None:
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        dist.all_reduce(p.grad, group=group)
        assert relative(p.grad, q.grad) <= 1e-13
    for b, c in zip(ours.buffers(), plain.buffers(), strict=True):
        assert relative(b, c) <= 1e-13
        everybodys = [torch.empty_like(b) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everybodys, b, group=group)
        assert all(torch.equal(b, other) for other in everybodys)


def equal_to_the_union(case: Case, rank: int, group: dist.ProcessGroup) -> None:
    plain, ours = layers(case, group, torch.float64)
    size = dist.get_world_size(group)
    for step, counts in enumerate(case.counts):
        counts = counts[:size]
        if sum(counts) < 2:
            continue
        torch.manual_seed(step)
        union = 3 + 2 * torch.randn(sum(counts), CHANNELS, *case.rest, dtype=torch.float64)
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        for found, wanted in both(plain, ours, union, union[mine], mine):
            assert relative(found, wanted) <= 1e-13
        assert_equal_layers(plain, ours, group)


def stand_in(rank: int, group: dist.ProcessGroup) -> None:
    """Rank 1 forwards a dummy batch, the first time with NaN."""
    case = Case(nn.BatchNorm2d, (2, 2), ())
    plain, ours = layers(case, group, torch.float64)
    for filler in (torch.nan, 7.0):
        torch.manual_seed(0)
        union = torch.randn(5, CHANNELS, 2, 2, dtype=torch.float64)
        share = {0: union[:3], 1: torch.full_like(union[:1], filler), 2: union[3:]}[rank]
        ours.counted = rank != 1
        mine = {0: slice(3), 1: slice(1), 2: slice(3, 5)}[rank]
        (output, wanted), (grad, wanted_grad) = both(plain, ours, union, share, mine)
        assert output.shape == share.shape
        if rank == 1:
            assert torch.equal(grad, torch.zeros_like(share))
            assert all(p.grad is not None and torch.equal(p.grad, torch.zeros_like(p)) for p in ours.parameters())
            mean, var = union.mean((0, 2, 3)), union.var((0, 2, 3), correction=0)
            shape = (1, CHANNELS, 1, 1)
            expected = (filler - mean) / (var + ours.eps).sqrt() * ours.weight + ours.bias
            torch.testing.assert_close(output[:, :, :1, :1], expected.view(shape), rtol=1e-12, atol=0, equal_nan=True)
        else:
            assert relative(output, wanted) <= 1e-13
            assert relative(grad, wanted_grad) <= 1e-13
        assert_equal_layers(plain, ours, group)


def nobody_and_one(rank: int, group: dist.ProcessGroup) -> None:
    case = Case(nn.BatchNorm1d, (), ())
    _, ours = layers(case, group, torch.float64)
    ours(torch.randn(4, CHANNELS, dtype=torch.float64))
    before = {name: b.clone() for name, b in ours.named_buffers()}
    ours.counted = rank != 0  # a stand-in on rank 0, empty tensors elsewhere
    share = torch.full((1 if rank == 0 else 0, CHANNELS), 2.0, dtype=torch.float64, requires_grad=True)
    output = ours(share)
    output.sum().backward()
    assert all(torch.equal(b, before[name]) for name, b in ours.named_buffers())
    ours.counted = True
    ours.eval()
    assert relative(output, ours(share)) <= 1e-13  # by the running statistics
    assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())
    without = SyncBatchNorm(CHANNELS, affine=False, track_running_stats=False, group=group)
    assert without(torch.zeros(0, CHANNELS)).shape == (0, CHANNELS)  # no statistics of any kind
    ours.train()
    with pytest.raises(ValueError, match="more than 1 value per channel, all ranks together have 1"):
        ours(torch.zeros(1 if rank == 2 else 0, CHANNELS, dtype=torch.float64))  # on every rank


def smaller_types(rank: int, group: dist.ProcessGroup) -> None:
    counts = (6, 3, 4)
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    torch.manual_seed(0)
    # A large mean: E[x^2] - E[x]^2 would have no correct digit left in float32.
    for dtype, mean, tolerance in ((torch.float32, 3000.0, 1e-3), (torch.bfloat16, 2.0, 0.01)):
        union = (mean + torch.randn(sum(counts), CHANNELS, 4, 4)).to(dtype)
        plain = nn.BatchNorm2d(CHANNELS, dtype=torch.float64)
        ours = convert_sync_batchnorm(nn.BatchNorm2d(CHANNELS), group)  # weights stay float32, as under mixed precision
        whole, part = union.double().requires_grad_(), union[mine].clone().requires_grad_()
        upstream = torch.randn_like(whole).to(dtype)
        wanted, output = plain(whole), ours(part)
        assert output.dtype == dtype
        (wanted * upstream.double()).sum().backward()
        (output * upstream[mine]).sum().backward()
        assert whole.grad is not None and part.grad is not None
        assert relative(output.double(), wanted[mine]) < tolerance
        assert relative(part.grad.double(), whole.grad[mine]) < tolerance
        assert relative(ours.get_buffer("running_var").double(), plain.get_buffer("running_var")) < 1e-5
        assert ours.get_buffer("running_var").dtype == torch.float32


def eval_is_alone(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 0:  # a collective would wait for the others
        for case in CASES[::2]:
            plain, ours = layers(case, group, torch.float32)
            plain.eval()
            ours.eval()
            images = torch.randn(3, CHANNELS, *case.rest)
            assert torch.equal(ours(images), plain(images))


def beside_buckets(rank: int, group: dist.ProcessGroup) -> None:
    """A separate group keeps messages of batch norms and buckets apart, in any order of the two on each rank."""
    ours = convert_sync_batchnorm(nn.BatchNorm1d(CHANNELS), group)
    mine = torch.full((1, CHANNELS), float(rank))
    if rank == 0:
        first = dist.all_reduce(big := torch.ones(7), async_op=True)
        output = ours(mine)
    else:
        output = ours(mine)
        first = dist.all_reduce(big := torch.ones(7), async_op=True)
    assert first is not None
    first.wait()
    assert torch.equal(big, torch.full((7,), 3.0))
    torch.testing.assert_close(output, torch.full((1, CHANNELS), (rank - 1) * 1.5**0.5))


def everything(rank: int, world_size: int) -> None:
    groups = [dist.new_group(list(range(size))) for size in (1, 2, 3)]
    for size, group in enumerate(groups, start=1):
        if rank < size:
            assert isinstance(group, dist.ProcessGroup)
            for case in CASES:
                equal_to_the_union(case, rank, group)
    *_, own = groups
    stand_in(rank, own)
    nobody_and_one(rank, own)
    smaller_types(rank, own)
    eval_is_alone(rank, own)
    beside_buckets(rank, own)


@pytest.mark.ranks
def test_ranks_equal_one_process(tmp_path: Path) -> None:
    run_ranks(everything, 3, tmp_path)  # in one start: it costs more than all checks; a traceback names the check


# ---- pure


@settings(deadline=None)  # the first example pays for torch's own start
@given(st.lists(st.lists(st.floats(-100, 100), max_size=5), max_size=6))
def test_moments_combine_to_those_of_the_union(sets: list[list[float]]) -> None:
    def of(values: list[float]) -> Moments:
        x = torch.tensor(values, dtype=torch.float64)
        mean = x.mean() if len(x) else x.new_zeros(())
        return Moments(x.new_tensor(len(x)), mean.reshape(1), (x - mean).square().sum().reshape(1))

    total = of([])
    for values in sets:
        total = merge_moments(total, of(values))
    for mine, wanted in zip(total, of([v for values in sets for v in values]), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-9)


def test_without_a_process_group_it_is_torchs_to_the_bit() -> None:
    plain = nn.BatchNorm2d(2)
    ours = convert_sync_batchnorm(copy.deepcopy(plain))
    images = torch.randn(3, 2, 4, 4)
    assert torch.equal(ours(images), plain(images))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), plain.buffers(), strict=True))


def test_convert_changes_the_class_and_nothing_else() -> None:
    shared = nn.BatchNorm1d(4, eps=0.1, momentum=None)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Sequential(shared, nn.BatchNorm2d(2), nn.BatchNorm3d(2)))
    model.eval()
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    keys = list(model.state_dict())
    assert convert_sync_batchnorm(model) is model
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert list(model.state_dict()) == keys
    assert all(after[name] is tensor for name, tensor in before.items()) and len(after) == len(before)
    assert model[1] is model[2][0]  # type: ignore[index]
    assert [type(m) is SyncBatchNorm for m in model.modules()].count(True) == 3
    assert isinstance(model[1], SyncBatchNorm) and model[1].counted and not model[1].training
    assert (model[1].eps, model[1].momentum) == (0.1, None)
    model.load_state_dict(model.state_dict())
    assert convert_sync_batchnorm(model) is model  # a second time does nothing


def test_convert_refuses_what_it_cannot_keep_right() -> None:
    class Special(nn.BatchNorm1d):
        pass

    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(Special(3)))
    with pytest.raises(TypeError, match=r"'1\.0', a Special"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize("shape", [(3,), (2, 4), (2, 4, 3)])
def test_an_input_of_other_channels_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \(N, 3, \.\.\.\)"):
        SyncBatchNorm(3)(torch.zeros(shape))
