"""Shards of a state, as a rank holds, saves and reads them, and the full state, gathered from all ranks.

The bytes of a rank's part form a safetensors file, on disk or in memory. Any safetensors reader can open it. The
metadata of the file contains the additional data of paceline.
"""

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.state import StateSource, TensorShard, make_strided_view
from paceline.collectives.buckets import assign_items_to_least_loaded
from paceline.collectives.control import all_gather_object
from paceline.collectives.sum_tree import round_up
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.runs.checkpoint_format import (
    HEADER_LENGTH_FIELD_BYTES,
    REAL_DTYPE_OF_COMPLEX,
    DamagedCheckpoint,
    Manifest,
    Piece,
    find_coverage_error,
)

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.complex128: "C128",
}  # fmt: skip
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
ALIGNED_BYTES = 64
METADATA_KEY = "paceline"  # the key of paceline's metadata
CHECKSUM_CHUNK = 1 << 17  # words that are multiplied at once; a processor keeps them in its cache
CHECKSUM_FACTOR = 6364136223846793005  # odd, so that multiplying loses no bit of an int64


def select_shards_to_save(shards: Sequence[TensorShard], rank: int, world_size: int) -> list[TensorShard]:
    """The tensors that `rank` saves: those that only it holds, and its portion, by bytes, of the replicated ones."""
    replicated = sorted((h for h in shards if h.replicated), key=lambda h: h.name)
    portion = assign_items_to_least_loaded([h.tensor.nbytes for h in replicated], world_size)[rank]
    return [h for h in shards if h.is_unique] + [replicated[i] for i in portion]


@dataclass(frozen=True)
class ShardFileLayout:
    """A rank's part of a state as a file. `part[i]` is at byte `offsets[i]` after a header of `header_bytes`."""

    shards: tuple[TensorShard, ...]
    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    header_bytes: int
    total_bytes: int

    def header(self, meta: Mapping[str, str]) -> bytes:
        table: dict[str, Any] = {"__metadata__": dict(meta)}
        for piece, entry, offset in zip(self.pieces, self.shards, self.offsets, strict=True):
            pair = [2] if piece.dtype in REAL_DTYPE_OF_COMPLEX else []
            dtype, shape = REAL_DTYPE_OF_COMPLEX.get(piece.dtype, piece.dtype), [*entry.tensor.shape, *pair]
            table[piece.key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + entry.tensor.nbytes]}
        return json.dumps(table, separators=(",", ":")).encode()


def make_shard_layout(part: Iterable[TensorShard], *, room_bytes: int = 4096) -> ShardFileLayout:
    """Lay out a part, large elements first, so that each is aligned. `room_bytes` are reserved for metadata."""
    ordered = tuple(sorted(part, key=lambda h: (-h.tensor.element_size(), h.name)))
    for entry in ordered:
        if entry.tensor.dtype not in DTYPE_NAMES:
            allowed = ", ".join(DTYPE_NAMES.values())
            raise UsageError(code="type-not-saved", name=entry.name, dtype=entry.tensor.dtype, allowed=allowed)
    *offsets, data_bytes = itertools.accumulate((entry.tensor.nbytes for entry in ordered), initial=0)
    shard = ShardFileLayout(ordered, tuple(map(_piece, ordered)), tuple(offsets), 0, 0)
    pieces_bytes = len(shard.header({"pieces": _encoded(shard.pieces)}))
    header = round_up(HEADER_LENGTH_FIELD_BYTES + pieces_bytes + room_bytes, ALIGNED_BYTES)
    return replace(shard, header_bytes=header, total_bytes=header + data_bytes)


def _encoded(pieces: tuple[Piece, ...]) -> str:
    return msgspec.json.encode(pieces).decode()


def _piece(shard: TensorShard) -> Piece:
    stop = shard.start + shard.tensor.numel() // shard.count
    times = f"x{shard.count}" if shard.count > 1 else ""
    part = "" if shard.unsharded_shape is None else f"[{shard.start}:{stop}]{times}"
    dtype, shape = DTYPE_NAMES[shard.tensor.dtype], tuple(shard.full_shape)
    return Piece(shard.name + part, shard.name, dtype, shape, shard.start, stop, shard.count, shard.range_stride)


