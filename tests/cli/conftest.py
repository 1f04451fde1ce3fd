"""The command as a user types it, and a small piece of the real MNIST."""

import os

import pytest
from tests import warm
from tests.run_script import run_script
from tests.small_mnist import small_mnist as small_mnist


@pytest.fixture
def paceline(tmp_path):
    """Run `paceline ARGUMENTS` in an empty folder. Agents and workers are started as ever, the command is forked.

    With `ranks`, that many forked processes run it as torchrun would have them, for what a training comes to.
    """

    def run(
        *arguments: object,
        env: dict[str, str] | None = None,
        command: tuple[str, ...] = ("-m", "paceline"),
        ranks: int = 0,
    ):
        if ranks:
            return run_script(ranks, *command, *arguments, cwd=tmp_path, env=env)
        words = (*command, *arguments)
        here = words[:3] == ("-m", "paceline", "train") and "--nproc" not in words  # it trains in this very process
        torch = here or words[1].startswith("torch.")
        verifies = words[:3] == ("-m", "paceline", "verify")
        return warm.run(words, cwd=tmp_path, env={**os.environ, **(env or {})}, torch=torch, ranks=verifies)

    return run
