"""Shards of a state: what one rank holds of it, saves of it and reads of it; and the whole state, brought together.

The bytes of a rank's part are laid out as a safetensors file, on disk or in memory. Any safetensors reader can open it.
What paceline needs in addition is in the metadata of the file.
"""

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.format import LENGTH_BYTES, REALS, Damaged, Manifest, Piece, cover
from paceline.checkpoint.state import Source, TensorShard, place
from paceline.collectives.buckets import assign_balanced
from paceline.collectives.control import all_gather_object
from paceline.collectives.tree import round_up
from paceline.errors import UsageError
from paceline.rank.world import World

WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.complex128: "C128",
}  # fmt: skip
TYPES = {word: dtype for dtype, word in WORDS.items()}
ALIGNED_BYTES = 64
OURS = "paceline"  # the key of our metadata


def rank_part(held: Sequence[TensorShard], rank: int, world_size: int) -> list[TensorShard]:
    """The tensors that `rank` saves: those that only it holds, and its share, by bytes, of the replicated ones."""
    replicated = sorted((h for h in held if h.replicated), key=lambda h: h.name)
    share = assign_balanced([h.tensor.nbytes for h in replicated], world_size)[rank]
    return [h for h in held if not (h.replicated or h.spare)] + [replicated[i] for i in share]


@dataclass(frozen=True)
class ShardLayout:
    """A rank's part of a state as a file: `part[i]` is at byte `offsets[i]` after a header of `header_bytes`."""

    part: tuple[TensorShard, ...]
    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    header_bytes: int
    total_bytes: int

    def header(self, meta: Mapping[str, str]) -> bytes:
        """The description of the tensors, and `meta`."""
        table: dict[str, Any] = {"__metadata__": dict(meta)}
        for piece, held, offset in zip(self.pieces, self.part, self.offsets, strict=True):
            pair = [2] if piece.dtype in REALS else []
            dtype, shape = REALS.get(piece.dtype, piece.dtype), [*held.tensor.shape, *pair]
            table[piece.key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + held.tensor.nbytes]}
        return json.dumps(table, separators=(",", ":")).encode()


def layout(part: Iterable[TensorShard], *, room_bytes: int = 4096) -> ShardLayout:
    """Lay out a part, large elements first, so that each is aligned. `room_bytes` stay free for metadata.

    Raises:
        UsageError: for a type of number that a file cannot hold.
    """
    ordered = tuple(sorted(part, key=lambda h: (-h.tensor.element_size(), h.name)))
    for one in ordered:
        if one.tensor.dtype not in WORDS:
            allowed = ", ".join(WORDS.values())
            raise UsageError(code="type-not-saved", name=one.name, dtype=one.tensor.dtype, allowed=allowed)
    *offsets, data_bytes = itertools.accumulate((one.tensor.nbytes for one in ordered), initial=0)
    found = ShardLayout(ordered, tuple(map(_piece, ordered)), tuple(offsets), 0, 0)
    header = round_up(
        LENGTH_BYTES + len(found.header({"pieces": _described(found.pieces)})) + room_bytes, ALIGNED_BYTES
    )
    return replace(found, header_bytes=header, total_bytes=header + data_bytes)


def _described(pieces: tuple[Piece, ...]) -> str:
    return msgspec.json.encode(pieces).decode()


def _piece(held: TensorShard) -> Piece:
    stop = held.start + held.tensor.numel() // held.count
    times = f"x{held.count}" if held.count > 1 else ""
    part = "" if held.whole is None else f"[{held.start}:{stop}]{times}"
    dtype, shape = WORDS[held.tensor.dtype], tuple(held.shape)
    return Piece(held.name + part, held.name, dtype, shape, held.start, stop, held.count, held.apart)


@torch.no_grad()
def fill(buffer: Tensor, shard: ShardLayout, meta: Mapping[str, Any]) -> None:
    """Write the file into `buffer`, (total_bytes,) uint8.

    The first bytes of the buffer, the length of the header, are zero until the rest is complete. The partial file of a
    killed writer is therefore never read as a state.
    """
    buffer[:LENGTH_BYTES] = 0
    last = {held.tensor.device: held for held in shard.part if held.tensor.numel()}  # its copy waits for those before
    for held, offset in zip(shard.part, shard.offsets, strict=True):
        start = shard.header_bytes + offset
        place = buffer[start : start + held.tensor.nbytes]
        if place.numel():
            place.view(held.tensor.dtype).view(held.tensor.shape).copy_(
                held.tensor, non_blocking=last[held.tensor.device] is not held
            )
    text = shard.header({OURS: msgspec.json.encode(meta).decode(), "pieces": _described(shard.pieces)})
    length = shard.header_bytes - LENGTH_BYTES
    if len(text) > length:
        raise UsageError(code="description-too-long", needed=len(text), length=length)
    header = bytearray(text.ljust(length))  # spaces are part of JSON
    buffer[LENGTH_BYTES : shard.header_bytes] = torch.frombuffer(header, dtype=torch.uint8)
    buffer[:LENGTH_BYTES] = torch.frombuffer(bytearray(length.to_bytes(LENGTH_BYTES, "little")), dtype=torch.uint8)


