"""Folders of a hostile user: run folders that name programs, processes and files of the user who finds them."""

import json
import os
from pathlib import Path
from typing import Any

CONFIG = "[run]\nsteps = 4\nepochs = 1\n"


def run_folder(folder: Path, *, config: str = CONFIG, **submission: Any) -> Path:
    """The files of a run whose agent is on a different host. The submission has the command to reach that host."""
    (folder / "attempt-1").mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    write_roster(folder, 4711, host="n7")
    if submission:
        (folder / "submit-1").mkdir()
        text = json.dumps({"on": "ssh", "started_at": 1.0, "hosts": ["n7"], **submission})
        (folder / "submit-1" / "submitted.json").write_text(text)
    (folder / "attempt-1" / "rank-0.log").write_text("hello\n")
    return folder


def write_roster(folder: Path, pid: int, *, host: str = os.uname().nodename, started: int = 1) -> None:
    roster = {"host": host, "agent_pid": pid, "workers": [], "agent_started": started}
    (folder / "attempt-1" / "agent-0.json").write_text(json.dumps(roster))


def canary(place: Path) -> tuple[Path, str]:
    """A file that exists only if the shell command runs; it then has the name of the user."""
    file = place / "canary"
    return file, f"id -un >> {file}"


def payload(file: Path) -> str:
    """Python code that writes a file when it is imported."""
    return f"import getpass; open({str(file)!r}, 'a').write(getpass.getuser() + '\\n')\ntask = None\n"
