"""The arguments of `session()`: their checks, the values that follow from them, and errors in terms of arguments."""

import inspect
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.config.choices import check_not_renamed
from paceline.config.strategies import EXACT_STRATEGIES, STRATEGY_INFO, unsupported_settings
from paceline.errors import PacelineError, UsageError, format_option, unknown_name_error
from paceline.rank.sites import user_frame_of_error
from paceline.runs.trackers import parse_report_to

MIN_ARGUMENT_VALUES = {
    "virtual_ranks": 1, "threads": 1, "checkpoint_every": 1, "keep_checkpoints": 2, "check_replicas_every": 0,
    "audit_every": 1,
    "timeout": 1, "batch_size": 1, "num_workers": 0,
}  # fmt: skip
COMMAND_OPTIONS = ("balance", "nproc", "nodes", "port", "hang_timeout", "max_restarts", "check", "without")
"""Options of `paceline launch` and `paceline replay`. No argument of a session replaces them."""
ARGUMENT_SPELLINGS = {
    "run_dir": "the folder in session('...')", "resume": "session('...', resume=True)",
    "threads_per_rank": "session(threads=...)",
}  # fmt: skip
"""Options with different names in a session."""
P = ParamSpec("P")
T = TypeVar("T")


def with_argument_checks(function: Callable[P, T], where: str) -> Callable[P, T]:
    """Raise an error for an unknown keyword, or a value that the annotation or MIN_ARGUMENT_VALUES does not allow."""
    positions = [*inspect.signature(function).parameters]
    names = [name for name in positions if name != "self"]

    @wraps(function)
    def checked(*arguments: P.args, **keywords: P.kwargs) -> T:
        if unknown_names := [name for name in keywords if name not in names]:
            check_not_renamed(where, unknown_names[0], names)
            raise unknown_name_error(f"argument of {where}", unknown_names[0], names)
        hints = get_type_hints(function) | {"data": Any}  # any object that behaves like a dataset
        for name, value in {**dict(zip(positions, arguments, strict=False)), **keywords}.items():
            hint = hints.get(name, Any)  # self has none
            if not _is_allowed(value, hint):
                parts = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
                if parts and isinstance(value, str):
                    raise unknown_name_error(name, value, get_args(parts[0]))
                allowed = inspect.formatannotation(hint)
                raise UsageError(code="argument-type", where=where, name=name, value=value, allowed=allowed)
            if name in MIN_ARGUMENT_VALUES and isinstance(value, Real) and value < MIN_ARGUMENT_VALUES[name]:
                least = MIN_ARGUMENT_VALUES[name]
                raise UsageError(code="argument-too-small", where=where, name=name, value=value, least=least)
        return function(*arguments, **keywords)

    return checked


def _is_allowed(value: object, hint: Any) -> bool:
    """Whether an argument has the annotated type. A number of numpy is a number, a bool is none."""
    origin, choices = get_origin(hint), get_args(hint)
    if hint is Any or origin is Literal:
        return hint is Any or value in choices
    if origin in (Union, UnionType):
        return any(_is_allowed(value, choice) for choice in choices)
    if hint in (int, float):
        return type(value) is not bool and isinstance(value, Integral if hint is int else Real)
    return isinstance(value, origin or hint)


@dataclass(frozen=True)
class SessionConfig:
    run_dir: str | os.PathLike[str] | None
    resume: bool
    strategy: str
    virtual_ranks: int | None
    seed: int | None
    threads: int | None
    precision: str | None
    checkpoint_every: int | str | None
    keep_checkpoints: int
    check_replicas_every: int
    not_finite: Literal["stop", "skip"]
    audit_every: int | None
    on_audit: Literal["stop", "exclude"]
    device: str
    backend: str
    timeout: float
    trust: bool
    report_to: str | None
    peak_tflops: float | None
    fsdp_wrap: str | None
    compress: str | None
    powersgd_rank: int | None
    local_steps: int | None
    outer_lr: float | None
    outer_momentum: float | None

    def __post_init__(self) -> None:
        owners, strategy = unsupported_settings(self.strategy), self.strategy
        for name, value in self.strategy_arguments.items():
            if name in owners:
                raise UsageError(
                    code="argument-of-another-strategy", name=name, value=value, owner=owners[name], strategy=strategy
                )
        if self.resume and self.run_dir is None:
            raise UsageError(code="session-resume-without-folder")
        if self.on_audit == "exclude" and not self.resume:
            raise UsageError(code="audit-needs-resume", value=self.on_audit)
        if self.peak_tflops is not None and not 0 <= self.peak_tflops < math.inf:
            raise UsageError(code="negative", setting="peak_tflops", value=self.peak_tflops)
        if parse_report_to(self.report_to) and self.run_dir is None:
            raise UsageError(code="report-to-without-folder", value=self.report_to)

    @cached_property
    def program_name(self) -> str:
        """The file name of the running program, or "session" in an interpreter."""
        path = getattr(sys.modules.get("__main__"), "__file__", None)
        return Path(path).name if path else "session"

    @property
    def is_exact(self) -> bool:
        return self.strategy in EXACT_STRATEGIES

    @property
    def strategy_arguments(self) -> dict[str, Any]:
        options = {option for info in STRATEGY_INFO.values() for option in info.factory_kwargs}
        return {name: value for name, value in vars(self).items() if name in options and value is not None}

    @property
    def strategy_options(self) -> dict[str, Any]:
        info = STRATEGY_INFO[self.strategy]
        return {
            **info.session_factory_kwargs,
            **{info.factory_kwargs[name]: value for name, value in self.strategy_arguments.items()},
        }

    @property
    def operational_settings(self) -> dict[str, Any]:
        """The settings that do not define the result, by their names in config.toml."""
        return {
            "checkpoint_every": self.checkpoint_every, "keep_checkpoints": self.keep_checkpoints,
            "not_finite": self.not_finite, "check_replicas_every": self.check_replicas_every,
            "audit_every": self.audit_every, "on_audit": self.on_audit,
            "threads_per_rank": self.threads, "device": self.device, "backend": self.backend, "timeout": self.timeout,
            "report_to": self.report_to, "peak_tflops": self.peak_tflops, "precision": self.precision,
        }  # fmt: skip


def format_argument(option: str, value: Any = None) -> str:
    if option in COMMAND_OPTIONS:
        return format_option(option, value)
    return ARGUMENT_SPELLINGS.get(option) or (option if value is None else f"{option}={value}")


def name_arguments_in_error(error: BaseException | None) -> None:
    """Let a PacelineError name arguments instead of flags, and begin with the line of the user's code."""
    if isinstance(error, PacelineError) and error.front_end != "session":
        error.front_end, error.render_option = "session", format_argument
        if (at := user_frame_of_error(error)) is not None:
            error.prefix = f"{at.file}:{at.line}: {error.prefix}"
