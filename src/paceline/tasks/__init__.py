"""Tasks by name: the built-in ones, and anybody's own as `module:name` or `file.py:name` (no torch here).

A task is found without importing it, so a typing mistake is reported before any process starts.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import itertools
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.datasets.mnist import check_mnist
from paceline.disk.owners import other_writers
from paceline.errors import UsageError, unknown

if TYPE_CHECKING:
    from paceline.tasks.task import Task


MOST_FILES = 1000  # of a folder that are looked at


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
        raise UsageError(f"no task given. Choose from: {', '.join(TASKS)}, or your own as module:name or file.py:name")
    if name in TASKS:
        for option in options:
            if option not in TASKS[name].options:
                takes = ", ".join("--" + o.replace("_", "-") for o in TASKS[name].options)
                raise UsageError(f"task {name} has no --{option.replace('_', '-')}; it takes {takes}")
        check_mnist(options.get("data_dir"))
        return
    if ":" not in name:
        if name.endswith(".py") and Path(name).is_file():
            raise UsageError(f"task {name!r} names a file: say which Task in it, {_of_file(Path(name))}")
        near = unknown("task", name, TASKS)
        raise UsageError(f"{near}, or your own as module:name or file.py:name")
    folder = _locate(name)
    if whose := other_writers(folder.resolve()):
        print(
            f"paceline: {whose}: what lies beside your task, and who can write there, is imported with it",
            file=sys.stderr,
        )
    if there := shadowed(folder):
        print(
            f"paceline: beside the task lies {', '.join(there)}: the installed module of that name is imported, not "
            f"what lies in {folder}. Rename yours if you mean it",
            file=sys.stderr,
        )


def load_task(name: str, options: Mapping[str, Any]) -> Task:
    """Import the task `name`; if it is a function, call it with `options`.

    Raises:
        UsageError: if the module has no such name, it is not a task, or takes no such option. What the module's own
            code raises passes through.
    """
    from paceline.tasks.task import Task  # imports torch

    reference = TASKS[name].reference if name in TASKS else name
    module_name, _, attribute = reference.rpartition(":")
    module = importlib.import_module(module_name) if name in TASKS else _import(module_name)
    found = getattr(module, attribute, None)
    if found is None:
        there = [n for n, value in vars(module).items() if not n.startswith("_") and _may_be(value, module_name, Task)]
        raise unknown(f"task in {module_name}", attribute, there or ["(it defines no Task, and no function)"])
    if isinstance(found, Task):
        if options:
            raise UsageError(f"{name} is a Task, so it takes no options; make it a function for {', '.join(options)}")
        return found
    if callable(found):
        try:
            signature(found).bind(**options)
        except TypeError as error:
            raise UsageError(f"{name} does not take these options ({', '.join(options) or 'none'}): {error}") from None
    task = found(**options) if callable(found) else found
    if not isinstance(task, Task):
        raise UsageError(f"{name} is {type(task).__name__!r}, not a paceline.Task or a function that returns one")
    return task


def _may_be(value: Any, module_name: str, task: type) -> bool:
    """Whether it is a Task, or a function of the module itself, which may return one."""
    here = str(getattr(value, "__module__", "")) == Path(module_name.rpartition(":")[2]).stem
    return isinstance(value, task) or (callable(value) and not isinstance(value, type) and here)


def _of_file(path: Path) -> str:
    """FILE:NAME for each Task that a file makes at its top level, without importing it."""
    with suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse(path.read_text())
        made = [n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)]
        tasks = [n for n in made if ast.unparse(n.value).partition("(")[0].rpartition(".")[2] == "Task"]
        if names := [target.id for n in tasks for target in n.targets if isinstance(target, ast.Name)]:
            return " or ".join(f"{path}:{name}" for name in names)
    return f"{path}:NAME"


def _locate(name: str) -> Path:
    """The folder that must be in the Python path for a user's task.

    Raises:
        UsageError: there is no such task, or an installed module has its name.
    """
    module_name, _, attribute = name.rpartition(":")
    if not attribute.isidentifier():
        raise UsageError(f"task {name!r}: {attribute!r} after the colon is no Python name. Write module:name")
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        if not path.is_file():
            raise UsageError(f"task {name!r}: there is no file {Path(module_name).absolute()}")
        if path.name in shadowed(path.parent):
            raise UsageError(
                f"task {name!r}: {path.stem} is an installed module, too, which comes first. Rename the file"
            )
        return path.parent
    folder, module_name = _apart(module_name)
    # Without importing any of it (find_spec on a dotted name would import the parents).
    search: list[str] | None = [*sys.path, str(folder)]
    for depth, part in enumerate(module_name.split(".")):
        spec = importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None:
            missing = ".".join(module_name.split(".")[: depth + 1])
            raise UsageError(
                f"task {name!r}: there is no module {missing!r}, neither in {folder} nor in the Python path. "
                "Start paceline in the folder that holds it, or name the file: path/to/file.py:name"
            )
        search = list(spec.submodule_search_locations or ())
    return folder


def _apart(module_name: str) -> tuple[Path, str]:
    """The folder and the module of FOLDER:module, as a run records where it found one; else the working folder."""
    folder, colon, module = module_name.rpartition(":")
    return (Path(folder), module) if colon else (Path.cwd(), module_name)


def shadowed(folder: Path) -> list[str]:
    """The modules in a folder that an installed module of the same name hides; of very many files the first."""
    others = [place for place in sys.path if place and Path(place).resolve() != folder]
    found: list[str] = []
    for path in sorted(itertools.islice(folder.iterdir(), MOST_FILES)):
        if path.suffix != ".py" and not (path / "__init__.py").is_file():
            continue
        spec = importlib.machinery.PathFinder.find_spec(path.stem, others)
        installed = path.stem in sys.stdlib_module_names or (spec is not None and spec.origin is not None)
        if installed and not (spec is not None and spec.origin and folder in Path(spec.origin).resolve().parents):
            found.append(path.name)
    return found


def _import(module_name: str) -> Any:
    """Import it from its own folder, which comes after all that is installed, so that it can replace none of that."""
    if not module_name.endswith(".py"):
        folder, module_name = _apart(module_name)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        return importlib.import_module(module_name)
    path = Path(module_name).resolve()
    # Under its own name and with its neighbours, as if it had been started as a script: loader workers and pickle must
    # be able to import it again.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.import_module(path.stem)
    if module.__file__ is None or Path(module.__file__).resolve() != path:
        raise UsageError(
            f"{path} cannot be imported as {path.stem!r}: that name is {module.__file__}. Rename the file."
        )
    return module
