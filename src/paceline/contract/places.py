"""Where does a rank stand? Read from its stacks, in the interpreter's words or in faulthandler's.

Frames are of four kinds: the user's own, torch's, Python's, and ours. People want to see the innermost of their own;
the judge wants to know whether the innermost of all waits for other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from paceline.contract.evidence import Evidence, Frame, Op

_NATIVE_FRAME = re.compile(r'^\s+File "([^"\n]*)", line (\d+) in (.*)$')
_NATIVE_THREAD = re.compile(r"^(?:Current thread|Thread|Stack) .*most recent call first")
_PYTHON = re.compile(r"(?:^|/)python3(?:\.\d+t?)?/(?!.*(?:site|dist)-packages/)|^<frozen ")
_TORCH = re.compile(r"(?:^|/)torch/")
_OURS = re.compile(r"(?:^|/(?:src|site-packages)/)paceline/")
GUARD = re.compile(r"paceline/worker/(?!world\.py|meeting\.py)")  # ours, and says nothing of where a training is
PLUMBING = re.compile(GUARD.pattern + "|paceline/sums/")  # what stands between a training and torch
_WAITS = re.compile(r"(?:^|/)(?:torch/(?:distributed/(?!optim/)|nn/parallel/distributed\.py)|paceline/sums/)")
_LOADS = re.compile(r"(?:^|/)torch/utils/data/")
_RUNS_C_CODE = re.compile(r"(?:^|/)torch/(?:autograd/|_tensor\.py)")  # backward: DDP waits in there, too
MAX_NATIVE_LINES = 5000


def frames(evidence: Evidence) -> Sequence[Frame]:
    """The main thread's stack, the innermost frame first; from faulthandler where the interpreter did not answer."""
    return evidence.stacks[0].frames if evidence.stacks else native_frames(evidence.native)


def native_frames(text: str) -> list[Frame]:
    """The main thread's stack out of faulthandler's text; the last, where it has written several."""
    found: list[Frame] = []
    for line in text.splitlines()[-MAX_NATIVE_LINES:]:
        if _NATIVE_THREAD.match(line):
            found = []
        elif match := _NATIVE_FRAME.match(line):
            found.append(Frame(match[1], int(match[2][:9]), match[3]))
    return found


def place(evidence: Evidence) -> Frame | None:
    """The frame to show: the innermost of the user's own code, else of ours, else of any."""
    return shown_of(frames(evidence))


def shown_of(stack: Sequence[Frame]) -> Frame | None:
    """The same for a stack."""
    own = (frame for frame in stack if not _is_library(frame) and not _OURS.search(frame.file))
    ours = (frame for frame in stack if _OURS.search(frame.file) and not GUARD.search(frame.file))
    return next(own, None) or next(ours, None) or (stack[0] if stack else None)


def _is_library(frame: Frame) -> bool:
    return bool(_TORCH.search(frame.file) or _PYTHON.search(frame.file))


def waits_for_ranks(evidence: Evidence) -> bool | None:
    """Whether the innermost frame is one that waits for other ranks: True surely, False surely not, None unknown.

    Torch's backward is unknown: it may compute, or wait in C++ for DDP's buckets.
    """
    stack = frames(evidence)
    if not stack:
        return None
    if imports_torch(stack):
        return False
    outside = (frame for frame in stack if not _PYTHON.search(frame.file) and not GUARD.search(frame.file))
    innermost = next(outside, stack[0])
    if _LOADS.search(innermost.file):
        return False
    if _WAITS.search(innermost.file):
        return True
    return None if _RUNS_C_CODE.search(innermost.file) else False


def imports_torch(stack: Sequence[Frame]) -> bool:
    """Whether it is within a module of torch's that is just being imported; DDP's first use imports for seconds."""
    return any(frame.function == "<module>" and _TORCH.search(frame.file) for frame in stack)


def stands_at(evidence: Evidence, op: Op) -> bool:
    """Whether the line that called `op` is still on the stack."""
    line = op.site.partition(" ")[0]
    return bool(line) and any(site(frame).partition(" ")[0] == line for frame in frames(evidence))


def site(frame: Frame | None) -> str:
    """A frame in words: "train.py:88 in load_batch"; empty for none."""
    return f"{PurePath(frame.file).name}:{frame.line} in {frame.function}" if frame is not None else ""
