"""One file is whole or not there, closed to others, and on the disk when it is said to be written."""

from __future__ import annotations

import errno
import hashlib
import os
import stat

import pytest
from tests.checkpoint.checkpoint_harness import (
    chunks,
    save,
    saved,
    shard_bytes,
    steps_in,
)

from paceline.checkpoint.manager import write_file


@pytest.fixture
def a_few_bytes_at_a_time(monkeypatch):
    """A system that never writes more than 7 bytes in one call."""
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, memoryview(data).cast("B")[:7]))


def test_a_file_is_written_whole_though_the_system_takes_a_few_bytes_at_a_time(tmp_path, a_few_bytes_at_a_time):
    data = shard_bytes(1, 0)
    size_bytes, sha256 = write_file(tmp_path / "a", [b"", *chunks(data)])
    assert (tmp_path / "a").read_bytes() == data
    assert size_bytes == len(data)
    assert sha256 == hashlib.sha256(data).hexdigest()


def test_memory_of_any_shape_is_written_by_its_bytes(tmp_path, a_few_bytes_at_a_time):
    square = memoryview(bytes(range(12))).cast("B", (3, 4))
    longs = memoryview(bytes(16)).cast("Q")
    assert write_file(tmp_path / "a", [square, longs])[0] == 28
    assert (tmp_path / "a").read_bytes() == bytes(range(12)) + bytes(16)


@pytest.mark.parametrize(("code", "tolerated"), [(errno.EIO, False), (errno.EINVAL, True)])
def test_a_folder_whose_names_may_be_lost_is_told_unless_there_is_no_way_to_sync_it(
    tmp_path, monkeypatch, code, tolerated
):
    checkpoints = saved(tmp_path, 1)
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if tolerated:
        save(checkpoints, 2)
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            save(checkpoints, 2)
    assert steps_in(tmp_path) == ([2, 1] if tolerated else [1])


def test_a_file_is_never_written_over_nor_through_a_link(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("old", "link"):
        with pytest.raises(FileExistsError):
            write_file(tmp_path / name, [b"new"])
    assert (tmp_path / "old").read_bytes() == b"old"
    assert not (tmp_path / "elsewhere").exists()


def test_an_error_of_the_chunks_is_not_swallowed(tmp_path):
    def failing():
        yield b"half"
        raise ValueError("the tensor is gone")

    with pytest.raises(ValueError, match="the tensor is gone"):
        write_file(tmp_path / "a", failing())


def test_checkpoints_are_private(tmp_path):
    before = os.umask(0)
    try:
        saved(tmp_path / "run" / "checkpoints", 1)
    finally:
        os.umask(before)
    for path in (tmp_path / "run" / "checkpoints").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "run" / "checkpoints").stat().st_mode) == 0o700
