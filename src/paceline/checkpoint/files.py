"""How is one file of a checkpoint written so that nothing is lost, and read so that nothing is taken on trust?"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from paceline.checkpoint.manifest import Damaged

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
READ_BYTES = 1 << 20


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, of which nothing is missing when this returns, even after a power cut.

    Returns:
        Its size in bytes, and its sha256 (hashed on the way: what was meant, not what the disk made of it).

    Raises:
        OSError: if anything fails (the disk is full; the file exists). A part of the file may then be there.
    """
    digest = hashlib.sha256()
    size_bytes = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            if not view.nbytes:  # an empty view cannot be cast
                continue
            view = view.cast("B")
            digest.update(view)
            size_bytes += view.nbytes
            _write_all(descriptor, view)
        os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            os.close(descriptor)
        raise
    os.close(descriptor)  # a network file system may say only now that the disk is full
    return size_bytes, digest.hexdigest()


def _write_all(descriptor: int, view: memoryview) -> None:
    while view.nbytes:
        written = os.write(descriptor, view)
        if written == 0:
            raise OSError(errno.EIO, "the system writes nothing, and gives no reason")
        view = view[written:]


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` outlive a power cut; syncing a file does not do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such thing
            raise
    finally:
        os.close(descriptor)


def check_folder(folder: Path) -> None:
    """Refuse a folder that is a link, or that somebody else may have filled.

    Raises:
        Damaged: says which, and why.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        raise Damaged(f"its folder {_why(error)}") from None
    if stat.S_ISLNK(found.st_mode):
        raise Damaged("its folder is a symbolic link, which is refused")
    if not stat.S_ISDIR(found.st_mode):
        raise Damaged("it is not a folder")
    _check_owner("its folder", found)


def read_whole(path: Path, limit_bytes: int) -> bytes:
    """The contents of a small file.

    Raises:
        Damaged: names the file.
    """
    with _opened(path) as (descriptor, found):
        if found.st_size > limit_bytes:
            raise Damaged(f"{path.name} has {found.st_size:,} bytes; more than {limit_bytes:,} are not read")
        return b"".join(_blocks(descriptor))


def check_file(path: Path, size_bytes: int, sha256: str | None) -> None:
    """Refuse a file that has another size or hash; without `sha256` its contents are not read.

    Raises:
        Damaged: names the file, with what was expected and what is there.
    """
    with _opened(path) as (descriptor, found):
        if found.st_size != size_bytes:
            raise Damaged(f"{path.name} has {found.st_size:,} bytes instead of {size_bytes:,}")
        if sha256 is None:
            return
        digest = hashlib.sha256()
        for block in _blocks(descriptor):
            digest.update(block)
        if digest.hexdigest() != sha256:
            raise Damaged(f"{path.name} has the sha256 {digest.hexdigest()} instead of {sha256}")


def _blocks(descriptor: int) -> Iterator[bytes]:
    while block := os.read(descriptor, READ_BYTES):
        yield block


@contextlib.contextmanager
def _opened(path: Path) -> Generator[tuple[int, os.stat_result]]:
    """A plain file of ours, open for reading; what goes wrong with it while it is open is its damage as well."""
    try:
        # O_NONBLOCK: to open a pipe that somebody left under this name would wait for ever
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise Damaged(f"{path.name} is not a plain file")
            _check_owner(path.name, found)
            yield descriptor, found
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Damaged(f"{path.name} {_why(error)}") from None


def _check_owner(name: str, found: os.stat_result) -> None:
    us = os.geteuid()
    if us not in (0, found.st_uid):
        raise Damaged(
            f"{name} belongs to user {found.st_uid}, and we are user {us}: it may hold anything. Copy it first"
        )
    if found.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(found.st_mode)
        raise Damaged(f"{name} can be written by everybody (mode {mode:o}): it may hold anything. `chmod o-w` it first")


def _why(error: OSError) -> str:
    known = {errno.ENOENT: "is missing", errno.ELOOP: "is a symbolic link, which is refused"}
    return known.get(error.errno or 0, f"cannot be read: {error.strerror}")
