"""Who else may have put a file there: judged on open descriptors, from the root of the file system down to the file.

    /               root's, nobody else writes                nothing to say
    /tmp            root's, everybody writes, but sticky      nobody can exchange what is ours in it: start afresh
    /tmp/shared     everybody writes                          whoever likes can exchange what lies below ...
    /tmp/shared/me  ours alone                                ... but not in here: start afresh
    run/config.toml ours, nobody else may write               ours

What is above the nearest folder that is ours alone, or sticky, does not count: another folder put into its place is
not ours, and seen to be none. Root has no exemption: what another user has left is not root's word.
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
# O_NONBLOCK: to open a pipe that somebody left there would wait for its writer; O_NOCTTY: nor is a terminal to be ours
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
WORDS = {
    errno.ENOENT: "is missing",
    errno.ELOOP: "is a symbolic link, which is refused",
    errno.ENXIO: "is not a plain file",
    errno.EACCES: "cannot be read: no permission. Only the user who started a run can look into it",
}


class Unreadable(UsageError, OSError):  # noqa: N818 - it says what the file is
    """What must not be read: `strerror` says why, `filename` which. To a person who named it, wrong use."""

    def __init__(self, path: Path, why: str) -> None:
        OSError.__init__(self, errno.EPERM, why, str(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


class NotOurs(Unreadable):
    """Somebody else could have written it."""


@dataclass(frozen=True)
class Opened:
    """A file or folder that is open, and who else could have changed it, in words; empty: nobody."""

    descriptor: int
    found: os.stat_result
    strangers: str


@contextmanager
def opened(path: Path, *, folder: bool = False, ours: bool = False) -> Generator[Opened]:
    """Open a plain file, or a folder, through no link at all: `path` must be resolved as far as links are meant.

    Args:
        path: what to open.
        folder: whether it is to be a folder.
        ours: refuse what anybody else could have changed.

    Raises:
        FileNotFoundError: it is not there.
        Unreadable: in words: it is something else, not for us to read, or (NotOurs) not ours.
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
    """Who else can change what lies in `folder`, in words for people; empty: nobody.

    Raises:
        OSError: there is no such folder.
    """
    with opened(folder, folder=True) as it:
        return it.strangers


def check_ours(folder: Path) -> None:
    """Refuse to act on what lies in a folder that anybody else could have written, or has.

    Raises:
        UsageError: says who, and what to do.
    """
    if whose := _strangers(folder):
        raise UsageError(code="run-of-others", whose=whose)


def note_strangers(folder: Path) -> bool:
    """Say, if anybody else could have written what lies in a folder, that it is only looked at; whether that is so."""
    if whose := _strangers(folder):
        words = whose.encode("unicode_escape", errors="replace").decode() if not whose.isprintable() else whose
        print(f"paceline: {words}: shown read-only", file=sys.stderr)
    return bool(whose)


def _strangers(folder: Path) -> str:
    """Who else could have written what is in a folder, in words; empty: nobody.

    A folder of ours may have been open to others once: then something in it is theirs, or a folder that they can write.
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
    """What people call a user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def descend(path: Path, *, folder: bool) -> tuple[int, str]:
    """Open each part of the path in the one before it; a descriptor of the last, and who can exchange it."""
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
    if error.errno == errno.ENOENT:  # as always: it is not there
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
    """Who can exchange what lies in an open folder, given who can exchange the folder itself."""
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
    """Whether the group has our name and nobody else in it, as most systems give each user one (with umask 002).

    Where there is an access list, the mode's bits for the group cover all that it names.
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
