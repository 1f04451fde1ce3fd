"""Finds the line of the user's program in a stack. Pure: from files and frames to words like `train.py:97 in step`.

A stack that ends in a collective has torch's lines inside, then perhaps ours or a framework's, then those of the
program: `train.py:40 in main, by transformers/trainer.py:3700`. The names of files are equal on all hosts:
`torch/distributed/...`, `paceline/train/step.py`, `python3.11/threading.py`, and the last parts of a user's file.
"""

import sys
import sysconfig
import traceback
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from paceline.protocol.evidence import Frame
from paceline.protocol.places import SITE_CHARS, Activity, activity_of, called_at, site
from paceline.rank.imports import HIDDEN_FRAME

MAX_DEPTH = 100  # frames to look at from inside; a framework's are some 30, a backward of ours under a dozen
_OURS = str(Path(__file__).resolve().parents[1])  # .../paceline
_STDLIB = sysconfig.get_path("stdlib")
_PROGRAMS = sysconfig.get_path("scripts") + "/"  # `paceline`, `accelerate`: no suffix, and nobody's code


class Owner(IntEnum):
    """Whose a line is."""

    USER = 0
    OURS = 1
    NOBODY = 2  # torch, the standard library, what is between us and them
    LIBRARY = 3  # somebody else's: a framework


USER, OURS, NOBODY, LIBRARY = Owner


class Site(NamedTuple):
    """Where something was called: in the user's program, and there by which line of a library."""

    frame: FrameType | None = None  # where nothing is the user's, the library's; else ours
    library: FrameType | None = None

    def words(self) -> str:
        """`train.py:40 in main, by transformers/trainer.py:3700`; empty if unknown."""
        return called_at(*(frame and frame_of(frame) for frame in self))


@cache
def owner(filename: str) -> Owner:
    """Whose file this is; by name alone."""
    if filename.startswith(_OURS + "/"):
        return Owner.NOBODY if activity_of(short(filename)) in (Activity.GUARD, Activity.WAITS) else Owner.OURS
    if "/site-packages/torch/" in filename or "/torch/distributed/" in filename:
        return Owner.NOBODY
    if "-packages/" in filename:
        return Owner.LIBRARY
    if filename.startswith((_STDLIB, "<frozen", _PROGRAMS)) or filename.endswith("/bin/paceline"):  # <frozen runpy>
        return Owner.NOBODY
    return Owner.USER


@cache
def short(filename: str) -> str:
    """What people on any host call this file."""
    filename = filename.removesuffix(HIDDEN_FRAME)
    if filename.startswith(_OURS + "/"):
        return "paceline" + filename[len(_OURS) :]
    for packages in ("/site-packages/", "/dist-packages/"):
        if packages in filename:
            return filename.rpartition(packages)[2]
    if filename.startswith(_STDLIB + "/"):
        return Path(_STDLIB).name + filename[len(_STDLIB) :]
    path = Path(filename)
    in_package = (path.parent / "__init__.py").exists()  # utils.py alone says little
    return f"{path.parent.name}/{path.name}" if in_package else path.name or filename


def site_words(frame: Frame) -> str:
    """`train.py:97 in step`: without folders, as in reports."""
    return site(frame)[:SITE_CHARS]


class _Packages(dict[str, str | None]):
    """By file, for each frame of each call: a library's package, "paceline", "" (NOBODY), or None (USER)."""

    def __missing__(self, filename: str) -> str | None:
        whose = owner(filename)
        name = "" if whose is NOBODY else short(filename).partition("/")[0]
        found = self[filename] = None if whose is USER else name
        return found


_packages = _Packages()


def call_site(frame: FrameType | None) -> Site:
    """From `frame` outwards, the first one of the user's program; else the first of a library; else of ours.

    Of the libraries inside it that one counts which the program has called, by its innermost line.
    """
    ours = library = first = None
    package, depth = "", 0
    while frame is not None and depth < MAX_DEPTH:
        name = _packages[frame.f_code.co_filename]
        if name is None:
            return Site(frame, library)
        if name == "paceline":
            ours = ours or frame
        elif name and name != package:
            first, library, package = first or frame, frame, name
        frame, depth = frame.f_back, depth + 1
    return Site(first or ours)


def frame_of(frame: FrameType) -> Frame:
    """The record of a running frame, its file called as everywhere."""
    file = frame.f_code.co_filename
    return Frame(short(file), frame.f_lineno, frame.f_code.co_name, owner(file) is LIBRARY)


def line_of(error: BaseException) -> str:
    """`train.py:97: `, the innermost line of the user's program that `error` came through; empty if there is none."""
    caller = call_site(sys._getframe(1)).frame  # pyright: ignore[reportPrivateUsage]
    places = [(caller, caller.f_lineno)] if caller is not None else []  # where it is raised before it leaves a function
    places += traceback.walk_tb(error.__traceback__)
    lines = [f"{short(file)}:{line}: " for frame, line in places if owner(file := frame.f_code.co_filename) is USER]
    return lines[-1] if lines else ""


def user_site() -> str:
    """The line of the user's program that has called this, also through frameworks; empty without one."""
    frame = call_site(sys._getframe(1)).frame  # pyright: ignore[reportPrivateUsage]
    return site_words(frame_of(frame)) if frame is not None else ""