def read_meta(path: Path | str) -> tuple[Any, tuple[Piece, ...]] | None:
    """Our metadata and the pieces of a file made by `fill`; None if it is another file, or not finished."""
    try:
        with safe_open(str(path), "pt") as file:
            words = file.metadata()
            return msgspec.json.decode(words[OURS]), msgspec.json.decode(words["pieces"], type=tuple[Piece, ...])
    except (SafetensorError, OSError, KeyError, TypeError, RecursionError, msgspec.MsgspecError):
        return None


class ShardFiles:
    """A whole state, read from the files of all ranks: a `checkpoint.state.Source`."""

    def __init__(self, files: Iterable[tuple[Path | str, Sequence[Piece]]]) -> None:
        self._pieces: dict[str, list[tuple[str, Piece]]] = {}
        for path, pieces in files:
            for piece in pieces:
                self._pieces.setdefault(piece.name, []).append((str(path), piece))
        self._names = sorted(self._pieces)
        self._open: dict[str, Any] = {}

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> Self:
        """The state in a checkpoint."""
        return cls((folder / file.name, file.pieces) for file in manifest.files)

    def names(self, prefix: str) -> list[str]:
        """See Source."""
        return [name for name in self._names if name.startswith(prefix)]

    def shape(self, name: str) -> torch.Size:
        """See Source."""
        return torch.Size(self._pieces[name][0][1].shape)

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        """See Source.

        Raises:
            Damaged: if a file does not hold what its description says, or the files do not hold each element once.
        """
        if name not in self._pieces:
            return None
        first = self._pieces[name][0][1]
        shape, count = torch.Size(first.shape), math.prod(first.shape)
        if any(piece.apart for _, piece in self._pieces[name]):
            whole = self._of_runs(name)
            return whole.view(shape) if start == 0 and stop is None else whole[start:stop].clone()
        end = count if stop is None else stop
        parts: list[Tensor] = []
        at = start
        for path, piece in sorted(self._pieces[name], key=lambda found: found[1].start):
            low, high = max(start, piece.start), min(end, piece.stop)
            if low < high:
                if (piece.dtype, piece.shape, low) != (first.dtype, first.shape, at) or piece.stop > count:
                    raise Damaged(f"{path} does not hold the elements of {name} from {at} on, but {piece}")
                parts.append(self._read(path, piece)[low - piece.start : high - piece.start])
                at = high
        if at != end:
            raise Damaged(f"{name} has the elements {start} to {end} nowhere behind {at}")
        result = torch.cat([torch.empty(0, dtype=TYPES.get(first.dtype, torch.uint8)), *parts])
        return result.view(shape) if start == 0 and stop is None else result

    def _of_runs(self, name: str) -> Tensor:
        """The whole tensor, flat, where files hold several runs of its elements each."""
        pieces = self._pieces[name]
        first = pieces[0][1]
        complaint = cover([piece for _, piece in pieces])
        if complaint or first.dtype not in TYPES:
            raise Damaged(f"{name}: {complaint or first.dtype}")
        whole = torch.empty(math.prod(first.shape), dtype=TYPES[first.dtype])
        for path, piece in pieces:
            into = place(whole, piece.start, piece.stop - piece.start, piece.count, piece.apart)
            into.copy_(self._read(path, piece).view(piece.count, -1))
        return whole

    def _read(self, path: str, piece: Piece) -> Tensor:
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, "pt")
            values: Tensor = self._open[path].get_tensor(piece.key)
            if piece.dtype in REALS:
                values = torch.view_as_complex(values)
            values = values.reshape(-1)
        except (SafetensorError, OSError, RuntimeError) as error:  # the last: no pairs of real numbers
            raise Damaged(f"{path}: {error}") from None
        if WORDS.get(values.dtype) != piece.dtype or values.numel() != piece.elements:
            raise Damaged(f"{path} holds {values.numel()} x {values.dtype} as {piece.key}, described as {piece}")
        return values


# ---- the whole state


