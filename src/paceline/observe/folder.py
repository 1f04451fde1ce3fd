"""The run folder: everything a run leaves behind, made once and never written over.

runs/mnist-cnn-20260131-093000/
    config.toml         every setting, resolved: `paceline train --config` repeats the run
    environment.json    versions, host, device, threads
    events-<rank>.jsonl what happened, step by step
    machine-<node>.jsonl what each node did, once a second
    checkpoints/        step-<steps done>/ each, see store/store.py
    model.safetensors   the weights
    summary.json        how it ended
    .lock               held by the processes of the run that is active here
    attempt-1/          of each start: config.toml, agent-<node>.json, rank-<r>.log, rank-<r>.times,
                        error-<r>.json, ended.json (the exit code and the verdict); of a run whose hosts come
                        and go nodes.json, and join.json while it takes some; launch.txt: see launched_attempt
    submit-1/           of each start on other machines, see launch/plan.py
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from paceline.disk import writing
from paceline.disk.owners import check_ours
from paceline.disk.reading import is_file, is_folder, names, read, real_path, symlinks
from paceline.errors import TrainingError, UsageError

CONFIG = "config.toml"
SUMMARY = "summary.json"
WEIGHTS = "model.safetensors"
BEST_WEIGHTS, AVERAGE_WEIGHTS = "model-best.safetensors", "model-ema.safetensors"
CHECKPOINTS = "checkpoints"
INVITATION = "join.json"  # in an attempt: what `paceline join` reads, the secret of the run included
LAUNCHED = "launch.txt"  # in an attempt of a session that has its own folder under `paceline launch`
LOCK = ".lock"
FAILURE = re.compile(r"error-[0-9]{1,9}(-generation-[0-9]{1,9})?\.json")
MOST_STARTS = 999_999  # numbers of attempts
LOCK_SECONDS = 10.0  # the workers of a launcher that was just killed need a moment to end


def open_run_dir(asked: Path | None, task: str, *, resume: bool = False, trust: bool = False) -> Path:
    """The absolute path of the folder to write into: a new run's, or with `resume` also that of a run that has ended.

    Args:
        asked: the folder; None: a new one under runs/.
        task: what a new one is called after.
        resume: whether it may hold a run.
        trust: whether it may be one that others own or could have written.

    Raises:
        UsageError: if it holds something that would be written over, no run, or links; if others could have written
            it, or it cannot be written.
    """
    if not resume:
        run_dir = create_run_dir(asked, task)
    elif asked is None:
        raise UsageError(code="resume-without-run-dir")
    else:
        run_dir = real_path(asked)
        check_is_run(run_dir, trust=trust)
        _make(run_dir, exist_ok=True)
    _check_private(run_dir, trust=trust)
    return run_dir


def _check_private(run_dir: Path, *, trust: bool) -> None:
    """Refuse a folder that others could have written, or with links that lead our writing elsewhere."""
    if not trust:
        check_ours(run_dir)
    for folder in (run_dir, run_dir / CHECKPOINTS):
        if found := symlinks(folder):
            raise UsageError(code="run-dir-has-links", folder=folder, link=found[0])
    if not trust and is_folder(run_dir / CHECKPOINTS):
        check_ours(run_dir / CHECKPOINTS)


def check_is_run(run_dir: Path, *, trust: bool = False) -> None:
    """Refuse to resume in a folder that holds something other than a run; a new or empty one will do.

    Raises:
        UsageError: says what is missing, or that others could have written it.
    """
    if is_folder(run_dir):
        _check_private(run_dir, trust=trust)
    if is_folder(run_dir) and names(run_dir) and not is_file(run_dir / CONFIG) and not _never_began(run_dir):
        raise UsageError(code="not-a-run", run_dir=run_dir, config=CONFIG)


def move_aside(run_dir: Path) -> None:
    """Move what a run has saved out of the way of a fresh start. Only with the folder's lock."""
    for name in (CHECKPOINTS, WEIGHTS):
        if os.path.lexists(run_dir / name):
            stem = name.partition(".")[0]
            aside = (run_dir / name.replace(stem, f"{stem}-before-fresh-{n}") for n in range(1, 10000))
            writing.rename(run_dir / name, next(path for path in aside if not os.path.lexists(path)))


def check_not_finished(run_dir: Path) -> None:
    """Refuse to start at step 0 where a finished run's weights would be written over.

    Raises:
        UsageError: says what to do.
    """
    if os.path.lexists(run_dir / WEIGHTS):
        raise UsageError(code="run-has-ended", run_dir=run_dir)


