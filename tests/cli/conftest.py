"""The command as a user types it, and a small piece of the real MNIST."""

import os
import subprocess
import sys

import pytest
from tests.small_mnist import small_mnist as small_mnist


@pytest.fixture
def paceline(tmp_path):
    """Run `paceline ARGUMENTS` in an empty folder."""

    def run(*arguments: object, env: dict[str, str] | None = None, command: tuple[str, ...] = ("-m", "paceline")):
        return subprocess.run(
            [sys.executable, *command, *map(str, arguments)],
            cwd=tmp_path, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=55,
        )  # fmt: skip

    return run
