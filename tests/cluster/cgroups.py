"""Which part of the machine's cgroups is a host's own? A folder per host, the root of what the host sees.

Only version 1 controllers that Slurm uses. With its own root every host may have the same /slurm_n1 inside.
The folders are named after the process that made them, so that those of a killed test run can be told and removed.
"""

import contextlib
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "paceline-lab-"


def controllers() -> list[str]:
    """What is mounted here of what Slurm can use; empty with version 2 alone."""
    return [name for name in ("freezer", "devices", "memory") if (ROOT / name / "tasks").exists()]


def make(host: str) -> list[Path]:
    """The host's folder under every controller."""
    folders = [ROOT / name / f"{PREFIX}{os.getpid()}-{host}" for name in controllers()]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return folders


def remove(owner: int | None = None) -> bool:
    """Remove the empty folders that process `owner` made (this one by default); one still in use stays: False."""
    for top in (tops := list(ROOT.glob(f"*/{PREFIX}{owner or os.getpid()}-*"))):
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
    return not any(top.exists() for top in tops)


def sweep() -> None:
    """Remove what test runs have left that were killed: their processes are gone, the folders are not."""
    owners = {int(path.name.removeprefix(PREFIX).split("-")[0]) for path in ROOT.glob(f"*/{PREFIX}*")}
    for owner in owners:
        if not Path(f"/proc/{owner}").exists():
            remove(owner)
