"""What is written down about a start, and what can be relied on afterwards."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.errors import raises

from paceline.errors import TrainingError
from paceline.launch.output import LogTail, find_last_lines, read_lines
from paceline.launch.plan import (
    SUBMISSION_FILE,
    SubmitRecord,
    last_submission,
    next_submit_dir,
    write_files,
    write_submission,
)


def test_every_start_has_a_private_folder_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: next_submit_dir(run), range(16)))
    assert sorted(folder.name for folder in folders) == sorted(f"submit-{n}" for n in range(1, 17))
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (run, *folders)} == {0o700}


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises("run-dir-not-writable"):
        next_submit_dir(tmp_path / "file" / "run")


def test_files_are_their_owners_and_never_half_there(tmp_path: Path) -> None:
    write_files(tmp_path, {"plan.json": "old"})
    (tmp_path / "plan.json").chmod(0o644)
    write_files(tmp_path, {"plan.json": "é\r\n"})
    assert (tmp_path / "plan.json").read_bytes() == "é\r\n".encode()
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "plan.json").symlink_to(tmp_path / "victim")
    write_files(tmp_path, {"plan.json": "secret"})
    assert not (tmp_path / "victim").exists() and not (tmp_path / "plan.json").is_symlink()
    (tmp_path / "closed").touch()
    with raises("settings-not-written", raised=TrainingError):
        write_files(tmp_path / "closed", {"plan.json": "secret"})


def test_the_newest_start_that_was_written_down_counts(tmp_path: Path) -> None:
    assert last_submission(tmp_path) == (tmp_path, None)
    second = SubmitRecord(
        on="ssh", started_at=2.0, nodes=2, hosts=("n1", "n2"), ssh=("ssh", "-F", "c"), command=("paceline",)
    )
    for submission in (SubmitRecord(on="slurm", started_at=1.0, slurm_job="7"), second):
        write_submission(next_submit_dir(tmp_path), submission)
    for number in range(3, 11):  # 10 comes after 9, also as a name
        (tmp_path / f"submit-{number}").mkdir()
    (tmp_path / "submit-10" / SUBMISSION_FILE).write_text('{"on": "slurm", ')  # torn
    assert last_submission(tmp_path) == (tmp_path / "submit-2", second)
    write_submission(tmp_path / "submit-10", SubmitRecord(on="local", started_at=3.0))
    assert last_submission(tmp_path) == (tmp_path / "submit-10", SubmitRecord(on="local", started_at=3.0))


def test_a_growing_file_is_read_once_in_whole_lines_that_steer_no_terminal(tmp_path: Path) -> None:
    path, shown = tmp_path / "log", ""
    tail = LogTail(path)
    assert tail.read() == ""
    text = "step 1\n\x1b[2Jstep 2 é\n\x07last"
    for byte in text.encode():
        with path.open("ab") as file:
            file.write(bytes([byte]))
        shown += tail.read()
    assert shown == "step 1\nstep 2 é\n"
    assert tail.read(to_the_end=True) == "last\n"
    assert tail.read(to_the_end=True) == ""


def test_a_line_that_never_ends_is_shown_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 3_000_000)
    assert len(LogTail(tmp_path / "log").read().strip()) > 100_000


@pytest.mark.parametrize("count", [0, 1, 3, 100_000, 300_000])
def test_the_last_lines_of_a_large_file(tmp_path: Path, count: int) -> None:
    lines = [f"line {number}\n" for number in range(200_000)]
    (tmp_path / "log").write_text("".join(lines))
    start, end = find_last_lines(tmp_path / "log", count)
    found = [line.text + "\n" for line in read_lines(tmp_path / "log", start, end)]
    assert found == lines[len(lines) - min(count, len(lines)) :]
    assert LogTail(tmp_path / "log", end).read() == ""
