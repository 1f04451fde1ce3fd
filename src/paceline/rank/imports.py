"""Imports large modules faster, calls functions after an import, and hides frames from warnings."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

TRAINING_MODULES = ("paceline.train.run", "torch._dynamo")  # each of torch's optimizers imports its compiler
T = TypeVar("T", bound=Callable[..., Any])
HIDDEN_FRAME_SUFFIX = " (as importlib._bootstrap)"


def import_without_gc(modules: Sequence[str]) -> None:
    """Import modules with the garbage collector disabled, which would scan each object again; raises their errors.

    Measured with torch and its compiler: 1.5 s of a core instead of 2.1 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        if was_enabled:
            gc.enable()


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` now if the module is imported, else right after its import.

    If it is called now, other modules may have imported names from the module, which keep their old values.
    """
    if sys.modules.get(name) is not None:
        then()
    elif not any(
        isinstance(finder, _ImportCallbackFinder) and (finder.name, finder.then) == (name, then)
        for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _ImportCallbackFinder(name, then))


class _ImportCallbackFinder(MetaPathFinder):
    """A finder that delegates to the other finders, and calls `then` once after the module is executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname != self.name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return spec
        attributes = vars(spec.loader)  # changes this loader only, not its class
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            attributes.pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:  # removed only here, because `find_spec` may also serve a mere existence test
                sys.meta_path.remove(self)
                self.then()

        attributes["exec_module"] = exec_module
        return spec


def hide_from_warnings(function: T) -> T:
    """Hide the frames of this function from warnings, so that they show the user's line. A decorator.

    When `warnings` counts stack levels, it skips frames of the import system. It recognizes them by two words in the
    file name. This decorator appends these words to the file name of the function. It must not be running yet.
    """
    hidden: Any = function
    hidden.__code__ = hidden.__code__.replace(co_filename=hidden.__code__.co_filename + HIDDEN_FRAME_SUFFIX)
    return function
