"""Probes see what a script that nobody changed does: the hooks in torch, and helpers that read tensors.

`Hooks` is the one set of hooks that shows where a script that nobody changed loads, goes forward and backward, steps:

    class Steps(Events):
        def step_ended(self, optimizer): ...

    Hooks(warn_once).listen(Steps()).install()

Two packages listen: probes/, for silent faults, in every run, and check/, for the facts of `--check`. Events without a
listener cost nothing. The hooks are in torch itself:
`DataLoader`'s iterators, `DistributedDataParallel`, `torch.autograd.backward` and optimizers; `wrap_function` puts others where
only one listener needs them. No argument and no result is changed, except that the closure of a step is wrapped. An
error of a listener is a warning, and the script continues. A process that the script forks is not the rank: its events
are ignored.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial, update_wrapper, wraps
from itertools import islice
from typing import Any, Self

from paceline.protocol.facts import MAX_DIGESTS
from paceline.rank.imports import hide_from_warnings, when_imported

Then = Callable[..., None]
MOST_BETWEEN = 12  # frames between two of torch's wrappers of an optimizer's step
MAX_PENDING = 64  # reads in flight
MAX_ELEMENTS = 1 << 16  # of a tensor that are read: tensors that differ as a whole differ in these
MAX_DEPTH = 5


class DeferredReads:
    """Reads values of a device a step or two later, so that the host never waits for them."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Any, Any, Callable[[list[Any]], None]]] = deque(maxlen=MAX_PENDING)

    def read(self, values: Any, then: Callable[[list[Any]], None]) -> None:
        """Call `then` with the numbers in this tensor: now if they are the host's, else in a later `look`."""
        if not values.is_cuda:
            then(values.tolist())
            return
        event = sys.modules["torch"].cuda.Event()
        copy = values.to("cpu", non_blocking=True)
        event.record()
        self._coming.append((event, copy, then))

    def look(self) -> None:
        """Handle the values that have arrived."""
        while self._coming and self._coming[0][0].query():
            _, copy, then = self._coming.popleft()
            then(copy.tolist())


def may_compute(tensor: Any) -> bool:
    """Whether something may be computed of this tensor now: not while a CUDA graph is captured."""
    return not tensor.is_cuda or not sys.modules["torch"].cuda.is_current_stream_capturing()


def short_hash(data: bytes) -> str:
    """Sixteen hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def some_of(tensor: Any, most: int = MAX_ELEMENTS) -> Any:
    """Some of its elements, evenly over the whole."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // most) or 1]


def digest_of(tensors: Iterable[Any], most: int = MAX_ELEMENTS) -> str:
    """One digest of several tensors, which may be None."""
    torch: Any = sys.modules["torch"]
    kept = (None if one is None else some_of(one, most).cpu().contiguous().view(torch.uint8) for one in tensors)
    return short_hash(b"".join(b"-" if one is None else bytes(one.numpy()) for one in kept))


def leaf_digests(batch: Any, depth: int = 0, most: int = MAX_ELEMENTS, *, constants: bool = False) -> list[str]:
    """The digests of all tensors, arrays and numbers in a batch, in order; "f:" before floating point.

    Empty for a tensor whose elements are all equal, except with `constants`.
    """
    torch: Any = sys.modules["torch"]
    if isinstance(batch, torch.Tensor):
        some = some_of(batch, most)
        if not constants and batch.dim() and some.numel() and bool((some == some[0]).all()):
            return [""]
        return [("f:" if batch.is_floating_point() else "") + digest_of([some], most)]
    inner: Any = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else None
    if depth < MAX_DEPTH and inner is not None:
        leaves = (leaf for value in inner for leaf in leaf_digests(value, depth + 1, most, constants=constants))
        return [*islice(leaves, MAX_DIGESTS)]
    if type(batch).__module__ == "numpy" and (data := getattr(batch, "tobytes", None)) is not None:
        return [short_hash(data())]
    return [short_hash(repr(batch).encode())] if isinstance(batch, (str, bytes, int, float)) else [""]


def sample_count(batch: Any, depth: int = 0) -> int:
    """The number of samples in a batch: the first dimension of its first tensor; 0: unknown."""
    if hasattr(batch, "shape") and len(batch.shape):
        return int(batch.shape[0])
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for value in inner if depth < MAX_DEPTH and (size := sample_count(value, depth + 1))), 0)


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
            wrap_function(replica, "__init__", after=lambda _, ddp, *__, **___: tell("replica_made", ddp))
            wrap_function(
                replica, "forward",
                before=lambda ddp, *inputs, **named: tell("forward_begins", ddp, inputs, named),
                after=lambda output, ddp, *_, **__: tell("forward_ended", ddp, output),
                failed=lambda error, *_, **__: tell("raised", "forward", error),
            )  # fmt: skip
            wrap_function(
                replica, "_sync_buffers",
                before=lambda ddp: tell("buffers_asked", ddp),
                after=lambda _, ddp: tell("buffers_given", ddp),
            )  # fmt: skip
            wrap_function(
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

        wrap_function(base, "__init__", after=begun)
        wrap_function(base, "_reset", after=begun_again)
        wrap_function(base, "_next_index", after=lambda indices, batches: tell("indices_drawn", batches, indices))
        given = partial(wrap_function, base, "__next__", before=partial(tell, "batch_asked"), failed=failed)
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


def wrap_function(
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

    @hide_from_warnings
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
