"""manifest.json: what a checkpoint holds, and whether this description of it is whole.

Two ranks share a weight of 10 elements; each wrote its half into its own file:

    {"manifest": {"format": 1, "step": 100, ...,
                  "files": [{"name": "shard-0-of-2.safetensors", "bytes": 140, "sha256": "9f...",
                             "pieces": [{"key": "0", "name": "model/fc.weight", "dtype": "F32",
                                         "shape": [5, 2], "start": 0, "stop": 5}]}, ...]},
     "sha256": "of the bytes of the inner object, as they are"}

A hash finds accidents. It is no signature: who can write the folder can write a matching hash as well.
"""

import hashlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec

from paceline.errors import PacelineError, TrainingError

FORMAT = 1
MOST_ELEMENTS = 2**62
MOST_RECTANGLES = 4096  # each is compared with each
LONGEST_WORDS = 500  # of an error: names in a file come from whoever wrote it

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Word = Annotated[str, msgspec.Meta(pattern=r"\A[A-Z][A-Z0-9_]*\Z")]

_SHARD = re.compile(r"shard-(0|[1-9][0-9]{0,8})-of-([1-9][0-9]{0,8})\.safetensors")


class Damaged(PacelineError):  # noqa: N818 - it says what the file is
    """A checkpoint that must not be loaded; says what was expected and what is there."""

    def __init__(self, words: str) -> None:
        shown = "".join(c if c.isprintable() else "?" for c in words)  # no control characters on a terminal
        super().__init__(shown if len(shown) <= LONGEST_WORDS else f"{shown[:LONGEST_WORDS]} ...")


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A flat range of elements of one tensor, or several of them, equally far apart, as one entry of a file."""

    key: str
    """name inside the file"""
    name: str
    """of the whole tensor, the same for every strategy: model/conv1.weight, optimizer/conv1.weight/exp_avg"""
    dtype: Word
    """safetensors' word: F32"""
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
    """of the whole tensor; () for a scalar"""
    start: Count
    stop: Count
    count: Positive = 1
    """how many such ranges, of one part of every row, say"""
    apart: Count = 0
    """elements from the begin of one to that of the next; 0: there is but one"""

    @property
    def elements(self) -> int:
        """Of all ranges together."""
        return (self.stop - self.start) * self.count


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's file: its size and hash, and the pieces in it."""

    name: str
    """shard-<rank>-of-<world size>.safetensors"""
    bytes: Count
    sha256: Sha256
    pieces: tuple[Piece, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint holds, who wrote it, and of which run."""

    format: int
    step: Count
    attempt: Count
    generation: Count
    world_size: Positive
    virtual_ranks: Positive
    definition: dict[str, Any]
    """the run's settings, to be compared with those of the run that resumes"""
    metrics: dict[str, float]
    samples_seen: Count
    scalars: dict[str, Any]
    """plain values that belong to the state; a tuple comes back as a list"""
    files: tuple[ShardFile, ...]


class _Envelope(msgspec.Struct):
    manifest: msgspec.Raw
    sha256: str


class _Stated(msgspec.Struct):
    format: int


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json.

    Raises:
        TrainingError: if a value would not come back as it is (nan, bytes, a key that is a number): it is named.
    """
    for name in ("definition", "metrics", "scalars"):
        _check_plain(getattr(manifest, name), name)
    inner = msgspec.json.encode(manifest, order="deterministic")
    return _sealed(inner, hashlib.sha256(inner).hexdigest())


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in the bytes of a manifest.json.

    Raises:
        Damaged: it is anything but a whole manifest of this format, whose pieces make up every tensor exactly.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        # Before the hash and the fields: a newer paceline may seal and describe in another way.
        stated = msgspec.json.decode(envelope.manifest, type=_Stated).format
    except msgspec.ValidationError as error:
        raise Damaged(f"is JSON, but not the manifest of a paceline checkpoint: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"is no JSON: {error}, in {len(data):,} bytes") from None
    if stated != FORMAT:
        age = "newer than this paceline's" if stated > FORMAT else "not this paceline's,"
        raise Damaged(f"format {stated} is {age} {FORMAT}")
    inner = bytes(envelope.manifest)
    digest = hashlib.sha256(inner).hexdigest()
    if envelope.sha256 != digest:
        raise Damaged(f"was changed: it says that its sha256 is {envelope.sha256}, and it is {digest}")
    if data != _sealed(inner, digest):  # one manifest has one spelling: whatever else is in the file was added
        raise Damaged(
            f"has bytes that paceline did not write: {len(data):,} instead of {len(_sealed(inner, digest)):,}"
        )
    try:
        manifest = msgspec.json.decode(inner, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"is not the manifest of a paceline checkpoint: {error}") from None
    _check_files(manifest)
    _check_cover(manifest)
    return manifest


def _sealed(inner: bytes, digest: str) -> bytes:
    return b'{"manifest":%b,"sha256":"%b"}' % (inner, digest.encode())


def _check_files(manifest: Manifest) -> None:
    if not manifest.files:
        raise Damaged("names no file")
    seen: set[str] = set()
    for file in manifest.files:
        match = _SHARD.fullmatch(file.name)
        if not match:
            raise Damaged(
                f"names the file {file.name!r}, which is not a plain shard-<rank>-of-<world size>.safetensors"
            )
        rank, world_size = int(match[1]), int(match[2])
        if world_size != manifest.world_size or rank >= world_size:
            raise Damaged(f"names the file {file.name!r}, but its world size is {manifest.world_size}")
        if file.name in seen:
            raise Damaged(f"names the file {file.name!r} twice")
        seen.add(file.name)
        keys = [piece.key for piece in file.pieces]
        if len(set(keys)) < len(keys):
            raise Damaged(f"names a key of {file.name} twice")


def _check_cover(manifest: Manifest) -> None:
    """Every element of every tensor is in exactly one piece."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in itertools.chain.from_iterable(file.pieces for file in manifest.files):
        pieces[piece.name].append(piece)
    for name, parts in pieces.items():
        first = parts[0]
        covered = 0
        if any(piece.apart or piece.count > 1 for piece in parts):
            if words := cover(parts):
                raise Damaged(f"{name!r} {words}")
            continue
        for piece in sorted(parts, key=lambda piece: (piece.start, piece.stop)):
            if (piece.dtype, piece.shape) != (first.dtype, first.shape):
                raise Damaged(f"{name!r} is {_kind(first)} in one piece and {_kind(piece)} in another")
            if piece.stop < piece.start:
                raise Damaged(f"{name!r} has a piece from element {piece.start} back to {piece.stop}")
            if piece.start < covered:
                raise Damaged(f"{name!r} has the elements {piece.start} to {min(covered, piece.stop)} in two pieces")
            if piece.start > covered:
                raise Damaged(f"{name!r} has no piece with the elements {covered} to {piece.start}")
            covered = piece.stop
        elements = math.prod(first.shape)  # at most 64 factors
        if elements > MOST_ELEMENTS:
            raise Damaged(f"{name!r} is larger than any memory: {_kind(first)}")
        if covered != elements:
            raise Damaged(f"{name!r} is {_kind(first)} with {elements} elements, and the pieces hold {covered}")


def cover(parts: Sequence[Piece]) -> str:
    """What is wrong with pieces of several ranges each (rectangles in rows of `apart`); empty if they cover it once."""
    first, elements, width = parts[0], math.prod(parts[0].shape), parts[0].apart
    if elements > MOST_ELEMENTS or len(parts) > MOST_RECTANGLES:
        return f"is {_kind(first)} in {len(parts)} pieces, which is more than can be"
    rectangles: list[tuple[int, ...]] = []  # rows from, to, columns from, to
    for piece in parts:
        if (piece.dtype, piece.shape, piece.apart) != (first.dtype, first.shape, width) or not width:
            return f"is {_kind(first)} with rows of {width} in one piece and otherwise in another"
        row, column = divmod(piece.start, width)
        rectangles.append((row, row + piece.count, column, column + piece.stop - piece.start))
    if any(not (a < b and c < d <= width and b * width <= elements) for a, b, c, d in rectangles):
        return f"is {_kind(first)}, and a piece lies beyond it"
    for (a, b, c, d), (e, f, g, h) in itertools.combinations(rectangles, 2):
        if a < f and e < b and c < h and g < d:
            return "has elements in two pieces"
    held = sum(piece.elements for piece in parts)
    return "" if held == elements else f"is {_kind(first)} with {elements} elements, and the pieces hold {held}"


def _kind(piece: Piece) -> str:
    return f"{piece.dtype}[{', '.join(map(str, piece.shape))}]"


def _check_plain(value: object, where: str) -> None:
    """Refuse what JSON would turn into something else without a word: nan becomes null, bytes become text."""
    if isinstance(value, dict):
        for key, inner in cast("dict[object, object]", value).items():
            if not isinstance(key, str):
                raise TrainingError(code="scalar-key-not-text", where=where, key=key)
            _check_plain(inner, f"{where}/{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(cast("list[object]", value)):
            _check_plain(inner, f"{where}/{index}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise TrainingError(code="scalar-not-finite", where=where, value=value)
    elif value is not None and not isinstance(value, bool | int | str):
        raise TrainingError(code="scalar-not-plain", where=where, kind=type(value).__name__)
