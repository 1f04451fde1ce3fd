"""A small piece of the real MNIST, and the command as a user types it."""

import os
import struct
import subprocess
import sys
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


@pytest.fixture
def paceline(tmp_path):
    """Run `paceline ARGUMENTS` in an empty folder."""

    def run(*arguments: object, env: dict[str, str] | None = None, command: tuple[str, ...] = ("-m", "paceline")):
        return subprocess.run(
            [sys.executable, *command, *map(str, arguments)],
            cwd=tmp_path, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=55,
        )  # fmt: skip

    return run
