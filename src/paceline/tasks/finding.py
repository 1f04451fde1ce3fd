"""Code by name, `module:name` or `file.py:name`: found without importing it, and imported (no torch here)."""

import argparse
import ast
import importlib
import importlib.machinery
import itertools
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError, unknown
from paceline.runs.owners import other_writers

MOST_FILES = 1000  # of a folder that are looked at
NONE_FOUND = "(none found)"
DYNAMIC = ("sys.modules", "globals()", "locals()", "vars()", "exec(", "setattr(")  # in a file: names may come from it


def check_reference(kind: str, name: str) -> None:
    """Check without importing it that a module or file is there, and warn of what is imported with it.

    Raises:
        UsageError: there is no such module, file or name, an installed module has its name, or it is no Python.
    """
    folder, file = locate(kind, name)
    if file is not None and file.suffix == ".py":
        check_syntax(file)
        check_defined(kind, name)
    if whose := other_writers(folder.resolve()):
        print(
            f"paceline: {whose}: what lies beside your {kind}, and who can write there, is imported with it",
            file=sys.stderr,
        )
    if there := shadowed(folder):
        print(
            f"paceline: beside the {kind} lies {', '.join(there)}: the installed module of that name is imported, not "
            f"what lies in {folder}. Rename yours if you mean it",
            file=sys.stderr,
        )


def imported(name: str) -> Any:
    """What `module:name` names; None if the module has no such name."""
    module_name, _, attribute = name.rpartition(":")
    return getattr(import_module(module_name), attribute, None)


def check_defined(kind: str, name: str) -> None:
    """Raise UsageError if the file of `module:name` surely has no such name at its top level."""
    module_name, _, attribute = name.rpartition(":")
    tree = source_of(kind, name)
    names = None if tree is None else names_in(tree)
    if names is not None and attribute not in names:
        choices = tasks_in(tree) if kind == "task" else sorted(n for n in names if not n.startswith("_"))
        raise unknown(f"{kind} in {module_name}", attribute, choices or [NONE_FOUND])


def source_of(kind: str, name: str) -> ast.Module | None:
    """The parsed file that `module:name` names, or None where it cannot be read; a plain name is none."""
    if ":" not in name:
        return None
    with suppress(OSError, SyntaxError, ValueError):
        _, file = locate(kind, name)
        return None if file is None else ast.parse(file.read_text())
    return None


def names_in(tree: ast.Module) -> set[str] | None:
    """The names that a module has at its top level; None where only importing it would tell."""
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    nodes: list[ast.AST] = [*tree.body]
    for node in nodes:  # grows
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
        nodes += ast.iter_child_nodes(node)
    text = ast.unparse(tree)
    return None if found & {"*", "__getattr__"} or any(word in text for word in DYNAMIC) else found


def tasks_in(tree: ast.Module | None) -> list[str]:
    """The names of a module's Tasks, and of its functions that return one, as far as its file tells."""
    found: list[str] = []
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef):
            found += [node.name] if re.search(r"Task\(|-> .*Task\b", ast.unparse(node)) else []
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            made_by = ast.unparse(node.value.func)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if made_by.rpartition(".")[2] == "Task" or made_by in found:
                found += [target.id for target in targets if isinstance(target, ast.Name)]
    return found


def trains_at_import(tree: ast.Module, function: str) -> int | None:
    """The line in which a file trains in a paceline.session() while it is imported; None where it does not.

    Also by a call of one of its own functions, and not where `if __name__ == "__main__"` stands before it. Without a
    `function` of its own that could train, it is the line that begins the session.
    """
    names: set[str] = set()  # what it is called in this file
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {f"{one.asname or one.name}.session" for one in node.names if one.name == "paceline"}
        elif isinstance(node, ast.ImportFrom) and node.module == "paceline":
            names |= {one.asname or one.name for one in node.names if one.name == "session"}
    made = [(n.value, n.targets[0]) for n in ast.walk(tree) if isinstance(n, ast.Assign)]
    made += [
        (n.context_expr, n.optional_vars) for n in ast.walk(tree) if isinstance(n, ast.withitem) and n.optional_vars
    ]
    steps = {f"{ast.unparse(to)}.backward" for call, to in made if any(_calls([call], names))}
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    own = {name for name, found in functions.items() if any(_calls(found.body, names | steps))}
    top = [n for n in tree.body if not (isinstance(n, ast.If) and "__name__" in ast.unparse(n.test))]
    return min(_calls(top, own | steps | (set() if function in functions else names)), default=None)