def whole(held: Sequence[TensorShard], world: World) -> dict[str, Tensor]:
    """Every tensor of the state in its shape, by name, sorted by name (a collective).

    Shards are gathered; replicated tensors are those of this rank.
    """
    mine: dict[str, list[TensorShard]] = defaultdict(list)
    for h in held:
        if not (h.replicated or h.spare):
            mine[h.name].append(h)
    parts = [(name, list(h.shape), str(h.tensor.dtype).removeprefix("torch.")) for name, (h, *_) in mine.items()]
    shapes = {name: (shape, dtype) for each in all_gather_object(parts, world) for name, shape, dtype in each}
    state = {h.name: h.tensor for h in held if h.replicated}
    for name, (shape, dtype) in sorted(shapes.items()):
        total = torch.zeros(shape, dtype=getattr(torch, dtype), device=world.device)
        for piece in mine.get(name, ()):
            piece.place(total.view(-1)).copy_(piece.tensor.reshape(piece.count, -1))
        # as bytes: all ranks but one have zeros, so the sum is the tensor, whatever its type
        dist.all_reduce(total.view(-1).view(torch.uint8), group=world.group)
        state[name] = total
    return dict(sorted(state.items()))


def sha256_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and every bit, in the order of the names."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return sha.hexdigest()


# ---- parameters that are sharded along one dimension


@dataclass(frozen=True)
class ShardedParameter:
    """This rank's shard of a parameter: the runs [start, stop) of dimension `dim`.

    If a weight contains query, key and value one after another, a rank holds three runs, a part of each.
    """

    whole: torch.Size
    dim: int
    runs: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> torch.Size:
        """The shape of the shard."""
        length = sum(stop - start for start, stop in self.runs)
        return torch.Size([length if dim == self.dim else size for dim, size in enumerate(self.whole)])

    def part(self, whole: Tensor) -> Tensor:
        """The shard of the whole tensor, as a copy."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.runs], self.dim)

    def held(self, one: TensorShard) -> list[TensorShard]:
        """`one`, the shard or a run of its rows, as pieces of the whole tensor, one for each run.

        Raises:
            ValueError: if `one` begins or ends within a row.
        """
        shape = self.shape
        row = shape.numel() // shape[0]
        first, odd = divmod(one.start, row)
        rows, rest = divmod(one.tensor.numel(), row)
        if odd or rest:
            raise ValueError(f"{one.name}: from element {one.start} on {one.tensor.numel()} are no rows of {row}")
        pieces = self._pieces(one, one.tensor.reshape(rows, *shape[1:]), first)
        return [piece for piece in pieces if piece.tensor.numel()]

    def _pieces(self, one: TensorShard, rows: Tensor, first: int) -> Iterator[TensorShard]:
        """`rows` of the shard, from row `first` on, by run."""
        inner, outer = self.whole[self.dim + 1 :].numel(), self.whole[1 : self.dim].numel()
        apart = self.whole[self.dim] * inner
        at = 0
        for start, stop in self.runs:
            length, last = stop - start, at + stop - start
            if self.dim == 0:  # the rows of this run that are in `rows`
                low, high = max(at, first), min(last, first + len(rows))
                part = rows[low - first : max(low, high) - first].flatten()
                yield replace(one, tensor=part, whole=self.whole, start=(start + low - at) * inner)
            else:
                part = rows.narrow(self.dim, at, length).flatten(self.dim).flatten(0, self.dim - 1)  # a view
                begin = first * outer * apart + start * inner
                yield replace(one, tensor=part, whole=self.whole, start=begin, count=len(part), apart=apart)
            at = last


def parameter_of(name: str, known: Mapping[str, object]) -> str | None:
    """The parameter that a tensor belongs to: itself, or the one that it is a gradient, an average or a state of."""
    if name in known:
        return name
    kind, _, rest = name.partition("/")
    if kind in ("model", "ema"):
        return rest if rest in known else None
    owner = rest.rpartition("/")[0]
    return owner if kind == "optimizer" and owner in known else None


def sharded_as(name: str, sharded: Mapping[str, ShardedParameter]) -> ShardedParameter | None:
    """The shard of the parameter that a tensor belongs to."""
    return sharded.get(parameter_of(name, sharded) or "")


class ShardedSource:
    """The shards of this rank, from a state of whole parameters: a `Source`."""

    def __init__(self, source: Source, sharded: Mapping[str, ShardedParameter]) -> None:
        self._source, self._sharded = source, sharded

    def names(self, prefix: str) -> Iterable[str]:
        """See Source."""
        return self._source.names(prefix)

    def shape(self, name: str) -> torch.Size:
        """See Source."""
        sharded, whole = sharded_as(name, self._sharded), self._source.shape(name)
        return whole if sharded is None or sharded.whole != whole else sharded.shape  # a counter is not sharded

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        """See Source."""
        sharded = sharded_as(name, self._sharded)
        if sharded is None or name not in self._source.names(name) or sharded.whole != self._source.shape(name):
            return self._source.tensor(name, start, stop)
        whole = self._source.tensor(name)
        assert whole is not None
        part = sharded.part(whole)
        return part if start == 0 and stop is None else part.reshape(-1)[start:stop].clone()