@torch.no_grad()
def serialize_shard_file(buffer: Tensor, shard: ShardFileLayout, meta: Mapping[str, Any]) -> None:
    """Write the file into `buffer`, (total_bytes,) uint8.

    The length of the header, in the first bytes of the buffer, is zero until the rest is complete. The partial file of
    a killed writer is therefore never read as a state.
    """
    buffer[:HEADER_LENGTH_FIELD_BYTES] = 0
    # the copy of the last one waits for the others
    last = {entry.tensor.device: entry for entry in shard.shards if entry.tensor.numel()}
    for entry, offset in zip(shard.shards, shard.offsets, strict=True):
        start = shard.header_bytes + offset
        target = buffer[start : start + entry.tensor.nbytes]
        if target.numel():
            target.view(entry.tensor.dtype).view(entry.tensor.shape).copy_(
                entry.tensor, non_blocking=last[entry.tensor.device] is not entry
            )
    text = shard.header({METADATA_KEY: msgspec.json.encode(meta).decode(), "pieces": _encoded(shard.pieces)})
    length = shard.header_bytes - HEADER_LENGTH_FIELD_BYTES
    if len(text) > length:
        raise UsageError(code="description-too-long", needed=len(text), length=length)
    header = bytearray(text.ljust(length))  # JSON may end with spaces
    buffer[HEADER_LENGTH_FIELD_BYTES : shard.header_bytes] = torch.frombuffer(header, dtype=torch.uint8)
    buffer[:HEADER_LENGTH_FIELD_BYTES] = torch.frombuffer(
        bytearray(length.to_bytes(HEADER_LENGTH_FIELD_BYTES, "little")), dtype=torch.uint8
    )


def read_shard_file_metadata(path: Path | str) -> tuple[Any, tuple[Piece, ...]] | None:
    """Metadata and pieces of a file of `serialize_shard_file`; None for any other file, or an incomplete one."""
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata()
            pieces = msgspec.json.decode(metadata["pieces"], type=tuple[Piece, ...])
            return msgspec.json.decode(metadata[METADATA_KEY]), pieces
    except (SafetensorError, OSError, KeyError, TypeError, RecursionError, msgspec.MsgspecError):
        return None


