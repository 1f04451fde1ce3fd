"""Finds tasks by name: built-in tasks, and custom ones as `module:name` or `file.py:name`. No torch here.

The checks do not import the task, so a typing error is reported before any process starts.
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
from paceline.errors import UsageError, unknown_name_error
from paceline.tasks import finding
from paceline.tasks.finding import NONE_FOUND, check_reference, import_module, parse_source_file, task_names_in_source
from paceline.tasks.settings import convert_settings, function_settings, parse_settings_from_source

if TYPE_CHECKING:
    from paceline.tasks.task import Task


@dataclass(frozen=True)
class BuiltInTask:
    reference: str
    options: tuple[str, ...]


TASKS = {
    "mnist-cnn": BuiltInTask("paceline.tasks.mnist:cnn", ("data_dir",)),
    "mnist-resnet18": BuiltInTask("paceline.tasks.mnist:resnet18", ("data_dir", "stem")),
}


def is_session_script(name: str) -> bool:
    """Whether the task of a run is the file name of a script with a session."""
    return name not in TASKS and ":" not in name


def check_task_without_import(name: str | None, options: Mapping[str, Any]) -> None:
    """Check a task without importing it."""
    if name is None:
        raise UsageError(code="no-task", allowed=[*TASKS])
    if name in TASKS:
        for option in options:
            if option not in TASKS[name].options:
                takes = ", ".join("--" + o.replace("_", "-") for o in TASKS[name].options)
                raise UsageError(code="task-option", name=name, option=option.replace("_", "-"), takes=takes)
        if (folder := options.get("data_dir")) is not None:
            check_mnist(folder)
        return
    if is_session_script(name):
        if name.endswith(".py") and Path(name).is_file():
            names = task_names_in_source(parse_source_file("task", f"{name}:NAME")) or ["NAME"]
            raise UsageError(code="task-is-a-file", value=name, tasks=" or ".join(f"{name}:{task}" for task in names))
        raise unknown_name_error("task", name, TASKS, more=", or a custom one as module:name or file.py:name")
    check_reference("task", name)
    convert_settings(name, parse_settings_from_source(name), options)


def check_optimizer_reference(name: str) -> None:
    """Check an optimizer `module:name` without importing it. A name without a module is not checked."""
    if ":" in name:
        check_reference("optimizer", name)


def load_task(name: str, options: Mapping[str, Any]) -> Task:
    """Import the task `name`; if it is a function, call it with `options`."""
    from paceline.tasks.task import Task  # imports torch

    reference = TASKS[name].reference if name in TASKS else name
    module_name, _, attribute = reference.rpartition(":")
    module = importlib.import_module(module_name) if name in TASKS else import_module(module_name)
    target = getattr(module, attribute, None)
    if target is None:
        in_source = task_names_in_source(parse_source_file("task", reference))
        choices = [n for n, value in vars(module).items() if isinstance(value, Task) or n in in_source]
        raise unknown_name_error(f"task in {module_name}", attribute, choices or [NONE_FOUND])
    if isinstance(target, Task):
        if options:
            raise UsageError(code="task-takes-no-settings", name=name, options=[*options])
        return target
    if callable(target):
        options = convert_settings(name, function_settings(target), options)
        try:
            signature(target).bind(**options)
        except TypeError as error:
            known = ", ".join(options) or "none"
            raise UsageError(code="task-settings", name=name, options=known, reason=str(error)) from None
    task = target(**options) if callable(target) else target
    if not isinstance(task, Task):
        raise UsageError(code="not-a-task", name=name, kind=type(task).__name__)
    return task


def is_session_loop(name: str) -> bool:
    """Whether `name` is a training loop: in its file, which is not imported, it uses a session and makes no Task."""
    tree = None if name in TASKS else parse_source_file("loop", name)
    if tree is None or "session(" not in ast.unparse(tree):
        return False
    finding.check_defined("loop", name, tree)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name.rpartition(":")[2]]
    return any("Task(" not in ast.unparse(node) for node in functions)


def load_function(name: str) -> Callable[[], object]:
    function = finding.import_object(name)
    try:
        signature(function).bind()
    except TypeError as error:
        raise UsageError(code="task-needs-arguments", name=name, reason=str(error)) from None
    return function
