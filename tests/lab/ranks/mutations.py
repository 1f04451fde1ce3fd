"""Bugs that `paceline verify` must find and name, planted into the running process.

Written without knowledge of how verify finds causes: from PITFALLS.md and from what real trainers got wrong. Each bug
changes the result and nothing else: no rank leaves out a collective that another one makes. Every rank enters `plant()`
around making *and* using the strategy; the one-process reference shares none of the names that are replaced.

Some bugs show only where the set-up lets them: `policies` says under which batch norm, those of clipping need a
gradient norm above 1, `optimizer-state-lost` needs momentum or AdamW, those of stand-ins a last batch smaller than W.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.collectives import batchnorm, communicator
from paceline.collectives.batchnorm import Moments, SyncBatchNorm
from paceline.collectives.buckets import PackedBucket, trainable_parameters
from paceline.collectives.control import Deferred
from paceline.collectives.control import scale_gradients as scaled_on
from paceline.collectives.reducer import Reducer
from paceline.data import plan as shuffle_module
from paceline.data.loader import MicroBatch
from paceline.data.plan import BatchPlan, MicroBatchPlan
from paceline.seeding import SeededStream
from paceline.stepping.totals import StepTotals, Totals
from paceline.stepping.trained_model import ModelInTraining
from paceline.strategies import base
from paceline.strategies import bucketed as bucketed_module
from paceline.strategies import ddp as ddp_module
from paceline.strategies import manual as manual_module
from paceline.strategies.base import Strategy
from paceline.strategies.bucketed import Bucketed
from paceline.strategies.buffers import VirtualRankBuffers
from paceline.strategies.ddp import DDP
from paceline.strategies.manual import Manual, all_reduce_gradients
from paceline.train import step as step_module

EVERYWHERE = (Manual, Bucketed, DDP)
MODULES = (manual_module, bucketed_module, ddp_module)
ACCUMULATION = 2  # verify's

Patch = tuple[Any, str, Any]  # (owner, attribute, what it becomes)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    scaled_on(parameters, factor, torch.device("cpu"))


@dataclass(frozen=True)
class Mutation:
    """A bug, where it is known from, and what a knowledgeable person would call it."""

    name: str
    source: str
    plant: Callable[[], AbstractContextManager[None]]
    causes: frozenset[str]
    """keys of verify's CAUSES; each one is a right name"""
    task: str = "dropout"
    strategies: tuple[str, ...] = ("manual", "bucketed", "ddp")
    policies: tuple[str, ...] = ("none", "local", "sync")
    """the batch norm policies under which it changes anything"""


# ---- how to plant ------------------------------------------------------------------------------------------------


@contextmanager
def planted(*patches: Patch) -> Generator[None]:
    """Inside, the attributes are replaced; afterwards they are exactly what they were."""
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(patch.object(owner, name, value))
        yield