class ShardFileSource:
    """A `StateSource` of the full state, read from the files of all ranks."""

    def __init__(self, files: Iterable[tuple[Path | str, Sequence[Piece]]]) -> None:
        self._pieces: dict[str, list[tuple[str, Piece]]] = {}
        for path, pieces in files:
            for piece in pieces:
                self._pieces.setdefault(piece.name, []).append((str(path), piece))
        self._names = sorted(self._pieces)
        self._open: dict[str, Any] = {}

    @classmethod
    def from_checkpoint(cls, folder: Path, manifest: Manifest) -> Self:
        return cls((folder / file.name, file.pieces) for file in manifest.files)

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._names if name.startswith(prefix)]

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._pieces[name][0][1].shape)

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        if name not in self._pieces:
            return None
        first = self._pieces[name][0][1]
        shape, count = torch.Size(first.shape), math.prod(first.shape)
        if any(piece.apart for _, piece in self._pieces[name]):
            full_tensor = self._assemble_ranges(name)
            return full_tensor.view(shape) if start == 0 and stop is None else full_tensor[start:stop].clone()
        end = count if stop is None else stop
        parts: list[Tensor] = []
        at = start
        for path, piece in sorted(self._pieces[name], key=lambda entry: entry[1].start):
            low, high = max(start, piece.start), min(end, piece.stop)
            if low < high:
                if (piece.dtype, piece.shape, low) != (first.dtype, first.shape, at) or piece.stop > count:
                    raise DamagedCheckpoint(f"{path} must have the elements of {name} from {at}, but has {piece}")
                parts.append(self._read(path, piece)[low - piece.start : high - piece.start])
                at = high
        if at != end:
            raise DamagedCheckpoint(f"no file has the elements {at} to {end} of {name}")
        result = torch.cat([torch.empty(0, dtype=DTYPES_BY_NAME.get(first.dtype, torch.uint8)), *parts])
        return result.view(shape) if start == 0 and stop is None else result

    def _assemble_ranges(self, name: str) -> Tensor:
        pieces = self._pieces[name]
        first = pieces[0][1]
        problem = find_coverage_error([piece for _, piece in pieces])
        if problem or first.dtype not in DTYPES_BY_NAME:
            raise DamagedCheckpoint(f"{name}: {problem or first.dtype}")
        full_tensor = torch.empty(math.prod(first.shape), dtype=DTYPES_BY_NAME[first.dtype])
        for path, piece in pieces:
            target = make_strided_view(full_tensor, piece.start, piece.stop - piece.start, piece.count, piece.apart)
            target.copy_(self._read(path, piece).view(piece.count, -1))
        return full_tensor

    def _read(self, path: str, piece: Piece) -> Tensor:
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, "pt")
            values: Tensor = self._open[path].get_tensor(piece.key)
            if piece.dtype in REAL_DTYPE_OF_COMPLEX:
                values = torch.view_as_complex(values)
            values = values.reshape(-1)
        except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: not pairs of real numbers
            raise DamagedCheckpoint(f"{path}: {error}") from None
        if DTYPE_NAMES.get(values.dtype) != piece.dtype or values.numel() != piece.elements:
            found = f"{values.numel()} x {values.dtype}"
            raise DamagedCheckpoint(f"{path} has {found} as {piece.key}, described as {piece}")
        return values


# ---- the full state


def gather_full_state(held: Sequence[TensorShard], world: World) -> dict[str, Tensor]:
    """All tensors of the state in their full shapes, sorted by name (a collective).

    Shards are gathered. Replicated tensors are those of this rank.
    """
    shards: dict[str, list[TensorShard]] = defaultdict(list)
    for h in held:
        if h.is_unique:
            shards[h.name].append(h)
    parts = [(name, list(h.full_shape), str(h.tensor.dtype).removeprefix("torch.")) for name, (h, *_) in shards.items()]
    shapes = {name: (shape, dtype) for entries in all_gather_object(parts, world) for name, shape, dtype in entries}
    state = {h.name: h.tensor for h in held if h.replicated}
    for name, (shape, dtype) in sorted(shapes.items()):
        total = torch.zeros(shape, dtype=getattr(torch, dtype), device=world.device)
        for shard in shards.get(name, ()):
            shard.view_in(total.view(-1)).copy_(shard.tensor.reshape(shard.count, -1))
        # A sum of bytes for any type: for each element, only one rank has bytes other than zero.
        dist.all_reduce(total.view(-1).view(torch.uint8), group=world.group)
        state[name] = total
    return dict(sorted(state.items()))


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names, types, shapes and all bits, in the order of names."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return sha.hexdigest()


