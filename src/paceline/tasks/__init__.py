"""Tasks by name: the built-in ones, and anybody's own as `module:name` or `file.py:name` (no torch here).

A task is found without importing it, so a typing mistake is reported before any process starts.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.mnist import check_mnist
from paceline.errors import UsageError, unknown
from paceline.tasks import finding
from paceline.tasks.finding import NONE_FOUND, check_reference, import_module, source_of, tasks_in
from paceline.tasks.settings import converted, settings_in, settings_of

if TYPE_CHECKING:
    from paceline.tasks.task import Task


@dataclass(frozen=True)
class BuiltIn:
    """Where a built-in task's function is, and which options it takes."""

    reference: str
    options: tuple[str, ...]


TASKS = {
    "mnist-cnn": BuiltIn("paceline.tasks.mnist:cnn", ("data_dir",)),
    "mnist-resnet18": BuiltIn("paceline.tasks.mnist:resnet18", ("data_dir", "stem")),
}


def check_task(name: str | None, options: Mapping[str, Any]) -> None:
    """Check a task without importing it.

    Raises:
        UsageError: there is no such task, it does not take an option, or its data are missing; says what there is.
    """
    if name is None:
        raise UsageError(code="no-task", allowed=[*TASKS])
    if name in TASKS:
        for option in options:
            if option not in TASKS[name].options:
                takes = ", ".join("--" + o.replace("_", "-") for o in TASKS[name].options)
                raise UsageError(code="task-option", name=name, option=option.replace("_", "-"), takes=takes)
        check_mnist(options.get("data_dir"))
        return
    if ":" not in name:
        if name.endswith(".py") and Path(name).is_file():
            raise UsageError(code="task-is-a-file", value=name, tasks=_of_file(Path(name)))
        raise unknown("task", name, TASKS, more=", or a custom one as module:name or file.py:name")
    check_reference("task", name)
    converted(name, settings_in(name), options)


def check_optimizer(name: str) -> None:
    """Check `module:name` without importing it, as far as its file tells; a name of ours is right.

    Raises:
        UsageError: there is no such module, or nothing of that name in it.
    """
    if ":" in name:
        check_reference("optimizer", name)


def load_task(name: str, options: Mapping[str, Any]) -> Task:
    """Import the task `name`; if it is a function, call it with `options`.

    Raises:
        UsageError: if the module has no such name, it is not a task, or takes no such option. What a
            function of the task raises passes through.
    """
    from paceline.tasks.task import Task  # imports torch

    reference = TASKS[name].reference if name in TASKS else name
    module_name, _, attribute = reference.rpartition(":")
    module = importlib.import_module(module_name) if name in TASKS else import_module(module_name)
    found = getattr(module, attribute, None)
    if found is None:
        known = tasks_in(source_of("task", reference))
        there = [n for n, value in vars(module).items() if isinstance(value, Task) or n in known]
        raise unknown(f"task in {module_name}", attribute, there or [NONE_FOUND])
    if isinstance(found, Task):
        if options:
            raise UsageError(code="task-takes-no-settings", name=name, options=[*options])
        return found
    if callable(found):
        options = converted(name, settings_of(found), options)
        try:
            signature(found).bind(**options)
        except TypeError as error:
            raise UsageError(
                code="task-settings", name=name, options=", ".join(options) or "none", reason=str(error)
            ) from None
    task = found(**options) if callable(found) else found
    if not isinstance(task, Task):
        raise UsageError(code="not-a-task", name=name, kind=type(task).__name__)
    return task


def is_loop(name: str) -> bool:
    """Whether it is a function in a file with a session, which makes no Task: a training loop. Without importing it."""
    tree = None if name in TASKS else source_of("loop", name)
    if tree is None or "session(" not in ast.unparse(tree):
        return False
    named = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name.rpartition(":")[2]]
    return any("Task(" not in ast.unparse(node) for node in named)


def check_loop(name: str) -> None:
    """Check a training loop without importing it: it must not begin before its function is called.

    Raises:
        UsageError: the file begins its session while it is imported; says where, and what to do.
    """
    script, colon, function = name.rpartition(":")
    script = script if colon else name
    tree = source_of("loop", f"{script}:main") if Path(script).is_file() and script.endswith(".py") else None
    if tree is not None and (line := finding.trains_at_import(tree, function)) is not None:
        raise UsageError(code="session-at-import", script=script, line=line)
    if tree is not None and colon and "session(" in ast.unparse(tree):
        finding.check_defined("loop", name)


def load_function(name: str) -> Callable[[], object]:
    """Import the function `name`, which needs no arguments.

    Raises:
        UsageError: it is none, or takes some.
    """
    found = finding.imported(name)
    try:
        signature(found).bind()
    except TypeError as error:
        raise UsageError(code="task-needs-arguments", name=name, reason=str(error)) from None
    return found


def _of_file(path: Path) -> str:
    """FILE:NAME for each Task of a file, without importing it."""
    names = tasks_in(source_of("task", f"{path}:NAME"))
    return " or ".join(f"{path}:{name}" for name in names or ["NAME"])
