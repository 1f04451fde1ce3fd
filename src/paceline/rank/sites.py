"""Finds the line of the user's program in a stack, and formats it like `train.py:97 in step`.

The innermost frames of a collective belong to torch. Frames of paceline or of a framework may follow, then those of the
program: `train.py:40 in main, by transformers/trainer.py:3700`. File names are equal on all hosts:
`torch/distributed/...`, `paceline/train/step.py`, `python3.11/threading.py`, and the last parts of a user's file.
"""

import sys
import sysconfig
import traceback
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import FrameType

from msgspec import Struct

from paceline.protocol.code_locations import SITE_CHARS, Activity, activity_of, called_at, site
from paceline.protocol.evidence import Frame
from paceline.rank.imports import HIDDEN_FRAME

MAX_DEPTH = 100  # limit of inspected frames; a framework has about 30
_OURS = str(Path(__file__).resolve().parents[1])  # .../paceline
_STDLIB = sysconfig.get_path("stdlib")
_PROGRAMS = sysconfig.get_path("scripts") + "/"  # entry points like `paceline` or `accelerate`


class Owner(IntEnum):
    """The owner of a line."""

    USER = 0
    OURS = 1
    NOBODY = 2  # torch, the standard library, and wrappers around them
    LIBRARY = 3  # a framework or another library


USER, OURS, NOBODY, LIBRARY = Owner


class Site(Struct, frozen=True):
    """A call site: a frame of the user's program, and the frame of the library that it called."""

    frame: FrameType | None = None  # without a frame of the user: that of a library, else ours
    library: FrameType | None = None

    def describe(self) -> str:
        """`train.py:40 in main, by transformers/trainer.py:3700`; empty if unknown."""
        return called_at(*(frame and frame_of(frame) for frame in (self.frame, self.library)))


@cache
def owner(filename: str) -> Owner:
    """The owner of a file, derived from its name."""
    if filename.startswith(_OURS + "/"):
        return Owner.NOBODY if activity_of(short_filename(filename)) in (Activity.GUARD, Activity.WAITS) else Owner.OURS
    if "/site-packages/torch/" in filename or "/torch/distributed/" in filename:
        return Owner.NOBODY
    if "-packages/" in filename:
        return Owner.LIBRARY
    if filename.startswith((_STDLIB, "<frozen", _PROGRAMS)) or filename.endswith("/bin/paceline"):  # <frozen runpy>
        return Owner.NOBODY
    return Owner.USER


@cache
def short_filename(filename: str) -> str:
    """The short name of a file, which is equal on all hosts."""
    filename = filename.removesuffix(HIDDEN_FRAME)
    if filename.startswith(_OURS + "/"):
        return "paceline" + filename[len(_OURS) :]
    for packages in ("/site-packages/", "/dist-packages/"):
        if packages in filename:
            return filename.rpartition(packages)[2]
    if filename.startswith(_STDLIB + "/"):
        return Path(_STDLIB).name + filename[len(_STDLIB) :]
    path = Path(filename)
    in_package = (path.parent / "__init__.py").exists()  # `utils.py` alone would be ambiguous
    return f"{path.parent.name}/{path.name}" if in_package else path.name or filename


def site_words(frame: Frame) -> str:
    """A frame as text without folders, as in reports: `train.py:97 in step`."""
    return site(frame)[:SITE_CHARS]


class _Packages(dict[str, str | None]):
    """A cache by file name: a library's package, "paceline", "" (NOBODY), or None (USER)."""

    def __missing__(self, filename: str) -> str | None:
        file_owner = owner(filename)
        name = "" if file_owner is NOBODY else short_filename(filename).partition("/")[0]
        package = self[filename] = None if file_owner is USER else name
        return package


_packages = _Packages()


def call_site(frame: FrameType | None) -> Site:
    """The first frame of the user's program from `frame` outwards; else the first of a library; else ours.

    The library of the site is the one that the program has called, with its innermost frame.
    """
    ours = library = first_library = None
    package, depth = "", 0
    while frame is not None and depth < MAX_DEPTH:
        name = _packages[frame.f_code.co_filename]
        if name is None:
            return Site(frame, library)
        if name == "paceline":
            ours = ours or frame
        elif name and name != package:
            first_library, library, package = first_library or frame, frame, name
        frame, depth = frame.f_back, depth + 1
    return Site(first_library or ours)


def frame_of(frame: FrameType) -> Frame:
    """The record of a running frame, with the short file name."""
    file = frame.f_code.co_filename
    return Frame(short_filename(file), frame.f_lineno, frame.f_code.co_name, owner(file) is LIBRARY)


def line_of(error: BaseException) -> str:
    """The innermost line of the user's program in the traceback of `error`, as `train.py:97: `; empty without one."""
    caller = call_site(sys._getframe(1)).frame  # pyright: ignore[reportPrivateUsage]
    locations = [(caller, caller.f_lineno)] if caller is not None else []  # for an error that has not left its function
    locations += traceback.walk_tb(error.__traceback__)
    lines = [
        f"{short_filename(file)}:{line}: "
        for frame, line in locations
        if owner(file := frame.f_code.co_filename) is USER
    ]
    return lines[-1] if lines else ""


def user_site() -> str:
    """The line of the user's program that called this, directly or through frameworks; empty without one."""
    frame = call_site(sys._getframe(1)).frame  # pyright: ignore[reportPrivateUsage]
    return site_words(frame_of(frame)) if frame is not None else ""
