"""Files of a checkpoint: written so that nothing is lost, read so that nothing is taken on trust."""

import contextlib
import errno
import hashlib
import math
import os
import shutil
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from paceline.checkpoint.format import Damaged, ShardFile
from paceline.disk import writing
from paceline.disk.owners import Unreadable, opened
from paceline.disk.reading import read

READ_BYTES = 1 << 20
LENGTH_BYTES = 8  # of the number that begins a file
MAX_HEADER_BYTES = 64 << 20
METADATA = "__metadata__"
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip

REALS = {"C64": "F32", "C128": "F64"}
"""complex numbers lie in a file as two real ones: safetensors has no complex128, older versions no complex64"""

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, of which nothing is missing when this returns, even after a power cut.

    Returns:
        Its size in bytes, and its sha256 (hashed on the way: what was meant, not what the disk made of it).

    Raises:
        OSError: if anything fails (the disk is full; the file exists). A part of the file may then be there.
    """
    digest = hashlib.sha256()
    size_bytes = 0
    descriptor = writing.create(path)
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            if not view.nbytes:  # an empty view cannot be cast
                continue
            view = view.cast("B")
            digest.update(view)
            size_bytes += view.nbytes
            _write_all(descriptor, view)
        os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            os.close(descriptor)
        raise
    os.close(descriptor)  # a network file system may say only now that the disk is full
    return size_bytes, digest.hexdigest()


def _write_all(descriptor: int, view: memoryview) -> None:
    while view.nbytes:
        written = os.write(descriptor, view)
        if written == 0:
            raise OSError(errno.EIO, "the system writes nothing, and gives no reason")
        view = view[written:]


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` outlive a power cut; syncing a file does not do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such thing
            raise
    finally:
        os.close(descriptor)


def room_for(root: Path, size_bytes: int) -> str | None:
    """None if the file system of `root`, a folder there or yet to be made, has `size_bytes` free; else a sentence."""
    folder = next(path for path in (root, *root.absolute().parents) if path.is_dir())
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes >= size_bytes:
        return None
    return f"a checkpoint needs {size_bytes:,} bytes, and the file system of {root} has {free_bytes:,} free"


def check_folder(folder: Path, *, trust: bool) -> None:
    """Refuse a folder that is a link, or (but with `trust`) that somebody else may have filled.

    Raises:
        Damaged: says which, and why.
    """
    with _as_damage("its folder"), opened(folder, folder=True, ours=not trust):
        pass


def read_whole(path: Path, limit_bytes: int, *, trust: bool) -> bytes:
    """The contents of a small file.

    Raises:
        Damaged: names the file.
    """
    with _as_damage(path.name):
        return read(path, limit_bytes=limit_bytes, ours=not trust)


def check_file(path: Path, file: ShardFile, *, hashed: bool, trust: bool) -> None:
    """Refuse a file that is not what the manifest says; unless it is to be `hashed`, only its size is compared.

    Raises:
        Damaged: names the file, with what was expected and what is there.
    """
    with _as_damage(path.name), opened(path, ours=not trust) as it:
        if it.found.st_size != file.bytes:
            raise Damaged(f"{path.name} has {it.found.st_size:,} bytes instead of {file.bytes:,}")
        if not hashed:
            return
        length = int.from_bytes(os.pread(it.descriptor, LENGTH_BYTES, 0), "little")
        header = os.pread(it.descriptor, min(length, MAX_HEADER_BYTES), LENGTH_BYTES)
        digest = hashlib.sha256()
        while block := os.read(it.descriptor, READ_BYTES):
            digest.update(block)
        if digest.hexdigest() != file.sha256:
            raise Damaged(f"{path.name} has the sha256 {digest.hexdigest()} instead of {file.sha256}")
        check_header(path.name, length, header, file)


@contextlib.contextmanager
def _as_damage(name: str) -> Generator[None]:
    """What goes wrong with a file, when it is opened or later, is its damage."""
    try:
        yield
    except Unreadable as error:
        raise Damaged(f"{name} {error.strerror}") from None
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[Number, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[Number, Number]


def check_header(name: str, length: int, header: bytes, file: ShardFile) -> None:
    """Refuse a safetensors file whose header is not that of the manifest's pieces, before its reader sees it.

    It begins with 8 bytes, how long the header is; the header is JSON of `name: {dtype, shape, data_offsets}`. Every
    bound is checked that the reader of a resumed run would meet, so that `verify` and a resume agree.

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
        elements, dtype = math.prod(entry.shape), REALS.get(piece.dtype, piece.dtype)
        if entry.dtype != dtype or elements != piece.elements * (1 if dtype == piece.dtype else 2):
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
