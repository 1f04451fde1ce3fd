"""Imports modules that make a million objects, and calls back when somebody imports one."""

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TRAINING = ("paceline.train.run", "torch._dynamo")  # each of torch's optimizers imports its compiler


def import_all(modules: Sequence[str]) -> None:
    """Import them without the garbage collector, which would look at each object again; raises what they raise.

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

    What another module has imported out of it before a late call is what it was.
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
