"""The run folder: numbered starts, one run at a time, no file is overwritten."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.errors import raises

from paceline.checkpoint.manager import Checkpoints
from paceline.runs.folder import (
    archive_checkpoints,
    attempt_number,
    check_not_finished,
    create_attempt_dir,
    lock_run_dir,
    move_summary_to_attempt,
    set_up_run_dir,
)


def test_starts_are_numbered_from_1_and_past_10(tmp_path):
    for wanted in range(1, 12):  # as text, attempt-9 is the last of attempt-1 ... attempt-10
        number, folder = create_attempt_dir(tmp_path)
        assert (number, folder.name) == (wanted, f"attempt-{wanted}")
        assert attempt_number(folder) == wanted
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_number_is_never_used_twice(tmp_path):
    for name in ("attempt-2", "attempt-10", "attempt-x", "attempt-007b", "attempts-99"):
        (tmp_path / name).mkdir()
    assert create_attempt_dir(tmp_path)[0] == 11
    assert [attempt_number(Path(name)) for name in ("attempt-x", "attempt-3b", "run")] == [0, 0, 0]


def test_a_deleted_start_does_not_give_its_number_away(tmp_path):
    """Otherwise its remaining files could belong to the new start."""
    (tmp_path / "checkpoints").mkdir()
    Checkpoints(tmp_path / "checkpoints").claim_publishing(7, 2)
    assert create_attempt_dir(tmp_path)[0] == 8
    (tmp_path / "checkpoints/.fence").write_text("torn")
    assert create_attempt_dir(tmp_path)[0] == 9


def test_the_last_starts_summary_is_put_into_its_folder(tmp_path):
    for ended in ("first", "second"):
        number, folder = create_attempt_dir(tmp_path)
        (tmp_path / "summary.json").write_text(ended)
        move_summary_to_attempt(tmp_path, number + 1)
        assert not (tmp_path / "summary.json").exists()
        assert (folder / "summary.json").read_text() == ended
        move_summary_to_attempt(tmp_path, number + 1)  # there is none any more
    assert (tmp_path / "attempt-1/summary.json").read_text() == "first"


# ---- the lock ----------------------------------------------------------------------------------------------------


def test_the_lock_names_its_holder(tmp_path):
    first = lock_run_dir(tmp_path)
    try:
        began = time.monotonic()
        with raises("run-is-active", run_dir=tmp_path) as caught:
            lock_run_dir(tmp_path, wait_seconds=0.3)
        assert 0.25 < time.monotonic() - began < 5
    finally:
        os.close(first)
    assert caught.value.fields["holder"].startswith(f"pid {os.getpid()} on {os.uname().nodename}, ")
    os.close(lock_run_dir(tmp_path, wait_seconds=0))  # and is free again


def test_a_shorter_name_leaves_nothing_of_the_longer_one(tmp_path):
    (tmp_path / ".lock").write_text("x" * 500)
    os.close(lock_run_dir(tmp_path))
    assert re.fullmatch(r"pid \d+ on \S+, [-\d]+ [:\d]+", (tmp_path / ".lock").read_text())


def test_the_lock_lasts_until_the_last_process_that_inherited_it_is_gone(tmp_path):
    lock = lock_run_dir(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[lock]
    )
    os.close(lock)  # the launcher is gone
    try:
        with raises("run-is-active"):
            lock_run_dir(tmp_path, wait_seconds=0.2)
    finally:
        holder.kill()
        holder.communicate()
    os.close(lock_run_dir(tmp_path, wait_seconds=0))


def test_who_waits_gets_the_lock_when_it_is_free(tmp_path):
    lock = lock_run_dir(tmp_path)
    holder = subprocess.Popen(["sleep", "0.5"], pass_fds=[lock])
    os.close(lock)
    began = time.monotonic()
    os.close(lock_run_dir(tmp_path, wait_seconds=30))
    assert 0.3 < time.monotonic() - began < 20
    assert holder.wait() == 0


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "else").write_text("precious")
    (tmp_path / ".lock").symlink_to("else")
    with raises("lock-not-held", path=tmp_path / ".lock"):
        lock_run_dir(tmp_path)
    assert (tmp_path / "else").read_text() == "precious"


# ---- whose folder it is ------------------------------------------------------------------------------------------

NEVER_BEGAN = [
    [], ["config.toml"],
    ["config.toml", "config.toml.partial", "environment.json", "summary.json", "machine-0.jsonl", ".lock",
     "attempt-1/"], ["attempt-1/", "attempt-2/", "checkpoints/"], ["checkpoints/.fence", "checkpoints/.tmp-3-1-0/"],
]  # fmt: skip
BEGAN = [
    ["config.toml", "events-0.jsonl"],
    ["config.toml", "notes.txt"],
    ["config.toml", "checkpoints/step-00000003/"],
    ["checkpoints/step-00000003/"],
    ["model.safetensors"],
    ["attempt-1/", "data/"],
    ["checkpoints-before-restart-1/"],
]


def filled(folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text("")
    return folder


@pytest.mark.parametrize("names", NEVER_BEGAN, ids=str)
def test_a_start_that_failed_before_its_first_step_can_be_tried_again(tmp_path, names):
    folder = filled(tmp_path / "run", names)
    assert set_up_run_dir(folder, "task") == folder
    assert set_up_run_dir(folder, "task", resume=True) == folder


@pytest.mark.parametrize("names", BEGAN, ids=str)
def test_what_could_be_lost_is_never_written_over(tmp_path, names):
    folder = filled(tmp_path / "run", names)
    with raises("run-dir-holds-run" if "config.toml" in names else "run-dir-not-empty") as caught:
        set_up_run_dir(folder, "task")
    assert ("--resume auto" in str(caught.value)) == ("config.toml" in names)
    assert all((folder / name).exists() for name in names)


@pytest.mark.parametrize("names", [names for names in BEGAN if "config.toml" not in names], ids=str)
def test_something_else_is_not_resumed(tmp_path, names):
    folder = filled(tmp_path / "run", names)
    with raises("not-a-run"):
        set_up_run_dir(folder, "task", resume=True)
    assert all((folder / name).exists() for name in names)


def test_resuming_makes_the_folder_that_is_not_there_yet(tmp_path):
    folder = set_up_run_dir(tmp_path / "a" / "b", "task", resume=True)
    assert folder.is_dir() and list(folder.iterdir()) == []
    with raises("resume-without-run-dir"):
        set_up_run_dir(None, "task", resume=True)


def test_what_a_fresh_beginning_would_write_over_is_moved_aside_and_never_onto_others(tmp_path):
    for number in (1, 2):
        (tmp_path / f"checkpoints/step-0000000{number}").mkdir(parents=True)
        (tmp_path / "model.safetensors").write_text(f"weights {number}")
        archive_checkpoints(tmp_path)
        assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "model.safetensors").exists()
        assert (tmp_path / f"checkpoints-before-restart-{number}" / f"step-0000000{number}").is_dir()
        assert (tmp_path / f"model-before-restart-{number}.safetensors").read_text() == f"weights {number}"
    archive_checkpoints(tmp_path)  # nothing to move
    assert len(list(tmp_path.iterdir())) == 4


def test_finished_weights_are_not_written_over_from_step_0(tmp_path):
    check_not_finished(tmp_path)
    (tmp_path / "model.safetensors").write_text("weights")
    with raises("run-has-ended"):
        check_not_finished(tmp_path)
