"""Save a checkpoint again and again; each time the writer dies, or a system call fails, at another call.

    python tests/checkpoint/crash_points.py FOLDER WORLD {killed-before,killed-after,EIO,ENOSPC} [--over-damaged]

A process of its own that forks one writer for each point: a fork costs milliseconds, a new interpreter a second.
Prints one JSON line: the number of points, how each ended, and every law that was broken.
"""

import argparse
import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_harness import leftovers, newest, save, saved, shard_name, steps_in

from paceline.checkpoint.manager import Checkpoints
from paceline.errors import PacelineError

CALLS = ("open", "write", "pwrite", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
CHANGES_NOTHING = ("fsync", "close")  # of what others see: killed there is killed at the next call that does
SAVED, TOLD, BROKEN = 0, 10, 11
MOST_POINTS = 1000


def install(point: int, fault: str) -> None:
    """Make the `point`-th of the following calls of this process fail."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            killed = fault.startswith("killed")
            if killed and (real.__name__ in CHANGES_NOTHING or (real.__name__ == "open" and not creates(*arguments))):
                return real(*arguments, **named)
            count += 1
            if count == point:
                if fault == "killed-before":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "killed-after":
                    try:
                        real(*arguments, **named)
                    finally:
                        os.kill(os.getpid(), signal.SIGKILL)
                if real.__name__ == "close":  # fails after the descriptor is gone
                    real(*arguments, **named)
                raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))
            return real(*arguments, **named)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def creates(path: object, flags: int, *_: object) -> bool:
    return bool(flags & (os.O_CREAT | os.O_TRUNC))


def writer(root: Path, world: int, point: int, fault: str) -> int:
    """Generation (2, 0) takes over and saves step 2, which also deletes step 0."""
    install(point, fault)
    try:
        checkpoints = Checkpoints(root)
        checkpoints.claim_publishing(2, 0)
        save(checkpoints, 2, world=world)
    except (OSError, PacelineError):
        return TOLD
    except BaseException:
        traceback.print_exc()
        return BROKEN
    return SAVED


def forked(root: Path, world: int, point: int, fault: str) -> int:
    pid = os.fork()
    if pid == 0:
        code = BROKEN
        try:
            code = writer(root, world, point, fault)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def broken_laws(root: Path, world: int, code: int, over_damaged: bool) -> list[str]:
    laws: list[str] = []
    if code == BROKEN:
        laws.append("an error that is neither of the system nor told in words")
    step, told = newest(root)
    if told and not over_damaged:
        laws.append(f"a half one has a checkpoint's name: {told}")
    if step not in (1, 2):
        laws.append(f"the newest whole one is step {step}")
    if code == SAVED and step != 2:
        laws.append("step 2 was said to be saved, and is not there")
    again = Checkpoints(root)
    again.claim_publishing(3, 0)
    if left := leftovers(root):
        laws.append(f"the next claim leaves {left}")
    if newest(root)[0] != step:
        laws.append("the next claim changes which one is the newest")
    save(again, 2, world=world)
    save(again, 3, world=world)
    if newest(root)[0] != 3 or steps_in(root) != [3, 2]:
        laws.append(f"the next run cannot save: {steps_in(root)}")
    return laws


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("world", type=int)
    parser.add_argument("fault", choices=("killed-before", "killed-after", "EIO", "ENOSPC"))
    parser.add_argument("--over-damaged", action="store_true", help="a damaged step 2 is there already")
    options = parser.parse_args()
    template = options.folder / "template"
    saved(template, 0, 1, *([2] if options.over_damaged else []), world=options.world)
    if options.over_damaged:
        (template / "step-00000002" / shard_name(0, options.world)).write_bytes(b"torn")
    ended: list[tuple[int, int | None]] = []
    broken: list[str] = []
    for point in range(1, MOST_POINTS):
        root = options.folder / f"point-{point}"
        shutil.copytree(template, root)
        code = forked(root, options.world, point, options.fault)
        ended.append((code, newest(root)[0]))
        broken += [f"point {point}: {law}" for law in broken_laws(root, options.world, code, options.over_damaged)]
        shutil.rmtree(root)
        if code == SAVED and options.fault.startswith("killed"):
            break  # the writer makes fewer calls than that
        if len(ended) > 20 and all(end == (SAVED, 2) for end in ended[-20:]):
            break  # an error at a deletion is no failure: only many in a row mean the end
    print(json.dumps({"points": len(ended), "ended": ended, "broken": broken}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
