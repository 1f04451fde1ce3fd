"""Finds the run that is meant, whose it is, who still works on it, and what its last start left.

A run of another user is shown as data: no process is signalled, no host asked and nothing written for its sake.
"""

import fcntl
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.flags import command_words
from paceline.errors import UsageError, unknown
from paceline.host.procfs import PROC, read_process
from paceline.host.sweep import Roster, roster_path
from paceline.launch.plan import Submission, submit_number
from paceline.runs.console import say
from paceline.runs.folder import CONFIG, LOCK, attempt_number, numbered_attempts
from paceline.runs.owners import check_ours, note_strangers, opened
from paceline.runs.reading import decode, folders, is_folder, names, real_path

RUNS = Path("runs")
SSH_SECONDS = 20.0


@dataclass(frozen=True)
class RunFlags:
    """Access to the run."""

    run: str
    """run folder, or the beginning of its name under runs/"""
    ssh: str = "ssh"
    """ssh command to reach the hosts of the run, as for `paceline train`; commands in the folder are not run"""
    trust: bool = False
    """use a run folder that another user owns or could have written, and trust all of it"""


@dataclass(frozen=True)
class NewestRunFlags(RunFlags):
    """Access to the run."""

    run: str = ""
    """run folder, or the beginning of its name under runs/ (default: the newest there)"""


@dataclass(frozen=True)
class Means:
    """What may be asked about a run besides its folder; about a run that is not the caller's, nothing."""

    ssh: tuple[str, ...] = ()
    slurm: bool = False


NOTHING = Means()


def find_run(asked: str) -> Path:
    """The folder of a run: a path, or the beginning of a name under runs/ that only one has.

    Raises:
        UsageError: if there is none, several, or the folder holds no run.
    """
    path = Path(asked)
    if not is_folder(path):
        runs = folders(real_path(RUNS))  # through no link: others could point it at another run of ours
        found = [name for name in runs if name == asked] or [name for name in runs if name.startswith(asked)]
        if not asked or not found:
            raise unknown("run", asked, runs[-20:] or ["(no folder runs/ here: name the run's folder)"])
        if len(found) > 1:
            raise UsageError(code="run-ambiguous", value=asked, count=len(found), allowed=[*found[-20:]])
        path = RUNS / found[0]
    path = real_path(path)
    if not holds_run(path):
        raise UsageError(code="not-a-run-folder", asked=asked, config=CONFIG)
    return path


def newest_run() -> Path:
    """The folder of the run in runs/ that was started or changed last; prints it.

    Raises:
        UsageError: if there is none.
    """
    found = [path for name in folders(real_path(RUNS)) if holds_run(path := real_path(RUNS / name))]
    if not found:
        raise UsageError(code="no-run-here")
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    say(f"the newest run is {newest}")
    return newest


def holds_run(folder: Path) -> bool:
    """Whether a folder is a run's: its settings are there, or a start of it.

    Raises:
        Unreadable: we may not know, or it holds too much.
    """
    there = names(folder)
    return CONFIG in there or any(attempt_number(Path(name)) or submit_number(Path(name)) for name in there)


def existing_run(config: RunFlags, *, act: bool = False) -> tuple[Path, Means]:
    """The folder of a run, and what may be asked about it: nothing where others could have written it, which is said.

    Raises:
        UsageError: if there is no such run; with `act`, if none is named or others could have written it.
    """
    run_dir = find_run(config.run) if config.run or act else newest_run()
    for folder in () if config.trust else dict.fromkeys((run_dir, home(run_dir))):
        if act:
            check_ours(folder)
        elif note_strangers(folder):
            return run_dir, NOTHING
    return run_dir, Means(command_words("--ssh", config.ssh), slurm=True)


def attempts(run_dir: Path) -> list[Path]:
    """The folders of a run's starts, the newest last."""
    return [*numbered_attempts(run_dir).values()]


def home(run_dir: Path) -> Path:
    """The run folder that the agent of the newest start has locked: that of `paceline launch` for a session's."""
    return next((attempt.parent for attempt in attempts(run_dir)[-1:]), run_dir)


