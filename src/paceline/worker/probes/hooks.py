"""Calls back where a script that nobody changed loads a batch, goes forward and backward, and steps.

    class Steps(Events):
        def step_ended(self, optimizer): ...

    Hooks(complain).listen(Steps()).install()

Found in torch itself: `DataLoader`'s iterators, `DistributedDataParallel`, `torch.autograd.backward` and optimizers. No
argument and no result is changed; what a listener raises is complained of once, and the script goes on. A process that
the script forks (a loader's, say) is not the rank, and is not heard.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Self

from paceline.worker.imports import when_imported

CompiledAsk = Callable[[], bool]


class Events:
    """What may be listened to: override what is of interest. All are called in the thread of the script."""

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

    def forward_ended(self, ddp: Any, output: Any) -> None:
        """It has returned."""

    def backward_begins(self, losses: Any) -> None:
        """`backward()` is called on a tensor, or on several."""

    def backward_ended(self) -> None:
        """It has returned; under DDP the gradients are reduced."""

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer is about to change its parameters; they have their gradients."""

    def step_ended(self, optimizer: Any) -> None:
        """It has changed them."""

    def raised(self, where: str, error: BaseException) -> None:
        """An exception has left "data", "forward" or "backward": the script ends of it, or swallows it."""


class Hooks:
    """Those of one process."""

    def __init__(self, complain: Callable[[BaseException], None]) -> None:
        self.active = True
        self._listeners: list[Events] = []
        self._complain = complain
        os.register_at_fork(after_in_child=self._in_child)

    def listen(self, listener: Events) -> Self:
        """Have this one called, after those before it."""
        self._listeners.append(listener)
        return self

    def install(self) -> Self:
        """Be called from now on, or as soon as torch is there as a whole."""
        when_imported("torch", self._install)
        return self

    def _in_child(self) -> None:
        self.active = False

    def _tell(self, event: str, *told: Any) -> None:
        if not self.active:
            return
        try:
            for listener in self._listeners:
                getattr(listener, event)(*told)
        except Exception as error:
            self._complain(error)

    def _install(self, *, late: bool) -> None:
        try:
            self._hook_loaders(sys.modules["torch.utils.data.dataloader"])
            self._hook_replicas(sys.modules["torch.nn.parallel.distributed"])
            self._hook_backward(sys.modules["torch.autograd"])
            optimizers = sys.modules["torch.optim.optimizer"]
            optimizers.register_optimizer_step_pre_hook(lambda optimizer, *_: self._tell("step_begins", optimizer))
            optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: self._tell("step_ended", optimizer))
        except Exception as error:  # a torch with other names
            self._complain(error)

    def _hook_loaders(self, dataloader: Any) -> None:
        # `__next__` is the base's alone; the two kinds of iterators have their own of the others, and call the base's
        base = dataloader._BaseDataLoaderIter
        begin, reset, draw, ask = base.__init__, base._reset, base._next_index, base.__next__

        @wraps(begin)
        def begun(batches: Any, loader: Any) -> None:
            begin(batches, loader)
            batches.of_loader = weakref.ref(loader)
            self._tell("epoch_begins", batches)

        @wraps(reset)
        def begun_again(batches: Any, loader: Any, first_iter: bool = False) -> None:
            reset(batches, loader, first_iter)
            if not first_iter:
                self._tell("epoch_begins", batches)

        @wraps(draw)
        def drawn(batches: Any) -> Any:
            indices = draw(batches)
            self._tell("indices_drawn", batches, indices)
            return indices

        @wraps(ask)
        def given(batches: Any) -> Any:
            self._tell("batch_asked", batches)
            try:
                batch = ask(batches)
            except StopIteration:
                self._tell("epoch_ended", batches)
                raise
            except BaseException as error:
                self._tell("raised", "data", error)
                raise
            self._tell("batch_given", batches, batch)
            return batch

        base.__init__, base._reset, base._next_index, base.__next__ = begun, begun_again, drawn, given

    def _hook_replicas(self, parallel: Any) -> None:
        replica = parallel.DistributedDataParallel
        make, forward = replica.__init__, replica.forward
        compiles: CompiledAsk = sys.modules["torch.compiler"].is_compiling

        @wraps(make)
        def made(ddp: Any, *args: Any, **kwargs: Any) -> None:
            make(ddp, *args, **kwargs)
            self._tell("replica_made", ddp)

        @wraps(forward)
        def called(ddp: Any, *inputs: Any, **named: Any) -> Any:
            if compiles():  # traced: nothing of ours shall be in the graph
                return forward(ddp, *inputs, **named)
            self._tell("forward_begins", ddp, inputs, named)
            try:
                output = forward(ddp, *inputs, **named)
            except BaseException as error:
                self._tell("raised", "forward", error)
                raise
            self._tell("forward_ended", ddp, output)
            return output

        replica.__init__, replica.forward = made, called

    def _hook_backward(self, autograd: Any) -> None:
        backward = autograd.backward
        compiles: CompiledAsk = sys.modules["torch.compiler"].is_compiling

        @wraps(backward)
        def called(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if compiles():
                return backward(tensors, *args, **kwargs)
            self._tell("backward_begins", tensors)
            try:
                backward(tensors, *args, **kwargs)
            except BaseException as error:
                self._tell("raised", "backward", error)
                raise
            self._tell("backward_ended")
            return None

        autograd.backward = called
