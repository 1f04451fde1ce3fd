"""The start of a session: comparison of its definition, its first message, and errors in terms of arguments."""

import math
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from paceline.checkpoint.resume import ResumePoint, RunLocation
from paceline.collectives.control import check_equal, raise_on_all_ranks
from paceline.config.definition import BITS_ONLY, check_same
from paceline.config.settings import dump_given
from paceline.data.plan import BatchPlan
from paceline.errors import PacelineError, UsageError, flag, plural
from paceline.rank.sites import line_of
from paceline.rank.world import World, device_name
from paceline.runs import folder as run_folder
from paceline.train.wording import batch_line

OF_LAUNCHERS = ("nproc", "nodes", "port", "hang_timeout", "max_restarts")  # of `paceline launch`, also for loops
ARGUMENTS = {
    "run_dir": "the folder in session('...')", "resume": "session('...', resume=True)",
    "threads_per_rank": "session(threads=...)",
}  # fmt: skip
"""Options with different names in a session."""


def keyword(option: str, value: Any = None) -> str:
    """An option as an argument of session() or s.loader()."""
    if option in OF_LAUNCHERS:
        return flag(option, value)
    return ARGUMENTS.get(option) or (option if value is None else f"{option}={value}")


def json_copy(saved: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """A copy of the entries that JSON represents exactly.

    Raises:
        UsageError: if `strict`, for any other entry. Otherwise such entries are skipped.
    """
    wrong = [name for name, value in saved.items() if not _is_plain({name: value})]
    if wrong and strict:
        raise UsageError(code="saved-not-plain", name=wrong[0], kind=type(saved[wrong[0]]).__name__)
    return deepcopy({name: value for name, value in saved.items() if name not in wrong})


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())  # pyright: ignore
    if isinstance(value, list):
        return all(_is_plain(part) for part in value)  # pyright: ignore
    return value is None or isinstance(value, (bool, int, str))


def reword(error: BaseException | None) -> None:
    """Let a PacelineError name arguments instead of flags, and begin with the line of the user's code."""
    if isinstance(error, PacelineError) and error.front_end != "session":
        error.front_end, error.write, error.before = "session", keyword, line_of(error) + error.before


def compare(
    definition: Mapping[str, Any], origin: ResumePoint | None, models: int, saved: int, world: World, *, exact: bool
) -> None:
    """Compare the definition of the run over ranks, and with the checkpoint of a resume (a collective).

    Raises:
        UsageError: on one rank, if it differs. ReportedByPeer on the others.
    """
    if exact:
        check_equal("processors, libraries and threads", {name: definition[name] for name in BITS_ONLY}, world)
    check_equal("data, optimizers and batches", {k: v for k, v in definition.items() if k not in BITS_ONLY}, world)
    if origin is not None:
        with raise_on_all_ranks(world):
            check_same(origin.content.definition, definition, (), origin.where)
            if models != saved:
                raise UsageError(code="models-differ", where=origin.where, saved=saved, prepared=models)


def startup_message(plan: BatchPlan, world: World, strategy: str, name: str) -> str:
    """The first message of a session: processes, strategy, batches and samples per rank."""
    processes = f"{plural(world.size, 'process', 'processes')} on {device_name(world.device)}"
    return f"{name}: {processes}, strategy {strategy}; {plan.size_words}; {batch_line(plan, world.size)}"


def write_session_settings(place: RunLocation | None, settings: Mapping[str, Any]) -> None:
    """Write config.toml with the arguments of the session and their defaults, on rank 0."""
    if place is not None and place.attempt_dir is not None:
        run_folder.shelve_summary(place.folder, place.attempt)
        run_folder.write_settings(place.folder, dump_given(settings))


def script_name() -> str:
    """The file name of the running program, or "session" in an interpreter."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    return Path(path).name if path else "session"
