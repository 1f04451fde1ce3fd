"""Only the newest generation publishes. Older ones get an error, and never hang on the lock."""

import fcntl
import os
import shutil
import time
from pathlib import Path

import pytest
from tests.checkpoint.checkpoint_harness import manifest_of, newest, save, saved, start_writer, steps_in, write_shards
from tests.errors import raises

from paceline.checkpoint import manager
from paceline.checkpoint.manager import Checkpoints, FencedError, PublishClaim, PublishFence
from paceline.errors import TrainingError


@pytest.mark.parametrize("newer", [(1, 1), (2, 0)])
def test_a_generation_that_was_overtaken_publishes_nothing_and_deletes_nothing(tmp_path, newer):
    old = saved(tmp_path, 1, 2, 3)
    tmp = old.begin(4)
    manifest = manifest_of(4, write_shards(tmp, 4, 2))
    kept = tmp_path / "kept"
    shutil.copytree(tmp, kept)
    Checkpoints(tmp_path).claim_publishing(*newer)
    assert not tmp.exists(), "a dead generation's leftover"
    with raises("fence-is-newer", raised=FencedError):  # and not that files are missing
        old.commit(tmp, manifest, keep=2)
    kept.rename(tmp)  # even if its files were still there
    with raises("fence-is-newer", raised=FencedError):
        old.commit(tmp, manifest, keep=2)
    assert steps_in(tmp_path) == [3, 2, 1]


def test_nobody_goes_back_to_an_older_generation(tmp_path):
    Checkpoints(tmp_path).claim_publishing(2, 3)
    Checkpoints(tmp_path).claim_publishing(2, 3)
    for older in ((2, 2), (1, 9)):
        with raises("fence-taken-over", raised=TrainingError) as caught:
            Checkpoints(tmp_path).claim_publishing(*older)
        assert str(caught.value.fields["newest"]) == "attempt 2, generation 3"
    Checkpoints(tmp_path).claim_publishing(10, 0)


def test_a_claim_removes_what_older_generations_left_and_nothing_else(tmp_path):
    saved(tmp_path, 1)
    for name in (".tmp-2-1-0", ".trash-00000000-1-0", ".trash-00000000-1-0-2", ".tmp-2-9-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".tmp-link").symlink_to(tmp_path / "step-00000001")
    Checkpoints(tmp_path).claim_publishing(1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".fence", ".tmp-2-9-0", "notes.txt", "step-00000001"]
    assert newest(tmp_path) == (1, [])


def test_without_its_fence_nothing_is_published(tmp_path):
    checkpoints = saved(tmp_path, 1)
    (tmp_path / ".fence").unlink()
    with raises("fence-missing", raised=FencedError):
        save(checkpoints, 2)
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize(
    ("text", "allowed"),
    [(b"", True), (bytes(42), True), (b"1 0\n", False), (b"x" * 42, False)],
    ids=["empty", "zeros", "short", "garbage"],
)
def test_a_fence_that_names_no_claim_is_never_guessed_at(tmp_path, text, allowed):
    (tmp_path / ".fence").write_bytes(text)
    if allowed:  # nobody has claimed yet, or the power failed before the first claim was on the disk
        Checkpoints(tmp_path).claim_publishing(1, 0)
    else:
        with raises("fence-damaged", raised=TrainingError):
            Checkpoints(tmp_path).claim_publishing(1, 0)


@pytest.mark.timeout(60)
def test_a_fence_held_by_a_frozen_process_is_told_and_not_waited_for_for_ever(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1)
    monkeypatch.setattr(manager, "LOCK_SECONDS", 0.2)
    with (tmp_path / ".fence").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with raises("fence-locked", raised=TrainingError):
            save(checkpoints, 2)
    save(checkpoints, 2)
    assert newest(tmp_path) == (2, [])


def test_a_child_forked_under_the_lock_does_not_keep_it(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    monkeypatch.setattr(manager, "LOCK_SECONDS", 0.2)
    with PublishFence(tmp_path / ".fence").hold_claim(PublishClaim(1, 0)):
        links = {link: link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
        held = next(int(link.name) for link, file in links.items() if file == tmp_path / ".fence")
        childs = os.dup(held)  # the same open file, as after a fork
    try:
        Checkpoints(tmp_path).claim_publishing(1, 1)
    finally:
        os.close(childs)


def test_a_folder_that_cannot_be_made_is_told_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with raises("checkpoints-not-written", raised=TrainingError):
        Checkpoints(tmp_path / "file" / "checkpoints").claim_publishing(1, 0)


def test_of_two_racing_processes_the_older_publishes_nothing_after_the_newer_claim(tmp_path):
    for generation in range(1, 4):
        root = tmp_path / str(generation)
        with start_writer(root, 1, 0, 100_000) as old:
            assert old.stdout
            assert old.stdout.readline() == "1\n"
            time.sleep(0.02 * generation)
            new = Checkpoints(root)
            new.claim_publishing(1, generation)
            there = steps_in(root)
            assert old.stdout.read().splitlines()[-1] == "fence-is-newer"
        assert steps_in(root) == there
        save(new, 100_001)
        assert newest(root) == (100_001, [])
