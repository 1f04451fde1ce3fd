"""Which run is meant, who still works on it, and what did its last start leave? For status, logs and cancel."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.errors import UsageError, unknown
from paceline.launch.failure import Failure
from paceline.launch.procfs import read_process
from paceline.launch.submission import Submission
from paceline.launch.sweep import Roster, roster_path
from paceline.observe.folder import CONFIG, LOCK, attempt_number

RUNS = Path("runs")
SSH_SECONDS = 20.0


def find_run(asked: str) -> Path:
    """The folder of a run: a path, or the beginning of a name under runs/ that only one has.

    Raises:
        UsageError: if there is none, several, or the folder holds no run.
    """
    path = Path(asked)
    if not path.is_dir():
        names = sorted(folder.name for folder in RUNS.glob("*") if folder.is_dir())
        found = [name for name in names if name == asked] or [name for name in names if name.startswith(asked)]
        if not asked or not found:
            raise unknown("run", asked, names[-20:] or ["(no folder runs/ here: name the run's folder)"])
        if len(found) > 1:
            raise UsageError(f"{asked!r} is the beginning of {len(found)} runs: {', '.join(found[-20:])}")
        path = RUNS / found[0]
    if not (path / CONFIG).is_file() and not any(path.glob("attempt-*")) and not any(path.glob("submit-*")):
        raise UsageError(f"{asked} holds no run: there is no {CONFIG} and no start of any")
    return path.resolve()


def attempts(run_dir: Path) -> list[Path]:
    """The folders of a run's starts, the newest last."""
    found = (path for path in run_dir.glob("attempt-*") if attempt_number(path) and path.is_dir())
    return sorted(found, key=attempt_number)


def is_locked(run_dir: Path) -> bool:
    """Whether a process, here or on any machine that shares the folder, holds the run."""
    try:
        descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not see each other
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def head_roster(run_dir: Path) -> Roster | None:
    """What node 0's agent of the newest start wrote down about itself."""
    for attempt in attempts(run_dir)[-1:]:
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(roster_path(attempt).read_bytes(), type=Roster)
    return None


def agent_runs(roster: Roster, submission: Submission | None) -> bool | None:
    """Whether this agent still runs, on its host; None: nobody can say."""
    if roster.host == os.uname().nodename:
        process = read_process(roster.agent_pid)
        return process is not None and process.runs and process.start == roster.agent_started
    done = _on_head(submission, f"uname -n; cat /proc/{roster.agent_pid}/stat || true")
    host, _, stat = (done or "").partition("\n")
    if host.strip() != roster.host:
        return None
    fields = stat.rpartition(")")[2].split()  # as launch/procfs.py reads them
    return len(fields) > 19 and fields[0] not in "ZX" and fields[19] == str(roster.agent_started)


def signal_agent(roster: Roster, submission: Submission | None, number: signal.Signals) -> bool:
    """Send a signal to an agent that `agent_runs`; whether that was possible."""
    if roster.host == os.uname().nodename:
        with suppress(ProcessLookupError):  # it has just ended: all is well
            os.kill(roster.agent_pid, number)
        return True
    word = number.name.removeprefix("SIG")
    return _on_head(submission, f"kill -{word} {roster.agent_pid} || true") is not None


def _on_head(submission: Submission | None, command: str) -> str | None:
    """What a shell command prints on node 0's host; None if it cannot be reached."""
    if submission is None or submission.on != "ssh" or not submission.hosts:
        return None
    name, _, port = submission.hosts[0].partition(":")
    where = ("-p", port, "--", name) if port.isdecimal() else ("--", submission.hosts[0])
    argv: Sequence[str] = (*submission.ssh, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *where)
    try:
        done = subprocess.run(
            (*argv, f"sh -c {shlex.quote(command)}"), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=SSH_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def first_failure(attempt: Path) -> str:
    """The first failure that a start's workers wrote down, of its last generation, in a line; empty: none did."""
    found: list[tuple[int, bool, float, Failure]] = []
    for path in attempt.glob("error-*.json"):
        match = re.fullmatch(r"error-[0-9]+(?:-generation-([0-9]+))?\.json", path.name)
        with suppress(OSError, msgspec.MsgspecError):
            failure = msgspec.json.decode(path.read_bytes(), type=Failure)
            if match is not None:
                found.append((-int(match[1] or 0), failure.victim, failure.monotonic_seconds, failure))
    if not found:
        return ""
    first = min(found, key=lambda one: one[:3])[3]
    message = (first.message.strip().splitlines() or [""])[0]
    return f"rank {first.rank} ({first.host}): {first.type}: {message}"
