"""Compressed sums over hosts: no value is lost, only delayed, and all ranks get the same bits.

Each rank reports a different `memory.node_key`, so that one host counts as several.
"""

from itertools import product
from pathlib import Path

import pytest
import torch
from tests.collectives.test_hosts import put_on
from tests.run_ranks import run_ranks
from torch import Tensor, nn

from paceline.collectives.communicator import make_communicator
from paceline.collectives.inter_node import BLOCK, Bf16Quantizer, Int8Quantizer, InterNodeAllReduce, PowerSgdCodec
from paceline.collectives.shm_communicator import node_topology

SHAPES = ((40, 30), (7,), (3, 50, 20), (), (600,))
OF_NOBODY, OF_ONE_HOST = 1, 4  # which tensor
STEPS = 12
WAYS = (None, "bf16", "int8", "powersgd")
SIZES = (2, 1)  # ranks of each host: 2 hosts, then 4


def made(host: int, step: int, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    """The tensors of a host in a step. No host ever has one of them; one is on the first host only, in two steps."""
    generator = torch.Generator().manual_seed(100 * host + step)
    tensors: list[Tensor | None] = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES]
    tensors[OF_NOBODY] = None
    if host or step > 1:
        tensors[OF_ONE_HOST] = None
    return tensors


def flat(tensors: list[Tensor | None]) -> Tensor:
    parts = [torch.zeros(s, dtype=torch.float64) if t is None else t for s, t in zip(SHAPES, tensors, strict=True)]
    return torch.cat([part.reshape(-1).double() for part in parts])


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]


def summed(rank: int, world_size: int, folder: Path) -> dict[object, tuple[list[Tensor], dict[str, Tensor], list[int]]]:
    """For each size and codec: the sums of all steps, the residuals, and which tensors this rank sends."""
    found: dict[object, tuple[list[Tensor], dict[str, Tensor], list[int]]] = {}
    for size in SIZES:
        put_on(rank // size, rank, world_size, folder)
        place = node_topology(make_communicator())
        assert place is not None
        assert (place.rank, place.node_count, place.node_index, place.memory.size) == (
            rank,
            4 // size,
            rank // size,
            size,
        )
        for way in WAYS:
            again: list[list[Tensor]] = []
            for _ in range(2):
                across, sums = InterNodeAllReduce(parameters(), place, way), list[Tensor]()
                for step in range(STEPS):
                    across.save_state()
                    across.sum(made(place.node_index, 99))  # of a step that is left out
                    across.restore_state()
                    one = across.sum(made(place.node_index, step))
                    # sent whole, in the step in which it is; what is held back of it still comes
                    assert [i for i, tensor in enumerate(one) if tensor is None] == [OF_NOBODY]
                    sums.append(flat(one))
                again.append(sums)
            assert all(torch.equal(a, b) for a, b in zip(*again, strict=True)), way
            found[size, way] = again[0], {**across.state(), "host": torch.tensor(place.node_index)}, across._carried
    return found


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(720)
def test_what_is_held_back_arrives_later_and_all_ranks_come_to_the_same_bits(tmp_path: Path) -> None:
    of_rank = run_ranks(summed, 4, tmp_path, tmp_path, timeout=600)
    for size, way in product(SIZES, WAYS):
        hosts = 4 // size
        given = torch.stack([sum(flat(made(host, step)) for host in range(hosts)) for step in range(STEPS)])
        (sums, _, _), *others = [found[size, way] for found in of_rank]
        for other, _, _ in others:
            assert all(torch.equal(a, b) for a, b in zip(sums, other, strict=True)), (size, way)
        late = given.sum(0) - torch.stack(sums).sum(0)
        if way is None:
            assert late.abs().max() < 1e-12
            continue
        assert late.abs().max() > 1e-4, "nothing was rounded"
        held = sum(held_back(state, carried) for _, state, carried in (found[size, way] for found in of_rank))
        torch.testing.assert_close(late, held, rtol=0, atol=1e-12, msg=lambda m, at=(size, way): f"{at}: {m}")


def held_back(state: dict[str, Tensor], carried: list[int]) -> Tensor:
    """(n,): the residuals of one rank, of its host's values and of the sums that it sends, at their elements."""
    found = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    sizes = [found[i].numel() for i in carried]
    if "held" in state:
        hosts = len(state["held"]) // len(state["owed"])
        owed = torch.zeros(hosts, len(state["owed"]), dtype=torch.float64)
        owed[state["host"]] = state["owed"]
        whole = state["held"][: sum(sizes)] + owed.flatten()[: sum(sizes)]
        for i, part in zip(carried, whole.split(sizes), strict=True):
            found[i] = part.view(SHAPES[i])
    for name, value in state.items():
        if name.startswith("held/"):
            i = carried[int(name.removeprefix("held/"))]
            found[i] = value.view(SHAPES[i])
    return flat([*found])


def values(rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    spread = 10.0 ** torch.arange(rows * 2 * BLOCK, dtype=torch.float64).fmod(9).sub(4)
    return (torch.randn(rows * 2 * BLOCK, generator=generator, dtype=torch.float64) * spread).view(rows, 2 * BLOCK)


def test_numbers_come_back_within_half_a_step_and_in_the_bytes_that_are_promised() -> None:
    found = values()
    packed = Int8Quantizer().pack(found)
    assert packed.shape == (3, 2 * (BLOCK + 4)) and packed.dtype == torch.uint8
    largest = found.view(3, 2, BLOCK).abs().amax(-1, keepdim=True)
    error = (Int8Quantizer().unpack(packed, torch.float64) - found).view(3, 2, BLOCK).abs()
    assert (error <= largest / 127 * 0.5001).all() and error.max() > 0
    packed = Bf16Quantizer().pack(found)
    assert packed.shape == (3, 4 * BLOCK)
    assert ((Bf16Quantizer().unpack(packed, torch.float64) - found).abs() <= found.abs() * 2**-8).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("code", [Int8Quantizer(), Bf16Quantizer()], ids=["int8", "bf16"])
def test_what_is_not_finite_stays_so(code: Int8Quantizer | Bf16Quantizer, bad: float) -> None:
    found = values()
    found[1, BLOCK + 7] = bad
    back = code.unpack(code.pack(found), torch.float64)
    assert not back[1, BLOCK + 7].isfinite()
    assert back[0].isfinite().all() and back[2].isfinite().all()


@pytest.mark.parametrize("code", [Int8Quantizer(), Bf16Quantizer()], ids=["int8", "bf16"])
def test_zeros_and_what_is_too_small_for_a_scale_are_zeros(code: Int8Quantizer | Bf16Quantizer) -> None:
    assert not code.unpack(code.pack(torch.zeros(2, BLOCK)), torch.float32).any()
    assert Int8Quantizer().unpack(Int8Quantizer().pack(torch.full((1, BLOCK), 1e-38)), torch.float32).isfinite().all()


def test_a_matrix_that_is_hardly_smaller_in_factors_is_sent_whole() -> None:
    shapes = [torch.Size(s) for s in ((40, 30), (9, 9), (100,), (64, 3, 3, 3))]
    state = PowerSgdCodec(shapes, torch.float32, 4).initial_state()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "held/0": (40, 30), "basis/0": (30, 4), "held/3": (64, 27), "basis/3": (27, 4)
    }  # fmt: skip
