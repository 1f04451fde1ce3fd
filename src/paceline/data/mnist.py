"""Reads and checks MNIST and other datasets in its format (IDX files)."""

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import UsageError

UNSIGNED_BYTE = 0x08  # the only type code that MNIST, Fashion-MNIST and EMNIST use
Split = Literal["train", "test"]
FILE_STEMS: dict[Split, str] = {"train": "train", "test": "t10k"}
PACKAGED_FOLDER = Path(__file__).parent / "mnist"


@dataclass(frozen=True)
class IdxArray:
    """The values of an IDX file: `data` holds prod(shape) unsigned bytes in C order."""

    shape: tuple[int, ...]
    data: bytes


def find_idx(folder: Path, stem: str) -> Path:
    """Find the file `stem` in `folder`, gzipped or not, also with the names of EMNIST."""
    if not folder.is_dir():
        raise UsageError(f"the data folder {folder} does not exist (or is not a folder)")
    for name in (stem, f"{stem}.gz"):
        if (folder / name).is_file():
            return folder / name
    prefix = "test" + stem.removeprefix("t10k") if stem.startswith("t10k") else stem
    files = filter(Path.is_file, folder.glob(f"*-{prefix}*"))
    matches = sorted(p for p in files if p.name.removesuffix(".gz").endswith(f"-{prefix}"))
    if len(matches) > 1:
        raise UsageError(f"{folder} holds several files for {stem}: {', '.join(p.name for p in matches)}. Keep one.")
    if not matches:
        contents = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
        raise UsageError(f"{folder} has no {stem} (nor {stem}.gz). It holds: {contents}")
    return matches[0]


def read_idx(path: Path, *, dimensions: int) -> IdxArray:
    """Read and check the IDX file at `path`, which must have `dimensions` dimensions; it may be gzipped.

    The file has two zero bytes, a type code, the number of dimensions, each dimension as a big-endian uint32, and the
    values. Format: the "File formats" section of the original MNIST page (LeCun, Cortes, Burges).
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
        problem = "truncated" if len(raw) < expected else "too long"
        raise UsageError(f"{path} is {problem}: its header announces {expected} bytes in all, it has {len(raw)}")
    return IdxArray(shape, raw[header_bytes:])


def read_mnist(split: Split, folder: Path | None = None) -> tuple[IdxArray, IdxArray]:
    """Images (N, rows, columns) and labels (N,) of a split, from the package or from `folder`."""
    source = PACKAGED_FOLDER if folder is None else folder
    images = read_idx(find_idx(source, f"{FILE_STEMS[split]}-images-idx3-ubyte"), dimensions=3)
    labels = read_labels(split, source)
    if images.shape[0] != labels.shape[0]:
        raise UsageError(f"{source}: {images.shape[0]} {split} images but {labels.shape[0]} labels")
    if images.shape[0] == 0:
        raise UsageError(f"{source}: the {split} files hold no images")
    return images, labels


def read_labels(split: Split, folder: Path) -> IdxArray:
    return read_idx(find_idx(folder, f"{FILE_STEMS[split]}-labels-idx1-ubyte"), dimensions=1)


def check_mnist(folder: Path) -> None:
    """Check the files in `folder` before the run starts."""
    for split in FILE_STEMS:
        read_mnist(split, folder)
