"""The full state on every rank has each shard at its elements, bit for bit, for any type."""

import hashlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.run_ranks import run_ranks
from torch import Tensor

from paceline.checkpoint.shards import DTYPE_NAMES, gather_full_state, hash_tensors
from paceline.checkpoint.state import TensorShard
from paceline.rank.world import World


def tensors() -> dict[str, Tensor]:
    """One of each type, with negative numbers, NaN and -0 if the type has them; also scalars and empty tensors."""
    generator = torch.Generator().manual_seed(3)
    found: dict[str, Tensor] = {}
    for dtype, word in DTYPE_NAMES.items():
        base = (torch.randn(5, 3, generator=generator) * 50).to(dtype)
        if dtype.is_floating_point:
            base[0] = torch.tensor([float("nan"), -0.0, float("-inf")])
        found |= {f"{word}/matrix": base, f"{word}/scalar": base[1, 1].clone(), f"{word}/none": base[:, :0]}
    return found


def as_bytes(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def everything(rank: int, world_size: int) -> str:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    held: list[TensorShard] = []
    for index, (name, tensor) in enumerate(tensors().items()):
        held.append(TensorShard(f"replicated/{name}", tensor))
        if rank == index % world_size:  # one rank alone has it
            held.append(TensorShard(f"own/{name}", tensor.t() if tensor.ndim == 2 else tensor, replicated=False))
        cut = sorted({0, tensor.numel() // 3, tensor.numel()})  # two of the ranks have a run of it each
        for part, (start, stop) in enumerate(pairwise(cut)):
            if rank == (index + part) % world_size:
                run = tensor.flatten()[start:stop]
                held.append(TensorShard(f"cut/{name}", run, tensor.shape, start, replicated=False))
    found = gather_full_state(held if rank else held[::-1], world)
    wanted = {f"{kind}/{name}": tensor for name, tensor in tensors().items() for kind in ("replicated", "own", "cut")}
    wanted = {n: t.t() if n.startswith("own/") and t.ndim == 2 else t for n, t in wanted.items()}
    wanted = {n: t for n, t in wanted.items() if not n.startswith("cut/") or t.numel()}
    assert list(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert as_bytes(found[name]) == as_bytes(tensor), name
    assert list(gather_full_state([], world)) == []
    return hash_tensors(found)


@pytest.mark.ranks
@pytest.mark.timeout(450)
def test_every_rank_gets_every_tensor_to_the_bit(tmp_path: Path) -> None:
    digests = run_ranks(everything, 3, tmp_path, timeout=420)
    assert len(set(digests)) == 1


def test_the_digest_is_over_names_types_shapes_and_bits_and_nothing_else() -> None:
    base = {"a": torch.tensor([[1.0, 0.0]]), "b": torch.tensor(2)}
    digest = hash_tensors(base)
    same = {"b": torch.tensor(2), "a": torch.tensor([[1.0, 9.0], [0.0, 9.0]])[:, :1].t()}  # other order, other memory
    assert hash_tensors(same) == digest
    others = [
        {**base, "c": torch.ones(0)},
        {"a": base["a"]},
        {"A": base["a"], "b": base["b"]},
        {**base, "a": base["a"].flatten()},
        {**base, "a": base["a"].view(torch.int32)},
        {**base, "a": torch.tensor([[1.0, -0.0]])},
        {**base, "b": torch.tensor([2])},
        {"a": base["b"], "b": base["a"]},
    ]
    digests = {digest, *(hash_tensors(other) for other in others)}
    assert len(digests) == len(others) + 1


def test_the_digest_stays_the_same_in_later_versions() -> None:
    # Written down in run folders: another digest for the same state would read as another result.
    state = {"model/w": torch.tensor([1.5, -0.0], dtype=torch.bfloat16), "optimizer/w/step": torch.tensor(3)}
    words = b"model/w torch.bfloat16 (2,)\n\xc0\x3f\x00\x80optimizer/w/step torch.int64 ()\n\x03" + bytes(7)
    assert hash_tensors(state) == hashlib.sha256(words).hexdigest()
