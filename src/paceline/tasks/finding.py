"""Finds code by name, `module:name` or `file.py:name`, without importing it, and imports it. No torch here."""

import argparse
import ast
import importlib
import importlib.machinery
import itertools
import re
import symtable
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError, unknown_name_error
from paceline.runs.owners import describe_writers

MAX_FILES = 1000  # of a folder that are checked
NONE_FOUND = "(none found)"
# a file that contains one of these can define names dynamically
DYNAMIC_NAME_MARKERS = ("sys.modules", "globals()", "locals()", "vars()", "exec(", "setattr(")


def check_reference(kind: str, name: str) -> None:
    """Check without importing it that a module or file exists. Warn about risks of an import from its folder."""
    folder, file = find_source(kind, name)
    if file is not None and file.suffix == ".py":
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except SyntaxError as error:
            line = f"{file}:{error.lineno}: {(error.text or '').strip()}"
            raise UsageError(code="syntax-error", line=line, reason=error.msg) from None
        check_defined(kind, name, tree)
    if writers := describe_writers(folder.resolve()):
        print(
            f"paceline: {writers}. The {kind} can import modules from this folder, so these users can run code as you",
            file=sys.stderr,
        )
    if names := shadowed_modules(folder):
        print(
            f"paceline: {', '.join(names)} in {folder} has the name of an installed module, which is imported instead. "
            f"Rename it if the {kind} needs it",
            file=sys.stderr,
        )


def import_object(name: str) -> Any:
    """Import the object `module:name`; None if the module has no such name."""
    module_name, _, attribute = name.rpartition(":")
    return getattr(import_module(module_name), attribute, None)


def check_defined(kind: str, name: str, tree: ast.Module) -> None:
    """Raise UsageError if the file of `module:name` certainly does not define the name at its top level."""
    module_name, _, attribute = name.rpartition(":")
    names = top_level_names(tree)
    if names is not None and attribute not in names:
        choices = task_names_in_source(tree) if kind == "task" else sorted(n for n in names if not n.startswith("_"))
        raise unknown_name_error(f"{kind} in {module_name}", attribute, choices or [NONE_FOUND])


def parse_source_file(kind: str, name: str) -> ast.Module | None:
    """The syntax tree of the file of `module:name`; None if it cannot be read, or `name` has no module."""
    if ":" not in name:
        return None
    with suppress(OSError, SyntaxError, ValueError):
        _, file = find_source(kind, name)
        return None if file is None else ast.parse(file.read_text())
    return None


def top_level_names(tree: ast.Module) -> set[str] | None:
    """The names that a module defines at its top level; None if only an import can tell."""
    text = ast.unparse(tree)
    if "import *" in text or any(marker in text for marker in DYNAMIC_NAME_MARKERS):
        return None
    try:
        symbols = symtable.symtable(text, "", "exec").get_symbols()
    except SyntaxError:  # one that the parser does not find
        return None
    names = {s.get_name() for s in symbols if s.is_local() or s.is_declared_global()}
    return None if "__getattr__" in names else names


def task_names_in_source(tree: ast.Module | None) -> list[str]:
    """The names of the Tasks in a module, and of functions that return one, as far as its source shows."""
    names: list[str] = []
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef):
            names += [node.name] if re.search(r"Task\(|-> .*Task\b", ast.unparse(node)) else []
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            made_by = ast.unparse(node.value.func)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if made_by.rpartition(".")[2] == "Task" or made_by in names:
                names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def find_source(kind: str, name: str) -> tuple[Path, Path | None]:
    """Return the folder that the Python path needs for this code, and the file that contains it."""
    module_name, _, attribute = name.rpartition(":")
    if not attribute.isidentifier():
        raise UsageError(code="not-a-name", kind=kind, value=name, attribute=attribute)
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        if not path.is_file():
            raise UsageError(code="no-such-task-file", kind=kind, value=name, file=Path(module_name).absolute())
        if path.name in shadowed_modules(path.parent):
            raise UsageError(code="task-file-shadowed", kind=kind, value=name, module=path.stem)
        return path.parent, path
    folder, module_name = _split_folder(module_name)
    # part by part, because find_spec on a dotted name would import the parents
    search: list[str] | None = [*sys.path, str(folder)]
    origin: str | None = None
    for depth, part in enumerate(module_name.split(".")):
        spec = importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None:
            missing = ".".join(module_name.split(".")[: depth + 1])
            raise UsageError(code="no-such-module-file", kind=kind, value=name, missing=missing, folder=folder)
        search, origin = list(spec.submodule_search_locations or ()), spec.origin
    return folder, None if origin is None else Path(origin)


def _split_folder(module_name: str) -> tuple[Path, str]:
    """Split FOLDER:module, the form in a run's record. Without a folder, use the working directory."""
    folder, colon, module = module_name.rpartition(":")
    return (Path(folder), module) if colon else (Path.cwd(), module_name)


def shadowed_modules(folder: Path) -> list[str]:
    """The modules in a folder that are hidden by an installed module of the same name. Checks up to MAX_FILES files."""
    other_folders = [entry for entry in sys.path if entry and Path(entry).resolve() != folder]
    names: list[str] = []
    for path in sorted(itertools.islice(folder.iterdir(), MAX_FILES)):
        if path.suffix != ".py" and not (path / "__init__.py").is_file():
            continue
        spec = importlib.machinery.PathFinder.find_spec(path.stem, other_folders)
        is_installed = path.stem in sys.stdlib_module_names or (spec is not None and spec.origin is not None)
        if is_installed and not (spec is not None and spec.origin and folder in Path(spec.origin).resolve().parents):
            names.append(path.name)
    return names


def import_module(module_name: str) -> Any:
    """Import a module from its folder. The folder is last in the path, so that it cannot replace installed modules."""
    if not module_name.endswith(".py"):
        folder, module_name = _split_folder(module_name)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        return import_with_user_errors(module_name, folder.resolve())
    path = Path(module_name).resolve()
    # Use its real module name, with its folder in the path, so that loader workers and pickle can import it again.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = import_with_user_errors(path.stem, path.parent)
    if module.__file__ is None or Path(module.__file__).resolve() != path:
        raise UsageError(code="module-name-taken", path=path, name=path.stem, file=module.__file__)
    return module


def import_with_user_errors(module_name: str, folder: Path) -> Any:
    """Import a module. It must not parse the command line, which belongs to paceline."""
    original_parse = argparse.ArgumentParser.parse_known_args

    def refuse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if args is None:
            files = [f.filename for f in traceback.extract_stack() if folder in Path(f.filename).parents]
            raise UsageError(code="parses-at-import", name=Path(files[-1]).name if files else module_name)
        return original_parse(parser, args, namespace)

    argparse.ArgumentParser.parse_known_args = refuse  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return importlib.import_module(module_name)
    except PacelineError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, SyntaxError):
            frames.append(traceback.FrameSummary(error.filename or "?", error.lineno, "", line=error.text or ""))
        in_folder = [frame for frame in frames if folder in Path(frame.filename).parents]
        lines = [f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}" for frame in reversed(in_folder)]
        reason = "".join(traceback.format_exception_only(error)).rstrip().rpartition("\n")[2]
        shown = "\n  imported in ".join([f"{lines[0]}\n  {reason}", *lines[1:]]) if lines else reason
        raise UsageError(code="import-failed", shown=shown, lines=lines, reason=reason) from error
    finally:
        argparse.ArgumentParser.parse_known_args = original_parse
