"""All writes into a run folder: new and private files, independent of the umask, without following links."""

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

from paceline.runs.owners import Unreadable, descend

FOLDER, FILE = 0o700, 0o600
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
POLL_SECONDS = 0.02
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS


@contextmanager
def _inside(path: Path) -> Generator[tuple[int, str]]:
    """A descriptor of the folder of `path`, opened without following links, and the name in it."""
    whole = path.absolute()
    descriptor, _ = descend(whole.parent, folder=True)
    try:
        yield descriptor, whole.name
    finally:
        os.close(descriptor)


def make_folder(folder: Path, *, exist_ok: bool = False) -> None:
    """Make a folder and its missing parents.

    Raises:
        OSError: it cannot be made. FileExistsError: it exists (unless `exist_ok`), or is no folder.
    """
    for path in reversed(folder.absolute().parents):
        if not path.exists():
            _mkdir(path, exist_ok=True)
    _mkdir(folder, exist_ok=exist_ok)


def _mkdir(folder: Path, *, exist_ok: bool) -> None:
    with _inside(folder) as (parent, name):
        try:
            os.mkdir(name, FOLDER, dir_fd=parent)
        except FileExistsError:
            if not exist_ok or not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise
        else:
            os.chmod(name, FOLDER, dir_fd=parent)  # a umask may hide it from ourselves


def rename(source: Path, target: Path) -> Path:
    """Rename a file or folder; the new path.

    Raises:
        OSError: it failed.
    """
    with _inside(source) as (parent, name), _inside(target) as (there, other):
        os.rename(name, other, src_dir_fd=parent, dst_dir_fd=there)
    return target


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents.

    Raises:
        OSError: it failed.
    """
    with _inside(path) as (parent, name):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)


def create(path: Path) -> int:
    """A descriptor of a new file.

    Raises:
        OSError: it exists, or cannot be made.
    """
    with _inside(path) as (parent, name):
        return _private(os.open(name, NEW, FILE, dir_fd=parent), path)


def write_new(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file. When this returns, the whole file survives a power failure.

    Returns:
        Its size in bytes, and the sha256 of the chunks (not of the stored bytes).

    Raises:
        OSError: it failed (the disk is full; the file exists). A part of the file may remain.
    """
    digest = hashlib.sha256()
    size_bytes = 0
    descriptor = create(path)
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
                    raise OSError(errno.EIO, "the system writes nothing, and gives no reason")
                view = view[written:]
        os.fsync(descriptor)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            os.close(descriptor)
        raise
    os.close(descriptor)  # a network file system may report only now that the disk is full
    return size_bytes, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power failure; syncing a file does not do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def keep(path: Path, *, append: bool = False, make: bool = True) -> int:
    """A descriptor, for reading and writing, of a file; it is made if it does not exist and `make` is set.

    Raises:
        OSError: it is a link or no plain file, or cannot be opened.
    """
    flags = os.O_RDWR | os.O_NONBLOCK | (os.O_CREAT if make else 0) | (os.O_APPEND if append else 0) | FLAGS
    with _inside(path) as (parent, name):
        return _private(os.open(name, flags, FILE, dir_fd=parent), path)


def lock(descriptor: int, seconds: float) -> bool:
    """Take a file's lock; False if another process still holds it after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)


def _private(descriptor: int, path: Path) -> int:
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable(path, "is not a plain file")
        if found.st_nlink > 1:
            raise Unreadable(path, "has another name somewhere (a hard link): what is written here would be there, too")
        if stat.S_IMODE(found.st_mode) != FILE and found.st_uid == os.geteuid():
            os.fchmod(descriptor, FILE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def replace(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write a file completely or not at all; see `replacing`.

    Args:
        path: the file; an existing one is replaced.
        data: its contents.
        sync: return when it is on the disk: other machines read it.
    """
    with replacing(path) as (folder, partial):
        descriptor = _private(os.open(partial, NEW, FILE, dir_fd=folder), path)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(descriptor)


@contextmanager
def replacing(path: Path) -> Generator[tuple[int, str]]:
    """A folder's descriptor, and the name in it of a file to write, which replaces `path` at the end.

    Readers of `path` see the old file or the new one.

    Raises:
        OSError: it failed, for example on a full disk; the old file remains.
    """
    with _inside(path) as (folder, name):
        partial = f".{name}.{secrets.token_hex(4)}.partial"
        try:
            yield folder, partial
            os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise
