"""Imports what a user has written, so that its errors begin with the user's own lines (no torch here)."""

import argparse
import ast
import importlib
import traceback
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError


def check_syntax(path: Path) -> None:
    """Raise UsageError, with the line, where a file is no Python."""
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        line = f"{path}:{error.lineno}: {(error.text or '').strip()}"
        raise UsageError(f"{line}\n  SyntaxError: {error.msg}") from None


def executed(module_name: str, folder: Path) -> Any:
    """Import it; what it raises begins with the line of the user's that has raised it.

    Raises:
        UsageError: whatever it has raised; or that it reads a command line, which is ours.
    """
    parse = argparse.ArgumentParser.parse_known_args

    def refuse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if args is None:
            own = [f.filename for f in traceback.extract_stack() if folder in Path(f.filename).parents]
            raise UsageError(
                f"{Path(own[-1]).name if own else module_name} parses the command line while it is imported: put it "
                "under if __name__ == '__main__'"
            )
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
        raise UsageError("\n  imported in ".join([f"{lines[0]}\n  {what}", *lines[1:]]) if own else what) from error
    finally:
        argparse.ArgumentParser.parse_known_args = parse
