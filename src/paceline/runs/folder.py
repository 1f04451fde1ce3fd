"""The run folder: all files of a run, created once and never overwritten. docs/run-folder.md describes its files."""

import os
import re
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from paceline.errors import TrainingError, UsageError
from paceline.runs import writing
from paceline.runs.owners import check_owned_by_us
from paceline.runs.reading import is_file, is_folder, list_folders, list_names, list_symlinks, read_file, real_path

CONFIG = "config.toml"
SUMMARY = "summary.json"
WEIGHTS = "model.safetensors"
BEST_WEIGHTS, AVERAGE_WEIGHTS = "model-best.safetensors", "model-ema.safetensors"
ADAPTER = "adapter"  # a folder: replaces the weights of a model whose training changes only an adapter of peft
CHECKPOINTS = "checkpoints"
JOIN_FILE = "join.json"  # in an attempt: read by `paceline join`, with the secret of the run
LAUNCH_FILE = "launch.txt"  # in an attempt of a session that has a separate folder under `paceline launch`
LOCK = ".lock"
FAILURE_FILE = re.compile(r"error-[0-9]{1,9}(-generation-[0-9]{1,9})?\.json")
MAX_ATTEMPTS = 999_999  # numbers of attempts
LOCK_SECONDS = 10.0  # the workers of a launcher that was just killed need a moment to end


def set_up_run_dir(asked: Path | None, task: str, *, resume: bool = False, trust: bool = False) -> Path:
    """The folder of a new run (None: runs/<task>-<time>), or with `resume`, of one that has ended."""
    if not resume and asked is None:
        run_dir = new_run_dir_path(task)
    elif asked is None:
        raise UsageError(code="resume-without-run-dir")
    else:
        run_dir = real_path(asked)
        if resume:
            check_usable_as_run_dir(run_dir, trust=trust)
        elif is_folder(run_dir) and not _has_no_steps(run_dir):
            has_run = is_file(run_dir / CONFIG)
            raise UsageError(code="run-dir-holds-run" if has_run else "run-dir-not-empty", run_dir=asked)
    _make(run_dir, exist_ok=asked is not None)
    _check_private(run_dir, trust=trust)
    return run_dir


def _check_private(run_dir: Path, *, trust: bool) -> None:
    if not trust:
        check_owned_by_us(run_dir)
    for folder in (run_dir, run_dir / CHECKPOINTS):
        if links := list_symlinks(folder):
            raise UsageError(code="run-dir-has-links", folder=folder, link=links[0])
    if not trust and is_folder(run_dir / CHECKPOINTS):
        check_owned_by_us(run_dir / CHECKPOINTS)


def check_usable_as_run_dir(run_dir: Path, *, trust: bool = False) -> None:
    if is_folder(run_dir):
        _check_private(run_dir, trust=trust)
    if is_folder(run_dir) and list_names(run_dir) and not is_file(run_dir / CONFIG) and not _has_no_steps(run_dir):
        raise UsageError(code="not-a-run", run_dir=run_dir, config=CONFIG)


def archive_checkpoints(run_dir: Path) -> None:
    """Rename a run's checkpoints and weights before a restart. The caller holds the folder's lock."""
    for name in (CHECKPOINTS, WEIGHTS, ADAPTER):
        if os.path.lexists(run_dir / name):
            stem = name.partition(".")[0]
            aside = (run_dir / name.replace(stem, f"{stem}-before-restart-{n}") for n in range(1, 10000))
            writing.rename(run_dir / name, next(path for path in aside if not os.path.lexists(path)))


def check_not_finished(run_dir: Path) -> None:
    if any(os.path.lexists(run_dir / name) for name in (WEIGHTS, ADAPTER)):
        raise UsageError(code="run-has-ended", run_dir=run_dir)


def lock_run_dir(run_dir: Path, *, wait_seconds: float = LOCK_SECONDS) -> int:
    """Lock the folder for this run, until all processes have closed the returned descriptor."""
    try:
        descriptor = writing.open_or_create(run_dir / LOCK)
    except OSError as error:
        raise UsageError(code="lock-not-held", path=run_dir / LOCK, strerror=error.strerror) from None
    if not writing.try_lock(descriptor, wait_seconds):
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise UsageError(code="run-is-active", run_dir=run_dir, holder=holder)
    holder = f"pid {os.getpid()} on {os.uname().nodename}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
    with suppress(OSError):  # on a full disk the holder is not recorded
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
    return descriptor


