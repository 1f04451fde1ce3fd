"""The command as a user types it, and a small piece of the real MNIST."""

import os

import pytest
from tests import warm
from tests.small_mnist import small_mnist as small_mnist


@pytest.fixture
def paceline(tmp_path):
    """Run `paceline ARGUMENTS` in an empty folder. Agents and workers are started as ever, the command is forked."""

    def run(
        *arguments: object,
        env: dict[str, str] | None = None,
        command: tuple[str, ...] = ("-m", "paceline"),
    ):
        words = (*command, *arguments)
        here = words[:3] == ("-m", "paceline", "train") and "--nproc" not in words  # it trains in this very process
        torch = here or words[1].startswith("torch.")
        return warm.run(words, cwd=tmp_path, env={**os.environ, **(env or {})}, torch=torch)

    return run
