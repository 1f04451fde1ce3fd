"""Checks that a safetensors file begins with what its manifest describes, before its reader sees it.

A file is: 8 bytes, how long the header is; the header, JSON of `name: {dtype, shape, data_offsets}`; the data.
Every bound is checked here that the reader of a resumed run would meet, so that `verify` and a resume agree.
"""

import math
from typing import Annotated

import msgspec

from paceline.store.manifest import Damaged, ShardFile

LENGTH_BYTES = 8  # of the number that begins a file
MAX_HEADER_BYTES = 64 << 20
METADATA = "__metadata__"
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[Number, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[Number, Number]


def check_header(name: str, length: int, header: bytes, file: ShardFile) -> None:
    """Refuse a file whose header is not that of the manifest's pieces.

    Args:
        name: of the file, for messages.
        length: what its first 8 bytes say.
        header: as many bytes after these, as far as there are any, and no more than are ever read.
        file: what the manifest says.

    Raises:
        Damaged: says what is wrong.
    """
    data_bytes = file.bytes - LENGTH_BYTES - length
    if length > MAX_HEADER_BYTES or data_bytes < 0 or len(header) != length:
        raise Damaged(f"{name} speaks of a header of {length:,} bytes, in a file of {file.bytes:,}")
    try:
        table = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries = {key: msgspec.json.decode(raw, type=_Entry) for key, raw in table.items() if key != METADATA}
        msgspec.json.decode(table.get(METADATA, b"{}"), type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"{name} has a header that is none of safetensors': {error}") from None
    if entries.keys() != {piece.key for piece in file.pieces}:
        raise Damaged(f"{name} holds other tensors than the manifest says")
    for piece in file.pieces:
        entry = entries[piece.key]
        elements = math.prod(entry.shape)
        if entry.dtype != piece.dtype or elements != piece.stop - piece.start:
            raise Damaged(f"{name} holds {elements} x {entry.dtype} as {piece.key!r}, the manifest says otherwise")
        start, stop = entry.data_offsets
        if entry.dtype not in BITS or (stop - start) * 8 != elements * BITS[entry.dtype]:
            raise Damaged(f"{name} gives {piece.key!r} the bytes {start} to {stop}, which is not its size")
    at = 0
    for start, stop in sorted(entry.data_offsets for entry in entries.values()):
        if start != at:
            raise Damaged(f"{name} has nothing, or two tensors, at byte {at} of its data")
        at = stop
    if at != data_bytes:
        raise Damaged(f"{name} describes {at:,} bytes of data, and has {data_bytes:,}")
