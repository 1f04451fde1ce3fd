"""The base class of all strategies. Without a subclass it trains on one device.

A strategy turns a single-device model into this rank's part of a training. A subclass overrides how gradients are
reduced and which state is sharded. The training step itself does not depend on the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.state import StateSource, TensorShard, load_shard, unsharded_parameter_shards
from paceline.collectives.buckets import trainable_parameters
from paceline.collectives.control import Deferred, scale_and_check_gradients
from paceline.collectives.norm import clip_to_norm, clip_to_norm_on_device, unsharded_grad_norm
from paceline.collectives.torch_communicator import print_on_rank_0
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.seeding import fork_rng_with_seed
from paceline.strategies import optimizers
from paceline.strategies.buffers import VirtualRankBuffers, ignore_dummy_batch
from paceline.strategies.validation import check_embedding_max_norm, check_optimizer_parameters

if TYPE_CHECKING:
    from paceline.collectives.hosts import NodeTopology
    from paceline.collectives.reducer import Reducer
    from paceline.data.loader import MicroBatch
    from paceline.data.plan import MicroBatchPlan
    from paceline.parallel.pipeline import Pipeline
    from paceline.strategies.average import EmaWeights
    from paceline.strategies.model_parallel import WholeModelView

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Strategy:
    """This rank's part of the training of a model.

    A step calls, in this order: `save_buffers`; for each micro-batch `enter`, a forward of `module`, `begin_backward`,
    a backward, `end_backward` and `leave`; before the last `leave` `sync_gradients`, `clip_grad_norm` if asked, and
    the optimizer's step.
    """

    sharded = False
    """whether each rank holds only a shard of the gradients"""
    hides_gradients = False
    """whether the gradients are those of the optimizer's pieces only, and not .grad of the model's parameters"""
    in_lockstep = False
    """whether a forward is a collective. Then all ranks run the same number of forwards, some on dummy batches"""
    local_step_node: NodeTopology | None = None
    """this node, if nodes take local steps. Then only the ranks of this node hold these gradients"""
    keeps_partial_sums = False
    """whether a rank with several virtual ranks keeps sums of the gradients of some of them"""
    can_defer_read = False
    """whether the results of a step may be read during the next step; see `stepping.step.Step`"""
    pipeline: Pipeline | None = None
    """the pipeline, if this rank holds one stage of the model. Every forward runs through it"""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        *,
        virtual_ranks: int | None = None,
        module: nn.Module | None = None,
        reducer: Reducer | None = None,
        trained: Sequence[Sequence[nn.Parameter]] | None = None,
    ) -> None:
        """Prepare the parts that all strategies have.

        Args:
            model: the plain model, for evaluation and saving.
            optimizer: over the model's parameters, or over pieces of them.
            world: the ranks of the training, and the device of this rank.
            virtual_ranks: number for which the run is defined. Default: the world size.
            module: the module for the training forward. Default: the model.
            reducer: sums gradients over ranks. None: this rank computes all of them.
            trained: the parameters that each optimizer trains, if it updates pieces of them. None: those of its groups.
        """
        self.model, self.module, self.optimizer = model, model if module is None else module, optimizer
        self.optimizers = optimizers.each_optimizer(optimizer)
        """The optimizers of a sequence, or the only one."""
        self.trained = optimizers.parameters_by_optimizer(optimizer) if trained is None else trained
        """The parameters of the model that each of them trains."""
        self.world, self.reducer, self.virtual_ranks = world, reducer, virtual_ranks or world.size
        self.parameters = trainable_parameters(model)
        self.parts: WholeModelView | None = None
        """set by `join`"""
        self.average: EmaWeights | None = None
        self._named = [*model.named_parameters()]
        self._frozen = {name: p for name, p in self._named if not p.requires_grad}
        self._inside: ExitStack | None = None
        if trained is None:
            check_optimizer_parameters(model, optimizer)
        if self.virtual_ranks > 1:
            check_embedding_max_norm(model)
        self.buffers = VirtualRankBuffers(model, world, self.virtual_ranks)

    def join(self, parts: WholeModelView, world: World) -> None:
        """Train a part of a model whose other parts are on other ranks of `world`.

        Args:
            parts: computes weights, gradients and state of the whole model from those of the parts.
            world: all ranks of the training, with their mesh.
        """
        self.parts, self.world, self.sharded = parts, world, True

    # a micro-batch

    def enter(self, batch: MicroBatch, is_last: bool, around: AbstractContextManager[Any] | None = None) -> None:
        """Begin a micro-batch: load its buffers into the model.

        Args:
            batch: the micro-batch.
            is_last: whether it is this rank's last one of the step.
            around: a context of a strategy, until `leave`. None: no context.
        """
        work = batch.work
        is_dummy = not (work.is_counted or work.is_repeated)
        if around is not None or is_dummy:
            with ExitStack() as stack:
                stack.enter_context(self.buffers.micro_batch_context(work))
                if around is not None:
                    stack.enter_context(around)
                if is_dummy:
                    stack.enter_context(ignore_dummy_batch(self.model, self.parameters))
                self._inside = stack.pop_all()
        elif not self.buffers.is_idle:
            self.buffers.enter_micro_batch(work)

    def leave(self, error: BaseException | None = None) -> None:
        """End the micro-batch that `enter` has begun.

        Args:
            error: the error of its forward or backward. The changes of buffers are then dropped. None: no error.
        """
        inside, self._inside = self._inside, None
        if inside is None and not self.buffers.is_idle:
            self.buffers.leave_micro_batch(failed=error is not None)
        elif inside is not None:
            inside.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    @contextmanager
    def alone(self, batch: MicroBatch) -> Generator[None]:
        """Inside, a forward of the plain model has the random stream and the buffers of `batch`.

        Args:
            batch: a micro-batch of a virtual rank.
        """
        with fork_rng_with_seed(batch.random_seed, self.world.device), self.buffers.micro_batch_context(batch.work):
            yield

    def begin_backward(self, work: MicroBatchPlan, is_last: bool) -> None:
        """Begin a backward inside a micro-batch.

        Args:
            work: of the current micro-batch.
            is_last: whether it is the last backward of the step on this rank.
        """
        if self.reducer is not None:
            self.reducer.begin_backward(work.virtual_rank, is_last=is_last, counted=work.is_counted)

    def end_backward(self, error: BaseException | None = None) -> None:
        """End a backward. May raise an error that explains `error` better.

        Args:
            error: the error of the backward. None: no error.
        """
        if self.reducer is not None:
            self.reducer.end_backward(failed=error is not None)

    def on_gradient(self, act: Callable[[Tensor], None]) -> None:
        """Call `act` with a parameter in each backward that reaches the last layer, also in those of the loop.

        Args:
            act: called after the gradient of that parameter has been added to its .grad.
        """
        self.parameters[-1].register_post_accumulate_grad_hook(act)

    # gradients

    def sync_gradients(self, divisor: float | Tensor) -> bool | Deferred[bool] | None:
        """Sum .grad over ranks and divide it by a scalar: the gradient of the global batch's mean (a collective).

        Call it under `torch.no_grad()`.

        Args:
            divisor: a number, or a tensor () on the device, for example the number of samples in the global batch.

        Returns:
            Whether the gradients are finite, the same on all ranks. Deferred: not read from the device yet. None: not
            checked.

        Raises:
            UsageError: a parameter that was frozen when the strategy was applied requires a gradient now, or buffers
                cannot be merged over virtual ranks.
        """
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UsageError(code="unfrozen-later", name=name)
        is_finite = self._reduce(divisor)
        if not self.buffers.is_idle:
            self.buffers.check_mergeable()  # after the gradient collectives: else their order differs between ranks
        return is_finite if self.parts is None else self.parts.after_reduction(is_finite)

    def _reduce(self, divisor: float | Tensor) -> bool | Deferred[bool] | None:
        if self.reducer is not None:
            return self.reducer.finish(divisor) or None
        return scale_and_check_gradients(self.parameters, 1 / divisor, self.world.device)

    def reset(self) -> None:
        """Drop the step's gradients after an error in a forward or backward, so that the next step can begin.

        Every rank calls this or `sync_gradients`, whose result is then not valid (a collective). `ddp` and `fsdp`
        can continue only if all ranks have failed before their first backward.
        """
        if self.reducer is not None:
            self.reducer.reset()
        self.model.zero_grad(set_to_none=True)
        self.clear_pieces((), set_to_none=True)

    def clear_gradients(self, optimizer: Optimizer, *, set_to_none: bool) -> None:
        """Clear the gradients of the model, except of parameters that other optimizers train.

        Args:
            optimizer: one of `optimizers`, whose zero_grad was called.
            set_to_none: set .grad to None. Otherwise fill it with zeros, unless `hides_gradients`.
        """
        owners = zip(self.optimizers, self.trained, strict=True)
        others = {p for one, own in owners if one is not optimizer for p in own}
        for parameter in self.model.parameters():
            if parameter.grad is not None and not (others and parameter in others):
                if set_to_none or self.hides_gradients:
                    parameter.grad = None
                else:
                    parameter.grad.detach_().zero_()
        self.clear_pieces(others, set_to_none=set_to_none)

    def clear_pieces(self, kept: Collection[nn.Parameter], *, set_to_none: bool) -> None:
        """Clear the gradients of this rank's pieces of parameters. Without pieces it does nothing.

        Args:
            kept: parameters whose pieces keep their gradients.
            set_to_none: remove the gradients. Otherwise fill them with zeros.
        """

    def gradients(self) -> list[TensorShard]:
        """This rank's gradients of the global batch's mean, by parameter, without unused parameters."""
        gradients = self._gradients()
        return gradients if self.parts is None else self.parts.as_shards_of_whole(gradients)

    def _gradients(self) -> list[TensorShard]:
        return [TensorShard(name, p.grad) for name, p in self._named if p.grad is not None]

    def clip_grad_norm(self, max_norm: float) -> Deferred[float]:
        """The global norm of the gradients (a collective if they are sharded).

        When it is read, all gradients are scaled so that the norm is at most `max_norm`, unless it is not finite.

        Args:
            max_norm: the largest norm.

        Returns:
            The norm before. `result()` reads it from the device.
        """
        tensors = [shard.tensor for shard in self._gradients()]
        norm = self._gradient_norm(tensors) if self.parts is None else self.parts.gradient_norm(self.gradients())
        return norm.map(lambda total_norm: clip_to_norm(tensors, total_norm, max_norm))

    def _gradient_norm(self, tensors: list[Tensor]) -> Deferred[float]:
        return unsharded_grad_norm(tensors)

    def clip_grad_norm_on_device(self, max_norm: float) -> Tensor:
        """The same without a read, if this rank has whole float32 gradients: the norm, (1,) float64.

        If it is not finite, the gradients are not valid.

        Args:
            max_norm: the largest norm.
        """
        tensors = [shard.tensor for shard in self._gradients()]
        norm = self._norm_on_device(tensors)
        clip_to_norm_on_device(tensors, norm, max_norm)
        return norm

    def _norm_on_device(self, tensors: list[Tensor]) -> Tensor:
        return self._gradient_norm(tensors).numbers

    def can_skip_on_device(self) -> bool:
        """Whether the device can skip an update without the host: see `step_unless`. Hooks may differ between ranks."""
        can_defer = self.can_defer_read and self.parts is None
        return can_defer and all(map(optimizers.can_skip_step_on_device, self.optimizers))

    def step_unless(self, found_inf: Tensor) -> None:
        """Update, unless `found_inf` is 1. `undo_buffers` is for that case.

        Args:
            found_inf: () float32 on the device, 1 or 0.
        """
        for optimizer in self.optimizers:
            vars(optimizer)["found_inf"] = found_inf  # torch's fused kernels skip the step if it is exactly 1
        try:
            self.optimizer.step()
        finally:
            for optimizer in self.optimizers:
                del vars(optimizer)["found_inf"]
        self.buffers.swap_saved_copies()

    def undo_buffers(self) -> None:
        """Restore the buffers before the last `step_unless`, also if `save_buffers` was called since."""
        self.buffers.swap_saved_copies()
        self.buffers.restore_copies()

    def check_finite_on_all_ranks(self) -> bool:
        """Whether the gradients of all nodes are finite, with local steps (a collective).

        A gradient that is not finite on one node becomes NaN on all nodes.
        """
        raise NotImplementedError

    # buffers

    def use_merged_buffers(self) -> AbstractContextManager[None]:
        """Inside, the model's buffers are the same on all ranks (a collective)."""
        return self.buffers.merged()

    @contextmanager
    def evaluated(self) -> Generator[None]:
        """Inside, the model is ready for evaluation: merged buffers, the average as weights (a collective)."""
        with self.use_merged_buffers(), nullcontext() if self.average is None else self.average.use_as_weights():
            yield

    def save_buffers(self) -> None:
        """Save the buffers of this rank's virtual ranks, and everything else that a step changes before the update."""
        if not self.buffers.is_idle:
            self.buffers.save_copies()

    def restore_buffers(self) -> None:
        """Restore what `save_buffers` has saved."""
        self.buffers.restore_copies()

    # state

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, the plain model holds all parameters, so that a single rank can call it (a collective)."""
        return nullcontext()

    def weights(self, names: Collection[str] | None = None) -> Mapping[str, Tensor]:
        """Current whole parameters and persistent buffers, by the names of the model (a collective).

        Args:
            names: only these, without gathering others. None: all.

        Returns:
            The tensors by name. They may share memory with the model.
        """
        weights = self._weights(names) if self.parts is None else self.parts.weights(self._weights, self._state)
        return weights if names is None else {name: weights[name] for name in names}

    def _weights(self, names: Collection[str] | None = None) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def state(self) -> list[TensorShard]:
        """All tensors of the state on this rank, not copied. Names do not depend on the strategy."""
        shards = self._state() if self.parts is None else self.parts.as_shards_of_whole(self._state())
        return shards if self.average is None else [*shards, *self.average.state()]

    def _state(self) -> list[TensorShard]:
        return [*self._parameter_shards(), *self.buffers.buffer_shards(), *self._optimizer_shards()]

    def _parameter_shards(self) -> list[TensorShard]:
        return unsharded_parameter_shards(self.model.named_parameters())

    def _optimizer_shards(self) -> list[TensorShard]:
        return optimizers.full_optimizer_state(self.model, self.optimizer)

    def load(self, source: StateSource) -> None:
        """Restore a state, which may come from any strategy and any number of ranks.

        Args:
            source: the saved state, in memory or on disk.
        """
        self._load(source if self.parts is None else self.parts.local_shard_source(source))
        if self.average is not None:
            self.average.load(source)

    @torch.no_grad()
    def _load(self, source: StateSource) -> None:
        shards = self._parameter_shards()
        for shard in shards:
            load_shard(source, shard)
        if self.local_step_node is None and (nodes := optimizers.load_mean_parameters(source, shards)):
            now = "and this run synchronises all nodes in each step"
            print_on_rank_0(optimizers.describe_resume_from_mean(nodes, now))
        self.buffers.load(source)
        self._load_optimizer(source)

    def _load_optimizer(self, source: StateSource) -> None:
        optimizers.load_optimizer(self.model, self.optimizer, source)


class MakeStrategy(Protocol):
    """Creates a Strategy for a model. The entries of `STRATEGIES` have this type."""

    def __call__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> Strategy:
        """Prepare `model`, which is on the world's device, for training on the ranks of `world` (a collective)."""
        ...
