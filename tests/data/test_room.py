"""What loader processes cannot hand over is told before the first step."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
import torch
from tests.errors import raises

from paceline.data import room
from paceline.data.room import Room, check_room

BATCH = ({"a": torch.zeros(2, 1000), "b": [torch.zeros(2, 1000)]}, torch.zeros(2, dtype=torch.int64))
SAMPLE_BYTES = 2 * 4000 + 8


@pytest.fixture
def few_files() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (75, hard))
    yield 75
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def has_free(monkeypatch: pytest.MonkeyPatch, size_bytes: int | None) -> None:
    monkeypatch.setattr(room, "_free_bytes", lambda: size_bytes)


def test_room_is_counted_in_bytes_of_all_ranks_batches_ahead_and_in_use(monkeypatch) -> None:
    needed_bytes = SAMPLE_BYTES * 64 * (2 * 3 + 1) * 4
    has_free(monkeypatch, needed_bytes)
    check_room(BATCH, 2, Room(largest_batch=64, num_workers=3, local_ranks=4))
    has_free(monkeypatch, needed_bytes - 1)
    with raises("shared-memory-too-small", free="13.7 MiB", num_workers=3, local_ranks=4):
        check_room(BATCH, 2, Room(largest_batch=64, num_workers=3, local_ranks=4))


def test_without_loader_processes_nothing_is_asked(monkeypatch) -> None:
    has_free(monkeypatch, 0)
    check_room(BATCH, 2, Room(largest_batch=64, num_workers=0, local_ranks=4))


def test_where_nobody_can_say_what_is_free_nothing_is_refused(monkeypatch) -> None:
    has_free(monkeypatch, None)
    check_room(BATCH, 2, Room(largest_batch=64, num_workers=3, local_ranks=4))


def test_where_there_is_none_at_all_loader_processes_are_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(room, "SHARED_MEMORY", str(tmp_path / "none"))
    check_room(BATCH, 2, Room(largest_batch=64, num_workers=0, local_ranks=4))
    with raises("no-shared-memory", setting="num_workers"):
        check_room(BATCH, 2, Room(largest_batch=64, num_workers=1, local_ranks=1))


def test_too_few_open_files_are_refused(few_files, monkeypatch) -> None:
    has_free(monkeypatch, 1 << 40)
    check_room(BATCH, 2, Room(largest_batch=1, num_workers=1, local_ranks=1))  # 3 tensors x 3 batches + 64 others
    with raises("too-few-open-files", files=75, num_workers=2, needed_files=79):
        check_room(BATCH, 2, Room(largest_batch=1, num_workers=2, local_ranks=1))


def test_this_machines_own_room_is_seen() -> None:
    assert room._free_bytes() is None or room._free_bytes() >= 0
