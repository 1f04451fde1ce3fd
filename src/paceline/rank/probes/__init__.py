"""Probes observe an unmodified script: hooks in torch, and helpers that read tensors.

`ScriptHooks` reports to listeners when an unmodified script loads data, runs forward and backward, and steps an
optimizer. Two packages listen: probes/ for silent faults, in every run, and check/ for the facts of `--check`. Events
without a listener cost nothing. The hooks are in torch itself: `DataLoader`'s iterators, `DistributedDataParallel`,
`torch.autograd.backward` and optimizers. `wrap_function` adds other hooks, which only one listener needs. Hooks change
no argument and no result, except that they wrap the closure of a step. An error of a listener gives a warning, and the
script continues. A process that the script forks is not the rank, so its events are ignored.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, update_wrapper, wraps
from itertools import islice
from typing import Any, Self

from paceline.protocol.facts import MAX_DIGESTS
from paceline.rank.imports import hide_from_warnings, when_imported

HookCallback = Callable[..., None]
MAX_WRAPPER_FRAMES = 12  # frames between two of torch's wrappers of an optimizer's step
MAX_PENDING = 64  # reads in flight
MAX_ELEMENTS = 1 << 16  # elements that are read of a tensor; sufficient to find differences
MAX_DEPTH = 5


class DeferredReads:
    """Reads values of a device one or two steps later, so that the host never waits for the device."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Any, Any, Callable[[list[Any]], None]]] = deque(maxlen=MAX_PENDING)

    def read(self, values: Any, then: Callable[[list[Any]], None]) -> None:
        """Call `then` with the numbers in this tensor: now if it is on the host, else in a later `deliver_arrived`."""
        if not values.is_cuda:
            then(values.tolist())
            return
        event = sys.modules["torch"].cuda.Event()
        copy = values.to("cpu", non_blocking=True)
        event.record()
        self._pending.append((event, copy, then))

    def deliver_arrived(self) -> None:
        while self._pending and self._pending[0][0].query():
            _, copy, then = self._pending.popleft()
            then(copy.tolist())


def is_not_capturing(tensor: Any) -> bool:
    """Whether kernels may run on this tensor now: not while a CUDA graph is captured."""
    return not tensor.is_cuda or not sys.modules["torch"].cuda.is_current_stream_capturing()


def short_hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def take_evenly_spaced_elements(tensor: Any, most: int = MAX_ELEMENTS) -> Any:
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // most) or 1]


def sampled_digest(tensors: Iterable[Any], most: int = MAX_ELEMENTS) -> str:
    torch: Any = sys.modules["torch"]
    samples = (
        None if t is None else take_evenly_spaced_elements(t, most).cpu().contiguous().view(torch.uint8)
        for t in tensors
    )
    return short_hash(b"".join(b"-" if t is None else bytes(t.numpy()) for t in samples))


def leaves(value: Any, depth: int = MAX_DEPTH) -> Iterator[Any]:
    """The values in nested mappings, lists and tuples, in order."""
    inner: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else None
    if inner is None or not depth:
        yield value
    else:
        for part in inner:
            yield from leaves(part, depth - 1)


def leaf_digests(batch: Any, most: int = MAX_ELEMENTS, *, constants: bool = False) -> list[str]:
    """The digests of all tensors, arrays and numbers in a batch, in order; with prefix "f:" for floating point.

    The digest is empty for a tensor whose elements are all equal, except with `constants`.
    """
    return [_leaf_digest(leaf, most, constants) for leaf in islice(leaves(batch), MAX_DIGESTS)]


def _leaf_digest(leaf: Any, most: int, constants: bool) -> str:
    if isinstance(leaf, sys.modules["torch"].Tensor):
        elements = take_evenly_spaced_elements(leaf, most)
        if not constants and leaf.dim() and elements.numel() and bool((elements == elements[0]).all()):
            return ""
        return ("f:" if leaf.is_floating_point() else "") + sampled_digest([elements], most)
    if type(leaf).__module__ == "numpy" and (data := getattr(leaf, "tobytes", None)) is not None:
        return short_hash(data())
    return short_hash(repr(leaf).encode()) if isinstance(leaf, (str, bytes, int, float)) else ""


