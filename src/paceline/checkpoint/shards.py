"""Lays out one rank's part of a state as the bytes of a safetensors file, on disk or in memory.

The bytes are laid out once; after that, saving a state means copying tensors into their places. Any safetensors reader
can open them; what paceline needs besides is in the file's own metadata.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.files import LENGTH_BYTES, REALS
from paceline.checkpoint.format import Damaged, Piece, cover
from paceline.checkpoint.state import Held, place
from paceline.errors import UsageError

WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.complex128: "C128",
}  # fmt: skip
TYPES = {word: dtype for dtype, word in WORDS.items()}
ALIGNED_BYTES = 64
OURS = "paceline"  # the key of our metadata


def rank_part(held: Sequence[Held], rank: int, world_size: int) -> list[Held]:
    """What `rank` saves: all that it alone holds, and its share, by bytes, of what every rank holds."""
    loads = [0] * world_size
    mine = [h for h in held if not (h.replicated or h.spare)]
    replicated = sorted((h for h in held if h.replicated), key=lambda h: (-h.tensor.nbytes, h.name))
    for one in replicated:
        lightest = min(range(world_size), key=lambda r: (loads[r], r))
        loads[lightest] += one.tensor.nbytes
        if lightest == rank:
            mine.append(one)
    return mine


@dataclass(frozen=True)
class ShardLayout:
    """Where each tensor of a rank's part lies: `pieces[i]` at byte `offsets[i]` after a header of `header_bytes`."""

    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    header_bytes: int
    total_bytes: int


def layout(part: Sequence[Held], *, room_bytes: int = 4096) -> tuple[list[Held], ShardLayout]:
    """`part` in the order of the file (large elements first, so that each lies aligned), and the places.

    `room_bytes` stay free for metadata.

    Raises:
        UsageError: for a type of number that a file cannot hold.
    """
    for one in part:
        if one.tensor.dtype not in WORDS:
            raise UsageError(
                code="type-not-saved", name=one.name, dtype=one.tensor.dtype, allowed=", ".join(WORDS.values())
            )
    ordered = sorted(part, key=lambda h: (-h.tensor.element_size(), h.name))
    pieces = tuple(_piece(one) for one in ordered)
    offsets: list[int] = []
    at = 0
    for one in ordered:
        offsets.append(at)
        at += one.tensor.nbytes
    described = len(_describe(pieces, ordered, offsets, {"pieces": msgspec.json.encode(pieces).decode()}))
    header = math.ceil((LENGTH_BYTES + described + room_bytes) / ALIGNED_BYTES) * ALIGNED_BYTES
    return ordered, ShardLayout(pieces, tuple(offsets), header, header + at)


def _piece(held: Held) -> Piece:
    stop = held.start + held.tensor.numel() // held.count
    times = f"x{held.count}" if held.count > 1 else ""
    part = "" if held.whole is None else f"[{held.start}:{stop}]{times}"
    shape = tuple(held.shape)
    kind = WORDS[held.tensor.dtype]
    return Piece(held.name + part, held.name, kind, shape, held.start, stop, held.count, held.apart)


def _describe(pieces: Sequence[Piece], part: Sequence[Held], offsets: Sequence[int], meta: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": dict(meta)}
    for piece, held, offset in zip(pieces, part, offsets, strict=True):
        end = offset + held.tensor.nbytes
        pair = [2] if piece.dtype in REALS else []
        dtype, shape = REALS.get(piece.dtype, piece.dtype), [*held.tensor.shape, *pair]
        table[piece.key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
    return json.dumps(table, separators=(",", ":")).encode()


@torch.no_grad()
def fill(buffer: Tensor, part: Sequence[Held], places: ShardLayout, meta: Mapping[str, Any]) -> None:
    """Write the safetensors file of `part` into `buffer`, (total_bytes,) uint8.

    Its first bytes, the header's length, are zeros until all the rest is there: what a killed writer leaves cannot be
    mistaken for a state.
    """
    buffer[:LENGTH_BYTES] = 0
    last = {held.tensor.device: held for held in part if held.tensor.numel()}  # it waits, and so for those before it
    for held, offset in zip(part, places.offsets, strict=True):
        start = places.header_bytes + offset
        place = buffer[start : start + held.tensor.nbytes]
        if place.numel():
            place.view(held.tensor.dtype).view(held.tensor.shape).copy_(
                held.tensor, non_blocking=last[held.tensor.device] is not held
            )
    pieces = msgspec.json.encode(places.pieces).decode()
    words = {OURS: msgspec.json.encode(meta).decode(), "pieces": pieces}
    text = _describe(places.pieces, part, places.offsets, words)
    length = places.header_bytes - LENGTH_BYTES
    if len(text) > length:
        raise UsageError(code="description-too-long", needed=len(text), length=length)
    header = bytearray(text.ljust(length))  # spaces are part of JSON
    buffer[LENGTH_BYTES : places.header_bytes] = torch.frombuffer(header, dtype=torch.uint8)
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
    """A whole state, read from several such files: a `checkpoint.state.Source`."""

    def __init__(self, files: Iterable[tuple[Path | str, Sequence[Piece]]]) -> None:
        self._pieces: dict[str, list[tuple[str, Piece]]] = {}
        for path, pieces in files:
            for piece in pieces:
                self._pieces.setdefault(piece.name, []).append((str(path), piece))
        self._names = sorted(self._pieces)
        self._open: dict[str, Any] = {}

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
        shape = torch.Size(first.shape)
        count = math.prod(shape)
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