def is_locked(run_dir: Path) -> bool:
    """Whether a process, here or on any machine that shares the folder, holds the run."""
    try:
        with opened(run_dir / LOCK) as lock:
            fcntl.flock(lock.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two lookers do not see each other
    except BlockingIOError:
        return True
    except OSError:  # there is none, or a file system without locks
        return False
    return False


def head_roster(run_dir: Path) -> Roster | None:
    """What node 0's agent of the newest start has written about itself."""
    for attempt in attempts(run_dir)[-1:]:
        with suppress(OSError):
            return decode(roster_path(attempt), Roster)
    return None


def agent_runs(run_dir: Path, roster: Roster, submission: Submission | None, ssh: Sequence[str]) -> bool | None:
    """Whether this agent still runs, and so holds the run's lock, on its host; None: nobody can say.

    `submission` says where its host is, `ssh` is the caller's command to ask there with; empty: no other host is asked.
    """
    if roster.host == os.uname().nodename:
        process = read_process(roster.agent_pid)
        same = process is not None and process.runs and process.start == roster.agent_started
        return same and _holds(roster.agent_pid, run_dir)
    done = _on_head(submission, ssh, f"uname -n; cat /proc/{roster.agent_pid}/stat || true")
    host, _, stat = (done or "").partition("\n")
    if host.strip() != roster.host:
        return None
    fields = stat.rpartition(")")[2].split()  # as host/procfs.py reads them
    return len(fields) > 19 and fields[0] not in "ZX" and fields[19] == str(roster.agent_started)


def signal_agent(run_dir: Path, roster: Roster, submission: Submission | None, ssh: Sequence[str]) -> bool:
    """Send SIGTERM to an agent that `agent_runs` and holds the run's lock; whether that was possible.

    Raises:
        UsageError: the process that the roster names does not hold this run: it is something else.
    """
    if roster.host == os.uname().nodename:
        with suppress(ProcessLookupError):  # it has just ended: all is well
            handle = os.pidfd_open(roster.agent_pid)  # the process that is checked next is the one that gets the signal
            try:
                if not _holds(roster.agent_pid, run_dir):
                    raise _not_its_agent(roster, run_dir)
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            finally:
                os.close(handle)
        return True
    lock = shlex.quote(str(home(run_dir) / LOCK))
    done = _on_head(
        submission,
        ssh,
        f'for file in /proc/{roster.agent_pid}/fd/*; do if [ "$file" -ef {lock} ]; then '
        f"kill -TERM {roster.agent_pid}; echo told; exit 0; fi; done; test -d /proc/{roster.agent_pid} || echo told",
    )
    if done is not None and done.strip() != "told":
        raise _not_its_agent(roster, run_dir)
    return done is not None


def _not_its_agent(roster: Roster, run_dir: Path) -> UsageError:
    return UsageError(code="agent-of-another-run", agent_pid=roster.agent_pid, host=roster.host, lock=run_dir / LOCK)


def _holds(pid: int, run_dir: Path) -> bool:
    """Whether a process has the lock of the run open, which only its own processes have."""
    try:
        with opened(home(run_dir) / LOCK) as lock:
            wanted = (lock.found.st_dev, lock.found.st_ino)
        held = [*(PROC / str(pid) / "fd").iterdir()]
    except OSError:  # there is none; or the process is another user's
        return False
    for link in held:
        with suppress(OSError):
            if ((it := link.stat()).st_dev, it.st_ino) == wanted:
                return True
    return False


def _on_head(submission: Submission | None, ssh: Sequence[str], command: str) -> str | None:
    """What a shell command prints on node 0's host; None if it cannot be reached."""
    if not ssh or submission is None or submission.on != "ssh" or not submission.hosts:
        return None
    name, _, port = submission.hosts[0].partition(":")
    where = ("-p", port, "--", name) if port.isdecimal() else ("--", submission.hosts[0])
    argv: Sequence[str] = (*ssh, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *where)
    try:
        done = subprocess.run(
            (*argv, f"sh -c {shlex.quote(command)}"), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=SSH_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
