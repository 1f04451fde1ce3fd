"""A small piece of the real MNIST, for tests that train."""

import struct
from pathlib import Path

import pytest

from paceline.data.mnist import Split, read_mnist


def write_mnist(folder: Path, *, train: int, test: int = 16) -> Path:
    """The first images of MNIST as IDX files, in a folder that may be there."""
    folder.mkdir(exist_ok=True)
    parts: list[tuple[Split, str, int]] = [("train", "train", train), ("test", "t10k", test)]
    for split, stem, count in parts:
        images, labels = read_mnist(split)
        head = struct.pack(">4I", 0x00000803, count, 28, 28)
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(head + bytes(images.data[: count * 784]))
        head = struct.pack(">2I", 0x00000801, count)
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(head + bytes(labels.data[:count]))
    return folder


@pytest.fixture(scope="session")
def small_mnist(tmp_path_factory) -> Path:
    """600 training and 200 test images, as plain IDX files."""
    return write_mnist(tmp_path_factory.mktemp("small-mnist"), train=600, test=200)
