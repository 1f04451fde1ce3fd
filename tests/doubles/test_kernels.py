"""Operations on many gradients use the same number of kernels as on a few, with the bits of one at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.doubles.syncs import on_the_cpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.collectives import shards as shares
from paceline.collectives.buckets import divide, divide_in_place
from paceline.collectives.control import scale_and_check_gradients
from paceline.collectives.norm import ShardedNorm, split_blocks_evenly
from paceline.collectives.shards import ParameterShards
from paceline.collectives.sum_tree import add_gradient_lists, add_optional

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)
THREE = torch.tensor(3.0, dtype=torch.float64)


class Kernels(TorchDispatchMode):
    """Counts operations that compute, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """The modules that torch imports for the first such mode stay loaded after a test."""
    with Kernels():
        torch.zeros(1)


def gradients(count: int, types: Sequence[torch.dtype] = (torch.float32,), seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3 + 7 * i, generator=generator).to(types[i % len(types)]) for i in range(count)]


def with_gradients(found: Sequence[Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(one)) for one in found]
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
    return parameters


def norm_of(found: Sequence[Tensor], missing: int | None = None) -> float:
    sizes = [len(one) for one in found]
    values = {i: one for i, one in enumerate(found) if i != missing}
    return ShardedNorm(sizes, split_blocks_evenly(sizes, 1), 0, CPU)(values).result()


def dividing(count: int) -> Callable[[], object]:
    found = gradients(count)
    return lambda: divide_in_place(found, THREE)


def scaling(count: int) -> Callable[[], object]:
    parameters = with_gradients(gradients(count))
    return lambda: scale_and_check_gradients(parameters, THREE, torch.device("meta"))  # as on a GPU


def adding(count: int) -> Callable[[], object]:
    one, other = gradients(count), gradients(count, seed=1)
    return lambda: add_gradient_lists([*one], [*other])


def packing(count: int) -> Callable[[], object]:
    bucket = ParameterShards(nn.ParameterList(gradients(count)), 0, 2).buckets[0]
    found = [torch.ones_like(parameter) for parameter in bucket.parameters]
    return lambda: shares._packed(bucket, [*found], 2)


@pytest.mark.parametrize("prepared", [dividing, scaling, adding, packing])
def test_ten_times_as_many_gradients_take_no_more_kernels(prepared: Callable[[int], Callable[[], object]]) -> None:
    counts: list[int] = []
    for count in (6, 60):
        act = prepared(count)
        with Kernels() as seen:
            act()
        counts.append(seen.count)
    assert 0 < counts[0] == counts[1] < 7  # scaled, and judged


def test_a_norm_takes_a_few_more_for_each_level_of_its_tree() -> None:
    counts: list[int] = []
    for count in (16, 160):
        found = gradients(count)
        with on_the_cpu(), Kernels() as seen:
            norm_of(found)
        counts.append(seen.count)
    assert counts[1] - counts[0] <= 3 * 7  # 160 of these are 2**7 times as many blocks


def test_each_is_divided_as_alone() -> None:
    for divisor in (3.0, THREE):
        found, wanted = gradients(12, TYPES), [divide(one, divisor) for one in gradients(12, TYPES)]
        divide_in_place(found, divisor)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_each_is_scaled_as_alone() -> None:
    parameters = with_gradients(gradients(12, TYPES))
    parameters[3].grad = None
    scale_and_check_gradients(parameters, 1 / THREE, CPU)
    for index, (parameter, alone) in enumerate(zip(parameters, gradients(12, TYPES), strict=True)):
        assert (parameter.grad is None) == (index == 3)
        assert parameter.grad is None or torch.equal(parameter.grad, alone.mul_(1 / THREE))


def test_each_is_added_as_alone() -> None:
    def with_gaps(seed: int) -> list[Tensor | None]:
        return [None if i % 4 == seed else one for i, one in enumerate(gradients(12, TYPES, seed))]

    wanted = [add_optional(*pair) for pair in zip(with_gaps(1), with_gaps(2), strict=True)]
    wanted[0] = None
    left, right = with_gaps(1), with_gaps(2)
    left[0] = right[0] = None
    for one, other in zip(add_gradient_lists(left, right) or [], wanted, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("missing", [None, 4])
def test_a_norm_has_the_same_bits_with_all_of_a_type_at_once(
    missing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for types in (TYPES, TYPES[:1]):
        alone = norm_of(gradients(40, types), missing)
        for elements in (128, 1024, 1 << 20):  # shares beyond a chunk, several chunks, one
            monkeypatch.setattr("paceline.collectives.norm.CHUNK_OF_GPU", elements)
            with on_the_cpu():
                assert norm_of(gradients(40, types), missing) == alone
