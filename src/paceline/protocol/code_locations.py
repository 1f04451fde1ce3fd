"""Finds the location of a rank in its stacks, which come from the interpreter or from faulthandler.

Frames belong to the user, to other libraries, to torch, to Python or to paceline. Messages contain the innermost frame
of the user and the line of a library that it called. Diagnoses depend on whether the innermost frame waits for other
ranks. `ACTIVITIES` lists the code that waits.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from pathlib import PurePath

from paceline.protocol.evidence import Evidence, Frame, Op

_NATIVE_FRAME = re.compile(r'^\s+File "([^"\n]*)", line (\d+) in (.*)$')
_NATIVE_THREAD = re.compile(r"^(?:Current thread|Thread|Stack) .*most recent call first")
_STANDARD_LIBRARY_PATTERN = re.compile(r"(?:^|/)python3(?:\.\d+t?)?/(?!.*(?:site|dist)-packages/)|^<frozen ")
MAX_NATIVE_LINES = 5000
SITE_CHARS, BY = 72, ", by "
PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")  # a project of the user may be in "my-packages/"


class FrameActivity(Enum):
    WAITS = 1  # only waits for other ranks, also if the frame is further out on the stack
    MEETS = 2  # the same, before there is any group
    WRAPS = 3  # waits, unless code of the user runs further inside
    LOADS = 4  # waits for its data
    UNKNOWN = 5  # C code that computes or waits for DDP's buckets
    GUARD = 6  # code of the guard, which shows nothing about the training
    OTHER = 7


ACTIVITIES: Mapping[str, FrameActivity] = {  # the longest matching prefix of a file's name counts
    "torch/distributed/": FrameActivity.WAITS,
    "torch/distributed/optim/": FrameActivity.OTHER,
    "torch/nn/parallel/distributed.py": FrameActivity.WRAPS,
    "torch/utils/data/": FrameActivity.LOADS,
    "torch/autograd/": FrameActivity.UNKNOWN,
    "torch/_tensor.py": FrameActivity.UNKNOWN,
    "paceline/collectives/": FrameActivity.WAITS,
    "paceline/rank/": FrameActivity.GUARD,
    "paceline/rank/world.py": FrameActivity.OTHER,
    "paceline/rank/rendezvous.py": FrameActivity.MEETS,
}


def activity_of_source_file(file: str) -> FrameActivity:
    name = _in_package(file)
    prefix = max((candidate for candidate in ACTIVITIES if name.startswith(candidate)), key=len, default="")
    return ACTIVITIES.get(prefix, FrameActivity.OTHER)


def _in_package(file: str) -> str:
    """`torch/distributed/...` for `/usr/lib/python3/dist-packages/torch/distributed/...`; other paths unchanged."""
    for folder in (*PACKAGE_FOLDERS, "/src/"):
        if folder in file:
            return file.rpartition(folder)[2]
    before, torch, rest = file.partition("/torch/")
    return f"torch/{rest}" if torch else before


def _is_torch(frame: Frame) -> bool:
    return _in_package(frame.file).startswith("torch/")


def _is_ours(frame: Frame) -> bool:
    return _in_package(frame.file).startswith("paceline/")


def _is_library(frame: Frame) -> bool:
    """Whether it belongs to another library than torch or paceline. Frames of faulthandler have full paths."""
    return (frame.library or any(folder in frame.file for folder in PACKAGE_FOLDERS)) and not (
        _is_torch(frame) or _is_ours(frame)
    )


def main_thread_frames(evidence: Evidence) -> Sequence[Frame]:
    return evidence.stacks[0].frames if evidence.stacks else parse_faulthandler_stack(evidence.native)


def parse_faulthandler_stack(text: str) -> list[Frame]:
    """The main thread's stack in faulthandler's text; the last one if there are several."""
    stack: list[Frame] = []
    for line in text.splitlines()[-MAX_NATIVE_LINES:]:
        if _NATIVE_THREAD.match(line):
            stack = []
        elif match := _NATIVE_FRAME.match(line):
            stack.append(Frame(match[1], int(match[2][:9]), match[3]))
    return stack


def format_rank_location(evidence: Evidence) -> str:
    """The location of a rank: "train.py:40 in main, by transformers/trainer.py:3700"; empty without a frame."""
    return format_stack_location(main_thread_frames(evidence))


def format_stack_location(stack: Sequence[Frame]) -> str:
    return format_call_site(*call_site_frames(stack))


def call_site_frames(stack: Sequence[Frame]) -> tuple[Frame | None, Frame | None]:
    """The frame for messages, and the innermost frame of the library that it called.

    The first is the innermost frame of the user, else of a library, else of paceline, else of any code.
    """
    library: Frame | None = None
    for frame in stack:
        if _is_library(frame):
            if library is None or _package(frame) != _package(library):
                library = frame
        elif not (_is_torch(frame) or _is_ours(frame) or _STANDARD_LIBRARY_PATTERN.search(frame.file)):
            return frame, library
    libraries = (frame for frame in stack if _is_library(frame))
    ours = (
        frame for frame in stack if _is_ours(frame) and activity_of_source_file(frame.file) is not FrameActivity.GUARD
    )
    return next(libraries, None) or next(ours, None) or (stack[0] if stack else None), None


def _package(frame: Frame) -> str:
    return _in_package(frame.file).partition("/")[0]


def is_waiting_for_ranks(evidence: Evidence) -> bool | None:
    """Whether the innermost frame waits for other ranks; None if unknown.

    Torch's backward is unknown: it may compute, or wait in C++ for DDP's buckets.
    """
    stack = main_thread_frames(evidence)
    if not stack:
        return None
    if is_importing_torch(stack):
        return False
    frames = (frame for frame in stack if not _STANDARD_LIBRARY_PATTERN.search(frame.file))
    activities = (activity_of_source_file(frame.file) for frame in frames)
    activity = next((activity for activity in activities if activity is not FrameActivity.GUARD), FrameActivity.OTHER)
    return None if activity is FrameActivity.UNKNOWN else activity in (FrameActivity.WAITS, FrameActivity.WRAPS)


def is_importing_torch(stack: Sequence[Frame]) -> bool:
    return any(frame.function == "<module>" and _is_torch(frame) for frame in stack)


def is_stack_in_op(evidence: Evidence, op: Op) -> bool:
    caller, _, library_line = op.site.partition(BY)
    lines = {caller.partition(" ")[0], *([library_line] if library_line else [])}
    return bool(caller) and lines <= {format_file_and_line(frame) for frame in main_thread_frames(evidence)}


@lru_cache(1 << 12)  # thousands of ranks are at few lines
def format_file_and_line(frame: Frame) -> str:
    """The file and line of a frame: "train.py:88"; in a library with its package: "lightning/.../result.py:270"."""
    if not _is_library(frame):
        return f"{PurePath(frame.file).name}:{frame.line}"
    *folders, name = _in_package(frame.file).split("/")
    return "/".join([*(folders if len(folders) < 3 else [folders[0], "..."]), f"{name}:{frame.line}"])


def format_location(frame: Frame | None) -> str:
    return f"{format_file_and_line(frame)} in {frame.function}" if frame is not None else ""


def format_library(library: Frame | None) -> str:
    return f"{BY}{format_file_and_line(library)}" if library is not None else ""


def format_call_site(frame: Frame | None, library: Frame | None) -> str:
    """A user's line and the line of the library that it called, limited to SITE_CHARS."""
    suffix = format_library(library)
    return format_location(frame)[: SITE_CHARS - len(suffix)] + suffix
