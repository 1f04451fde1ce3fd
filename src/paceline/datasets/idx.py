"""IDX, the file format of MNIST and its kin: read, and checked before anything is started (no torch here).

An IDX file is two zero bytes, a type code, the number of dimensions, each dimension as a big-endian uint32, then the
values. Files may be gzipped. Format: the "File formats" section of the original MNIST page (LeCun, Cortes, Burges).
"""

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError

UNSIGNED_BYTE = 0x08  # the only type code that MNIST, Fashion-MNIST and EMNIST use


@dataclass(frozen=True)
class IdxArray:
    """The values of an IDX file: `data` holds prod(shape) unsigned bytes in C order."""

    shape: tuple[int, ...]
    data: bytes


def find_idx(folder: Path, stem: str) -> Path:
    """The file `stem` in `folder`, gzipped or not, also under EMNIST's names ("emnist-digits-train-images-idx3-ubyte").

    Raises:
        UsageError: if there is no such file, or more than one could be meant.
    """
    if not folder.is_dir():
        raise UsageError(f"the data folder {folder} does not exist (or is not a folder)")
    for name in (stem, f"{stem}.gz"):
        if (folder / name).is_file():
            return folder / name
    prefix = "test" + stem.removeprefix("t10k") if stem.startswith("t10k") else stem
    found = sorted(
        p for p in folder.glob(f"*-{prefix}*") if p.name.removesuffix(".gz").endswith(f"-{prefix}") and p.is_file()
    )
    if len(found) > 1:
        raise UsageError(f"{folder} holds several files for {stem}: {', '.join(p.name for p in found)}. Keep one.")
    if not found:
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
        raise UsageError(f"{folder} has no {stem} (nor {stem}.gz). It holds: {there}")
    return found[0]


def read_idx(path: Path, *, dimensions: int) -> IdxArray:
    """Read and check the IDX file at `path`, which must have `dimensions` dimensions.

    Raises:
        UsageError: if the file cannot be read, is no IDX file of unsigned bytes, is damaged, truncated or too long.
    """
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)  # checks the gzip checksum too
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error or type(error).__name__}") from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != UNSIGNED_BYTE or raw[3] != dimensions:
        raise UsageError(
            f"{path} is not an IDX file of unsigned bytes with {dimensions} dimensions: it starts with "
            f"{raw[:4].hex(' ') or 'nothing'}, not 00 00 08 {dimensions:02x}"
        )
    header_bytes = 4 + 4 * dimensions
    if len(raw) < header_bytes:
        raise UsageError(f"{path} is truncated: it ends within its header")
    shape = struct.unpack(f">{dimensions}I", raw[4:header_bytes])
    expected = header_bytes + math.prod(shape)
    if len(raw) != expected:
        what = "truncated" if len(raw) < expected else "too long"
        raise UsageError(f"{path} is {what}: its header announces {expected} bytes in all, it has {len(raw)}")
    return IdxArray(shape, raw[header_bytes:])
