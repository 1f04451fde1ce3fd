"""The format of a checkpoint, a folder with manifest.json and one safetensors file per rank, and its checks.

Example: each of two ranks has written one half of a weight of 10 elements:

    {"manifest": {"format": 1, "step": 100, ...,
                  "files": [{"name": "shard-0-of-2.safetensors", "bytes": 140, "sha256": "9f...",
                             "pieces": [{"key": "0", "name": "model/fc.weight", "dtype": "F32",
                                         "shape": [5, 2], "start": 0, "stop": 5}]}, ...]},
     "sha256": "of the bytes of the inner object"}

A hash detects accidents. It is not a signature: anyone who can write the folder can also write a matching hash.

This module does not import torch: commands list and verify checkpoints without it.
"""

import contextlib
import hashlib
import itertools
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec

from paceline.errors import PacelineError, TrainingError
from paceline.runs.owners import UnreadableFileError, open_file
from paceline.runs.reading import read_file

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT_BYTES = 1 << 24  # about 100,000 pieces
MOST_ELEMENTS = 2**62
MAX_RECTANGULAR_PIECES = 4096  # all pairs are compared
MAX_MESSAGE_LENGTH = 500  # of an error: names in a damaged file may have any length
READ_BYTES = 1 << 20
HEADER_LENGTH_FIELD_BYTES = 8  # of the header's length at the start of a safetensors file
MAX_HEADER_BYTES = 64 << 20
METADATA_KEY = "__metadata__"
JSON_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
REAL_DTYPE_OF_COMPLEX = {"C64": "F32", "C128": "F64"}
"""A file stores a complex number as two real ones: safetensors has no complex128, and older versions no complex64."""

NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
DtypeName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Z][A-Z0-9_]*\Z")]

_STEP = re.compile(r"step-([0-9]{8,15})")
_SHARD = re.compile(r"shard-(0|[1-9][0-9]{0,8})-of-([1-9][0-9]{0,8})\.safetensors")


