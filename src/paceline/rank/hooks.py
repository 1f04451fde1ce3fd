"""Hooks in other people's code: when a module is imported, around a function, and the events of a training script.

`Hooks` is the one set of hooks that shows where a script that nobody changed loads, goes forward and backward, steps:

    class Steps(Events):
        def step_ended(self, optimizer): ...

    Hooks(warn_once).listen(Steps()).install()

Two packages listen: probes/, for silent faults, in every run, and check/, for the facts of `--check`. Events without a
listener cost nothing. The hooks are in torch itself:
`DataLoader`'s iterators, `DistributedDataParallel`, `torch.autograd.backward` and optimizers; `hang` puts others where
only one listener needs them. No argument and no result is changed, except that the closure of a step is wrapped. An
error of a listener is a warning, and the script continues. A process that the script forks is not the rank: its events
are ignored.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Self, TypeVar

Then = Callable[..., None]

MOST_BETWEEN = 12  # frames between two of torch's wrappers of an optimizer's step
TRAINING = ("paceline.train.run", "torch._dynamo")  # each of torch's optimizers imports its compiler
T = TypeVar("T", bound=Callable[..., Any])
UNSEEN = " (as importlib._bootstrap)"


class Events:
    """The events: override some. All but one are called in the thread of the script."""

    def torch_is_there(self) -> None:
        """torch has just been imported: listeners may add hooks."""

    def epoch_begins(self, batches: Any) -> None:
        """A `DataLoader` has made the iterator `batches`, or begins again with it."""

    def indices_drawn(self, batches: Any, indices: Any) -> None:
        """Its sampler has given the indices of one more batch: a list, or one; loaders with processes draw ahead."""

    def batch_asked(self, batches: Any) -> None:
        """The script asks for a batch."""

    def batch_given(self, batches: Any, batch: Any) -> None:
        """It gets one."""

    def epoch_ended(self, batches: Any) -> None:
        """There is no more."""

    def replica_made(self, ddp: Any) -> None:
        """A `DistributedDataParallel` has been made, with equal parameters on all its ranks."""

    def forward_begins(self, ddp: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """It is called."""

    def buffers_asked(self, ddp: Any) -> None:
        """In its forward it waits for the buffers of rank 0."""

    def buffers_given(self, ddp: Any) -> None:
        """It has them."""

    def forward_ended(self, ddp: Any, output: Any) -> None:
        """It has returned."""

    def backward_begins(self, losses: Any) -> None:
        """`backward()` is called on a tensor, or on several."""

    def backward_ended(self) -> None:
        """It has returned; under DDP the gradients are reduced."""

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer is about to change its parameters; they have their gradients, of a closure or from before."""

    def closure_ended(self, optimizer: Any) -> None:
        """It has called its closure once more (L-BFGS): other gradients, at parameters that it may give up again."""

    def step_ended(self, optimizer: Any) -> None:
        """It has changed them."""

    def session_begins(self) -> None:
        """The script begins a session, or a training of paceline."""

    def thread_ended(self, name: str, error: BaseException) -> None:
        """A thread of the script has ended with this exception; called in that thread."""

    def raised(self, where: str, error: BaseException) -> None:
        """An exception has left "data", "forward" or "backward": the script ends, or swallows it. See the ledger for a
        "collective".
        """

    def script_ended(self) -> None:
        """The script has ended with exit code 0."""


