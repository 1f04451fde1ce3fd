"""Everything that is written into a run: its owner's alone whatever the umask, made anew, and never through a link."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from paceline.disk.owners import Unreadable

FOLDER, FILE = 0o700, 0o600
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def make_folder(folder: Path, *, exist_ok: bool = False) -> None:
    """Make a folder, and those above it that are missing.

    Raises:
        OSError: it cannot be made; FileExistsError if it is there already and that is not ok, or is something else.
    """
    for path in reversed(folder.absolute().parents):
        if not path.exists():
            _mkdir(path, exist_ok=True)
    _mkdir(folder, exist_ok=exist_ok)


def _mkdir(folder: Path, *, exist_ok: bool) -> None:
    try:
        folder.mkdir(FOLDER)
    except FileExistsError:
        if not exist_ok or folder.is_symlink() or not folder.is_dir():
            raise
    else:
        if folder.stat().st_mode & 0o777 != FOLDER:  # a umask that hides us from ourselves
            folder.chmod(FOLDER)


def create(path: Path, *, read: bool = False) -> int:
    """A descriptor of a new file.

    Raises:
        OSError: it is there already, or cannot be made.
    """
    return _private(os.open(path, (os.O_RDWR if read else os.O_WRONLY) | os.O_CREAT | os.O_EXCL | FLAGS, FILE), path)


def keep(path: Path, *, append: bool = False, make: bool = True) -> int:
    """A descriptor, to read and to write, of a file that is made if it is not there (and `make`): a log, a lock.

    Raises:
        OSError: it is a link, no plain file, or cannot be opened.
    """
    flags = os.O_RDWR | os.O_NONBLOCK | (os.O_CREAT if make else 0) | (os.O_APPEND if append else 0) | FLAGS
    return _private(os.open(path, flags, FILE), path)


def _private(descriptor: int, path: Path) -> int:
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable(path, "is not a plain file")
        if stat.S_IMODE(found.st_mode) != FILE and found.st_uid == os.geteuid():
            os.fchmod(descriptor, FILE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def replace(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write a file whole, or not at all: whoever reads it sees the old one or the new one.

    Args:
        path: of the file; an older one of that name is replaced.
        data: all of its contents.
        sync: return only when it is on the disk itself: other machines read it.

    Raises:
        OSError: the disk is full, say; the older file is then still there.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    descriptor = create(partial)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(descriptor)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
