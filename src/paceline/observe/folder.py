"""The run folder: everything a run leaves behind, made once and never written over (no torch here).

runs/mnist-cnn-20261121-093000/
    config.toml         every setting, resolved: `paceline train --config` repeats the run
    environment.json    versions, host, device, threads
    events-<rank>.jsonl what happened, step by step
    model.safetensors   the weights
    summary.json        how it ended
    attempt-1/          of each start: agent.json, rank-<r>.log, error-<r>.json
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from paceline.errors import UsageError

PRIVATE = 0o700  # data, paths and environment are nobody else's business


def create_run_dir(asked: Path | None, task: str) -> Path:
    """Make the folder of a new run and return its absolute path.

    Raises:
        UsageError: if it holds something already, or cannot be written.
    """
    if asked is not None:
        run_dir = asked.absolute()
        if run_dir.is_dir() and not _never_began(run_dir):
            raise UsageError(
                f"--run-dir {asked} is not empty: a run is never written over. Name a new folder, or remove this one."
            )
        _make(run_dir, exist_ok=True)
        return run_dir
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", task).strip("-.") or "run"
    stem = Path("runs").absolute() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):  # several runs may start within a second
        run_dir = stem if attempt == 0 else stem.with_name(f"{stem.name}-{attempt + 1}")
        if not run_dir.exists():
            _make(run_dir, exist_ok=False)
            return run_dir
    raise UsageError(f"there are 1000 runs named {stem} already")


def _never_began(run_dir: Path) -> bool:
    """Whether all that is there was left by starts that failed before the first step, so that nothing can be lost."""
    ours = ("config.toml", "environment.json", "summary.json")
    return all(p.name in ours or p.name.startswith("attempt-") for p in run_dir.iterdir())


def create_attempt_dir(run_dir: Path) -> tuple[int, Path]:
    """Make the folder of the next start of a run; its number counts from 1."""
    number = 1 + sum(1 for _ in run_dir.glob("attempt-*"))
    attempt_dir = run_dir / f"attempt-{number}"
    _make(attempt_dir, exist_ok=False)
    return number, attempt_dir


def _make(folder: Path, *, exist_ok: bool) -> None:
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=exist_ok)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"the run folder {folder} cannot be written: {error.strerror}. Name another: --run-dir"
        ) from None