def folder_name(step: int) -> str:
    """The folder name of a step's checkpoint. Up to step 99,999,999, names sort like steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == folder_name(int(match[1])) else None


def shard_name(rank: int, world_size: int) -> str:
    return f"shard-{rank}-of-{world_size}.safetensors"


class DamagedCheckpoint(PacelineError):  # noqa: N818 - describes the checkpoint
    """A checkpoint that must not be loaded. The text has the expected and the actual content."""

    def __init__(self, text: str) -> None:
        printable = "".join(c if c.isprintable() else "?" for c in text)  # no control characters on a terminal
        super().__init__(printable if len(printable) <= MAX_MESSAGE_LENGTH else f"{printable[:MAX_MESSAGE_LENGTH]} ...")


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A flat range of elements of one tensor, or several ranges at equal distances, as one entry of a file."""

    key: str  # the name inside the file
    name: str
    """The name of the full tensor, the same for all strategies: model/conv1.weight, optimizer/conv1.weight/exp_avg."""
    dtype: DtypeName  # as in safetensors: F32
    shape: Annotated[
        tuple[NonNegativeInt, ...], msgspec.Meta(max_length=64)
    ]  # the shape of the full tensor; () for a scalar
    start: NonNegativeInt
    stop: NonNegativeInt
    count: PositiveInt = 1  # the number of ranges, for example one in each row
    apart: NonNegativeInt = 0
    """The number of elements from the start of a range to the start of the next one; 0 for a single range."""

    @property
    def elements(self) -> int:
        return (self.stop - self.start) * self.count


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str  # has the form shard-<rank>-of-<world size>.safetensors
    bytes: NonNegativeInt
    sha256: Sha256
    pieces: tuple[Piece, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    step: NonNegativeInt
    attempt: NonNegativeInt
    generation: NonNegativeInt
    world_size: PositiveInt
    virtual_ranks: PositiveInt
    definition: dict[str, Any]  # the settings of the run, which a resumed run compares with its settings
    metrics: dict[str, float]
    samples_seen: NonNegativeInt
    scalars: dict[str, Any]  # plain values of the state; a tuple is read as a list
    files: tuple[ShardFile, ...]


class _Envelope(msgspec.Struct):
    manifest: msgspec.Raw
    sha256: str


class _FormatVersionOnly(msgspec.Struct):
    format: int


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json.

    Raises:
        TrainingError: with the name of a value that JSON would change (nan, bytes, a key that is a number).
    """
    for name in ("definition", "metrics", "scalars"):
        _check_plain(getattr(manifest, name), name)
    inner = msgspec.json.encode(manifest, order="deterministic")
    return _sealed(inner, hashlib.sha256(inner).hexdigest())


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in the bytes of a manifest.json."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        # Before the hash and the fields: a newer paceline may have different ones.
        stated_format = msgspec.json.decode(envelope.manifest, type=_FormatVersionOnly).format
    except msgspec.ValidationError as error:
        raise DamagedCheckpoint(f"is JSON, but not the manifest of a paceline checkpoint: {error}") from None
    except JSON_DECODE_ERRORS as error:
        raise DamagedCheckpoint(f"is not JSON: {error}, in {len(data):,} bytes") from None
    if stated_format != FORMAT_VERSION:
        age = "newer than this paceline's" if stated_format > FORMAT_VERSION else "not this paceline's,"
        raise DamagedCheckpoint(f"format {stated_format} is {age} {FORMAT_VERSION}")
    inner = bytes(envelope.manifest)
    digest = hashlib.sha256(inner).hexdigest()
    if envelope.sha256 != digest:
        raise DamagedCheckpoint(f"was changed: it states the sha256 {envelope.sha256}, but has {digest}")
    if data != _sealed(inner, digest):  # a manifest has only one valid encoding: everything else was added later
        expected = len(_sealed(inner, digest))
        raise DamagedCheckpoint(f"has bytes that paceline did not write: {len(data):,} instead of {expected:,}")
    try:
        manifest = msgspec.json.decode(inner, type=Manifest)
    except JSON_DECODE_ERRORS as error:
        raise DamagedCheckpoint(f"is not the manifest of a paceline checkpoint: {error}") from None
    _check_file_entries(manifest)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in itertools.chain.from_iterable(file.pieces for file in manifest.files):
        pieces[piece.name].append(piece)
    for name, parts in pieces.items():
        if problem := find_coverage_error(parts):
            raise DamagedCheckpoint(f"{name!r} {problem}")
    return manifest


def _sealed(inner: bytes, digest: str) -> bytes:
    return b'{"manifest":%b,"sha256":"%b"}' % (inner, digest.encode())


def _check_file_entries(manifest: Manifest) -> None:
    if not manifest.files:
        raise DamagedCheckpoint("lists no file")
    seen_names: set[str] = set()
    for file in manifest.files:
        match = _SHARD.fullmatch(file.name)
        if not match:
            kind = "a plain shard-<rank>-of-<world size>.safetensors"
            raise DamagedCheckpoint(f"lists the file {file.name!r}, which is not {kind}")
        rank, world_size = int(match[1]), int(match[2])
        if world_size != manifest.world_size or rank >= world_size:
            raise DamagedCheckpoint(f"lists the file {file.name!r}, but its world size is {manifest.world_size}")
        if file.name in seen_names:
            raise DamagedCheckpoint(f"lists the file {file.name!r} twice")
        seen_names.add(file.name)
        if len({piece.key for piece in file.pieces}) < len(file.pieces):
            raise DamagedCheckpoint(f"lists a key of {file.name} twice")


def find_coverage_error(parts: Sequence[Piece]) -> str:
    """The reason why pieces do not contain each element of a tensor exactly once; empty if they do."""
    first, elements = parts[0], math.prod(parts[0].shape)  # at most 64 factors
    for piece in parts:
        if (piece.dtype, piece.shape) != (first.dtype, first.shape):
            return f"is {_dtype_and_shape(first)} in one piece and {_dtype_and_shape(piece)} in a different one"
        if piece.apart != first.apart or (piece.count > 1 and not piece.apart):
            whole = f"is {_dtype_and_shape(first)} with rows of {first.apart}"
            return f"{whole} in one piece, and different in a second one"
    if elements > MOST_ELEMENTS:
        return f"is larger than any memory: {_dtype_and_shape(first)}"
    if problem := _find_rectangle_overlap(parts, first.apart, elements) if first.apart else _find_range_error(parts):
        return problem
    held = sum(piece.elements for piece in parts)
    found = f"with {elements} elements, but the pieces have {held}"
    return "" if held == elements else f"is {_dtype_and_shape(first)} {found}"


def _find_range_error(parts: Sequence[Piece]) -> str:
    """A gap or an overlap between pieces of one range each; empty if there is none."""
    covered = 0
    for piece in sorted(parts, key=lambda piece: (piece.start, piece.stop)):
        if piece.stop < piece.start:
            return f"has a piece from element {piece.start} back to {piece.stop}"
        if piece.start < covered:
            return f"has the elements {piece.start} to {min(covered, piece.stop)} in two pieces"
        if piece.start > covered:
            return f"has no piece with the elements {covered} to {piece.start}"
        covered = piece.stop
    return ""


def _find_rectangle_overlap(parts: Sequence[Piece], width: int, elements: int) -> str:
    """An overlap of pieces that are rectangles in rows of `width` elements; empty if there is none."""
    if len(parts) > MAX_RECTANGULAR_PIECES:
        return f"has {len(parts)} pieces, more than the {MAX_RECTANGULAR_PIECES} that are supported"
    rectangles: list[tuple[int, ...]] = []  # rows from, to, columns from, to
    for piece in parts:
        row, column = divmod(piece.start, width)
        rectangles.append((row, row + piece.count, column, column + piece.stop - piece.start))
    if any(not (a < b and c < d <= width and b * width <= elements) for a, b, c, d in rectangles):
        return f"is {_dtype_and_shape(parts[0])}, and a piece is out of its bounds"
    for (a, b, c, d), (e, f, g, h) in itertools.combinations(rectangles, 2):
        if a < f and e < b and c < h and g < d:
            return "has elements in two pieces"
    return ""


def _dtype_and_shape(piece: Piece) -> str:
    return f"{piece.dtype}[{', '.join(map(str, piece.shape))}]"


def _check_plain(value: object, where: str) -> None:
    """Raise an error for values that JSON would silently change: nan becomes null, bytes become text."""
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


# ---- files on disk


def read_manifest(folder: Path, *, trust: bool) -> Manifest:
    """The manifest in a checkpoint's folder, which must have the name of its step."""
    with _raise_as_damaged("its folder"), open_file(folder, folder=True, must_be_ours=not trust):
        pass
    with _raise_as_damaged(MANIFEST_NAME):
        manifest = decode_manifest(read_file(folder / MANIFEST_NAME, limit_bytes=MANIFEST_LIMIT_BYTES, ours=not trust))
        if folder.name != folder_name(manifest.step):
            raise DamagedCheckpoint(f"is of step {manifest.step}, its folder is {folder.name}")
    return manifest


def check_files(folder: Path, manifest: Manifest, hashed: Collection[str] | None, *, trust: bool = False) -> None:
    """Compare the sizes of all files with the manifest, and the hashes of the files named in `hashed` (None: of all).

    Raises:
        ValueError: if `hashed` has a name that is not in the manifest.
    """
    for file in manifest.files:  # sizes first, because this is fast
        check_file(folder, file, hashed=False, trust=trust)
    for file in manifest.files:
        if hashed is None or file.name in hashed:
            check_file(folder, file, hashed=True, trust=trust)


def check_file(
    folder: Path, file: ShardFile, *, hashed: bool, trust: bool = False, tick: Callable[[], object] = lambda: None
) -> None:
    """Compare the size of a file, and with `hashed` its hash and header. `tick` is called while it is read."""
    with _raise_as_damaged(file.name), open_file(folder / file.name, must_be_ours=not trust) as source:
        if source.status.st_size != file.bytes:
            raise DamagedCheckpoint(f"has {source.status.st_size:,} bytes instead of {file.bytes:,}")
        if not hashed:
            return
        length = int.from_bytes(os.pread(source.descriptor, HEADER_LENGTH_FIELD_BYTES, 0), "little")
        header = os.pread(source.descriptor, min(length, MAX_HEADER_BYTES), HEADER_LENGTH_FIELD_BYTES)
        digest = hashlib.sha256()
        while block := os.read(source.descriptor, READ_BYTES):
            digest.update(block)
            tick()
        if digest.hexdigest() != file.sha256:
            raise DamagedCheckpoint(f"has the sha256 {digest.hexdigest()} instead of {file.sha256}")
        _check_header(length, header, file)


@contextlib.contextmanager
def _raise_as_damaged(name: str) -> Generator[None]:
    try:
        yield
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{name} {error}") from None
    except UnreadableFileError as error:
        raise DamagedCheckpoint(f"{name} {error.strerror}") from None
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{name} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{name} cannot be read: {error.strerror}") from None


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[NonNegativeInt, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


def _check_header(length: int, header: bytes, file: ShardFile) -> None:
    """Compare the header of a safetensors file with the pieces in the manifest, before safetensors reads it.

    The file begins with 8 bytes, the length of the header. The header is JSON: `name: {dtype, shape, data_offsets}`.
    This checks every bound that a resumed run checks, so that `verify` and a resume agree.
    """
    data_bytes = file.bytes - HEADER_LENGTH_FIELD_BYTES - length
    if length > MAX_HEADER_BYTES or data_bytes < 0 or len(header) != length:
        raise DamagedCheckpoint(f"states a header of {length:,} bytes, in a file of {file.bytes:,}")
    try:
        table = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries = {key: msgspec.json.decode(raw, type=_Entry) for key, raw in table.items() if key != METADATA_KEY}
        msgspec.json.decode(table.get(METADATA_KEY, b"{}"), type=dict[str, str])
    except JSON_DECODE_ERRORS as error:
        raise DamagedCheckpoint(f"has no valid safetensors header: {error}") from None
    if entries.keys() != {piece.key for piece in file.pieces}:
        raise DamagedCheckpoint("has different tensors than the manifest")
    for piece in file.pieces:
        entry = entries[piece.key]
        elements, dtype = math.prod(entry.shape), REAL_DTYPE_OF_COMPLEX.get(piece.dtype, piece.dtype)
        if entry.dtype != dtype or elements != piece.elements * (1 if dtype == piece.dtype else 2):
            raise DamagedCheckpoint(f"has {elements} x {entry.dtype} as {piece.key!r}, unlike the manifest")
        start, stop = entry.data_offsets
        if entry.dtype not in DTYPE_BITS or (stop - start) * 8 != elements * DTYPE_BITS[entry.dtype]:
            raise DamagedCheckpoint(f"has {piece.key!r} in the bytes {start} to {stop}, which is not its size")
    offset = 0
    for start, stop in sorted(entry.data_offsets for entry in entries.values()):
        if start != offset:
            raise DamagedCheckpoint(f"has no tensor, or two tensors, at byte {offset} of its data")
        offset = stop
    if offset != data_bytes:
        raise DamagedCheckpoint(f"describes {offset:,} bytes of data, but has {data_bytes:,}")