def lock_run_dir(run_dir: Path, *, wait_seconds: float = LOCK_SECONDS) -> int:
    """Take the folder for this run; the lock is held as long as any process has the returned descriptor open.

    Raises:
        UsageError: if another run has it, naming that one.
    """
    try:
        descriptor = writing.keep(run_dir / LOCK)
    except OSError as error:
        raise UsageError(code="lock-not-held", path=run_dir / LOCK, strerror=error.strerror) from None
    if not writing.lock(descriptor, wait_seconds):
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise UsageError(code="run-is-active", run_dir=run_dir, holder=holder)
    holder = f"pid {os.getpid()} on {os.uname().nodename}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
    with suppress(OSError):  # on a full disk the lock holds all the same, without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
    return descriptor


def create_run_dir(asked: Path | None, task: str) -> Path:
    """Make the folder of a new run and return its absolute path."""
    if asked is not None:
        run_dir = real_path(asked)
        if is_folder(run_dir) and not _never_began(run_dir):
            there = is_file(run_dir / CONFIG)
            raise UsageError(code="run-dir-holds-run" if there else "run-dir-not-empty", run_dir=asked)
        _make(run_dir, exist_ok=True)
        return run_dir
    run_dir = new_run_dir(task)
    _make(run_dir, exist_ok=False)
    return run_dir


def new_run_dir(task: str, where: Path = Path("runs")) -> Path:
    """The folder for a run without --run-dir; it is not made."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", task).strip("-.") or "run"
    stem = where.resolve() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):  # several runs may start within a second
        run_dir = stem if attempt == 0 else stem.with_name(f"{stem.name}-{attempt + 1}")
        if not run_dir.exists():
            return run_dir
    raise UsageError(code="too-many-runs", stem=stem)


def _never_began(run_dir: Path) -> bool:
    """Whether all that is there was left by starts that failed before the first step, so that nothing can be lost."""
    ours = (CONFIG, "environment.json", SUMMARY, LOCK)
    starts = ("attempt-", "submit-", "agent-", "machine-")
    return all(
        name in ours
        or name.startswith(starts)
        or name.endswith(".partial")
        or (name == CHECKPOINTS and not any(n.startswith("step-") for n in names(run_dir / name)))
        for name in names(run_dir)
    )


def create_attempt_dir(run_dir: Path, launched: Path | None = None) -> tuple[int, Path]:
    """Make the folder of a run's next start, numbered from 1; `launched`: see `launched_attempt`."""
    numbers = [attempt_number(Path(name)) for name in names(run_dir)]
    number = 1 + max(*numbers, _fenced_attempt(run_dir), 0)
    if number > MOST_STARTS:
        raise UsageError(code="attempt-out-of-range", run_dir=run_dir, number=number - 1)
    attempt_dir = run_dir / f"attempt-{number}"
    _make(attempt_dir, exist_ok=False)
    if launched is not None:
        writing.replace(attempt_dir / LAUNCHED, str(launched).encode())
    return number, attempt_dir


def launched_attempt(attempt_dir: Path) -> Path:
    """The attempt that has the logs, errors and reports: for a session under `paceline launch` the launch's."""
    with suppress(OSError, ValueError):
        launched = Path(read(attempt_dir / LAUNCHED, limit_bytes=10_000).decode())
        if launched.is_absolute() and attempt_number(launched) and names(launched):
            return launched
    return attempt_dir


def _fenced_attempt(run_dir: Path) -> int:
    """The attempt that may publish checkpoints, by their fence: it counts even if its folder was deleted."""
    try:
        return int(read(run_dir / CHECKPOINTS / ".fence", limit_bytes=100).split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def shelve_summary(run_dir: Path, attempt: int) -> None:
    """Move the last start's summary into its folder: this start ends in its own way."""
    last = run_dir / f"attempt-{attempt - 1}"
    if last.is_dir() and (run_dir / SUMMARY).exists():
        writing.rename(run_dir / SUMMARY, last / SUMMARY)


def write_settings(folder: Path, text: str) -> None:
    """Write `folder`/config.toml whole, or not at all: other ranks and restarted workers read it.

    Raises:
        TrainingError: if the disk is full, say.
    """
    try:
        writing.replace(folder / CONFIG, text.encode())
    except OSError as error:
        raise TrainingError(code="settings-not-written", path=folder / CONFIG, strerror=error.strerror) from None


def attempt_number(folder: Path, kind: str = "attempt") -> int:
    """Which start of the run a folder belongs to, of those called `kind`-N; 0 if its name does not say."""
    match = re.fullmatch(rf"{kind}-([0-9]{{1,9}})", folder.name)
    return int(match[1]) if match else 0


def failure_records(attempt: Path) -> list[str]:
    """The files in which a start's workers have recorded their failures; which came first only its agent knows."""
    return sorted(name for name in names(attempt) if FAILURE.fullmatch(name))


def _make(folder: Path, *, exist_ok: bool) -> None:
    try:
        writing.make_folder(folder, exist_ok=exist_ok)
        probe = folder / f".writable-{os.getpid()}"
        os.close(writing.create(probe))
        probe.unlink()
    except OSError as error:
        raise UsageError(code="run-dir-not-writable", folder=folder, strerror=error.strerror) from None
