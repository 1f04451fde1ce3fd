"""Imports modules that make a million objects, calls back when a module is imported, and hides frames from warnings."""

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

TRAINING = ("paceline.train.run", "torch._dynamo")  # each of torch's optimizers imports its compiler
T = TypeVar("T", bound=Callable[..., Any])
HIDDEN_FRAME = " (as importlib._bootstrap)"


def import_all(modules: Sequence[str]) -> None:
    """Import them without the garbage collector, which would look at each object again; raises their errors.

    Measured with torch and its compiler: 1.5 s of a core instead of 2.1 s.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        if collects:
            gc.enable()


def when_imported(name: str, then: Callable[..., None]) -> None:
    """Call `then(late=True)` now if the module is there, else `then(late=False)` right after it has been executed.

    Names that other modules imported from it before a late call stay the old ones.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(late=True)
    elif not any(
        isinstance(finder, _Finder) and (finder.name, finder.then) == (name, then) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Finds what the others find, and has `then` called after it is executed; once."""

    def __init__(self, name: str, then: Callable[..., None]) -> None:
        self.name, self.then = name, then
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """The other finders' answer."""
        if fullname != self.name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return spec
        own = vars(spec.loader)  # of this one object: its class stays what everybody expects
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            own.pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:  # until then: some only ask whether there is such a module
                sys.meta_path.remove(self)
                self.then(late=False)

        own["exec_module"] = exec_module
        return spec


def hide_from_warnings(function: T) -> T:
    """Have warnings pass over this function, which is not running yet, so that they name the user's line.

    `warnings` passes over the frames of the import system, which it knows by two words in the name of their file,
    wherever it counts a stack level. A function of ours between a user's line and torch's has them in its file's name.
    """
    changed: Any = function
    changed.__code__ = changed.__code__.replace(co_filename=changed.__code__.co_filename + HIDDEN_FRAME)
    return function
