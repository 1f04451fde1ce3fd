"""All writes to a run folder: new, private files, independent of the umask, without following links."""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.runs.owners import UnreadableFileError, open_without_links

FOLDER, FILE = 0o700, 0o600
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
POLL_SECONDS = 0.02
NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS


@contextmanager
def _open_parent(path: Path) -> Generator[tuple[int, str]]:
    """A descriptor of the parent of `path`, opened without following links, and the name in it."""
    absolute = path.absolute()
    descriptor, _ = open_without_links(absolute.parent, folder=True)
    try:
        yield descriptor, absolute.name
    finally:
        os.close(descriptor)


def make_folder(folder: Path, *, exist_ok: bool = False) -> None:
    """Create a folder and its missing parents. FileExistsError: it exists (unless `exist_ok`), or is not a folder."""
    for path in reversed(folder.absolute().parents):
        if not path.exists():
            _mkdir(path, exist_ok=True)
    _mkdir(folder, exist_ok=exist_ok)


def _mkdir(folder: Path, *, exist_ok: bool) -> None:
    with _open_parent(folder) as (parent, name):
        try:
            os.mkdir(name, FOLDER, dir_fd=parent)
        except FileExistsError:
            if not exist_ok or not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise
        else:
            os.chmod(name, FOLDER, dir_fd=parent)  # the umask may forbid access even to its owner


def rename(source: Path, target: Path) -> Path:
    with _open_parent(source) as (parent, name), _open_parent(target) as (target_parent, target_name):
        os.rename(name, target_name, src_dir_fd=parent, dst_dir_fd=target_parent)
    return target


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents."""
    with _open_parent(path) as (parent, name):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)


def create_file(path: Path) -> int:
    with _open_parent(path) as (parent, name):
        return _make_private(os.open(name, NEW_FILE_FLAGS, FILE, dir_fd=parent), path)


def write_new_file(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file that survives a power failure. Returns its size, and the sha256 of the chunks.

    After an OSError (a full disk) a part of the file may remain.
    """
    digest = hashlib.sha256()
    size_bytes = 0
    descriptor = create_file(path)
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            if not view.nbytes:  # an empty view cannot be cast
                continue
            view = view.cast("B")
            digest.update(view)
            size_bytes += view.nbytes
            while view.nbytes:
                written = os.write(descriptor, view)
                if written == 0:
                    raise OSError(errno.EIO, "the system wrote 0 bytes")
                view = view[written:]
        os.fsync(descriptor)
    except BaseException:
        with suppress(OSError):  # raise the first error
            os.close(descriptor)
        raise
    os.close(descriptor)  # a network file system may report a full disk only here
    return size_bytes, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power failure. The sync of a file does not include its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system cannot sync folders
            raise
    finally:
        os.close(descriptor)


def open_or_create(path: Path, *, append: bool = False, make: bool = True) -> int:
    """A descriptor of a file, for reading and writing. Creates the file if it does not exist and `make` is set."""
    flags = os.O_RDWR | os.O_NONBLOCK | (os.O_CREAT if make else 0) | (os.O_APPEND if append else 0) | FLAGS
    with _open_parent(path) as (parent, name):
        return _make_private(os.open(name, flags, FILE, dir_fd=parent), path)


def try_lock(descriptor: int, seconds: float) -> bool:
    """Lock a file. Returns False if another process still holds the lock after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)


def _make_private(descriptor: int, path: Path) -> int:
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableFileError(path, "is not a plain file")
        if status.st_nlink > 1:
            reason = "has a second name (a hard link), so that a write would also change that file"
            raise UnreadableFileError(path, reason)
        if stat.S_IMODE(status.st_mode) != FILE and status.st_uid == os.geteuid():
            os.fchmod(descriptor, FILE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def replace_file(path: Path, data: bytes | Iterable[bytes], *, sync: bool = False) -> None:
    """Write a file atomically, also if an iterable of its parts raises an exception.

    `sync`: wait until it is on disk, because other machines read it.
    """
    with replace_atomically(path) as (folder, partial):
        descriptor = _make_private(os.open(partial, NEW_FILE_FLAGS, FILE, dir_fd=folder), path)
        with os.fdopen(descriptor, "wb") as file:
            for part in [data] if isinstance(data, bytes) else data:
                file.write(part)
            file.flush()
            if sync:
                os.fsync(descriptor)


@contextmanager
def replace_atomically(path: Path) -> Generator[tuple[int, str]]:
    """Replace `path` atomically: readers see the old file or the new one.

    Yields the descriptor of its folder, and the name in it of a temporary file, which the caller must create.
    After an OSError (a full disk) the old file remains.
    """
    with _open_parent(path) as (folder, name):
        partial = f".{name}.{secrets.token_hex(4)}.partial"
        try:
            yield folder, partial
            os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise
