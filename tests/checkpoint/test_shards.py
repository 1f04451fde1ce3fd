"""A rank's part of a state as a file is read as it was written, completely or in parts, or raises an error."""

import inspect
import itertools
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.errors import raises
from torch import Tensor

from paceline.checkpoint.shards import (
    DTYPE_NAMES,
    METADATA_KEY,
    ShardFileSource,
    make_shard_layout,
    read_shard_file_metadata,
    select_shards_to_save,
    serialize_shard_file,
)
from paceline.checkpoint.state import TensorShard
from paceline.runs.checkpoint_format import DamagedCheckpoint, Piece

META = {"step": 7, "words": "Grüße"}


def written(path: Path, part: list[TensorShard], meta: dict[str, Any] | None = None) -> tuple[Path, tuple[Piece, ...]]:
    places = make_shard_layout(part)
    buffer = torch.full((places.total_bytes,), 255, dtype=torch.uint8)  # what was in the memory before
    serialize_shard_file(buffer, places, META if meta is None else meta)
    path.write_bytes(buffer.numpy().tobytes())
    return path, places.pieces


def same(a: Tensor | None, b: Tensor) -> bool:
    assert a is not None
    as_bytes = [t.contiguous().flatten().view(torch.uint8) if t.numel() else t.new_empty(0) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def tensors_of_all_types() -> dict[str, Tensor]:
    """Every type, each as matrix, scalar, empty, strided and transposed."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    for dtype, word in DTYPE_NAMES.items():
        base = (torch.randn(5, 3, generator=generator) * 50).to(dtype)
        found |= {f"{word}/matrix": base, f"{word}/scalar": base[1, 1].clone(), f"{word}/none": base[:, :0]}
        found |= {f"{word}/turned": base.t(), f"{word}/gaps": base[::2, 1], f"{word}/expanded": base[0].expand(4, 3)}
    found["special"] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    return found


def test_all_types_come_back_and_plain_safetensors_reads_them_too(tmp_path: Path) -> None:
    tensors = tensors_of_all_types()
    path, pieces = written(tmp_path / "file", [TensorShard(name, tensor) for name, tensor in tensors.items()])
    assert read_shard_file_metadata(path) == (META, pieces)
    shards, plain = ShardFileSource([(path, pieces)]), load_file(path)
    assert shards.names("") == sorted(tensors) and shards.names("F64/") == sorted(n for n in tensors if n[:4] == "F64/")
    assert plain.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert shards.shape(name) == tensor.shape
        assert same(shards.tensor(name), tensor), name
        pairs = tensor.is_complex()  # real and imaginary part
        assert same(torch.view_as_complex(plain[name]) if pairs else plain[name], tensor), name
    assert shards.tensor("other") is None


def test_what_is_read_is_a_copy(tmp_path: Path) -> None:
    shards = ShardFileSource([written(tmp_path / "file", [TensorShard("a", torch.ones(3))])])
    first = shards.tensor("a")
    assert first is not None
    first.zero_()
    assert same(shards.tensor("a"), torch.ones(3))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_slice_of_a_tensor_in_pieces_is_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    total = torch.Size(shape).numel()
    whole = torch.arange(total).to(data.draw(st.sampled_from([torch.float32, torch.int16, torch.bool]))).view(shape)
    inner = data.draw(st.sets(st.integers(0, total), max_size=4))
    at = [0, *sorted(inner), total]
    files = []
    for number, (start, stop) in enumerate(itertools.pairwise(at)):
        run = whole.flatten()[start:stop]
        other = TensorShard(f"other/{number}", torch.ones(number, dtype=torch.float64))
        held = TensorShard("x", run, torch.Size(shape), start, replicated=False)
        files.append(written(folder / str(number), data.draw(st.permutations([held, other]))))
    shards = ShardFileSource(data.draw(st.permutations(files)))
    assert same(shards.tensor("x"), whole)
    for _ in range(4):
        start, stop = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
        assert same(shards.tensor("x", start, stop), whole.flatten()[start:stop])


def test_a_tensor_with_a_part_missing_is_damaged_and_never_filled_with_anything(tmp_path: Path) -> None:
    def run(start: int, stop: int) -> tuple[Path, tuple[Piece, ...]]:
        held = TensorShard("x", torch.ones(stop - start), torch.Size([10]), start, replicated=False)
        return written(tmp_path / f"{start}-{stop}", [held])

    for files in ([run(0, 4)], [run(4, 10)], [run(0, 4), run(6, 10)], [run(0, 4), run(0, 6)]):
        with pytest.raises(DamagedCheckpoint, match="x"):
            ShardFileSource(files).tensor("x")
    assert same(ShardFileSource([run(0, 4), run(6, 10)]).tensor("x", 7, 9), torch.ones(2))  # what is there can be had
    with pytest.raises(DamagedCheckpoint, match="x"):
        ShardFileSource([run(0, 4), run(4, 10)]).tensor("x", 5, 11)  # more than the tensor has


# ---- who saves what


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 500), max_size=30), st.integers(1, 9), st.randoms(use_true_random=False))
def test_each_replicated_tensor_has_one_rank_and_loads_are_even(sizes: list[int], world_size: int, random: Any) -> None:
    state = [TensorShard(f"t{i}", torch.empty(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    parts: list[list[TensorShard]] = []
    for rank in range(world_size):
        own = TensorShard(f"own/{rank}", torch.empty(rank), replicated=False)
        seen = [*state, own]
        random.shuffle(seen)  # no rank's order matters
        parts.append(select_shards_to_save(seen, rank, world_size))
        assert [h.name for h in parts[-1] if not h.replicated] == [own.name]
    saved = [h.name for part in parts for h in part if h.replicated]
    assert sorted(saved) == sorted(h.name for h in state)
    loads = [sum(h.tensor.nbytes for h in part if h.replicated) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0)


# ---- what is not finished


def test_a_writer_that_is_stopped_at_any_moment_leaves_nothing_that_is_taken_for_a_state(tmp_path: Path) -> None:
    old, new = (
        [TensorShard("a", torch.ones(50)), TensorShard("b", torch.ones(3))],
        [TensorShard("a", torch.zeros(50)), TensorShard("b", torch.ones(3))],
    )
    places = make_shard_layout(old)
    buffer = torch.empty(places.total_bytes, dtype=torch.uint8)
    serialize_shard_file(buffer, places, {"step": 1})
    before = buffer.numpy().tobytes()
    moments: list[bytes] = []

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if frame.f_code is code or (frame.f_back is not None and frame.f_back.f_code is code):
            moments.append(buffer.numpy().tobytes())
            return trace
        return None

    code = inspect.unwrap(serialize_shard_file).__code__  # behind torch.no_grad
    try:
        sys.settrace(trace)
        serialize_shard_file(buffer, make_shard_layout(new), {"step": 2})
    finally:
        sys.settrace(None)
    after = buffer.numpy().tobytes()
    # The last words, the header's length, may be torn too.
    moments += [after[:n] + bytes(8 - n) + after[8:] for n in range(8)]
    moments += [before[:n] + bytes(8 - n) + before[8:] for n in range(8)]
    path = tmp_path / "file"
    found: list[int] = []
    for moment in {*moments, after, before}:
        path.write_bytes(moment)
        read = read_shard_file_metadata(path)
        assert (read is not None) == (moment in (before, after))
        found += [read[0]["step"]] if read else []
    assert sorted(found) == [1, 2] and len(set(moments)) > 6
    assert all(moment[:8] == bytes(8) for moment in moments if moment[8:] not in (before[8:], after[8:]))


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path, pieces = written(tmp_path / "file", [TensorShard("a", torch.arange(40)), TensorShard("b", torch.ones(3))])
    data = path.read_bytes()
    for length in {*range(0, len(data), 97), 0, 7, 8, 9, len(data) - 1}:
        path.write_bytes(data[:length])
        assert read_shard_file_metadata(path) is None
        with pytest.raises(DamagedCheckpoint):
            ShardFileSource([(path, pieces)]).tensor("a")
    path.unlink()
    assert read_shard_file_metadata(path) is None
    with pytest.raises(DamagedCheckpoint, match="file"):
        ShardFileSource([(path, pieces)]).tensor("a")
    assert read_shard_file_metadata(tmp_path) is None  # a folder


def test_more_words_than_there_is_room_for_are_an_error_with_numbers(tmp_path: Path) -> None:
    part = [TensorShard("a", torch.ones(3))]
    places = make_shard_layout(part, room_bytes=100)
    buffer = torch.zeros(places.total_bytes, dtype=torch.uint8)
    with raises("description-too-long"):
        serialize_shard_file(buffer, places, {"much": "x" * 5000})
    path = tmp_path / "file"
    path.write_bytes(buffer.numpy().tobytes())
    assert read_shard_file_metadata(path) is None
    places = make_shard_layout(part, room_bytes=6000)
    serialize_shard_file(torch.zeros(places.total_bytes, dtype=torch.uint8), places, {"much": "ü" * 400})


def test_the_room_is_enough_for_many_long_names() -> None:
    part = [
        TensorShard("optimizer/" + 'ä"\\' * 40 + str(i), torch.ones(2), torch.Size([10**9]), 10**8) for i in range(300)
    ]
    places = make_shard_layout(part)
    serialize_shard_file(torch.zeros(places.total_bytes, dtype=torch.uint8), places, META)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_a_type_that_cannot_be_kept_is_named_with_its_tensor(dtype: torch.dtype) -> None:
    with raises("type-not-saved", name="model/odd", dtype=dtype):
        make_shard_layout([TensorShard("fine", torch.ones(2)), TensorShard("model/odd", torch.zeros(2, dtype=dtype))])


# ---- files that somebody else has made


def file_of(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def words(pieces: str | None = None, ours: str | None = "{}") -> dict[str, str]:
    known = {"pieces": pieces, METADATA_KEY: ours}
    return {key: value for key, value in known.items() if value is not None}


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
PIECE = Piece("a", "a", "F32", (2,), 0, 2)
PIECES = msgspec.json.encode([PIECE]).decode()
GOOD = {"__metadata__": words(PIECES), "a": ENTRY}

HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "zeros": bytes(4096),
    "a header longer than the file": file_of(GOOD, bytes(8), 10**6),
    "a header of 2^63 bytes": file_of(GOOD, bytes(8), 2**63),
    "a header of 2^64 - 1 bytes": file_of(GOOD, bytes(8), 2**64 - 1),
    "a header that is no JSON": file_of(b"{" * 64, bytes(8)),
    "a header that is no UTF-8": file_of(b'{"\xff\xfe": 1}', bytes(8)),
    "a header of very deep JSON": file_of(b'{"__metadata__":' + b"[" * 100_000, bytes(8)),
    "a header that is a list": file_of([1, 2], b""),
    "overlapping tensors": file_of({**GOOD, "b": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12)),
    "offsets beyond the file": file_of({**GOOD, "a": {**ENTRY, "data_offsets": [0, 800]}}, bytes(8)),
    "offsets that go backwards": file_of({**GOOD, "a": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8)),
    "a shape that overflows": file_of({**GOOD, "a": {**ENTRY, "shape": [2**62, 4]}}, bytes(8)),
    "a type nobody knows": file_of({**GOOD, "a": {**ENTRY, "dtype": "F31"}}, bytes(8)),
    "bytes that belong to no tensor": file_of(GOOD, bytes(16)),
}
NOT_OURS: dict[str, bytes] = {
    "no metadata": file_of({"a": ENTRY}, bytes(8)),
    "somebody else's metadata": file_of({"__metadata__": {"format": "pt"}, "a": ENTRY}, bytes(8)),
    "no pieces": file_of({**GOOD, "__metadata__": words(None)}, bytes(8)),
    "pieces that are no JSON": file_of({**GOOD, "__metadata__": words("{")}, bytes(8)),
    "pieces of another kind": file_of({**GOOD, "__metadata__": words('[{"key": 1}]')}, bytes(8)),
    "negative places": file_of({**GOOD, "__metadata__": words(PIECES.replace('"start":0', '"start":-1'))}, bytes(8)),
    "very deep pieces": file_of({**GOOD, "__metadata__": words("[" * 100_000)}, bytes(8)),
    "very deep words of ours": file_of({**GOOD, "__metadata__": words(PIECES, "[" * 100_000)}, bytes(8)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(HOSTILE[case])
    assert read_shard_file_metadata(path) is None
    with pytest.raises(DamagedCheckpoint, match="file"):
        ShardFileSource([(path, [PIECE])]).tensor("a")


@pytest.mark.parametrize("case", NOT_OURS)
def test_a_file_that_is_not_ours_has_no_meta(case: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(NOT_OURS[case])
    assert read_shard_file_metadata(path) is None


def test_a_file_that_is_no_more_what_its_description_says_is_damaged(tmp_path: Path) -> None:
    path, (piece,) = written(tmp_path / "file", [TensorShard("a", torch.arange(6.0).view(2, 3))])
    for wrong in (
        msgspec.structs.replace(piece, dtype="F64"),
        msgspec.structs.replace(piece, dtype="I32"),
        msgspec.structs.replace(piece, dtype="F4"),
        msgspec.structs.replace(piece, key="b"),
        msgspec.structs.replace(piece, stop=5),
        msgspec.structs.replace(piece, stop=8),
        msgspec.structs.replace(piece, start=1),
        msgspec.structs.replace(piece, shape=(2, 4)),
        msgspec.structs.replace(piece, shape=(2, 2)),
        msgspec.structs.replace(piece, shape=(2**60,)),
        msgspec.structs.replace(piece, shape=(2**32, 2**32)),
        msgspec.structs.replace(piece, shape=()),
    ):
        with pytest.raises(DamagedCheckpoint):
            ShardFileSource([(path, [wrong])]).tensor("a")
    other = written(tmp_path / "other", [TensorShard("a", torch.ones(3, dtype=torch.int64), torch.Size([6]), 3)])
    half = written(tmp_path / "half", [TensorShard("a", torch.ones(3), torch.Size([6]), 0)])
    with pytest.raises(DamagedCheckpoint):  # two halves of different types
        ShardFileSource([half, other]).tensor("a")
