"""The MNIST files: the real ones inside this package, or a folder of the same layout (no torch here).

Fashion-MNIST and EMNIST come in the same files. Source: LeCun, Cortes, Burges, "The MNIST database".
"""

import hashlib
from pathlib import Path
from typing import Literal

from paceline.datasets.idx import IdxArray, find_idx, read_idx
from paceline.errors import UsageError

Split = Literal["train", "test"]
STEMS: dict[Split, str] = {"train": "train", "test": "t10k"}
PACKAGED = Path(__file__).parent / "mnist"
SHA256 = {
    "train-images-idx3-ubyte.gz": "0b367032e93c5d0cea0925647cfdb18614af8ee15f83e6f2fc2ad904a6835971",
    "train-labels-idx1-ubyte.gz": "1787548bbe0bff1ec2ecdc0ef292b02df999e2d1a6002d27500982c652b17203",
    "t10k-images-idx3-ubyte.gz": "1a1a05eab793c14bb050b398624a11b0ffd1a2953baed553b1b9bd079e2a20be",
    "t10k-labels-idx1-ubyte.gz": "b91679a0acfe4ba0e50a2437a903084cba1f5f92592b016a25a7dfd00455798b",
}


def read_mnist(split: Split, folder: Path | None = None) -> tuple[IdxArray, IdxArray]:
    """Images (N, rows, columns) and labels (N,) of a split, from the package or from `folder`.

    Raises:
        UsageError: if a file is missing, damaged, or images and labels are not equally many.
    """
    source = PACKAGED if folder is None else folder
    images = read_idx(find_idx(source, f"{STEMS[split]}-images-idx3-ubyte"), dimensions=3)
    labels = read_labels(split, source)
    if images.shape[0] != labels.shape[0]:
        raise UsageError(f"{source}: {images.shape[0]} {split} images but {labels.shape[0]} labels")
    if images.shape[0] == 0:
        raise UsageError(f"{source}: the {split} files hold no images")
    return images, labels


def read_labels(split: Split, folder: Path) -> IdxArray:
    """Labels (N,) of a split from `folder`."""
    return read_idx(find_idx(folder, f"{STEMS[split]}-labels-idx1-ubyte"), dimensions=1)


def check_mnist(folder: Path | None = None) -> None:
    """Check the files before anything is started: the packaged ones by SHA-256, others by reading them.

    Raises:
        UsageError: naming the file and what is wrong with it.
    """
    if folder is not None:
        for split in STEMS:
            read_mnist(split, folder)
        return
    for name, expected in SHA256.items():
        path = PACKAGED / name
        if not path.is_file():
            raise UsageError(f"{path} is missing: the installation is incomplete. Install paceline again.")
        actual = hashlib.sha256(path.read_bytes()).hexdigest()
        if actual != expected:
            raise UsageError(
                f"{path} is damaged: its SHA-256 is {actual[:12]}..., not {expected[:12]}... Install paceline again."
            )
