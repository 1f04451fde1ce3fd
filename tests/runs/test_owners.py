"""Which users could have written a file: with real files, and as root if other users are needed."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.errors import raises

from paceline.errors import UsageError
from paceline.runs.owners import UnreadableFileError, UntrustedFileError, check_owned_by_us, describe_writers, open_file

OTHER = 65432  # a user without a name


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    made.mkdir(0o700)
    return made


def run_in(folder: Path, *modes: int) -> Path:
    for depth, mode in enumerate(modes):
        folder = folder / f"level-{depth}"
        folder.mkdir()
        folder.chmod(mode)
    return folder


@pytest.mark.parametrize(
    ("modes", "who"),
    [
        ((0o700,), ""),
        ((0o755,), ""),
        ((0o777,), "all users"),
        ((0o1777,), "all users"),  # sticky keeps others from exchanging, not from writing
        ((0o777, 0o700), "all users"),  # whoever writes above exchanges the run
        ((0o1777, 0o700), ""),  # but not below a sticky folder
        ((0o777, 0o755, 0o700), ""),  # nor below one of ours
        ((0o777, 0o1777, 0o700), ""),
        ((0o755, 0o777, 0o700), "all users"),
    ],
)
def test_who_can_change_a_run_follows_from_all_folders_up_to_the_first_that_is_ours(place, modes, who) -> None:
    found = describe_writers(run_in(place, *modes))
    assert found == "" if not who else who in found


@pytest.mark.root
def test_what_belongs_to_others_is_theirs_and_roots_folders_count_for_nothing(place: Path) -> None:
    run = run_in(place, 0o755, 0o755)
    os.chown(run, OTHER, OTHER)
    assert f"{run} belongs to user {OTHER}, " in describe_writers(run)
    with raises("run-of-others"):
        check_owned_by_us(run)
    os.chown(run, 0, 0)
    os.chown(run.parent, OTHER, OTHER)
    assert f"{run.parent} belongs to user {OTHER}" in describe_writers(run)
    run.parent.chmod(0o1755)  # the owner of a sticky folder may exchange what is in it
    assert f"{run.parent} belongs to user {OTHER}" in describe_writers(run)


def test_what_others_could_write_in_a_folder_of_ours_makes_it_theirs(place: Path) -> None:
    run = run_in(place, 0o755)
    (run / "attempt-1").mkdir()
    check_owned_by_us(run)
    (run / "attempt-1").chmod(0o777)
    with pytest.raises(UsageError, match="attempt-1 can be written by all users"):
        check_owned_by_us(run)


@pytest.mark.root
def test_the_group_of_ones_own_name_is_no_other_and_an_access_list_says_more(place: Path) -> None:
    run = run_in(place, 0o770)
    os.chown(run, 0, 0)  # root's own group
    assert describe_writers(run) == ""
    os.chown(run, 0, OTHER)
    assert f"group number {OTHER}" in describe_writers(run)
    os.chown(run, 0, 0)
    # version 2; user::rwx, user:OTHER:rwx, group::---, mask::rwx, other::---
    entries = [(1, 7, 2**32 - 1), (2, 7, OTHER), (4, 0, 2**32 - 1), (16, 7, 2**32 - 1), (32, 0, 2**32 - 1)]
    acl = (2).to_bytes(4, "little") + b"".join(
        tag.to_bytes(2, "little") + mode.to_bytes(2, "little") + who.to_bytes(4, "little") for tag, mode, who in entries
    )
    try:
        os.setxattr(run, "system.posix_acl_access", acl)
    except OSError:
        pytest.xfail("this file system has no access lists")
    assert stat.S_IMODE(run.stat().st_mode) == 0o770
    assert "group root" in describe_writers(run)


def test_a_file_is_judged_as_it_is_opened(place: Path) -> None:
    file = place / "config.toml"
    file.write_text("")
    with open_file(file, must_be_ours=True) as it:
        assert stat.S_ISREG(it.status.st_mode) and it.other_writers_message == ""
    file.chmod(0o666)
    with pytest.raises(UntrustedFileError, match="can be written by all users"), open_file(file, must_be_ours=True):
        pass
    with open_file(file) as it:  # to look at it
        assert "all users" in it.other_writers_message


def test_nothing_is_reached_through_a_link(place: Path) -> None:
    (place / "real").mkdir()
    (place / "real" / "file").write_text("")
    (place / "link").symlink_to("real")
    (place / "real" / "other").symlink_to("file")
    for path, words in ((place / "link" / "file", "is below .*link, a symbolic link"),
                        (place / "real" / "other", "is a symbolic link"),
                        (place / "real" / "file" / "x", "is below .*file, which is not a folder")):  # fmt: skip
        with pytest.raises(UnreadableFileError, match=words), open_file(path):
            pass
    with pytest.raises(UnreadableFileError, match="is a symbolic link"):
        describe_writers(place / "link")
    with pytest.raises(FileNotFoundError), open_file(place / "real" / "none"):
        pass


@pytest.mark.timeout(10)
def test_what_is_no_plain_file_is_not_waited_for(place: Path) -> None:
    os.mkfifo(place / "pipe")
    (place / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(UnreadableFileError, match="is not a plain file"), open_file(place / name):
            pass
    with pytest.raises(UnreadableFileError, match="is not a plain file"), open_file(Path("/dev/null")):
        pass


def test_no_descriptor_is_left_open(place: Path) -> None:
    (place / "file").write_text("")
    program = (
        "import os, sys; from pathlib import Path; from paceline.runs.owners import open_file, describe_writers\n"
        "place = Path(sys.argv[1]); before = len(os.listdir('/proc/self/fd'))\n"
        "for name in ('file', 'none', 'file/x'):\n"
        "    try:\n"
        "        with open_file(place / name): pass\n"
        "    except OSError: pass\n"
        "describe_writers(place); assert len(os.listdir('/proc/self/fd')) == before\n"
    )
    subprocess.run([sys.executable, "-c", program, str(place)], check=True, timeout=90)
