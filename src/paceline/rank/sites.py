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
from msgspec.structs import replace

from paceline.protocol.code_locations import (
    PACKAGE_FOLDERS,
    SITE_CHARS,
    FrameActivity,
    activity_of_source_file,
    format_call_site,
    format_location,
)
from paceline.protocol.evidence import Frame
from paceline.rank.imports import HIDDEN_FRAME_SUFFIX

MAX_DEPTH = 100  # limit of inspected frames; a framework has about 30
_PACKAGE_DIR = str(Path(__file__).resolve().parents[1])  # .../paceline
_STDLIB = sysconfig.get_path("stdlib")
_SCRIPTS_DIR = sysconfig.get_path("scripts") + "/"  # entry points like `paceline` or `accelerate`


class CodeOwner(IntEnum):
    USER = 0
    OURS = 1
    NOBODY = 2  # torch, the standard library, and wrappers around them
    LIBRARY = 3  # a framework or another library


USER, OURS, NOBODY, LIBRARY = CodeOwner


class Site(Struct, frozen=True):
    """A call site: a frame of the user's program, and the frame of the library that it called."""

    frame: FrameType | None = None  # without a frame of the user: that of a library, else ours
    library: FrameType | None = None

    def describe(self) -> str:
        """`train.py:40 in main, by transformers/trainer.py:3700`; empty if unknown."""
        return format_call_site(*(frame and frame_record(frame) for frame in (self.frame, self.library)))


@cache
def code_owner(filename: str) -> CodeOwner:
    if filename.startswith(_PACKAGE_DIR + "/"):
        is_helper = activity_of_source_file(short_filename(filename)) in (FrameActivity.GUARD, FrameActivity.WAITS)
        return CodeOwner.NOBODY if is_helper else CodeOwner.OURS
    if "/site-packages/torch/" in filename or "/torch/distributed/" in filename:
        return CodeOwner.NOBODY
    if any(folder in filename for folder in PACKAGE_FOLDERS):
        return CodeOwner.LIBRARY
    if filename.startswith((_STDLIB, "<frozen", _SCRIPTS_DIR)) or filename.endswith("/bin/paceline"):  # <frozen runpy>
        return CodeOwner.NOBODY
    return CodeOwner.USER


@cache
def short_filename(filename: str) -> str:
    """The short name of a file, which is equal on all hosts."""
    filename = filename.removesuffix(HIDDEN_FRAME_SUFFIX)
    if filename.startswith(_PACKAGE_DIR + "/"):
        return "paceline" + filename[len(_PACKAGE_DIR) :]
    for folder in PACKAGE_FOLDERS:
        if folder in filename:
            return filename.rpartition(folder)[2]
    if filename.startswith(_STDLIB + "/"):
        return Path(_STDLIB).name + filename[len(_STDLIB) :]
    path = Path(filename)
    in_package = (path.parent / "__init__.py").exists()  # `utils.py` alone would be ambiguous
    return f"{path.parent.name}/{path.name}" if in_package else path.name or filename


def format_frame(frame: Frame) -> str:
    """A frame as text without folders, as in reports: `train.py:97 in step`."""
    return format_location(frame)[:SITE_CHARS]


class _PackageCache(dict[str, str | None]):
    """A cache by file name: a library's package, "paceline", "" (NOBODY), or None (USER)."""

    def __missing__(self, filename: str) -> str | None:
        file_owner = code_owner(filename)
        name = "" if file_owner is NOBODY else short_filename(filename).partition("/")[0]
        package = self[filename] = None if file_owner is USER else name
        return package


_package_cache = _PackageCache()


def call_site(frame: FrameType | None) -> Site:
    """The first frame of the user's program from `frame` outwards; else the first of a library; else ours.

    The library of the site is the one that the program has called, with its innermost frame.
    """
    ours = library = first_library = None
    package, depth = "", 0
    while frame is not None and depth < MAX_DEPTH:
        name = _package_cache[frame.f_code.co_filename]
        if name is None:
            return Site(frame, library)
        if name == "paceline":
            ours = ours or frame
        elif name and name != package:
            first_library, library, package = first_library or frame, frame, name
        frame, depth = frame.f_back, depth + 1
    return Site(first_library or ours)


def frame_record(frame: FrameType) -> Frame:
    file = frame.f_code.co_filename
    return Frame(short_filename(file), frame.f_lineno, frame.f_code.co_name, code_owner(file) is LIBRARY)


def user_frame_of_error(error: BaseException) -> Frame | None:
    """The user's innermost frame in the traceback of `error`; else the caller, for an error in the same function."""
    caller = call_site(sys._getframe(1)).frame  # pyright: ignore[reportPrivateUsage]
    locations = [(caller, caller.f_lineno)] if caller is not None else []
    locations += traceback.walk_tb(error.__traceback__)
    of_user = [(frame, line) for frame, line in locations if code_owner(frame.f_code.co_filename) is USER]
    return replace(frame_record(of_user[-1][0]), line=of_user[-1][1]) if of_user else None


def format_user_site(frame: FrameType | None = None) -> str:
    """The line of the user's program in `frame`, by default that of the caller, or outside of it; empty without one."""
    frame = call_site(frame or sys._getframe(1)).frame  # pyright: ignore[reportPrivateUsage]
    return format_frame(frame_record(frame)) if frame is not None else ""
