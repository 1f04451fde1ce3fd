"""The settings of a task function: its arguments, set by `--task-arg NAME=VALUE`, with the types of their annotations.

They are read from the source of the function without importing it, so errors appear before any process starts.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional, Union, get_args

import msgspec

from paceline.errors import UsageError, unknown_name_error
from paceline.tasks.finding import parse_source_file

SETTINGS_WITH_FLAGS = ("data_dir", "stem")  # they have separate flags, and the definition compares their effect instead
TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "Path": Path}


@dataclass(frozen=True)
class Setting:
    name: str
    value_type: Any  # the type of the argument; Any if it is unknown, then the value stays a string
    annotation: str  # the type in the source
    default: str | None  # the default in the source; None if a value is required


def parse_settings_from_source(name: str) -> list[Setting] | None:
    """The settings of the task `module:name`; None if they are unknown or the task is not a function."""
    tree = parse_source_file("task", name)
    attribute = name.rpartition(":")[2]
    functions = [n for n in (tree.body if tree else ()) if isinstance(n, ast.FunctionDef) and n.name == attribute]
    return _settings(functions[-1]) if functions and not functions[-1].decorator_list else None


def function_settings(function: Callable[..., Any]) -> list[Setting] | None:
    with suppress(OSError, TypeError, SyntaxError):
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        return _settings(node) if isinstance(node, ast.FunctionDef) else None
    return None


def convert_settings(task: str, settings: list[Setting] | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the strings in `values` to the types of the settings. Other values stay unchanged."""
    if settings is None:
        return dict(values)
    by_name = {setting.name: setting for setting in settings}
    for name in values:
        if name not in by_name:
            raise unknown_name_error(f"setting of {task}", name, by_name or ["(it takes none)"])
    missing = [setting.name for setting in settings if setting.default is None and setting.name not in values]
    if missing:
        raise UsageError(code="task-needs-values", task=task, missing=[*missing], name=missing[0])
    return {name: _converted(task, by_name[name], value) for name, value in values.items()}


def complete_task_args(task: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a task, including those with default values, in the form of a run's definition."""
    settings = parse_settings_from_source(task)
    defaults = {s.name: _literal(s.default) for s in settings or () if s.default is not None}
    complete = defaults | convert_settings(task, settings, values)
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in complete.items()}
    return {f"task_arg.{name}": value for name, value in plain.items() if name not in SETTINGS_WITH_FLAGS}


def settings_help(task: str) -> str:
    """The help text for the settings of a task; empty if it has none, or they are unknown."""
    settings = [s for s in parse_settings_from_source(task) or () if s.name not in SETTINGS_WITH_FLAGS]
    rows = [(s.name, s.annotation, "required" if s.default is None else f"default {s.default}") for s in settings]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)] if rows else []
    lines = [f"  {name:{widths[0]}}  {annotation:{widths[1]}}  {default}" for name, annotation, default in rows]
    return "\n".join([f"settings of {task}, --task-arg NAME=VALUE:", *lines]) if lines else ""


def _settings(node: ast.FunctionDef) -> list[Setting] | None:
    a = node.args
    if a.kwarg or a.vararg:
        return None
    positional = [*a.posonlyargs, *a.args]
    defaults = [*[None] * (len(positional) - len(a.defaults)), *a.defaults, *a.kw_defaults]
    return [_setting(arg, default) for arg, default in zip([*positional, *a.kwonlyargs], defaults, strict=True)]


def _setting(arg: ast.arg, default: ast.expr | None) -> Setting:
    text = None if default is None else ast.unparse(default)
    value = _literal(text)
    if arg.annotation is None and type(value).__name__ in TYPES and text != value:
        return Setting(arg.arg, type(value), type(value).__name__, text)
    setting_type: Any = Any
    with suppress(KeyError, SyntaxError, ValueError):
        setting_type = _type(arg.annotation)
    return Setting(arg.arg, setting_type, ast.unparse(arg.annotation) if arg.annotation else "", text)


def _type(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(quoted)):
            return _type(ast.parse(quoted, mode="eval").body)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return TYPES[name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_type(left), _type(right)]  # noqa: UP007 - these are values, not annotations
        case ast.Subscript(value=ast.Name(id="Literal") | ast.Attribute(attr="Literal"), slice=choices):
            return Literal[ast.literal_eval(choices)]
        case ast.Subscript(value=ast.Name(id="Optional") | ast.Attribute(attr="Optional"), slice=inner):
            return Optional[_type(inner)]  # noqa: UP045
        case _:
            raise KeyError(node)


def _literal(text: str | None) -> Any:
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text or "")
    return text


def _converted(task: str, setting: Setting, value: Any) -> Any:
    if not isinstance(value, str) or (setting.value_type is Any and not setting.annotation):
        return value
    if setting.value_type is Any:
        raise UsageError(
            code="task-arg-type-not-text", name=setting.name, value=value, task=task, annotation=setting.annotation,
            allowed=[*TYPES],
        )  # fmt: skip
    if value.lower() == "none" and type(None) in get_args(setting.value_type):
        return None
    try:
        return msgspec.convert(value, setting.value_type, strict=False, dec_hook=lambda cls, text: cls(text))
    except msgspec.ValidationError as error:
        raise UsageError(
            code="task-arg-wrong-value", name=setting.name, value=value, task=task, kind=setting.annotation,
            reason=str(error),
        ) from None  # fmt: skip
