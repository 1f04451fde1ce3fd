"""Written files are private and complete, and writes follow no links."""

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.runs import writing
from paceline.runs.owners import UnreadableFileError


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: None) -> None:
    writing.make_folder(tmp_path / "a" / "b")
    os.close(writing.create_file(tmp_path / "a" / "new"))
    os.close(writing.open_or_create(tmp_path / "a" / "log", append=True))
    writing.replace_file(tmp_path / "a" / "whole", b"x")
    assert {mode(tmp_path / "a" / name) for name in ("new", "log", "whole")} == {0o600}
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700


def test_a_file_that_was_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("old\n")
    (tmp_path / "log").chmod(0o666)
    descriptor = writing.open_or_create(tmp_path / "log", append=True)
    os.write(descriptor, b"new\n")
    os.close(descriptor)
    assert (tmp_path / "log").read_text() == "old\nnew\n" and mode(tmp_path / "log") == 0o600


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "file").touch()
    writing.make_folder(tmp_path / "a", exist_ok=True)
    for path in ("a", "file"):
        with pytest.raises(FileExistsError):
            writing.make_folder(tmp_path / path)
    with pytest.raises(FileExistsError):
        writing.make_folder(tmp_path / "file", exist_ok=True)
    with pytest.raises(FileExistsError):
        writing.create_file(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        writing.open_or_create(tmp_path / "none", make=False)


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("thesis")
    (tmp_path / "folder").mkdir()
    (tmp_path / "to-file").symlink_to("precious")
    (tmp_path / "to-folder").symlink_to("folder")
    (tmp_path / "to-nothing").symlink_to("new")
    for open_ in (writing.create_file, writing.open_or_create):
        for name in ("to-file", "to-nothing"):
            with pytest.raises(OSError):
                open_(tmp_path / name)
    with pytest.raises(FileExistsError):
        writing.make_folder(tmp_path / "to-folder", exist_ok=True)
    writing.replace_file(tmp_path / "to-file", b"mine")  # the link itself is what is replaced
    assert (tmp_path / "precious").read_text() == "thesis" and not (tmp_path / "to-file").is_symlink()
    assert not (tmp_path / "new").exists()


def test_a_folder_that_was_exchanged_for_a_link_leads_nowhere(tmp_path: Path) -> None:
    """A user who can write to the parent folder can do this during a run."""
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    (tmp_path / "mine").rename(tmp_path / "away")
    (tmp_path / "mine").symlink_to("other")
    path = tmp_path / "mine" / "weights"
    for write in (
        lambda: writing.replace_file(path, b"new"),
        lambda: writing.open_or_create(path),
        lambda: writing.create_file(tmp_path / "mine" / "new"),
        lambda: writing.remove(path),
        lambda: writing.rename(path, tmp_path / "mine" / "gone"),
        lambda: writing.make_folder(tmp_path / "mine" / "folder"),
    ):
        with pytest.raises(UnreadableFileError, match="symbolic link"):
            write()
    assert [(p.name, p.read_text()) for p in (tmp_path / "other").iterdir()] == [("weights", "other")]


def test_a_file_with_a_second_name_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("thesis")
    (tmp_path / "log").hardlink_to(tmp_path / "precious")
    with pytest.raises(UnreadableFileError, match="hard link"):
        writing.open_or_create(tmp_path / "log", append=True)


def test_a_file_and_a_folder_are_removed_and_a_link_only_itself(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    writing.remove(tmp_path / "a")
    writing.remove(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.timeout(10)
def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(UnreadableFileError, match="is not a plain file"):
        writing.open_or_create(tmp_path / "log", append=True)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    writing.replace_file(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        writing.replace_file(tmp_path / "a", b"new", sync=True)
    assert (tmp_path / "a").read_bytes() == b"old" and [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.fixture
def a_few_bytes_at_a_time(monkeypatch):
    """A system that writes at most 7 bytes in each call."""
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, memoryview(data).cast("B")[:7]))


def test_a_file_is_written_whole_though_the_system_takes_a_few_bytes_at_a_time(tmp_path, a_few_bytes_at_a_time):
    data = bytes(range(256)) * 12
    size_bytes, sha256 = writing.write_new_file(tmp_path / "a", [b"", data[:10], data[10:1000], data[1000:]])
    assert (tmp_path / "a").read_bytes() == data
    assert size_bytes == len(data)
    assert sha256 == hashlib.sha256(data).hexdigest()


def test_memory_of_any_shape_is_written_by_its_bytes(tmp_path, a_few_bytes_at_a_time):
    square = memoryview(bytes(range(12))).cast("B", (3, 4))
    longs = memoryview(bytes(16)).cast("Q")
    assert writing.write_new_file(tmp_path / "a", [square, longs])[0] == 28
    assert (tmp_path / "a").read_bytes() == bytes(range(12)) + bytes(16)


def test_a_file_is_never_written_over_nor_through_a_link(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("old", "link"):
        with pytest.raises(FileExistsError):
            writing.write_new_file(tmp_path / name, [b"new"])
    assert (tmp_path / "old").read_bytes() == b"old"
    assert not (tmp_path / "elsewhere").exists()


def test_an_error_of_the_chunks_is_not_swallowed(tmp_path):
    def failing():
        yield b"half"
        raise ValueError("the tensor is gone")

    with pytest.raises(ValueError, match="the tensor is gone"):
        writing.write_new_file(tmp_path / "a", failing())
