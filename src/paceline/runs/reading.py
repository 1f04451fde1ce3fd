"""All reads from a run folder: plain files, without following links, of bounded size, depth and line length.

A different user may have written the files: their contents are only data. `ours=True` raises an error for files that a
different user could have changed (owners.py).
"""

import errno
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paceline.runs.owners import REASONS, UnreadableFileError, open_file

MAX_RECORD_BYTES = 4 << 20  # of one JSON record: settings, reports of hangs, started processes
MAX_TOML_BYTES = 1 << 16
MAX_TOML_DOTS = 200  # in a line: tomllib takes 18 s for a key of 30,000 parts
MAX_LINE_BYTES = 16 << 20  # with --record-samples, a line has the indices of a micro-batch
MAX_ENTRIES = 20_000
BLOCK_BYTES = 1 << 20
LARGE_BYTES, MAX_COMPRESSION = 64 << 20, 100  # a file system may compress text, but not to a hundredth

T = TypeVar("T")


def read_file(path: Path, *, limit_bytes: int = MAX_RECORD_BYTES, ours: bool = False) -> bytes:
    """The contents of a small file. UnreadableFileError: it is not plain, too large, or not `ours`."""
    with open_file(path, must_be_ours=ours) as file:
        if file.status.st_size > limit_bytes:
            raise UnreadableFileError(path, f"has {file.status.st_size:,} bytes, above the limit of {limit_bytes:,}")
        parts: list[bytes] = []
        remaining_bytes = limit_bytes + 1
        while remaining_bytes and (block := os.read(file.descriptor, min(remaining_bytes, BLOCK_BYTES))):
            parts.append(block)
            remaining_bytes -= len(block)
        if not remaining_bytes:  # it has grown meanwhile
            raise UnreadableFileError(path, f"has more than the limit of {limit_bytes:,} bytes")
        return b"".join(parts)


def read_json(path: Path, kind: type[T], *, limit_bytes: int = MAX_RECORD_BYTES, ours: bool = False) -> T:
    data = read_file(path, limit_bytes=limit_bytes, ours=ours)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableFileError(path, f"is not a {kind.__name__}: {error}") from None


def read_json_if_readable(path: Path, kind: type[T], *, limit_bytes: int = MAX_RECORD_BYTES) -> T | None:
    with suppress(OSError):
        return read_json(path, kind, limit_bytes=limit_bytes)
    return None


def read_toml(path: Path, *, ours: bool = False) -> dict[str, Any]:
    data = read_file(path, limit_bytes=MAX_TOML_BYTES, ours=ours)
    if any(line.count(b".") > MAX_TOML_DOTS for line in data.splitlines()):
        raise UnreadableFileError(path, f"has a line with more than the limit of {MAX_TOML_DOTS} dots")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or a number of 5,000 digits
        raise UnreadableFileError(path, f"is not valid TOML: {error}") from None


def read_lines(path: Path, *, from_end_bytes: int | None = None) -> Iterator[bytes]:
    """The lines of a file of any size, each of bounded length. `from_end_bytes`: read only the end of the file."""
    with open_file(path) as file:
        if file.status.st_size > LARGE_BYTES and file.status.st_blocks * 512 < file.status.st_size // MAX_COMPRESSION:
            reason = f"has {file.status.st_size:,} bytes that are mostly holes, unlike files of a run"
            raise UnreadableFileError(path, reason)
        skipped = 0 if from_end_bytes is None else max(0, file.status.st_size - from_end_bytes)
        os.lseek(file.descriptor, skipped, os.SEEK_SET)
        rest: list[bytes] = []
        rest_bytes = 0
        is_torn = skipped > 0  # the first line is incomplete
        while block := os.read(file.descriptor, BLOCK_BYTES):
            *complete, last = block.split(b"\n")
            if complete:
                first = b"".join((*rest, complete[0]))
                yield from complete[1:] if is_torn else (first, *complete[1:])
                rest, rest_bytes, is_torn = [], 0, False
            rest.append(last)
            rest_bytes += len(last)
            if rest_bytes > MAX_LINE_BYTES:
                raise UnreadableFileError(path, f"has a line above the limit of {MAX_LINE_BYTES:,} bytes")
        if rest_bytes and not is_torn:
            yield b"".join(rest)


def real_path(path: Path) -> Path:
    """The path with all links resolved. For circular links the path itself, which cannot be opened."""
    return Path(os.path.realpath(path))


def is_folder(path: Path) -> bool:
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    return stat.S_ISREG(_mode(path))


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except PermissionError:
        raise UnreadableFileError(path, REASONS[errno.EACCES]) from None
    except (OSError, ValueError):
        return 0


def list_names(folder: Path) -> list[str]:
    """The names in a folder, sorted; none if it does not exist."""
    return _listed(folder, lambda _: True)


def numbered_files(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """The files in a folder whose names match `pattern`, by the number in its group 1; see `list_names`."""
    matches = (pattern.fullmatch(name) for name in list_names(folder))
    return dict(sorted((int(match[1]), folder / match[0]) for match in matches if match))


def list_symlinks(folder: Path) -> list[str]:
    return _listed(folder, os.DirEntry.is_symlink)


def list_folders(folder: Path) -> list[str]:
    return _listed(folder, lambda entry: entry.is_dir(follow_symlinks=False))


def _listed(folder: Path, is_wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    matching: list[str] = []
    with suppress(FileNotFoundError), open_file(folder, folder=True) as file, os.scandir(file.descriptor) as entries:
        for number, entry in enumerate(entries):
            if number == MAX_ENTRIES:
                raise UnreadableFileError(folder, f"has more than {MAX_ENTRIES:,} files, unlike a run")
            if is_wanted(entry):
                matching.append(entry.name)
    return sorted(matching)
