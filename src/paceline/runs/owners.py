"""Which other users could have written a file, from open descriptors of all folders from the root down to the file.

    /               root's, only root writes            no other user
    /tmp            root's, all write, but sticky       others cannot replace our entries: forget the folders above
    /tmp/shared     all write                           anyone can replace the entries below ...
    /tmp/shared/me  ours, only we write                 ... but not in here: forget the folders above
    run/config.toml ours, only we write                 ours

The folders above the nearest one that is only ours, or sticky, do not count: a folder that replaces it is not ours,
which we detect. Root has no exemption: files that another user left are not root's.
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

ROOT = 0
SEARCH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe would wait for its writer; O_NOCTTY: a terminal must not become ours
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
WORDS = {
    errno.ENOENT: "is missing",
    errno.ELOOP: "is a symbolic link, which is refused",
    errno.ENXIO: "is not a plain file",
    errno.EACCES: "cannot be read: no permission. Only the user who started a run can look into it",
}


class Unreadable(UsageError, OSError):  # noqa: N818 - it says what the file is
    """A file that must not be read: `strerror` has the reason, `filename` the path. A UsageError for its user."""

    def __init__(self, path: Path, why: str) -> None:
        OSError.__init__(self, errno.EPERM, why, str(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


class NotOurs(Unreadable):
    """A file that another user could have written."""


@dataclass(frozen=True)
class Opened:
    """An open file or folder, and a sentence about the users who could have changed it; empty: only we."""

    descriptor: int
    found: os.stat_result
    strangers: str


@contextmanager
def opened(path: Path, *, folder: bool = False, ours: bool = False) -> Generator[Opened]:
    """Open a plain file or a folder without following any link.

    Args:
        path: the file, with all links resolved that may be followed.
        folder: expect a folder.
        ours: raise an error if another user could have changed it.

    Raises:
        FileNotFoundError: it does not exist.
        Unreadable: it is of another type, we may not read it, or (NotOurs) another user could have changed it.
    """
    descriptor, strangers = descend(path.absolute(), folder=folder)
    try:
        found = os.fstat(descriptor)
        if not folder and not stat.S_ISREG(found.st_mode):
            raise Unreadable(path, "is not a plain file")
        if found.st_uid != os.geteuid():
            strangers = f"{path} belongs to {_whose(found.st_uid)}"
        else:
            strangers = _others(path, found, descriptor) or strangers
        if ours and strangers:
            raise NotOurs(path, f"is not to be trusted: {strangers}")
        yield Opened(descriptor, found, strangers)
    finally:
        os.close(descriptor)


def other_writers(folder: Path) -> str:
    """A sentence about the users who can change the files in `folder`; empty: only we can.

    Raises:
        OSError: the folder does not exist.
    """
    with opened(folder, folder=True) as it:
        return it.strangers


def check_ours(folder: Path) -> None:
    """Check that no other user owns or could have written the files in a folder.

    Raises:
        UsageError: another user could; with the user and the fix.
    """
    if whose := _strangers(folder):
        raise UsageError(code="run-of-others", whose=whose)


def note_strangers(folder: Path) -> bool:
    """Print that a folder is only read if another user could have written its files; whether that is the case."""
    if whose := _strangers(folder):
        words = whose.encode("unicode_escape", errors="replace").decode() if not whose.isprintable() else whose
        print(f"paceline: {words}: shown read-only", file=sys.stderr)
    return bool(whose)


def _strangers(folder: Path) -> str:
    """A sentence about the users who could have written the files in a folder; empty: only we.

    A folder of ours may have been open to others before: they may own an entry, or can write into a subfolder.
    """
    if whose := other_writers(folder):
        return whose
    with opened(folder, folder=True) as it, os.scandir(it.descriptor) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            if found.st_uid != os.geteuid():
                return f"{folder / entry.name} belongs to {_whose(found.st_uid)}"
            if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH:
                return f"{folder / entry.name} can be written by everybody (`chmod go-w` ends that)"
    return ""


def user_name(uid: int) -> str:
    """The name of a user, or the number if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def descend(path: Path, *, folder: bool) -> tuple[int, str]:
    """Open each part of a path inside its parent; a descriptor of the last, and who else can replace it."""
    strange = ""
    at, *parts = path.parts
    descriptor = os.open(at, SEARCH if parts else READ)
    try:
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            strange = _below(path.parents[len(parts) - 1 - index], descriptor, strange)
            flags = READ | (os.O_DIRECTORY if folder else 0) if last else SEARCH
            try:
                inner = os.open(part, flags, dir_fd=descriptor)
            except OSError as error:
                raise _in_words(path, path.parents[len(parts) - 2 - index] if not last else path, error) from None
            os.close(descriptor)
            descriptor = inner
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, strange


def _in_words(path: Path, part: Path, error: OSError) -> OSError:
    if error.errno == errno.ENOENT:
        return FileNotFoundError(error.errno, error.strerror, str(path))
    linked = False
    with suppress(OSError):
        linked = part.is_symlink()
    if linked or error.errno == errno.ELOOP:
        return Unreadable(path, WORDS[errno.ELOOP] if part == path else f"lies behind {part}, a symbolic link")
    if error.errno == errno.ENOTDIR:
        return Unreadable(path, "is not a folder" if part == path else f"lies behind {part}, which is no folder")
    return Unreadable(path, WORDS.get(error.errno or 0, f"cannot be read: {error.strerror}"))


def _below(folder: Path, descriptor: int, strange: str) -> str:
    """Who else can replace the entries of an open folder; `strange`: who can replace the folder."""
    found, us = os.fstat(descriptor), os.geteuid()
    if found.st_uid not in (us, ROOT):
        return f"{folder} belongs to {_whose(found.st_uid)}"
    if found.st_mode & stat.S_ISVTX:
        return ""
    return _others(folder, found, descriptor) or ("" if found.st_uid == us else strange)


def _whose(uid: int) -> str:
    return f"user {user_name(uid)}, and we are {user_name(os.geteuid())}"


def _others(path: Path, found: os.stat_result, descriptor: int) -> str:
    who = ""
    if found.st_mode & stat.S_IWOTH:
        who = "everybody"
    elif found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid, descriptor):
        try:
            who = f"group {grp.getgrgid(found.st_gid).gr_name}"
        except KeyError:
            who = f"group number {found.st_gid}"
    return who and f"{path} can be written by {who} (`chmod go-w` ends that)"


def _is_private_group(gid: int, descriptor: int) -> bool:
    """Whether the group has our name and no other member, as most systems give each user one (with umask 002).

    If there is an access list, the mode's group bits cover all its entries.
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
