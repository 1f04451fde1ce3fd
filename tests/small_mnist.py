"""A small piece of the real MNIST, for tests that train."""

import struct
from pathlib import Path

import pytest

from paceline.data.mnist import read_mnist


@pytest.fixture(scope="session")
def small_mnist(tmp_path_factory) -> Path:
    """600 training and 200 test images, as plain IDX files."""
    folder = tmp_path_factory.mktemp("small-mnist")
    for split, stem, count in (("train", "train", 600), ("test", "t10k", 200)):
        images, labels = read_mnist(split)
        header = struct.pack(">4I", 0x00000803, count, 28, 28)
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(header + images.data[: count * 784])
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x00000801, count) + labels.data[:count])
    return folder