class Right:
    """A strategy with its methods as they were before `changed` replaced some of them."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        names = ("enter", "leave", "begin_backward", "sync_gradients", "clip_grad_norm")
        self.methods = {name: getattr(strategy, name) for name in names}

    def __getattr__(self, name: str) -> Any:
        return self.methods[name] if name in self.methods else getattr(self.strategy, name)


def changed(right: Right, **methods: Any) -> None:
    vars(right.strategy).update(methods)


def strategies(change: Callable[[Right], object], *classes: type[Strategy]) -> list[Patch]:
    """Patches that let `change` see what these strategies (by default: all of them) have made."""

    def patched(kind: type[Strategy]) -> Patch:
        original = kind.__init__

        def init(self: Strategy, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            change(Right(self))

        return kind, "__init__", init

    return [patched(kind) for kind in classes or EVERYWHERE]


def wrong_sync(sync: Callable[[Right, list[MicroBatchPlan], Tensor], None], *classes: type[Strategy]) -> list[Patch]:
    """Patches that call sync(the right strategy, its work of this step, total weight) instead of sync_gradients."""

    def change(right: Right) -> None:
        works: list[MicroBatchPlan] = []

        def enter(batch: MicroBatch, is_last: bool) -> None:
            works.append(batch.work)
            right.enter(batch, is_last)

        def sync_gradients(total_weight: float | Tensor) -> None:
            sync(right, works, torch.as_tensor(total_weight, dtype=torch.float64))
            works.clear()

        changed(right, enter=enter, sync_gradients=sync_gradients)

    return strategies(change, *classes)


def wrong_clip(clip: Callable[[Right, float], float]) -> list[Patch]:
    """Patches that call clip(the right strategy, largest norm) instead of clip_grad_norm."""
    return strategies(lambda right: changed(right, clip_grad_norm=lambda max_norm: known(clip(right, max_norm))))


def known(number: float) -> Deferred[float]:
    """One that need not be read."""
    return Deferred(torch.zeros(0), lambda _: number)


def wrong_sync_points(may_sync: Callable[[int, bool], bool], *classes: type[Strategy]) -> list[Patch]:
    """Patches that let gradients travel with a micro-batch if may_sync(number in the step, is it the last)."""

    def change(right: Right) -> None:
        entered: list[MicroBatchPlan] = []
        travels = [False]

        def enter(batch: MicroBatch, is_last: bool) -> None:
            travels[0] = may_sync(len(entered), is_last)
            entered.append(batch.work)
            if is_last:
                entered.clear()
            right.enter(batch, travels[0])

        changed(right, enter=enter, begin_backward=lambda work, is_last: right.begin_backward(work, travels[0]))

    return strategies(change, *classes)


def samples_of(works: Iterable[MicroBatchPlan]) -> int:
    return sum(len(work.indices) for work in works if work.is_counted)


def gradients_of(right: Right) -> list[Tensor]:
    return [p.grad for p in trainable_parameters(right.model) if p.grad is not None]


def sum_over_ranks(number: float, like: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    value = like.new_tensor(float(number))
    dist.all_reduce(value, op=op)
    return value


# ---- samples -----------------------------------------------------------------------------------------------------


def contiguous_chunks() -> AbstractContextManager[None]:
    def indices(self: BatchPlan, epoch: int, step: int, virtual_rank: int) -> Tensor:
        order = torch.cat([self.global_indices(epoch, k) for k in range(self.steps_per_epoch)])
        # Cut once more into equal parts, not into batches: no step may be empty on all ranks, that would be an error.
        return order.tensor_split(self.virtual_ranks)[virtual_rank].tensor_split(self.steps_per_epoch)[step]

    return planted((BatchPlan, "indices", indices))


def padding() -> AbstractContextManager[None]:
    def indices(self: BatchPlan, epoch: int, step: int, virtual_rank: int) -> Tensor:
        batch = self.global_indices(epoch, step)
        missing = -len(batch) % self.virtual_ranks
        padded = torch.cat([batch, batch.repeat(self.virtual_ranks)[:missing]])
        return padded[virtual_rank :: self.virtual_ranks]

    return planted((BatchPlan, "indices", indices))


def no_reshuffle() -> AbstractContextManager[None]:
    original = shuffle_module._shuffled_order
    return planted((shuffle_module, "_shuffled_order", lambda n, seed, epoch: original(n, seed, 0)))


def seed_plus_epoch() -> AbstractContextManager[None]:
    def order(num_samples: int, seed: int, epoch: int) -> Tensor:
        return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))

    return planted((shuffle_module, "_shuffled_order", order))


def order_of_each_rank() -> AbstractContextManager[None]:
    original = shuffle_module._shuffled_order

    def order(num_samples: int, seed: int, epoch: int) -> Tensor:
        return original(num_samples, seed + dist.get_rank(), epoch)

    return planted((shuffle_module, "_shuffled_order", order))


def tail_dropped() -> AbstractContextManager[None]:
    return planted((BatchPlan, "steps_per_epoch", property(lambda self: self.num_samples // self.global_batch)))


# ---- start -------------------------------------------------------------------------------------------------------


def broadcast_forgotten() -> AbstractContextManager[None]:
    return planted(*((module, "broadcast_module", lambda model, **_: None) for module in MODULES))


def head_made_after_broadcast() -> AbstractContextManager[None]:
    original = manual_module.broadcast_module

    def broadcast(model: nn.Module, **group: Any) -> None:
        original(model, **group)
        with torch.no_grad():
            head = [p for p in trainable_parameters(model) if p.dim() > 1][-1]
            head.mul_(1 + 0.01 * dist.get_rank())  # rank 0 starts right, the others nearby

    return planted(*((module, "broadcast_module", broadcast) for module in MODULES))


# ---- sync --------------------------------------------------------------------------------------------------------


def never_reduced() -> AbstractContextManager[None]:
    def local(parameters: Iterable[nn.Parameter], divisor: Tensor) -> None:
        scale_gradients(parameters, dist.get_world_size() / divisor)

    def finish(self: Reducer, divisor: Tensor) -> None:
        local(self._parameters, divisor)

    return planted(
        (manual_module, "all_reduce_gradients", local),
        (Reducer, "_on_gradient", lambda self, parameter: None),
        (Reducer, "finish", finish),
        *wrong_sync_points(lambda number, is_last: False, DDP),  # no_sync around every micro-batch, the last one too
    )


def no_sync_on_the_wrong_microbatch() -> AbstractContextManager[None]:
    return planted(*wrong_sync_points(lambda number, is_last: number == 0, DDP))


def one_gradient_forgotten() -> AbstractContextManager[None]:
    right_reduce, right_buckets, right_ddp = (
        all_reduce_gradients,
        communicator.buckets_of,
        ddp_module.DistributedDataParallel,
    )

    def all_but_last(parameters: Sequence[nn.Parameter], divisor: Tensor) -> None:
        right_reduce(parameters[:-1], divisor)
        scale_gradients(parameters[-1:], dist.get_world_size() / divisor)

    def finish_last(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        scale_gradients(trainable_parameters(right.model)[-1:], dist.get_world_size() / total_weight)
        right.sync_gradients(total_weight)

    @wraps(right_ddp)  # its signature is looked at
    def ignoring_last(module: nn.Module, **options: Any) -> nn.Module:
        right_ddp._set_params_and_buffers_to_ignore_for_model(module, [[n for n, _ in module.named_parameters()][-1]])
        return right_ddp(module, **options)

    return planted(
        (manual_module, "all_reduce_gradients", all_but_last),
        (communicator, "buckets_of", lambda parameters, size: right_buckets(parameters[:-1], size)),
        *wrong_sync(finish_last, Bucketed),
        (ddp_module, "DistributedDataParallel", ignoring_last),
    )


def parameter_reduced_instead() -> AbstractContextManager[None]:
    @torch.no_grad()
    def all_reduce(parameters: Iterable[nn.Parameter], divisor: Tensor) -> None:
        for parameter in parameters:
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
            scale_gradients([parameter], dist.get_world_size() / divisor)

    return planted((manual_module, "all_reduce_gradients", all_reduce))


# ---- mean --------------------------------------------------------------------------------------------------------


def divided_by_world_size_too() -> AbstractContextManager[None]:
    return planted(*wrong_sync(lambda right, works, total: right.sync_gradients(total * right.world.size)))


def not_divided_by_world_size() -> AbstractContextManager[None]:
    return planted(*wrong_sync(lambda right, works, total: right.sync_gradients(total / right.world.size)))


def divided_by_microbatches_too() -> AbstractContextManager[None]:
    return planted(*wrong_sync(lambda right, works, total: right.sync_gradients(total * ACCUMULATION)))


def tail_divided_by_full_batch() -> AbstractContextManager[None]:
    largest = [0.0]

    def sync(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        samples = float(sum_over_ranks(samples_of(works), total_weight))
        largest[0] = max(largest[0], samples)
        right.sync_gradients(total_weight * (largest[0] / samples))

    return planted(*wrong_sync(sync))


def incomplete_window_divided_by_full_count() -> AbstractContextManager[None]:
    def sync(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        count = sum_over_ranks(len(works), total_weight, dist.ReduceOp.MAX)
        right.sync_gradients(total_weight * ACCUMULATION / count)

    return planted(*wrong_sync(sync))


def divided_by_samples_not_weights() -> AbstractContextManager[None]:
    def sync(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        right.sync_gradients(sum_over_ranks(samples_of(works), total_weight))

    return planted(*wrong_sync(sync))


# ---- shares ------------------------------------------------------------------------------------------------------


def mean_of_rank_means() -> AbstractContextManager[None]:
    right_pack = PackedBucket.pack
    seen: list[MicroBatchPlan] = []  # of this rank in this step: buckets leave before the step synchronises

    def count() -> int:
        return max(1, samples_of(seen))

    def pack(bucket: PackedBucket, grads: Sequence[Tensor | None] | None) -> Tensor:
        flat = right_pack(bucket, grads)
        flat[: bucket.size - len(bucket._parameters)] /= count()  # after the gradients come the flags
        return flat

    def hook(_, bucket):  # unannotated: DDP takes annotations that are strings for wrong ones
        bucket.buffer().div_(count())
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    def change(right: Right, *, before_sync: Callable[[], None]) -> None:
        def enter(batch: MicroBatch, is_last: bool) -> None:
            seen.append(batch.work)
            right.enter(batch, is_last)

        def sync_gradients(total_weight: Tensor) -> None:
            before_sync()
            right.sync_gradients(float(right.world.size))
            seen.clear()

        changed(right, enter=enter, sync_gradients=sync_gradients)

    def manual(right: Right) -> None:
        def divide() -> None:
            scale_gradients(trainable_parameters(right.model), torch.tensor(1 / count(), dtype=torch.float64))

        change(right, before_sync=divide)

    def ddp(right: Right) -> None:
        right.module.register_comm_hook(None, hook)
        change(right, before_sync=lambda: None)

    return planted(
        *strategies(manual, Manual),
        *strategies(lambda right: change(right, before_sync=lambda: None), Bucketed),
        (PackedBucket, "pack", pack),
        *strategies(ddp, DDP),
    )


def mean_of_microbatch_means() -> AbstractContextManager[None]:
    original = step_module.weighted_losses

    def weighted_losses(loss: Any, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        losses, weights = original(loss, outputs, targets)
        weights = torch.ones_like(losses) if weights is None else weights
        return losses, weights / weights.sum()

    return planted((step_module, "weighted_losses", weighted_losses))


# ---- accumulation ------------------------------------------------------------------------------------------------


def only_last_microbatch() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        def enter(batch: MicroBatch, is_last: bool) -> None:
            right.model.zero_grad(set_to_none=True)
            right.enter(batch, is_last)

        changed(right, enter=enter)

    return planted(*strategies(change))


def buckets_leave_with_first_microbatch() -> AbstractContextManager[None]:
    return planted(*wrong_sync_points(lambda number, is_last: number == 0, Bucketed))


def reduced_after_each_microbatch() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        def leave(error: BaseException | None = None) -> None:
            right.leave(error)
            if not last[0]:
                all_reduce_gradients(trainable_parameters(right.model), 1.0)

        def enter(batch: MicroBatch, is_last: bool) -> None:
            last[0] = is_last
            right.enter(batch, is_last)

        last = [False]
        changed(right, enter=enter, leave=leave)

    return planted(*strategies(change, Manual))


def stale_gradients() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        left: list[tuple[nn.Parameter, Tensor]] = []

        def keep(*_: Any) -> None:
            left[:] = [(p, p.grad.clone()) for p in trainable_parameters(right.model) if p.grad is not None]

        def enter(batch: MicroBatch, is_last: bool) -> None:
            for parameter, grad in left:
                parameter.grad = grad  # as if the step had not cleared it
            left.clear()
            right.enter(batch, is_last)

        right.optimizer.register_step_post_hook(keep)
        changed(right, enter=enter)

    return planted(*strategies(change))


def stand_in_counted() -> AbstractContextManager[None]:
    return planted((base, "ignore_batch", lambda model, parameters: nullcontext()))


# ---- none --------------------------------------------------------------------------------------------------------


def none_becomes_zero() -> AbstractContextManager[None]:
    def sync(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        right.sync_gradients(total_weight)
        for parameter in trainable_parameters(right.model):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    return planted(*wrong_sync(sync))


def no_gradient_without_samples() -> AbstractContextManager[None]:
    def sync(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        right.sync_gradients(total_weight)
        if samples_of(works) == 0:
            right.model.zero_grad(set_to_none=True)

    return planted(*wrong_sync(sync))


# ---- gradient ----------------------------------------------------------------------------------------------------


def unpacked_in_another_order() -> AbstractContextManager[None]:
    def unpack(bucket: PackedBucket, flat: Tensor, used_here: Sequence[bool]) -> None:
        original(PackedBucket(bucket._parameters[::-1]), flat, used_here[::-1])

    original = PackedBucket.unpack
    return planted((PackedBucket, "unpack", unpack))


def order_differs_on_one_rank() -> AbstractContextManager[None]:
    @torch.no_grad()
    def all_reduce(parameters: Sequence[nn.Parameter], divisor: Tensor) -> None:
        in_order = parameters[::-1] if dist.get_rank() == 1 else parameters
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in in_order])
        dist.all_reduce(flat)
        flat /= divisor
        for parameter, piece in zip(in_order, flat.split([p.numel() for p in in_order]), strict=True):
            parameter.grad = piece.view_as(parameter)

    return planted((manual_module, "all_reduce_gradients", all_reduce))


def reduced_in_half_precision() -> AbstractContextManager[None]:
    right_pack = PackedBucket.pack

    def sync(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        for grad in gradients_of(right):
            grad.copy_(grad.half())
        right.sync_gradients(total_weight)

    def ddp(right: Right) -> None:
        right.module.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)

    return planted(
        *wrong_sync(sync, Manual),
        (PackedBucket, "pack", lambda *arguments: (flat := right_pack(*arguments)).half().to(flat.dtype)),
        *strategies(ddp, DDP),
    )


def gradient_through_statistics_not_summed() -> AbstractContextManager[None]:
    class Normalise(batchnorm._Normalize):
        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
            with patch.object(batchnorm, "dist", SimpleNamespace(is_initialized=lambda: False)):
                return batchnorm_backward(ctx, grad_output)

    batchnorm_backward = batchnorm._Normalize.backward
    return planted((batchnorm, "_Normalize", Normalise))


# ---- scale -------------------------------------------------------------------------------------------------------


def sum_back_propagated() -> AbstractContextManager[None]:
    """As every step was until hooks and autograd functions were thought of: sums, divided after they were added up."""
    return in_backward(lambda work: float(work.global_samples))


def scaled_for_half_precision() -> AbstractContextManager[None]:
    return in_backward(lambda work: 2.0**10)


def mean_of_each_microbatch_back_propagated() -> AbstractContextManager[None]:
    return in_backward(lambda work: work.global_samples / max(1, len(work.indices)))


def hooks_before_the_sum() -> AbstractContextManager[None]:
    return planted((ModelInTraining, "hide_hooks", lambda self, alone, counted=True: []))


def in_backward(factor: Callable[[MicroBatchPlan], float]) -> AbstractContextManager[None]:
    """Each loss is multiplied by a factor before backward, and what it has added to the gradients is divided by it."""
    entered: list[MicroBatchPlan] = []

    def change(right: Right) -> None:
        def enter(batch: MicroBatch, is_last: bool) -> None:
            entered[:] = [batch.work]
            right.enter(batch, is_last)

        changed(right, enter=enter)

    original = ModelInTraining.backward

    def backward(self: ModelInTraining, loss: Tensor, **options: Any) -> None:
        by = factor(entered[0])
        parameters = trainable_parameters(self.replica.model)
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        original(self, loss * by, **options)
        for parameter, old in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                parameter.grad /= by
                parameter.grad = parameter.grad if old is None else parameter.grad.add_(old)
            else:
                parameter.grad = old

    return planted(*strategies(change, Manual), (ModelInTraining, "backward", backward))


# ---- clipping ----------------------------------------------------------------------------------------------------


def clipped_before_sync() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        def sync_gradients(total_weight: Tensor) -> None:
            scale_gradients(trainable_parameters(right.model), right.world.size / total_weight)
            right.clip_grad_norm(1.0).result()
            right.sync_gradients(float(right.world.size))

        changed(
            right,
            sync_gradients=sync_gradients,
            clip_grad_norm=lambda _: known(float(nn.utils.get_total_norm(gradients_of(right)))),
        )

    return planted(*strategies(change, Manual))


def clipped_by_own_norm() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        own = [torch.zeros(())]

        def sync_gradients(total_weight: Tensor) -> None:
            own[0] = nn.utils.get_total_norm(gradients_of(right)) * right.world.size / total_weight
            right.sync_gradients(total_weight)

        def clip_grad_norm(max_norm: float) -> Deferred[float]:
            nn.utils.clip_grads_with_norm_(trainable_parameters(right.model), max_norm, own[0])
            return known(float(own[0]))

        changed(right, sync_gradients=sync_gradients, clip_grad_norm=clip_grad_norm)

    return planted(*strategies(change, Manual, Bucketed))  # under DDP .grad is the mean already


def clipped_to_twice_the_norm() -> AbstractContextManager[None]:
    return planted(*wrong_clip(lambda right, max_norm: right.clip_grad_norm(2 * max_norm).result()))


def clipped_by_value() -> AbstractContextManager[None]:
    def clip(right: Right, max_norm: float) -> float:
        norm = nn.utils.get_total_norm(gradients_of(right))
        nn.utils.clip_grad_value_(trainable_parameters(right.model), max_norm)
        return float(norm)

    return planted(*wrong_clip(clip))


def clipped_each_tensor_alone() -> AbstractContextManager[None]:
    def clip(right: Right, max_norm: float) -> float:
        norm = nn.utils.get_total_norm(gradients_of(right))
        for parameter in trainable_parameters(right.model):
            nn.utils.clip_grad_norm_([parameter], max_norm)
        return float(norm)

    return planted(*wrong_clip(clip))


def norm_summed_over_copies() -> AbstractContextManager[None]:
    def clip(right: Right, max_norm: float) -> float:
        squared = nn.utils.get_total_norm(gradients_of(right)).square()
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(trainable_parameters(right.model), max_norm, squared.sqrt())
        return float(squared.sqrt())

    return planted(*wrong_clip(clip))


# ---- optimizer ---------------------------------------------------------------------------------------------------


def decayed_twice() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        @torch.no_grad()
        def decay(*_: Any) -> None:
            for group in right.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - group["lr"] * (group["weight_decay"] or 0.01))

        right.optimizer.register_step_pre_hook(decay)

    return planted(*strategies(change))


def lr_scaled_by_world_size() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        before: list[float] = []

        def scale(*_: Any) -> None:
            before[:] = [group["lr"] for group in right.optimizer.param_groups]
            for group in right.optimizer.param_groups:
                group["lr"] *= right.world.size

        def restore(*_: Any) -> None:  # so that a schedule sees nothing
            for group, lr in zip(right.optimizer.param_groups, before, strict=True):
                group["lr"] = lr

        right.optimizer.register_step_pre_hook(scale)
        right.optimizer.register_step_post_hook(restore)

    return planted(*strategies(change))


def state_lost_off_rank_0() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        if right.world.rank != 0:
            right.optimizer.register_step_pre_hook(lambda *_: right.optimizer.state.clear())

    return planted(*strategies(change))


def stepped_on_rank_0_only() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        original = right.optimizer.step

        @torch.no_grad()
        def step(*arguments: Any) -> None:
            before = [p.clone() for p in trainable_parameters(right.model)]
            original(*arguments)  # with its hooks, by which verify looks at gradients: a collective
            for parameter, old in zip(trainable_parameters(right.model), before, strict=True):
                parameter.copy_(old)

        if right.world.rank != 0:
            right.optimizer.step = step

    return planted(*strategies(change))


# ---- random ------------------------------------------------------------------------------------------------------


def seeded_by_rank() -> AbstractContextManager[None]:
    return planted((MicroBatchPlan, "random_seed", lambda self, seed: seed + dist.get_rank()))


def same_stream_for_all() -> AbstractContextManager[None]:
    original = MicroBatchPlan.random_seed
    return planted((MicroBatchPlan, "random_seed", lambda w, seed: original(structs.replace(w, virtual_rank=0), seed)))


def same_stream_for_all_microbatches() -> AbstractContextManager[None]:
    original = MicroBatchPlan.random_seed
    return planted((MicroBatchPlan, "random_seed", lambda w, seed: original(structs.replace(w, micro_batch=0), seed)))


def not_seeded() -> AbstractContextManager[None]:
    return planted((SeededStream, "enter", lambda self, seed: None))


# ---- buffers -----------------------------------------------------------------------------------------------------


def buffers_of_rank_0() -> AbstractContextManager[None]:
    def merge(self: VirtualRankBuffers) -> dict[str, Tensor]:
        own = self._of[min(self._of)] if self._of else self._initial
        taken = {name: own[name].clone() for name in self._initial}
        for buffer in taken.values():
            dist.broadcast(buffer, src=0)
        return taken

    return planted((VirtualRankBuffers, "_merge", merge))


def buffers_of_each_rank() -> AbstractContextManager[None]:
    return planted((VirtualRankBuffers, "merged", lambda self: nullcontext()))


def stand_in_moves_buffers() -> AbstractContextManager[None]:
    original = VirtualRankBuffers.enter
    return planted((VirtualRankBuffers, "enter", lambda self, w: original(self, structs.replace(w, is_counted=True))))


def statistics_not_synchronised() -> AbstractContextManager[None]:
    return planted((SyncBatchNorm, "forward", _BatchNorm.forward))


def statistics_unweighted() -> AbstractContextManager[None]:
    def union(self: SyncBatchNorm, own: Moments) -> Moments:
        packed = torch.cat([own.count.reshape(1), own.mean, own.m2])
        gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, packed, group=self.group)
        filled = torch.stack([each for each in gathered if each[0] > 0])  # (ranks with samples, 1 + 2C)
        sizes, (means, m2s) = filled[:, :1], filled[:, 1:].split(self.num_features, 1)
        mean = means.mean(0)
        variance = (m2s / sizes + means.square()).mean(0) - mean.square()  # E[x^2] - E[x]^2, each a mean of means
        return Moments(sizes.sum(), mean, variance * sizes.sum())

    return planted((SyncBatchNorm, "_union", union))


def spread_of_means_ignored() -> AbstractContextManager[None]:
    original = batchnorm.merge_moments
    return planted((batchnorm, "merge_moments", lambda a, b: original(a, b)._replace(m2=a.m2 + b.m2)))


def biased_running_variance() -> AbstractContextManager[None]:
    original = SyncBatchNorm._statistics

    def statistics(self: SyncBatchNorm, union: Moments, own_count: int) -> tuple[Tensor, Tensor]:
        result = original(self, union, own_count)
        if self.running_var is not None and self.momentum is not None and union.count > 1:
            too_much = union.m2 / (union.count - 1) - union.m2 / union.count
            self.running_var.sub_((self.momentum * too_much).to(self.running_var.dtype))
        return result

    return planted((SyncBatchNorm, "_statistics", statistics))


# ---- loss --------------------------------------------------------------------------------------------------------


def weights_ignored() -> AbstractContextManager[None]:
    original = step_module.weighted_losses
    return planted((step_module, "weighted_losses", lambda *arguments: (original(*arguments)[0], None)))


def own_loss_reported() -> AbstractContextManager[None]:
    original = StepTotals.start

    def start(self: StepTotals) -> Callable[[], Totals]:
        own: list[Any] = [sum(self._losses), sum(self._weights)]
        wait = original(self)

        def mine() -> Totals:
            right = wait()
            assert isinstance(right, Totals)
            return Totals(*own, right.votes) if own[1] > 0 else right  # a rank without samples has no loss of its own

        return mine

    return planted((StepTotals, "start", start))


# ---- error -------------------------------------------------------------------------------------------------------


def loss_averages() -> AbstractContextManager[None]:
    original = step_module.weighted_losses

    def weighted_losses(loss: Any, outputs: Any, targets: Any) -> Any:
        return original(lambda *arguments: loss(*arguments).mean(), outputs, targets)

    return planted((step_module, "weighted_losses", weighted_losses))


def pause_forgotten() -> AbstractContextManager[None]:
    original = Reducer.begin_backward
    return planted(
        (Reducer, "begin_backward", lambda self, virtual_rank, **_: original(self, virtual_rank, is_last=True))
    )


# ---- the list ----------------------------------------------------------------------------------------------------


def bug(
    name: str,
    source: str,
    plant: Callable[[], AbstractContextManager[None]],
    causes: str,
    task: str = "dropout",
    strategies: str = "manual bucketed ddp",
    policies: str = "none local sync",
) -> Mutation:
    return Mutation(
        name, source, plant, frozenset(causes.split()), task, tuple(strategies.split()), tuple(policies.split())
    )


CONTROL = Mutation("control", "no bug: no finding", nullcontext, frozenset())

CONTROLS_OF_SCALE = [
    replace(CONTROL, name=f"{task}-control", task=task)
    for task in ("clamped", "clamped_batchnorm", "module_hook", "parameter_hooks")
]
"""no bug, in models whose gradient path is not linear"""

# fmt: off
MUTATIONS = [
    bug("contiguous-chunks", "002: a contiguous chunk per rank", contiguous_chunks, "samples"),
    bug("padding", "002 'must pad'; torch's DistributedSampler", padding, "samples"),
    bug("no-reshuffle", "003: no set_epoch", no_reshuffle, "samples"),
    bug("seed-plus-epoch", "trap 5: torch's DistributedSampler", seed_plus_epoch, "samples"),
    bug("order-of-each-rank", "DataLoader(shuffle=True) without a sampler", order_of_each_rank, "samples"),
    bug("tail-dropped", "DataLoader(drop_last=True)", tail_dropped, "samples"),
    bug("broadcast-forgotten", "002: hand-written data parallelism", broadcast_forgotten, "start"),
    bug("head-made-after-broadcast", "fine-tuning: a layer replaced too late", head_made_after_broadcast, "start"),
    bug("never-reduced", "a bare training loop under torchrun; no_sync around all", never_reduced, "sync"),
    bug(
        "no-sync-wrong-microbatch", "DDP: no_sync the wrong way round", no_sync_on_the_wrong_microbatch, "sync",
        strategies="ddp"
    ),
    bug(
        "one-gradient-forgotten", "DDP: a parameter it was told to ignore, or never saw", one_gradient_forgotten,
        "sync"
    ),
    bug(
        "parameter-reduced-instead", "a well-known teaching DP (famous tools)", parameter_reduced_instead, "sync",
        strategies="manual"
    ),
    bug("divided-by-world-size-too", "DDP: averaged by it and by oneself", divided_by_world_size_too, "mean"),
    bug("not-divided-by-world-size", "all_reduce sums: means added up", not_divided_by_world_size, "mean"),
    bug(
        "divided-by-microbatches-too", "loss / accumulation_steps of a mean over the whole",
        divided_by_microbatches_too, "mean"
    ),
    bug("tail-divided-by-full-batch", "loss.sum() / batch_size, a constant", tail_divided_by_full_batch, "mean"),
    bug(
        "incomplete-window", "accelerate 1.15 (famous tools)", incomplete_window_divided_by_full_count,
        "mean accumulation"
    ),
    bug(
        "samples-not-weights", "padding tokens: divided by sequences", divided_by_samples_not_weights, "mean loss",
        "tokens"
    ),
    bug("mean-of-rank-means", "002: mean of means 3-17 %", mean_of_rank_means, "shares"),
    bug(
        "mean-of-token-means", "transformers before 4.46: mean per micro-batch", mean_of_microbatch_means,
        "shares loss", "tokens"
    ),
    bug("only-last-microbatch", "zero_grad inside the accumulation loop", only_last_microbatch, "accumulation"),
    bug(
        "first-microbatch-leaves",
        "own buckets: hooks armed on the wrong backward",
        buckets_leave_with_first_microbatch,
        "accumulation error",  # since this list was written the reducer itself refuses it
        strategies="bucketed",
    ),
    bug(
        "reduced-each-microbatch", "sums communicated in every backward", reduced_after_each_microbatch,
        "accumulation", strategies="manual"
    ),
    bug("stale-gradients", "trap 1: zero_grad that does not reach them", stale_gradients, "accumulation gradient"),
    bug(
        "stand-in-counted", "trap 15's cure gone wrong: an idle rank's dummy batch", stand_in_counted,
        "accumulation gradient"
    ),
    bug(
        "none-becomes-zero", "002; zero_grad(set_to_none=False)", none_becomes_zero, "none", "unused",
        "manual bucketed"
    ),
    bug(
        "no-gradient-without-samples", "002: only ranks that have a gradient take the sum",
        no_gradient_without_samples, "none sync"
    ),
    bug(
        "unpacked-in-another-order", "own buckets: packed last first, unpacked first first",
        unpacked_in_another_order, "gradient", strategies="bucketed"
    ),
    bug(
        "order-differs-on-one-rank", "famous tools: all-reduces swapped on one rank", order_differs_on_one_rank,
        "gradient sync", strategies="manual"
    ),
    bug("reduced-in-half-precision", "DDP's fp16_compress_hook", reduced_in_half_precision, "gradient"),
    bug(
        "statistics-gradient-local", "own SyncBatchNorm: forward synchronised, backward not",
        gradient_through_statistics_not_summed, "gradient sync", "batchnorm", policies="sync"
    ),
    bug(
        "sum-back-propagated", "any trainer that divides after the sum", sum_back_propagated, "scale", "clamped",
        strategies="manual"
    ),
    bug(
        "sum-back-propagated-module-hook", "the same, with a full backward hook", sum_back_propagated, "scale",
        "module_hook", strategies="manual"
    ),
    bug(
        "hooks-before-the-sum", "hand-written data parallelism: a hook sees the gradient of a rank's micro-batch",
        hooks_before_the_sum, "scale", "parameter_hooks"
    ),
    bug(
        "weight-known-too-late", "a clamp, and several micro-batches with a weight each: an error", nullcontext,
        "error", "clamped_tokens"
    ),
    bug(
        "scaled-for-half-precision", "GradScaler: hooks see gradients before unscale_", scaled_for_half_precision,
        "scale", "clamped", strategies="manual"
    ),
    bug(
        "mean-of-each-microbatch", "DDP and accelerate: backward of each micro-batch's own mean",
        mean_of_each_microbatch_back_propagated, "scale", "clamped_batchnorm", strategies="manual", policies="local"
    ),
    bug(
        "clipped-before-sync", "clip_grad_norm_ before the all-reduce", clipped_before_sync, "clipping",
        strategies="manual"
    ),
    bug(
        "clipped-by-own-norm", "the norm measured before the all-reduce", clipped_by_own_norm, "clipping",
        strategies="manual bucketed"
    ),
    bug("clipped-to-twice-the-norm", "a norm scaled along with something else", clipped_to_twice_the_norm, "clipping"),
    bug("clipped-by-value", "clip_grad_value_ for clip_grad_norm_", clipped_by_value, "clipping"),
    bug("clipped-each-tensor", "clip_grad_norm_ in a loop over parameters", clipped_each_tensor_alone, "clipping"),
    bug(
        "norm-summed-over-copies", "a sharded trainer's norm on replicated gradients", norm_summed_over_copies,
        "clipping"
    ),
    bug("decayed-twice", "weight decay in the loop and in the optimizer", decayed_twice, "optimizer"),
    bug(
        "lr-scaled-by-world-size", "linear scaling with an unchanged global batch", lr_scaled_by_world_size,
        "optimizer"
    ),
    bug(
        "optimizer-state-lost", "002: optimizer state of a resumed run on rank 0 only", state_lost_off_rank_0,
        "optimizer"
    ),
    bug("stepped-on-rank-0-only", "`if rank == 0` around too much", stepped_on_rank_0_only, "optimizer sync"),
    bug("seeded-by-rank", "torch.manual_seed(seed + rank)", seeded_by_rank, "random"),
    bug("same-stream-for-all", "torch.manual_seed(seed) on every rank", same_stream_for_all, "random"),
    bug("same-stream-each-microbatch", "a seed made of step and rank", same_stream_for_all_microbatches, "random"),
    bug("not-seeded", "002: RNG differs", not_seeded, "random"),
    bug(
        "buffers-of-rank-0", "000, 004; DDP's broadcast_buffers", buffers_of_rank_0, "buffers", "batchnorm",
        policies="local"
    ),
    bug(
        "buffers-of-each-rank", "000, 004: buffers differ by 0.097", buffers_of_each_rank, "buffers", "batchnorm",
        policies="local"
    ),
    bug(
        "stand-in-moves-buffers", "trap 15's cure gone wrong", stand_in_moves_buffers, "buffers", "batchnorm",
        policies="local"
    ),
    bug(
        "statistics-not-synchronised", "SyncBatchNorm never converted", statistics_not_synchronised, "buffers sync",
        "batchnorm", policies="sync"
    ),
    bug(
        "statistics-unweighted", "SyncBatchNorm on uneven shares: mean of means", statistics_unweighted, "buffers",
        "batchnorm", policies="sync"
    ),
    bug(
        "spread-of-means-ignored", "SyncBatchNorm by hand: mean of variances", spread_of_means_ignored, "buffers",
        "batchnorm", policies="sync"
    ),
    bug(
        "biased-running-variance", "BatchNorm by hand: no n / (n - 1)", biased_running_variance, "buffers",
        "batchnorm", policies="sync"
    ),
    bug("weights-ignored", "padding tokens count like others", weights_ignored, "loss", "tokens"),
    bug("own-loss-reported", "003: loss of rank 0", own_loss_reported, "loss"),
    bug("loss-averages", "002: reduction='mean'", loss_averages, "error"),
    bug("pause-forgotten", "own buckets without no_sync", pause_forgotten, "error", strategies="bucketed"),
]
# fmt: on