def checksum(tensor: Tensor) -> Tensor:
    """() int64: a hash of the bits of a tensor, and of their order. Ranks compare it instead of the tensor.

    It is a sum of words of 32 bits, each times an odd number of 64 bits, modulo 2**64. So one changed word always
    changes it. In words of 64 bits, the signs of two numbers would cancel: 2**63 times any odd number is 2**63.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.as_strided(flat.shape, (1,))  # the stride of a single element can be anything
    if data.element_size() < 4:
        data = data.view(torch.uint8)
        if data.storage_offset() % 4 or len(data) % 4:
            data = torch.nn.functional.pad(data, (0, -len(data) % 4))  # a copy
    total: Tensor | None = None
    for words in data.view(torch.int32).split(CHECKSUM_CHUNK):
        odd = _odd_numbers(data.device)[: len(words)]
        # `dot` needs no copy of the products, but a GPU has none for integers
        part = torch.dot(words.long(), odd) if data.is_cpu else (words * odd).sum()
        total = part if total is None else torch.add(part, total, alpha=CHECKSUM_FACTOR)
    assert total is not None
    return total


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (CHECKSUM_CHUNK,), generator=generator).mul_(2).add_(1).to(device)


# ---- parameters that are sharded along one dimension


@dataclass(frozen=True)
class ParameterShard:
    """This rank's shard of a parameter: the ranges [start, stop) of dimension `dim`.

    If a weight contains query, key and value one after the other, a rank has three ranges, a part of each.
    """

    full_shape: torch.Size
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> torch.Size:
        length = sum(stop - start for start, stop in self.ranges)
        return torch.Size([length if dim == self.dim else size for dim, size in enumerate(self.full_shape)])

    def extract_shard(self, whole: Tensor) -> Tensor:
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def split_into_full_ranges(self, shard: TensorShard) -> list[TensorShard]:
        """`shard`, this shard or some of its rows, as parts of the full tensor, one for each range."""
        shape = self.shape
        row = shape.numel() // shape[0]
        first, offset = divmod(shard.start, row)
        rows, rest = divmod(shard.tensor.numel(), row)
        if offset or rest:
            elements = f"{shard.start} to {shard.start + shard.tensor.numel()}"
            raise ValueError(f"{shard.name}: the elements {elements} are not full rows of {row}")
        parts = self._parts(shard, shard.tensor.reshape(rows, *shape[1:]), first)
        return [part for part in parts if part.tensor.numel()]

    def _parts(self, shard: TensorShard, rows: Tensor, first: int) -> Iterator[TensorShard]:
        """`rows` of the shard, the first of which is row `first`, by range."""
        full, at = self.full_shape, 0
        inner, outer = full[self.dim + 1 :].numel(), full[1 : self.dim].numel()
        apart = full[self.dim] * inner
        for start, stop in self.ranges:
            length, last = stop - start, at + stop - start
            if self.dim == 0:  # the rows of this range that are in `rows`
                low, high = max(at, first), min(last, first + len(rows))
                part = rows[low - first : max(low, high) - first].flatten()
                yield replace(shard, tensor=part, unsharded_shape=full, start=(start + low - at) * inner)
            else:
                part = rows.narrow(self.dim, at, length).flatten(self.dim).flatten(0, self.dim - 1)  # a view
                begin = first * outer * apart + start * inner
                yield replace(
                    shard, tensor=part, unsharded_shape=full, start=begin, count=len(part), range_stride=apart
                )
            at = last


def find_parameter_of_tensor(name: str, known: Mapping[str, object]) -> str | None:
    """The parameter that a tensor belongs to: itself, or that of a gradient, an average or an optimizer state."""
    if name in known:
        return name
    prefix, _, rest = name.partition("/")
    if prefix in ("model", "ema"):
        return rest if rest in known else None
    owner = rest.rpartition("/")[0]
    return owner if prefix == "optimizer" and owner in known else None


def find_parameter_shard_of_tensor(name: str, sharded: Mapping[str, ParameterShard]) -> ParameterShard | None:
    return sharded.get(find_parameter_of_tensor(name, sharded) or "")


class SlicedSource:
    """A `StateSource` of this rank's shards, from a source of full parameters."""

    def __init__(self, source: StateSource, sharded: Mapping[str, ParameterShard]) -> None:
        self._source, self._sharded = source, sharded

    def names(self, prefix: str) -> Iterable[str]:
        return self._source.names(prefix)

    def shape(self, name: str) -> torch.Size:
        sharded, shape = find_parameter_shard_of_tensor(name, self._sharded), self._source.shape(name)
        return shape if sharded is None or sharded.full_shape != shape else sharded.shape  # a counter is not sharded

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        sharded = find_parameter_shard_of_tensor(name, self._sharded)
        if sharded is None or name not in self._source.names(name) or sharded.full_shape != self._source.shape(name):
            return self._source.tensor(name, start, stop)
        full_tensor = self._source.tensor(name)
        assert full_tensor is not None
        part = sharded.extract_shard(full_tensor)
        return part if start == 0 and stop is None else part.reshape(-1)[start:stop].clone()