def _calls(nodes: Iterable[ast.AST], names: Collection[str]) -> Iterator[int]:
    """The lines in which any of `names` is called as these statements run."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            yield node.lineno
        yield from _calls(ast.iter_child_nodes(node), names)


def locate(kind: str, name: str) -> tuple[Path, Path | None]:
    """The folder that must be in the Python path for a user's task (or another `kind`), and the file with the code.

    Raises:
        UsageError: there is no such task, or an installed module has its name.
    """
    module_name, _, attribute = name.rpartition(":")
    if not attribute.isidentifier():
        raise UsageError(code="not-a-name", kind=kind, value=name, attribute=attribute)
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        if not path.is_file():
            raise UsageError(code="no-such-task-file", kind=kind, value=name, file=Path(module_name).absolute())
        if path.name in shadowed(path.parent):
            raise UsageError(code="task-file-shadowed", kind=kind, value=name, module=path.stem)
        return path.parent, path
    folder, module_name = _apart(module_name)
    # Without importing any of it (find_spec on a dotted name would import the parents).
    search: list[str] | None = [*sys.path, str(folder)]
    origin: str | None = None
    for depth, part in enumerate(module_name.split(".")):
        spec = importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None:
            missing = ".".join(module_name.split(".")[: depth + 1])
            raise UsageError(code="no-such-module-file", kind=kind, value=name, missing=missing, folder=folder)
        search, origin = list(spec.submodule_search_locations or ()), spec.origin
    return folder, None if origin is None else Path(origin)


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


def import_module(module_name: str) -> Any:
    """Import it from its own folder, which comes after all that is installed, so that it can replace none of that."""
    if not module_name.endswith(".py"):
        folder, module_name = _apart(module_name)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        return executed(module_name, folder.resolve())
    path = Path(module_name).resolve()
    # Under its own name and with its neighbours, as if it had been started as a script: loader workers and pickle must
    # be able to import it again.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = executed(path.stem, path.parent)
    if module.__file__ is None or Path(module.__file__).resolve() != path:
        raise UsageError(code="module-name-taken", path=path, name=path.stem, file=module.__file__)
    return module


def check_syntax(path: Path) -> None:
    """Raise UsageError, with the line, where a file is no Python."""
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        line = f"{path}:{error.lineno}: {(error.text or '').strip()}"
        raise UsageError(code="syntax-error", line=line, reason=error.msg) from None


def executed(module_name: str, folder: Path) -> Any:
    """Import it; what it raises begins with the line of the user's that has raised it.

    Raises:
        UsageError: whatever it has raised; or that it reads a command line, which is ours.
    """
    parse = argparse.ArgumentParser.parse_known_args

    def refuse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if args is None:
            own = [f.filename for f in traceback.extract_stack() if folder in Path(f.filename).parents]
            raise UsageError(code="parses-at-import", name=Path(own[-1]).name if own else module_name)
        return parse(parser, args, namespace)

    argparse.ArgumentParser.parse_known_args = refuse  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return importlib.import_module(module_name)
    except PacelineError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, SyntaxError):
            frames.append(traceback.FrameSummary(error.filename or "?", error.lineno, "", line=error.text or ""))
        own = [frame for frame in frames if folder in Path(frame.filename).parents]
        lines = [f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}" for frame in reversed(own)]
        what = "".join(traceback.format_exception_only(error)).rstrip().rpartition("\n")[2]
        shown = "\n  imported in ".join([f"{lines[0]}\n  {what}", *lines[1:]]) if own else what
        raise UsageError(code="import-failed", shown=shown, lines=lines, reason=what) from error
    finally:
        argparse.ArgumentParser.parse_known_args = parse
