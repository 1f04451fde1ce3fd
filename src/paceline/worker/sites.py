"""Finds the line of the user's program in a stack. Pure: from files and frames to words like `train.py:97 in step`.

A stack that ends in a collective has torch's lines inside, then perhaps ours, then those of the program. Files are
named so that every host has the same word for them: `torch/distributed/...`, `paceline/train/step.py`,
`python3.11/threading.py`, and what is the user's by its last parts.
"""

import sysconfig
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import FrameType

from paceline.contract.evidence import Frame
from paceline.contract.places import Activity, activity_of, site

MAX_DEPTH = 24  # frames to look at from inside; a backward of ours is under a dozen deep
SITE_CHARS = 72
_OURS = str(Path(__file__).resolve().parents[1])  # .../paceline
_STDLIB = sysconfig.get_path("stdlib")


class Owner(IntEnum):
    """Whose a line is."""

    USER = 0
    OURS = 1
    NOBODY = 2  # torch, the standard library, what is between us and them


USER, OURS = Owner.USER, Owner.OURS  # asked for each frame of each call


@cache
def owner(filename: str) -> Owner:
    """Whose file this is; by name alone."""
    if filename.startswith(_OURS + "/"):
        return Owner.NOBODY if activity_of(short(filename)) in (Activity.GUARD, Activity.WAITS) else Owner.OURS
    if "/site-packages/torch/" in filename or "/torch/distributed/" in filename:
        return Owner.NOBODY
    if "-packages/" in filename:  # somebody else's library calls collectives: its line says most
        return Owner.USER
    # `<frozen runpy>`; the console script `paceline`, which has no suffix
    if filename.startswith((_STDLIB, "<frozen")) or filename.endswith("/bin/paceline"):
        return Owner.NOBODY
    return Owner.USER


@cache
def short(filename: str) -> str:
    """What people on any host call this file."""
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
    """`train.py:97 in step`: without folders, as the judge and the page write it."""
    return site(frame)[:SITE_CHARS]


def site_frame(frame: FrameType | None) -> FrameType | None:
    """From `frame` outwards, the first one of the user's program; else the first of ours; else None."""
    ours: FrameType | None = None
    depth = 0
    while frame is not None and depth < MAX_DEPTH:
        whose = owner(frame.f_code.co_filename)
        if whose is USER:
            return frame
        if ours is None and whose is OURS:
            ours = frame
        frame, depth = frame.f_back, depth + 1
    return ours


def frame_of(frame: FrameType) -> Frame:
    """The record of a running frame, its file called as everywhere."""
    return Frame(short(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)
