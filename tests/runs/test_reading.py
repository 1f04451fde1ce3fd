"""All reads are bounded: size, depth, length of lines, number of entries."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from paceline.runs import reading
from paceline.runs.owners import UnreadableFileError
from paceline.runs.reading import (
    is_file,
    is_folder,
    list_folders,
    list_names,
    list_symlinks,
    read_file,
    read_json,
    read_lines,
    read_toml,
    real_path,
)


class Record(msgspec.Struct):
    number: int


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    assert read_file(tmp_path / "a", limit_bytes=100) == b"x" * 100
    with pytest.raises(UnreadableFileError, match="has 100 bytes, above the limit of 99"):
        read_file(tmp_path / "a", limit_bytes=99)
    os.truncate(tmp_path / "a", 1 << 40)
    with pytest.raises(UnreadableFileError, match="1,099,511,627,776 bytes"):
        read_file(tmp_path / "a")


def test_what_says_that_it_is_empty_and_is_not_is_bounded_too() -> None:
    assert Path("/proc/self/status").stat().st_size == 0
    with pytest.raises(UnreadableFileError, match="limit of 10 bytes"):
        read_file(Path(f"/proc/{os.getpid()}/status"), limit_bytes=10)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 1_000_000, b'{"number": "x"}', b'{"number": ' + b"9" * 5000 + b"}", b'"\xff"', b"\xff"]
)
def test_what_is_no_record_is_told_in_words(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(UnreadableFileError, match=r"a\.json is not a Record"):
        read_json(tmp_path / "a.json", Record)
    (tmp_path / "a.json").write_bytes(b'{"number": 3}')
    assert read_json(tmp_path / "a.json", Record) == Record(3)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 30_000,
        ".".join("a" * 30_000) + " = 1",
        "a = " + "{a=" * 20_000,
        "a",
        "\ud800",
        "a = " + "9" * 5000,
    ],
)
def test_settings_that_would_take_for_ever_are_refused_at_once(tmp_path: Path, text: str) -> None:
    """tomllib needs 18 s for the second."""
    (tmp_path / "a.toml").write_bytes(text.encode(errors="surrogatepass"))
    began = time.monotonic()
    with pytest.raises(
        UnreadableFileError,
        match=r"a\.toml (is not valid TOML|has a line with more than the limit of 200 dots|has .* bytes)",
    ):
        read_toml(tmp_path / "a.toml")
    assert time.monotonic() - began < 9


def test_lines_are_read_whole_across_blocks_and_the_last_may_have_no_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 7)
    path = tmp_path / "a"
    text = [b"a", b"", b"bb" * 20, b"c" * 7, b"", b"last"]
    path.write_bytes(b"\n".join(text))
    assert list(read_lines(path)) == text
    path.write_bytes(b"\n".join(text) + b"\n")
    assert list(read_lines(path)) == text
    assert list(read_lines(path, from_end_bytes=7)) == [b"", b"last"]  # what is cut off before is not a line
    assert list(read_lines(path, from_end_bytes=1000)) == text
    path.write_bytes(b"")
    assert list(read_lines(path)) == []


def test_a_line_that_is_too_long_ends_the_reading(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 1000)
    (tmp_path / "a").write_bytes(b"good\n" + b"x" * 2_000_000)
    found = read_lines(tmp_path / "a")
    with pytest.raises(UnreadableFileError, match="a line above the limit of 1,000 bytes"):
        list(found)


def test_a_folder_with_too_much_in_it_is_no_run(tmp_path: Path, monkeypatch) -> None:
    assert list_names(tmp_path / "none") == []
    for name in ("b", "a", "c"):
        (tmp_path / name).touch()
    (tmp_path / "d").symlink_to("a")
    (tmp_path / "e").mkdir()
    assert list_names(tmp_path) == ["a", "b", "c", "d", "e"]
    assert list_symlinks(tmp_path) == ["d"] and list_folders(tmp_path) == ["e"]
    assert list_symlinks(tmp_path / "none") == list_folders(tmp_path / "none") == []
    monkeypatch.setattr(reading, "MAX_ENTRIES", 3)
    with pytest.raises(UnreadableFileError, match="has more than 3 files"):
        list_names(tmp_path)


def test_a_file_that_is_mostly_holes_is_no_log_of_events(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        for place in range(0, 30 << 30, 15 << 20):
            file.seek(place)
            file.write(b"\n")
    with pytest.raises(UnreadableFileError, match="mostly holes"):
        next(read_lines(tmp_path / "a"))


def test_links_in_a_circle_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    assert real_path(tmp_path / "a") == tmp_path / "a"  # Path.resolve raises RuntimeError
    with pytest.raises(UnreadableFileError, match="symbolic link"):
        read_file(real_path(tmp_path / "a"))


def test_what_is_there_is_known_or_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert is_file(tmp_path / "file") and not is_folder(tmp_path / "file")
    assert is_folder(tmp_path) and not is_file(tmp_path)
    assert not is_file(tmp_path / "none") and not is_folder(tmp_path / "file" / "x") and not is_file(Path("a\0b"))
