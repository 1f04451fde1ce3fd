"""The box alone: what a worker writes, its agent reads, and nobody writes into a file that is no box."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.box import BOX_BYTES, Box, make_box, read_step


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = make_box(3)
    yield made
    os.close(made)


def test_the_agent_reads_what_the_worker_has_written_last(descriptor: int) -> None:
    assert read_step(descriptor) == 0
    box = Box.from_env({"PACELINE_BOX_FD": str(descriptor)})
    assert box is not None
    for step in (1, 2**40 + 3, 7):
        box.set_step(step)
        assert read_step(descriptor) == step
    box.close()
    assert read_step(descriptor) == 7
    assert os.fstat(descriptor).st_size == BOX_BYTES


def test_a_second_look_finds_the_same_box(descriptor: int) -> None:
    env = {"PACELINE_BOX_FD": str(descriptor)}
    one, other = Box.from_env(env), Box.from_env(env)
    assert one is not None and other is not None
    one.set_step(5)
    one.close()
    one.close()
    other.set_step(6)
    other.close()
    assert read_step(descriptor) == 6


def test_without_an_agent_there_is_no_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_BOX_FD", raising=False)
    assert Box.from_env() is None
    assert Box.from_env({"PACELINE_BOX_FD": ""}) is None
    assert Box.from_env({"PACELINE_BOX_FD": "99999"}) is None


def test_a_number_that_is_another_file_by_now_is_no_box(tmp_path: Path) -> None:
    """A program that a worker starts inherits the variable, but not the descriptor."""
    path = tmp_path / "precious"
    path.write_bytes(b"x" * BOX_BYTES)
    with path.open("r+b") as file:
        assert Box.from_env({"PACELINE_BOX_FD": str(file.fileno())}) is None
