"""Publication is one rename; which checkpoints are kept or deleted, and what a concurrent reader finds."""

import errno
import os
import shutil
import stat
from pathlib import Path

import msgspec
import pytest
from tests.checkpoint.checkpoint_harness import (
    leftovers,
    manifest_of,
    newest,
    save,
    saved,
    shard_name,
    start_writer,
    steps_in,
    write_shards,
)

from paceline.checkpoint.manager import CheckpointEntry, Checkpoints
from paceline.runs.checkpoint_format import DamagedCheckpoint


def spoil(root: Path, step: int) -> None:
    path = root / f"step-{step:08d}" / shard_name(0, 2)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


# ---- publishing --------------------------------------------------------------------------------------------------


def test_a_saved_checkpoint_is_the_newest_and_says_what_was_given(tmp_path):
    checkpoints = saved(tmp_path, 1)
    tmp = checkpoints.begin(2)
    manifest = manifest_of(2, write_shards(tmp, 2, 3))
    path = checkpoints.commit(tmp, manifest, keep=2)
    assert path == tmp_path / "step-00000002"
    assert Checkpoints(tmp_path).newest_valid(print) == (path, manifest)
    assert leftovers(tmp_path) == []


def test_entries_are_the_newest_first_and_other_names_are_ignored(tmp_path):
    checkpoints = saved(tmp_path, 9, 10)
    for name in ("step-1", "step-000000009", "step-0000000x", "xstep-00000001", ".tmp-1-1-0", "step-00000011~"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-100000000").mkdir()
    found = [CheckpointEntry(step, tmp_path / f"step-{step:08d}") for step in (100000000, 10, 9)]
    assert checkpoints.entries() == found
    assert Checkpoints(tmp_path / "nowhere").entries() == []
    assert Checkpoints(tmp_path / "nowhere").newest_valid(print) is None


@pytest.mark.parametrize("spoiled", ["missing", "short", "gap"])
def test_a_checkpoint_that_could_not_be_loaded_is_never_published(tmp_path, spoiled):
    checkpoints = saved(tmp_path, 1)
    tmp = checkpoints.begin(2)
    manifest = manifest_of(2, write_shards(tmp, 2, 2))
    if spoiled == "missing":
        (tmp / shard_name(1, 2)).unlink()
    elif spoiled == "short":
        os.truncate(tmp / shard_name(1, 2), 10)
    else:
        manifest = msgspec.structs.replace(manifest, files=manifest.files[:1])
    with pytest.raises(
        DamagedCheckpoint, match="has no piece|pieces have 3000" if spoiled == "gap" else shard_name(1, 2)
    ):
        checkpoints.commit(tmp, manifest, keep=2)
    assert steps_in(tmp_path) == [1]


def test_a_whole_checkpoint_of_the_same_step_is_kept(tmp_path):
    saved(tmp_path, 1, 2)
    inode = (tmp_path / "step-00000002").stat().st_ino
    again = Checkpoints(tmp_path)
    again.claim_publishing(1, 1)
    told: list[str] = []
    tmp = again.begin(2)
    manifest = manifest_of(2, write_shards(tmp, 2, 1), generation=1)
    assert again.commit(tmp, manifest, 2, told.append) == tmp_path / "step-00000002"
    assert (tmp_path / "step-00000002").stat().st_ino == inode
    assert "already exists" in told[0]
    assert leftovers(tmp_path) == []


def test_a_damaged_checkpoint_of_the_same_step_is_replaced_though_its_sizes_are_right(tmp_path):
    saved(tmp_path, 1, 2)
    spoil(tmp_path, 2)
    again = Checkpoints(tmp_path)
    again.claim_publishing(1, 1)
    save(again, 2)
    assert newest(tmp_path) == (2, [])
    assert leftovers(tmp_path) == []


def test_a_try_that_failed_can_be_repeated(tmp_path):
    checkpoints = saved(tmp_path, 1)
    (checkpoints.begin(2) / shard_name(0, 2)).write_bytes(b"half")
    save(checkpoints, 2)
    assert newest(tmp_path) == (2, [])


def test_checkpoints_are_private(tmp_path):
    before = os.umask(0)
    try:
        saved(tmp_path / "run" / "checkpoints", 1)
    finally:
        os.umask(before)
    for path in (tmp_path / "run" / "checkpoints").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "run" / "checkpoints").stat().st_mode) == 0o700