class Hooks:
    """Those of one process."""

    def __init__(self, warn_once: Callable[[BaseException], None]) -> None:
        self._listeners: dict[str, list[Then]] = {}
        self._warn_once = warn_once
        os.register_at_fork(after_in_child=self._listeners.clear)

    def listen(self, *listeners: Events) -> Self:
        """Have these called, after those before them."""
        for name in vars(Events):
            heard = [getattr(one, name) for one in listeners if getattr(type(one), name) is not getattr(Events, name)]
            self._listeners[name] = [*self._listeners.get(name, ()), *heard]
        return self

    def dismiss(self, *listeners: Events) -> None:
        """A session begins: remove these listeners, and call the others."""
        for name, heard in self._listeners.items():
            self._listeners[name] = [one for one in heard if getattr(one, "__self__", None) not in listeners]
        self._tell("session_begins")

    def end(self) -> None:
        """The script has ended with exit code 0."""
        self._tell("script_ended")

    def install(self) -> Self:
        """Be called from now on, or as soon as torch is there as a whole."""
        when_imported("torch", self._install)
        before = threading.excepthook

        def ended(args: threading.ExceptHookArgs) -> None:
            if isinstance(args.exc_value, Exception):
                self._tell("thread_ended", args.thread.name if args.thread is not None else "?", args.exc_value)
            before(args)

        threading.excepthook = ended
        return self

    def _tell(self, event: str, *told: Any) -> None:
        for then in self._listeners.get(event, ()):
            try:
                then(*told)
            except Exception as error:
                self._warn_once(error)

    def _install(self, *, late: bool) -> None:
        tell = self._tell
        try:
            self._hang_on_loaders(sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter)
            replica = sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel
            hang(replica, "__init__", after=lambda _, ddp, *__, **___: tell("replica_made", ddp))
            hang(
                replica, "forward",
                before=lambda ddp, *inputs, **named: tell("forward_begins", ddp, inputs, named),
                after=lambda output, ddp, *_, **__: tell("forward_ended", ddp, output),
                failed=lambda error, *_, **__: tell("raised", "forward", error),
            )  # fmt: skip
            hang(
                replica, "_sync_buffers",
                before=lambda ddp: tell("buffers_asked", ddp),
                after=lambda _, ddp: tell("buffers_given", ddp),
            )  # fmt: skip
            hang(
                sys.modules["torch.autograd"], "backward",
                before=lambda losses, *_, **__: tell("backward_begins", losses),
                after=lambda *_, **__: tell("backward_ended"),
                failed=lambda error, *_, **__: tell("raised", "backward", error),
            )  # fmt: skip
            optimizers = sys.modules["torch.optim.optimizer"]
            optimizers.register_optimizer_step_pre_hook(self._step_begins)
            optimizers.register_optimizer_step_post_hook(self._step_ended)
        except Exception as error:  # a torch with other names
            self._warn_once(error)
        tell("torch_is_there")

    def _step_begins(self, optimizer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Gradients exist now, unless a closure computes them: then `step_begins` follows when it has returned."""
        if _is_of_another_step(optimizer):
            return None
        closure = _closure(args, named)
        if not callable(closure) or not self._listeners.get("step_begins"):
            self._tell("step_begins", optimizer)
            return None
        watched = Closure(
            closure, partial(self._tell, "step_begins", optimizer), partial(self._tell, "closure_ended", optimizer)
        )
        return (args, named | {"closure": watched}) if "closure" in named else ((args[0], watched, *args[2:]), named)

    def _step_ended(self, optimizer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if _is_of_another_step(optimizer):
            return
        closure = _closure(args, named)
        if isinstance(closure, Closure):
            closure.begin()  # it was not called
        self._tell("step_ended", optimizer)

    def _hang_on_loaders(self, base: Any) -> None:
        """Only the base has `__next__`; the two kinds of iterators override the other methods, and call these."""
        tell = self._tell

        def begun(_: Any, batches: Any, loader: Any) -> None:
            batches.of_loader = weakref.ref(loader)
            tell("epoch_begins", batches)

        def begun_again(_: Any, batches: Any, loader: Any, first_iter: bool = False) -> None:
            if not first_iter:
                tell("epoch_begins", batches)

        def failed(error: BaseException, batches: Any) -> None:
            over = isinstance(error, StopIteration)
            tell("epoch_ended", batches) if over else tell("raised", "data", error)

        hang(base, "__init__", after=begun)
        hang(base, "_reset", after=begun_again)
        hang(base, "_next_index", after=lambda indices, batches: tell("indices_drawn", batches, indices))
        given = partial(hang, base, "__next__", before=partial(tell, "batch_asked"), failed=failed)
        given(after=lambda batch, batches: tell("batch_given", batches, batch))


class Closure:
    """The closure of an optimizer's step: calls back when it has returned, the first time and later."""

    def __init__(self, closure: Callable[..., Any], first: Callable[[], None], later: Callable[[], None]) -> None:
        self._closure, self._first, self._later = closure, first, later
        self._begun = False
        update_wrapper(self, closure)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call it."""
        result = self._closure(*args, **named)
        if self._begun:
            self._later()
        self.begin()
        return result

    def begin(self) -> None:
        """The step begins, if it has not yet."""
        if not self._begun:
            self._begun = True
            self._first()


def _is_of_another_step(optimizer: Any) -> bool:
    """Whether a subclass's step has called its base's: torch calls the hooks in both."""
    frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage] - torch's wrapper of the method
    wrapper, args = frame.f_code, frame.f_code.co_varnames[0]
    for _ in range(MOST_BETWEEN):
        frame = frame.f_back
        if frame is None:
            return False
        if frame.f_code is wrapper and (frame.f_locals.get(args) or (None,))[0] is optimizer:
            return True
    return False


def _closure(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The closure argument of `optimizer.step(...)`."""
    return named.get("closure", args[1] if len(args) > 1 else None)


def hang(
    owner: Any, name: str, *, before: Then | None = None, after: Then | None = None, failed: Then | None = None
) -> None:
    """Wrap a function of torch: call `before` with its arguments, `after` or `failed` with its result or error first.

    Compiled code does not call them, so that they are not in the graph. Their errors are ignored.
    """
    function = getattr(owner, name)
    compiles = sys.modules["torch.compiler"].is_compiling

    def tell(then: Then | None, *told: Any, **named: Any) -> None:
        if then is not None:
            try:
                then(*told, **named)
            except Exception:
                return

    @unseen
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if compiles():
            return function(*args, **kwargs)
        tell(before, *args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            tell(failed, error, *args, **kwargs)
            raise
        tell(after, result, *args, **kwargs)
        return result

    setattr(owner, name, called)


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


def unseen(function: T) -> T:
    """Have warnings pass over this function, which is not running yet, so that they name the user's line.

    `warnings` passes over the frames of the import system, which it knows by two words in the name of their file,
    wherever it counts a stack level. A function of ours between a user's line and torch's has them in its file's name.
    """
    changed: Any = function
    changed.__code__ = changed.__code__.replace(co_filename=changed.__code__.co_filename + UNSEEN)
    return function
