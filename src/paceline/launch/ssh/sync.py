"""`--sync`: the working folder copied to all hosts by the user's rsync, and nothing deleted there."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from paceline.errors import UsageError
from paceline.launch.hosts import labels
from paceline.launch.job import Command, Job
from paceline.launch.ssh.plan import client

EXCLUDED = (".git", ".venv", "/runs", "__pycache__")  # `/runs`: that of the folder itself only
SYNC_SECONDS = 3600.0
WORDS_OF_AN_ERROR = 2  # lines of rsync's, which says the reason first


def rsync_commands(job: Job) -> list[Command]:
    """One rsync for each host, from the working folder here to that of the same path there.

    Without --delete: what else the hosts have is not ours to remove.

    Raises:
        UsageError: when no working folder is named.
    """
    if not job.cwd.startswith("/"):
        raise UsageError(f"--sync needs the full path of the working folder, got {job.cwd!r}")
    folder = job.cwd.rstrip("/") + "/"
    rsync = ("rsync", "-a", "--protect-args", *(f"--exclude={name}" for name in EXCLUDED))  # no shell sees the paths
    return [
        Command(label, (*rsync, "-e", shlex.join(client(job.ssh, host)), "--", folder, f"{host.name}:{folder}"))
        for label, host in zip(labels(job.hosts), job.hosts, strict=True)
    ]


def sync(commands: Sequence[Command], *, seconds: float = SYNC_SECONDS) -> None:
    """Run them all at once.

    Raises:
        UsageError: when rsync is missing here, or has failed; every host with its reason.
    """
    started: list[tuple[Command, subprocess.Popen[str]]] = []
    wrong: list[str] = []
    try:
        for command in commands:
            process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
            started.append((command, process))
        for command, process in started:
            _, words = process.communicate(timeout=seconds)
            if process.returncode:
                lines = [line for line in words.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
                wrong.append(f"{command.name}: {' / '.join(lines[:WORDS_OF_AN_ERROR])}")
    except FileNotFoundError as error:
        raise UsageError("--sync needs rsync, here and on every host: install it, or copy the folder") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"--sync: rsync was not done within {seconds:g} s") from error
    finally:
        for _, process in started:
            with suppress(ProcessLookupError):
                process.terminate()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
    if wrong:
        raise UsageError("\n  ".join(["--sync could not copy the working folder to:", *wrong]))
