"""What a strategy is, and the record of functions that it returns.

A strategy turns a single-device model into this rank's part of a training. What it returns is a record whose defaults
are what one device does; a strategy overrides only what it must, so the training step never asks which one it is.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.state import Source, TensorShard, load_into, whole_parameters
from paceline.collectives.buckets import trainable
from paceline.collectives.communicator import say
from paceline.collectives.control import Pending, scaled
from paceline.collectives.hosts import Hosts
from paceline.collectives.norm import scale_to_norm, total_norm
from paceline.data.loader import MicroBatch
from paceline.data.plan import Work
from paceline.errors import UsageError
from paceline.pipeline.line import Pipeline
from paceline.rank.world import World
from paceline.seeding import Streams, random_stream
from paceline.strategies.buffers import VirtualBuffers, uncounted
from paceline.strategies.held import hold_optimizer, load_optimizer, take_mean, words_of_mean
from paceline.strategies.refusals import refuse_foreign, refuse_max_norm

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Replica:
    """This rank's part of a training. Build it with `replica`, which fills in what all strategies share."""

    model: nn.Module
    """the plain model, with its own names: for evaluation and saving"""
    module: nn.Module
    """what the training forward calls: the model, or a wrapper of it"""
    optimizer: Optimizer
    world: World
    virtual_ranks: int
    """how many the run is defined for"""
    body: Callable[[MicroBatch, bool], AbstractContextManager[Streams]]
    """(micro-batch, is it the step's last here?): surrounds all that is computed for it: random stream, buffers"""
    backward: Callable[[Work, bool], AbstractContextManager[Any]]
    """(work, is it the step's last backward here?): surrounds each backward inside `body`"""
    sync_gradients: Callable[[float | Tensor], bool | Pending[bool] | None]
    """(divisor, a scalar): sums .grad over ranks and divides it: the gradient of the global batch's mean. Whether
    it was found to be finite on the way, on all ranks alike: True, or still to be read, or None, nobody has looked"""
    reset: Callable[[], None]
    """after an error in a forward or backward of your own loop, in place of `sync_gradients`: drops the step's
    gradients, so that the next one can begin. Every rank calls it, or `sync_gradients`, whose result is then worth
    nothing (a collective). `ddp` and `fsdp` can go on only where all ranks have failed before their first backward"""
    clip_grad_norm: Callable[[float], Pending[float]]
    """(largest norm allowed): the global norm of the gradients (a collective where they are sharded); once that is
    read all of them are scaled alike, unless it is not finite"""
    merged_buffers: Callable[[], AbstractContextManager[None]]
    """inside, the model's buffers are the same on all ranks (a collective)"""
    keep_buffers: Callable[[], None]
    """remembers the buffers of this rank's virtual ranks"""
    put_back_buffers: Callable[[], None]
    """makes them what they were when they were last kept"""
    alone: Callable[[MicroBatch], AbstractContextManager[Streams]]
    """surrounds a forward of the plain model that is only looked at: its random stream, its buffers"""
    on_gradient: Callable[[Callable[[], None]], None]
    """(function): calls it in each backward that reaches the model, whoever has called the backward"""
    gradients: Callable[[], list[TensorShard]]
    """the gradients of the global batch's mean that this rank holds, by parameter; none where nobody has used it"""
    sharded: bool
    """whether each rank holds a share of the gradients only, and all must be asked about them"""
    in_lockstep: bool
    """whether a forward is a collective, so that all ranks must go through equally many, with stand-ins if need be"""
    gathered: Callable[[], AbstractContextManager[None]]
    """inside, the plain model holds all parameters, and may be called by one rank alone (a collective)"""
    weights: Callable[[], Mapping[str, Tensor]]
    """whole parameters and persistent buffers, by the model's names, as they are now (a collective)"""
    state: Callable[[], list[TensorShard]]
    """every tensor of the training's state that this rank holds, under names that no strategy changes; no copies"""
    load: Callable[[Source], None]
    """takes over a state that any strategy on any number of ranks has held"""
    pipeline: Pipeline | None = None
    """this rank's stage, where the model's layers are shared: every forward goes through it"""
    host: Hosts | None = None
    """this host, where each takes steps by itself: only its ranks hold these gradients"""
    all_finite: Callable[[], bool] | None = None
    """with `host`: whether the gradients of all are finite; one that is not becomes NaN on all (a collective)"""


class Strategy(Protocol):
    """One rung of the ladder."""

    def __call__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> Replica:
        """Prepare `model`, already on the world's device, for training among the ranks of `world`.

        `virtual_ranks` is that of the plan whose batches will come; by default the world size.
        """
        ...