def new_run_dir_path(task: str, where: Path = Path("runs")) -> Path:
    """The path of a new folder for a run without --run-dir. Does not create the folder."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", task).strip("-.") or "run"
    stem = where.resolve() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):  # several runs may start within a second
        run_dir = stem if attempt == 0 else stem.with_name(f"{stem.name}-{attempt + 1}")
        if not run_dir.exists():
            return run_dir
    raise UsageError(code="too-many-runs", stem=stem)


def _has_no_steps(run_dir: Path) -> bool:
    """Whether a folder has only files of starts that failed before the first step, so that no work can be lost."""
    ours = (CONFIG, "environment.json", SUMMARY, LOCK)
    starts = ("attempt-", "submit-", "agent-", "machine-")
    return all(
        name in ours
        or name.startswith(starts)
        or name.endswith(".partial")
        or (name == CHECKPOINTS and not any(n.startswith("step-") for n in list_names(run_dir / name)))
        for name in list_names(run_dir)
    )


def create_attempt_dir(run_dir: Path, launched: Path | None = None) -> tuple[int, Path]:
    """Create the folder of the next start. Returns its number, from 1, and path.

    `launched`: see `resolve_launch_attempt_dir`.
    """
    numbers = [attempt_number(Path(name)) for name in list_names(run_dir)]
    number = 1 + max(*numbers, _fenced_attempt(run_dir), 0)
    if number > MAX_ATTEMPTS:
        raise UsageError(code="attempt-out-of-range", run_dir=run_dir, number=number - 1)
    attempt_dir = run_dir / f"attempt-{number}"
    _make(attempt_dir, exist_ok=False)
    if launched is not None:
        writing.replace_file(attempt_dir / LAUNCH_FILE, str(launched).encode())
    return number, attempt_dir


def resolve_launch_attempt_dir(attempt_dir: Path) -> Path:
    """The attempt with the logs, errors and reports. For a session under `paceline launch`, that of the launch."""
    with suppress(OSError, ValueError):
        launched = Path(read_file(attempt_dir / LAUNCH_FILE, limit_bytes=10_000).decode())
        if launched.is_absolute() and attempt_number(launched) and list_names(launched):
            return launched
    return attempt_dir


def attempt_dirs(run_dir: Path) -> dict[int, Path]:
    """The folder of each start of a run, the newest last; see `resolve_launch_attempt_dir`."""
    paths = {attempt_number(Path(name)): run_dir / name for name in list_folders(run_dir)}
    return {number: resolve_launch_attempt_dir(paths[number]) for number in sorted(paths) if number}


def _fenced_attempt(run_dir: Path) -> int:
    """The attempt in the fence of the checkpoints, whose folder may have been deleted."""
    try:
        return int(read_file(run_dir / CHECKPOINTS / ".fence", limit_bytes=100).split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def move_summary_to_attempt(run_dir: Path, attempt: int) -> None:
    last = run_dir / f"attempt-{attempt - 1}"
    if last.is_dir() and (run_dir / SUMMARY).exists():
        writing.rename(run_dir / SUMMARY, last / SUMMARY)


def write_settings(folder: Path, text: str) -> None:
    try:
        writing.replace_file(folder / CONFIG, text.encode())
    except OSError as error:
        raise TrainingError(code="settings-not-written", path=folder / CONFIG, strerror=error.strerror) from None


def attempt_number(folder: Path, kind: str = "attempt") -> int:
    """The N of a folder named `kind`-N; 0 for other names."""
    match = re.fullmatch(rf"{kind}-([0-9]{{1,9}})", folder.name)
    return int(match[1]) if match else 0


def failure_file_names(attempt: Path) -> list[str]:
    return sorted(name for name in list_names(attempt) if FAILURE_FILE.fullmatch(name))


def _make(folder: Path, *, exist_ok: bool) -> None:
    try:
        writing.make_folder(folder, exist_ok=exist_ok)
        probe = folder / f".writable-{os.getpid()}"
        os.close(writing.create_file(probe))
        probe.unlink()
    except OSError as error:
        raise UsageError(code="run-dir-not-writable", folder=folder, strerror=error.strerror) from None


def create_user_compile_cache() -> Path:
    """The folder for code that torch and Triton compile, for all runs of this user. Creates it.

    torch compiles C++ for the processor of this machine, but its keys do not contain the processor. Several
    machines may have one home folder, so each kind of processor has a folder.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "paceline", "inductor")
    try:
        lines = Path("/proc/cpuinfo").read_bytes().partition(b"\n\n")[0].splitlines()  # of the first core
        kind = sorted(line for line in lines if line.startswith((b"model name", b"flags", b"Features", b"CPU p")))
        folder = folder.expanduser().resolve() / sha256(b"\n".join(kind)).hexdigest()[:16]
        writing.make_folder(folder, exist_ok=True)
        check_owned_by_us(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        raise UsageError(code="compile-no-folder", folder=folder, strerror=error) from None
    return folder