def sample_count(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor; 0 if unknown."""
    return next((int(leaf.shape[0]) for leaf in leaves(batch) if len(getattr(leaf, "shape", ()))), 0)


class ScriptListener:
    """A listener: subclasses override some events. All events except `on_thread_failed` run in the script's thread.

    `batches` is the iterator of a `DataLoader`, `ddp` a `DistributedDataParallel`: a replica.
    """

    def on_torch_imported(self) -> None: ...  # listeners may add hooks
    def on_epoch_begin(self, batches: Any) -> None: ...  # made or restarted
    def on_indices_drawn(self, batches: Any, indices: Any) -> None: ...  # of a batch; loaders with processes draw ahead
    def on_batch_requested(self, batches: Any) -> None: ...
    def on_batch_received(self, batches: Any, batch: Any) -> None: ...
    def on_epoch_end(self, batches: Any) -> None: ...  # no more batches
    def on_replica_created(self, ddp: Any) -> None: ...  # its parameters are equal on all its ranks
    def on_forward_begin(self, ddp: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None: ...
    def on_buffers_broadcast(self, ddp: Any) -> None: ...  # the forward waits for the buffers of rank 0
    def on_buffers_received(self, ddp: Any) -> None: ...
    def on_forward_end(self, ddp: Any, output: Any) -> None: ...
    def on_backward_begin(self, losses: Any) -> None: ...  # of one or several tensors
    def on_backward_end(self) -> None: ...  # with DDP the gradients are reduced
    def on_step_begin(self, optimizer: Any) -> None: ...  # the gradients are there, from a closure or from before
    def on_step_end(self, optimizer: Any) -> None: ...
    def on_session_begin(self) -> None: ...  # of paceline, or a training of paceline
    def on_thread_failed(self, name: str, error: BaseException) -> None: ...  # in the thread that has ended with it
    def on_exception(self, where: str, error: BaseException) -> None: ...  # from "data", "forward" or "backward"
    def on_script_succeeded(self) -> None: ...  # with exit code 0


class ScriptHooks:
    def __init__(self, warn_once: Callable[[BaseException], None]) -> None:
        self._listeners: dict[str, list[HookCallback]] = {}
        self._warn_once = warn_once
        os.register_at_fork(after_in_child=self._listeners.clear)

    def add_listeners(self, *listeners: ScriptListener) -> Self:
        for name in vars(ScriptListener):
            added = [getattr(x, name) for x in listeners if getattr(type(x), name) is not getattr(ScriptListener, name)]
            self._listeners[name] = [*self._listeners.get(name, ()), *added]
        return self

    def remove_listeners(self, *listeners: ScriptListener) -> None:
        """Remove these listeners, and report to the others that a session begins."""
        for name, methods in self._listeners.items():
            self._listeners[name] = [method for method in methods if getattr(method, "__self__", None) not in listeners]
        self._tell("on_session_begin")

    def report_success(self) -> None:
        self._tell("on_script_succeeded")

    def install(self) -> Self:
        when_imported("torch", self._wrap_torch)
        previous_hook = threading.excepthook

        def ended(args: threading.ExceptHookArgs) -> None:
            if isinstance(args.exc_value, Exception):
                self._tell("on_thread_failed", args.thread.name if args.thread is not None else "?", args.exc_value)
            previous_hook(args)

        threading.excepthook = ended
        return self

    def _tell(self, event: str, *arguments: Any) -> None:
        for then in self._listeners.get(event, ()):
            try:
                then(*arguments)
            except Exception as error:
                self._warn_once(error)

    def _wrap_torch(self) -> None:
        tell = self._tell
        try:
            self._wrap_loaders(sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter)
            replica = sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel
            wrap_function(replica, "__init__", after=lambda _, ddp, *__, **___: tell("on_replica_created", ddp))
            wrap_function(
                replica, "forward",
                before=lambda ddp, *inputs, **named: tell("on_forward_begin", ddp, inputs, named),
                after=lambda output, ddp, *_, **__: tell("on_forward_end", ddp, output),
                failed=lambda error, *_, **__: tell("on_exception", "forward", error),
            )  # fmt: skip
            wrap_function(
                replica, "_sync_buffers",
                before=lambda ddp: tell("on_buffers_broadcast", ddp),
                after=lambda _, ddp: tell("on_buffers_received", ddp),
            )  # fmt: skip
            wrap_function(
                sys.modules["torch.autograd"], "backward",
                before=lambda losses, *_, **__: tell("on_backward_begin", losses),
                after=lambda *_, **__: tell("on_backward_end"),
                failed=lambda error, *_, **__: tell("on_exception", "backward", error),
            )  # fmt: skip
            optimizers = sys.modules["torch.optim.optimizer"]
            optimizers.register_optimizer_step_pre_hook(self._step_begins)
            optimizers.register_optimizer_step_post_hook(self._step_ended)
        except Exception as error:  # a torch with different names
            self._warn_once(error)
        tell("on_torch_imported")

    def _step_begins(self, optimizer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Report `on_step_begin` now, or, if a closure computes the gradients, when the closure has returned."""
        if _is_nested_step(optimizer):
            return None
        closure = _closure(args, named)
        if not callable(closure) or not self._listeners.get("on_step_begin"):
            self._tell("on_step_begin", optimizer)
            return None
        watched = ObservedClosure(closure, partial(self._tell, "on_step_begin", optimizer))
        return (args, named | {"closure": watched}) if "closure" in named else ((args[0], watched, *args[2:]), named)

    def _step_ended(self, optimizer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if _is_nested_step(optimizer):
            return
        closure = _closure(args, named)
        if isinstance(closure, ObservedClosure):
            closure.notify_first_call()  # if the optimizer has not called it
        self._tell("on_step_end", optimizer)

    def _wrap_loaders(self, base: Any) -> None:
        """Wrap the base class of iterators. Subclasses inherit `__next__`, and call the base for the other methods."""
        tell = self._tell

        def begun(_: Any, batches: Any, loader: Any) -> None:
            batches.of_loader = weakref.ref(loader)
            tell("on_epoch_begin", batches)

        def begun_again(_: Any, batches: Any, loader: Any, first_iter: bool = False) -> None:
            if not first_iter:
                tell("on_epoch_begin", batches)

        def failed(error: BaseException, batches: Any) -> None:
            is_end = isinstance(error, StopIteration)
            tell("on_epoch_end", batches) if is_end else tell("on_exception", "data", error)

        wrap_function(base, "__init__", after=begun)
        wrap_function(base, "_reset", after=begun_again)
        wrap_function(base, "_next_index", after=lambda indices, batches: tell("on_indices_drawn", batches, indices))
        wrap_next = partial(wrap_function, base, "__next__", before=partial(tell, "on_batch_requested"), failed=failed)
        wrap_next(after=lambda batch, batches: tell("on_batch_received", batches, batch))


class ObservedClosure:
    """The closure of an optimizer's step. Calls `then` after its first call."""

    def __init__(self, closure: Callable[..., Any], then: Callable[[], None]) -> None:
        self._closure, self._then = closure, then
        self._begun = False
        update_wrapper(self, closure)

    def __call__(self, *args: Any, **named: Any) -> Any:
        result = self._closure(*args, **named)
        self.notify_first_call()
        return result

    def notify_first_call(self) -> None:
        if not self._begun:
            self._begun = True
            self._then()


def _is_nested_step(optimizer: Any) -> bool:
    """Whether the step of a subclass has called the step of its base: torch calls the hooks for both."""
    frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage] - torch's wrapper of the method
    wrapper, args = frame.f_code, frame.f_code.co_varnames[0]
    for _ in range(MAX_WRAPPER_FRAMES):
        frame = frame.f_back
        if frame is None:
            return False
        if frame.f_code is wrapper and (frame.f_locals.get(args) or (None,))[0] is optimizer:
            return True
    return False


def _closure(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return named.get("closure", args[1] if len(args) > 1 else None)


def wrap_function(
    owner: Any, name: str, *, before: HookCallback | None = None, after: HookCallback | None = None,
    failed: HookCallback | None = None,
) -> None:  # fmt: skip
    """Wrap function `name` of a module or class of torch with hooks.

    `before` gets the arguments; `after` gets the result and the arguments; `failed` gets the error and the arguments.
    Errors of hooks are ignored. Compiled code does not call hooks, so that they are not in the graph.
    """
    function = getattr(owner, name)
    compiles = sys.modules["torch.compiler"].is_compiling

    def tell(then: HookCallback | None, *arguments: Any, **named: Any) -> None:
        if then is not None:
            try:
                then(*arguments, **named)
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


def wrap_when_imported(module: str, owner: str, name: str, **hooks: HookCallback) -> None:
    """As `wrap_function`, for a method of a class of this module, when the module is imported."""
    when_imported(module, lambda: wrap_function(getattr(sys.modules[module], owner), name, **hooks))
