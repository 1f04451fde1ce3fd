"""At every moment of a save, the old or the new checkpoint is complete. No partial one is ever loaded."""

import errno
import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import warm
from tests.checkpoint.checkpoint_harness import leftovers, newest, save, saved, steps_in

from paceline.checkpoint.manager import Checkpoints

pytestmark = pytest.mark.sample(3)

SCRIPT = Path(__file__).with_name("crash_points.py")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory: the test kills processes only, and thousands of disk syncs would be slow."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def crash_points(folder: Path, world: int, fault: str, *more: str) -> dict:
    done = warm.run([SCRIPT, folder, world, fault, *more], torch=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("fault", ["killed-before", "killed-after"])
def test_a_writer_killed_at_any_call_leaves_the_old_checkpoint_or_the_new_one(memory, world, fault):
    found = crash_points(memory, world, fault)
    assert found["broken"] == []
    assert found["points"] > 10 + 4 * world
    steps = [step for _, step in found["ended"]]
    assert steps == sorted(steps)  # published once, and never taken back
    assert set(steps) == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed-before", "killed-after"])
def test_a_writer_killed_while_it_replaces_a_damaged_checkpoint_leaves_the_older_one(memory, fault):
    found = crash_points(memory, 2, fault, "--over-damaged")
    assert found["broken"] == []
    assert {step for _, step in found["ended"]} == {1, 2}


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
def test_a_call_that_fails_is_told_and_leaves_the_old_checkpoint_or_the_new_one(memory, fault):
    found = crash_points(memory, 2, fault)
    assert found["broken"] == []
    assert [10, 1] in found["ended"]
    assert [0, 2] in found["ended"]  # old checkpoints that cannot be deleted are no failure


def test_everything_is_on_the_disk_before_it_is_published_and_so_is_the_name_before_it_is_said(tmp_path, monkeypatch):
    """A power failure would lose all changes since the last sync."""
    root = tmp_path / "run" / "checkpoints"
    unsynced: set[str] = set()
    at_rename: list[set[str]] = []
    real = {name: getattr(os, name) for name in ("open", "write", "mkdir", "fsync", "rename")}

    def opened_as(descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())

    def changes(path: object) -> None:
        unsynced.update((str(path), str(Path(str(path)).parent)))

    def whole(name: object, folder: int | None) -> Path:
        return Path(str(name)) if folder is None else Path(opened_as(folder), str(name))

    def open_(path, flags, *more, dir_fd=None):
        if flags & os.O_CREAT and not whole(path, dir_fd).exists():
            changes(whole(path, dir_fd))
        return real["open"](path, flags, *more, dir_fd=dir_fd)

    def write(descriptor, data):
        unsynced.add(opened_as(descriptor))
        return real["write"](descriptor, data)

    def mkdir(path, *more, dir_fd=None):
        real["mkdir"](path, *more, dir_fd=dir_fd)
        changes(whole(path, dir_fd))

    def fsync(descriptor):
        real["fsync"](descriptor)
        unsynced.discard(opened_as(descriptor))

    def rename(name, other, *, src_dir_fd=None, dst_dir_fd=None):
        old, new = whole(name, src_dir_fd), whole(other, dst_dir_fd)
        at_rename.append({path for path in unsynced if path.startswith(str(old))})
        real["rename"](name, other, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        changes(new)
        unsynced.discard(str(new))

    root.parent.mkdir()
    for replacement in (open_, write, mkdir, fsync, rename):
        monkeypatch.setattr(os, replacement.__name__.strip("_"), replacement)
    saved(root, 1)
    monkeypatch.undo()
    assert at_rename == [set()]
    assert unsynced == set()


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


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.needs("mount")
def test_a_full_disk_is_told_and_the_old_checkpoint_stays(small_disk):
    checkpoints = saved(small_disk / "checkpoints", 1)
    assert checkpoints.find_space_shortage(100_000) is None
    assert "needs 300,000 bytes" in (checkpoints.find_space_shortage(300_000) or "")
    with pytest.raises(OSError) as caught:
        save(checkpoints, 2, size=150_000)
    assert caught.value.errno == errno.ENOSPC
    assert newest(checkpoints.root) == (1, [])
    assert leftovers(checkpoints.root) == [".tmp-2-1-0"]
    again = Checkpoints(checkpoints.root)
    again.claim_publishing(1, 1)
    assert leftovers(checkpoints.root) == []
    save(again, 2)
    assert newest(again.root) == (2, [])


def test_room_is_looked_for_before_the_folder_is_made(tmp_path):
    checkpoints = Checkpoints(tmp_path / "not" / "yet")
    assert checkpoints.find_space_shortage(1) is None
    assert "free" in (checkpoints.find_space_shortage(1 << 60) or "")
