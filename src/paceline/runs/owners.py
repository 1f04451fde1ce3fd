"""Determines which other users could have written a file, from descriptors of all folders from the root to the file.

"We" are the user of this process.

    /               owned by root, only root writes     no other user
    /tmp            owned by root, all write, sticky    others cannot replace our entries: ignore the folders above
    /tmp/shared     all write                           anyone can replace the entries below ...
    /tmp/shared/me  owned by us, only we write          ... but not in here: ignore the folders above
    run/config.toml owned by us, only we write          ours

The folders above the nearest sticky folder, or the nearest one that only we can write, do not matter: if someone
replaces that folder, the new one is not ours. This also applies to root: files of other users are not root's.
"""

import errno
import grp
import os
import pwd
import stat
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError

ROOT_UID = 0
SEARCH_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe would wait for its writer; O_NOCTTY: a terminal must not control this process
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
REASONS = {
    errno.ENOENT: "is missing",
    errno.ELOOP: "is a symbolic link",
    errno.ENXIO: "is not a plain file",
    errno.EACCES: "cannot be read: no permission. Only the user who started a run can read it",
}


class UnreadableFileError(UsageError, OSError):
    """A file that must not be read. `strerror` is the reason, `filename` the path."""

    def __init__(self, path: Path, why: str) -> None:
        OSError.__init__(self, errno.EPERM, why, str(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


class UntrustedFileError(UnreadableFileError):
    """A file that a different user could have written."""


@dataclass(frozen=True)
class OwnerCheckedFile:
    """An open file or folder. `strangers` names the other users who could have changed it; empty if only we could."""

    descriptor: int
    status: os.stat_result
    other_writers_message: str


@contextmanager
def open_file(path: Path, *, folder: bool = False, must_be_ours: bool = False) -> Generator[OwnerCheckedFile]:
    """Open a plain file or a folder without following symbolic links.

    Raises:
        FileNotFoundError: it does not exist.
        UntrustedFileError: a different user could have changed it, with `must_be_ours`.
        UnreadableFileError: it has a different type, or we have no permission to read it.
    """
    descriptor, strangers = open_without_links(path.absolute(), folder=folder)
    try:
        status = os.fstat(descriptor)
        if not folder and not stat.S_ISREG(status.st_mode):
            raise UnreadableFileError(path, "is not a plain file")
        if status.st_uid != os.geteuid():
            strangers = f"{path} belongs to {_describe_owner(status.st_uid)}"
        else:
            strangers = _writers(path, status, descriptor) or strangers
        if must_be_ours and strangers:
            raise UntrustedFileError(path, f"is not trusted: {strangers}")
        yield OwnerCheckedFile(descriptor, status, strangers)
    finally:
        os.close(descriptor)


def describe_writers(folder: Path) -> str:
    """A message with the other users who can change the files in `folder`; empty if there are none."""
    with open_file(folder, folder=True) as opened:
        return opened.other_writers_message


def check_owned_by_us(folder: Path) -> None:
    if strangers := _other_writers_message(folder):
        raise UsageError(code="run-of-others", whose=strangers)


def warn_if_shared(folder: Path) -> bool:
    """If a different user could have written the files in a folder, print a warning and return True."""
    if text := _other_writers_message(folder):
        shown = text if text.isprintable() else text.encode("unicode_escape", errors="replace").decode()
        print(f"paceline: {shown}: shown read-only", file=sys.stderr)
    return bool(text)


def _other_writers_message(folder: Path) -> str:
    """A message with the other users who could have written the files in a folder; empty if there are none.

    Our folder may have been writable earlier: other users may own an entry, or can write into a subfolder.
    """
    if writers := describe_writers(folder):
        return writers
    with open_file(folder, folder=True) as opened, os.scandir(opened.descriptor) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != os.geteuid():
                return f"{folder / entry.name} belongs to {_describe_owner(status.st_uid)}"
            if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IWOTH:
                return f"{folder / entry.name} can be written by all users (fix: `chmod go-w`)"
    return ""


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def open_without_links(path: Path, *, folder: bool) -> tuple[int, str]:
    """Open each part of a path inside its parent; return a descriptor of the last part, and its other writers."""
    strangers = ""
    root, *parts = path.parts
    descriptor = os.open(root, SEARCH_FLAGS if parts else READ_FLAGS)
    try:
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            strangers = _entry_writers(path.parents[len(parts) - 1 - index], descriptor, strangers)
            flags = READ_FLAGS | (os.O_DIRECTORY if folder else 0) if last else SEARCH_FLAGS
            try:
                inner = os.open(part, flags, dir_fd=descriptor)
            except OSError as error:
                failed = path if last else path.parents[len(parts) - 2 - index]
                raise _describe_open_error(path, failed, error) from None
            os.close(descriptor)
            descriptor = inner
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, strangers


def _describe_open_error(path: Path, part: Path, error: OSError) -> OSError:
    if error.errno == errno.ENOENT:
        return FileNotFoundError(error.errno, error.strerror, str(path))
    is_link = False
    with suppress(OSError):
        is_link = part.is_symlink()
    if is_link or error.errno == errno.ELOOP:
        return UnreadableFileError(path, REASONS[errno.ELOOP] if part == path else f"is below {part}, a symbolic link")
    if error.errno == errno.ENOTDIR:
        place = "is not a folder" if part == path else f"is below {part}, which is not a folder"
        return UnreadableFileError(path, place)
    return UnreadableFileError(path, REASONS.get(error.errno or 0, f"cannot be read: {error.strerror}"))


def _entry_writers(folder: Path, descriptor: int, strangers: str) -> str:
    """Who else can replace the entries of an open folder. `strangers`: who else can replace the folder."""
    status, own_uid = os.fstat(descriptor), os.geteuid()
    if status.st_uid not in (own_uid, ROOT_UID):
        return f"{folder} belongs to {_describe_owner(status.st_uid)}"
    if status.st_mode & stat.S_ISVTX:
        return ""
    return _writers(folder, status, descriptor) or ("" if status.st_uid == own_uid else strangers)


def _describe_owner(uid: int) -> str:
    return f"user {user_name(uid)}, and we are {user_name(os.geteuid())}"


def _writers(path: Path, status: os.stat_result, descriptor: int) -> str:
    writers = ""
    if status.st_mode & stat.S_IWOTH:
        writers = "all users"
    elif status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid, descriptor):
        try:
            writers = f"group {grp.getgrgid(status.st_gid).gr_name}"
        except KeyError:
            writers = f"group number {status.st_gid}"
    return writers and f"{path} can be written by {writers} (fix: `chmod go-w`)"


def _is_private_group(gid: int, descriptor: int) -> bool:
    """Whether a group is our private group: most systems (with umask 002) create one with the name of each user.

    Not if the file has an access list, because the group bits of the mode then apply to all its entries.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if group.gr_name != user.pw_name or not {*group.gr_mem} <= {user.pw_name}:
        return False
    try:
        os.getxattr(f"/proc/self/fd/{descriptor}", "system.posix_acl_access")
    except OSError as error:
        return error.errno in (errno.ENODATA, errno.EOPNOTSUPP)
    return False
