"""The releases of torch that paceline is tested with, and what older ones lack."""

from importlib.metadata import PackageNotFoundError, version

from paceline.ladder import LADDER
from paceline.protocol.control import WorkerBirth

OLDEST, NEWEST = "2.11", "2.14"  # the releases that CI installs


def untested_torch() -> list[str]:
    """Return one line if the installed torch is newer than any tested one. Nothing in a worker: its launcher warns."""
    release, words = _release()
    if WorkerBirth.here() is not None or release <= _numbers(NEWEST):
        return []
    return [f"torch {words} is newer than the releases that paceline is tested with ({OLDEST} to {NEWEST})"]


def lacks_torch(strategy: str) -> str:
    """Return why the installed torch cannot run the strategy; empty if it can, or if torch is not installed here."""
    least, why = LADDER[strategy].least_torch
    release, words = _release()
    if not why or not release or release >= _numbers(least):
        return ""
    return f"strategy {strategy} requires torch {least} or newer (found {words}; older versions {why})"


def _release() -> tuple[tuple[int, ...], str]:
    try:
        words = version("torch")
    except PackageNotFoundError:
        return (), ""
    return _numbers(words), words


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(part) for part in words.partition("+")[0].split(".")[:2] if part.isdecimal())