def replica(
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    virtual_ranks: int | None = None,
    module: nn.Module | None = None,
    sync_gradients: Callable[[float | Tensor], bool | Pending[bool] | None] | None = None,
    reset: Callable[[], None] = lambda: None,
    around: Callable[[Work, bool], AbstractContextManager[Any]] = lambda _work, _is_last: nullcontext(),
    backward: Callable[[Work, bool], AbstractContextManager[Any]] = lambda _work, _is_last: nullcontext(),
    on_gradient: Callable[[Callable[[], None]], None] | None = None,
    gradients: Callable[[], list[TensorShard]] | None = None,
    gradient_norm: Callable[[], Pending[float]] | None = None,
    sharded: bool = False,
    in_lockstep: bool = False,
    gathered: Callable[[], AbstractContextManager[None]] = nullcontext,
    weights: Callable[[], Mapping[str, Tensor]] | None = None,
    hold_parameters: Callable[[], list[TensorShard]] | None = None,
    hold: Callable[[], list[TensorShard]] | None = None,
    load: Callable[[Source], None] | None = None,
    host: Hosts | None = None,
) -> Replica:
    """A Replica with the shared parts filled in.

    Args:
        model: the plain model.
        optimizer: over the model's parameters.
        world: this rank's place.
        module: what forward calls, if it is not the model itself.
        virtual_ranks: see Strategy.
        sync_gradients: see Replica; by default only the division, as one device does.
        reset: see Replica; what the other ranks need of this one, beside dropping its gradients.
        around: (work, is it the step's last here?): surrounds a micro-batch from its forward on.
        backward: see Replica; says what becomes of the gradients.
        on_gradient: see Replica; by default hooks on the first parameter and the last.
        gradients: see Replica; by default the parameters' .grad. `sharded`, `in_lockstep`, `gathered`, `weights` too.
        gradient_norm: the global norm of all gradients; infinite or NaN only if one of them is.
        hold_parameters: the parameters as this rank holds them, to be saved and overwritten.
        hold: the optimizer's state, where it is not wholly here; and `load`, which takes it over. With `host` (see
            Replica) it also takes over what each host has for itself.
    """
    parameters = trainable(model)
    named = [*model.named_parameters()]
    frozen = {name: p for name, p in named if not p.requires_grad}
    virtual_ranks = virtual_ranks or world.size
    if hold is None:
        refuse_foreign(model, optimizer)
    if virtual_ranks > 1:
        refuse_max_norm(model)
    buffers = VirtualBuffers(model, world, virtual_ranks)

    @contextmanager
    def body(batch: MicroBatch, is_last: bool) -> Generator[Streams]:
        for_nothing = nullcontext() if batch.work.counted else uncounted(model, parameters)
        with alone(batch) as outside, around(batch.work, is_last), for_nothing:
            yield outside

    @contextmanager
    def alone(batch: MicroBatch) -> Generator[Streams]:
        with random_stream(batch.random_seed, world.device) as outside, buffers.of(batch.work):
            yield outside

    def sync_all_gradients(total_weight: float | Tensor) -> bool | Pending[bool] | None:
        for name, parameter in frozen.items():
            if parameter.requires_grad:
                raise UsageError(code="unfrozen-later", name=name)
        if sync_gradients is not None:
            found = sync_gradients(total_weight)
        else:
            found = scale_gradients(parameters, 1 / total_weight, world.device)
        buffers.check()  # after the gradients' collectives: before, their order differs between ranks
        return found

    def reset_gradients() -> None:
        reset()
        model.zero_grad(set_to_none=True)
        optimizer.zero_grad(set_to_none=True)  # pieces of parameters are not the model's

    def on_own_gradient(act: Callable[[], None]) -> None:
        for parameter in {id(p): p for p in (parameters[0], parameters[-1])}.values():
            parameter.register_post_accumulate_grad_hook(lambda _: act())

    held_gradients = gradients or (lambda: [TensorShard(name, p.grad) for name, p in named if p.grad is not None])

    def clip_grad_norm(max_norm: float) -> Pending[float]:
        tensors = [held.tensor for held in held_gradients()]
        norm = total_norm(tensors) if gradient_norm is None else gradient_norm()
        return norm.then(lambda found: scale_to_norm(tensors, found, max_norm))

    held_parameters = hold_parameters or (lambda: whole_parameters(model.named_parameters()))

    def state() -> list[TensorShard]:
        optimizers = hold_optimizer(model, optimizer) if hold is None else hold()
        return [*held_parameters(), *buffers.hold(), *optimizers]

    @torch.no_grad()
    def load_all(source: Source) -> None:
        for held in held_parameters():
            load_into(source, held)
        if host is None and (hosts := take_mean(source, held_parameters())):
            say(words_of_mean(hosts, "now all agree after each step"))
        buffers.load(source)
        load_optimizer(model, optimizer, source) if load is None else load(source)

    return Replica(
        model=model,
        module=model if module is None else module,
        optimizer=optimizer,
        world=world,
        virtual_ranks=virtual_ranks,
        body=body,
        backward=backward,
        sync_gradients=sync_all_gradients,
        reset=reset_gradients,
        clip_grad_norm=clip_grad_norm,
        merged_buffers=buffers.merged,
        keep_buffers=buffers.keep,
        put_back_buffers=buffers.put_back,
        alone=alone,
        on_gradient=on_gradient or on_own_gradient,
        gradients=held_gradients,
        sharded=sharded,
        in_lockstep=in_lockstep,
        gathered=gathered,
        weights=model.state_dict if weights is None else weights,
        state=state,
        load=load_all,
        host=host,
    )


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float | Tensor, device: torch.device) -> Pending[bool]:
    """Multiply every gradient there is, on `device`, by the scalar `factor`; whether they are finite."""
    return scaled([p.grad for p in parameters if p.grad is not None], factor, device)