# ---- readers -----------------------------------------------------------------------------------------------------


def test_a_reader_racing_the_writer_always_finds_a_whole_checkpoint(tmp_path):
    with start_writer(tmp_path, 1, 0, 150) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == "1\n"
        seen: list[int] = []
        told: list[str] = []
        while writer.poll() is None:
            found = Checkpoints(tmp_path).newest_valid(told.append)
            assert found
            seen.append(found[1].step)
        writer.stdout.read()
    assert writer.returncode == 0
    assert told == []
    assert seen == sorted(seen)
    assert len(set(seen)) > 3  # else the reader was not fast enough to race


def test_a_reader_that_listed_before_everything_was_retired_looks_again(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1, 2)
    reader = Checkpoints(tmp_path)
    before = reader.entries()
    for step in (3, 4, 5):
        save(checkpoints, step)
    lists = iter([before])
    entries = reader.entries
    monkeypatch.setattr(reader, "entries", lambda: next(lists, None) or entries())  # what a slow reader has seen
    told: list[str] = []
    found = reader.newest_valid(told.append)
    assert found
    assert found[1].step == 5
    assert told == []


# ---- retention ---------------------------------------------------------------------------------------------------


def test_the_newest_ones_are_kept_and_older_ones_deleted(tmp_path):
    checkpoints = saved(tmp_path)
    for step in range(1, 7):
        save(checkpoints, step, keep=3)
    assert steps_in(tmp_path) == [6, 5, 4]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("looked", [True, False])
def test_damaged_ones_do_not_count_and_never_push_out_the_one_that_training_stands_on(tmp_path, looked):
    saved(tmp_path, 90, 100, 200, 300)
    spoil(tmp_path, 200)  # right sizes, wrong bytes
    (tmp_path / "step-00000300" / "manifest.json").unlink()
    resumed = Checkpoints(tmp_path)
    if looked:
        found = resumed.newest_valid(lambda _: None)
        assert found
        assert found[1].step == 100
    resumed.claim_publishing(2, 0)
    save(resumed, 110)
    assert steps_in(tmp_path) == [300, 200, 110, 100]
    assert newest(tmp_path)[0] == 110
    save(resumed, 310)
    save(resumed, 320)
    assert steps_in(tmp_path) == [320, 310]


def test_one_that_loses_bytes_later_stops_counting(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    os.truncate(tmp_path / "step-00000002" / shard_name(0, 2), 5)
    save(checkpoints, 3)
    assert steps_in(tmp_path) == [3, 2, 1]
    save(checkpoints, 4)
    assert steps_in(tmp_path) == [4, 3]


def test_a_deletion_that_fails_is_told_and_is_no_failure(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1, 2)

    def busy(path: Path, **_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    told: list[str] = []
    for step in (3, 4):
        tmp = checkpoints.begin(step)
        checkpoints.commit(tmp, manifest_of(step, write_shards(tmp, step, 2)), 2, told.append)
    assert steps_in(tmp_path) == [4, 3]  # half deleted ones are no checkpoints
    assert leftovers(tmp_path) == [".trash-00000001-1-0", ".trash-00000002-1-0"]
    assert [text.endswith(os.strerror(errno.EBUSY)) for text in told] == [True, True]
    monkeypatch.undo()
    Checkpoints(tmp_path).claim_publishing(1, 1)
    assert leftovers(tmp_path) == []
