"""kill -9 of a launcher at random moments: who is still there 5 s later?

    python tests/launch/soak_kills.py --kills 20 --seed 0
    python tests/launch/soak_kills.py --kills 20 --after 0.5 15 -- paceline train mnist-cnn --nproc 2 --run-dir {dir}

`{dir}` in the command becomes a fresh folder name for every kill. Survivors are found by a marker in their environment
(/proc/PID/environ), so that neither a new parent nor a new session hides them. A kill counts only if the launcher was
still running: otherwise the moment is tried again, earlier. The exit code is 1 if anything survived, 2 if a command
ends before it can be killed.
"""

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from launch_harness import LAUNCHER, MARK, PRELUDE, carriers, kill_all, survivors

SMALL_JOB = "grandchild()\nif rank == 1: signal.signal(signal.SIGTERM, signal.SIG_IGN)\nforever()"
TRIES = 5


def default_command(folder: Path) -> list[str]:
    """A supervised job of two plain workers: one ignores SIGTERM, both have a child."""
    folder.mkdir()
    script = folder / "worker.py"
    script.write_text(PRELUDE + SMALL_JOB)
    settings = {"attempt_dir": str(folder), "argv": [sys.executable, str(script)], "nproc": 2}
    return [sys.executable, "-P", "-c", LAUNCHER, json.dumps(settings)]


def one_kill(command: list[str], after_seconds: float, log: Path) -> dict[str, object] | None:
    """Start, kill, count; None if the command ended before the kill."""
    mark = uuid.uuid4().hex
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(after_seconds)
        return None
    except subprocess.TimeoutExpired:
        pass
    try:
        before = len(carriers(mark))
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed = time.monotonic()
        left = survivors(mark, 5.0)
        gone_seconds = time.monotonic() - killed
    finally:
        kill_all(mark)
    return {
        "after_seconds": round(after_seconds, 3),
        "processes": before,
        "gone_seconds": round(gone_seconds, 2),
        "survivors": [f"{pid}: {words}" for pid, words in left.items()],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after", type=float, nargs=2, default=(0.05, 1.5), metavar=("MIN", "MAX"), help="seconds")
    parser.add_argument("--out", type=Path, help="write the kills as JSON")
    parser.add_argument("command", nargs="*", help="the launcher to kill, after --; by default a small job")
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    kills: list[dict[str, object]] = []
    print("kill  after s  processes  gone after s  survivors")
    with tempfile.TemporaryDirectory() as root:
        for number in range(arguments.kills):
            low, high = arguments.after
            for attempt in range(TRIES):
                folder = Path(root) / f"{number}-{attempt}"
                command = [word.replace("{dir}", str(folder)) for word in arguments.command] or default_command(folder)
                after_seconds = moments.uniform(low, high)
                if kill := one_kill(command, after_seconds, Path(root) / "output.log"):
                    break
                high = max(low, after_seconds * 0.8)
            else:
                print((Path(root) / "output.log").read_text(errors="replace")[-2000:], file=sys.stderr)
                print(f"{shlex.join(command)}: ended {TRIES} times before it could be killed", file=sys.stderr)
                return 2
            kills.append(kill)
            left = kill["survivors"]
            assert isinstance(left, list)
            print(
                f"{number:4}  {kill['after_seconds']:7.2f}  {kill['processes']:9}  {kill['gone_seconds']:12.2f}  "
                + (", ".join(left) or "none"),
                flush=True,
            )
    bad = sum(bool(kill["survivors"]) for kill in kills)
    print(f"{len(kills)} kills, {bad} with survivors after 5 s")
    if arguments.out:
        words = arguments.command or ["(a small supervised job)"]
        result = {"command": shlex.join(words), "seed": arguments.seed, "after_seconds": arguments.after}
        arguments.out.write_text(json.dumps({**result, "with_survivors": bad, "kills": kills}, indent=2) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
