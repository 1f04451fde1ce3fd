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

from paceline.collectives import batchnorm, torch_communicator
from paceline.collectives.batchnorm import Moments, SyncBatchNorm
from paceline.collectives.buckets import PackedBucket, trainable_parameters
from paceline.collectives.control import Deferred
from paceline.collectives.control import scale_and_check_gradients as scaled_on
from paceline.collectives.reducer import Reducer
from paceline.data import loader as loader_module
from paceline.data import plan as shuffle_module
from paceline.data.loader import MicroBatch
from paceline.data.plan import BatchPlan, MicroBatchPlan
from paceline.seeding import SeededRngScope
from paceline.stepping.totals import Totals, TotalsReducer
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
Plant = Callable[[], AbstractContextManager[None]]


def scale_and_check_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    scaled_on(parameters, factor, torch.device("cpu"))


@dataclass(frozen=True)
class Mutation:
    """A bug, where it is known from, and what a knowledgeable person would call it."""

    name: str
    source: str
    plant: Plant
    causes: frozenset[str]
    """keys of verify's CAUSES; each one is a right name"""
    task: str = "dropout"
    strategies: tuple[str, ...] = ("manual", "bucketed", "ddp")
    policies: tuple[str, ...] = ("none", "local", "sync")
    """the batch norm policies under which it changes anything"""


MUTATIONS: list[Mutation] = []


def bug(
    source: str, causes: str, *, task: str = "dropout", strategies: str = "manual bucketed ddp",
    policies: str = "none local sync", name: str = "", to: list[Mutation] = MUTATIONS,
) -> Callable[[Plant], Plant]:  # fmt: skip
    """Add a mutation that the decorated function plants."""

    def add(plant: Plant) -> Plant:
        where = task, tuple(strategies.split()), tuple(policies.split())
        name_of_bug = name or plant.__name__.replace("_", "-")
        to.append(Mutation(name_of_bug, source, plant, frozenset(causes.split()), *where))
        return plant

    return add


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


@bug("002: a contiguous chunk per rank", "samples error")  # the step refuses another number of samples
def contiguous_chunks() -> AbstractContextManager[None]:
    original = loader_module.plan_rank_micro_batches

    def plan_work(plan: BatchPlan, epoch: int, step: int, share: range, **options: bool) -> list[MicroBatchPlan]:
        order = torch.cat([plan.global_indices(epoch, k) for k in range(plan.steps_per_epoch)])
        # Cut once more into equal parts, not into batches: no step may be empty on all ranks, that would be an error.
        chunks = [chunk.tensor_split(plan.steps_per_epoch)[step] for chunk in order.tensor_split(plan.virtual_ranks)]
        with planted((BatchPlan, "microbatches", lambda self, _, v: chunks[v].tensor_split(self.accumulation))):
            return original(plan, epoch, step, share, **options)

    return planted((loader_module, "plan_rank_micro_batches", plan_work))


@bug("002 'must pad'; torch's DistributedSampler", "samples error")
def padding() -> AbstractContextManager[None]:
    original = BatchPlan.microbatches

    def microbatches(self: BatchPlan, whole: Tensor, virtual_rank: int) -> Sequence[Tensor]:
        missing = -len(whole) % self.virtual_ranks
        return original(self, torch.cat([whole, whole.repeat(self.virtual_ranks)[:missing]]), virtual_rank)

    return planted((BatchPlan, "microbatches", microbatches))


@bug("003: no set_epoch", "samples")
def no_reshuffle() -> AbstractContextManager[None]:
    original = shuffle_module._shuffled_order
    return planted((shuffle_module, "_shuffled_order", lambda n, seed, epoch: original(n, seed, 0)))


@bug("trap 5: torch's DistributedSampler", "samples")
def seed_plus_epoch() -> AbstractContextManager[None]:
    def order(num_samples: int, seed: int, epoch: int) -> Tensor:
        return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))

    return planted((shuffle_module, "_shuffled_order", order))


@bug("DataLoader(shuffle=True) without a sampler", "samples")
def order_of_each_rank() -> AbstractContextManager[None]:
    original = shuffle_module._shuffled_order

    def order(num_samples: int, seed: int, epoch: int) -> Tensor:
        return original(num_samples, seed + dist.get_rank(), epoch)

    return planted((shuffle_module, "_shuffled_order", order))


@bug("DataLoader(drop_last=True)", "samples")
def tail_dropped() -> AbstractContextManager[None]:
    return planted((BatchPlan, "steps_per_epoch", property(lambda self: self.num_samples // self.global_batch)))


# ---- start -------------------------------------------------------------------------------------------------------


@bug("002: hand-written data parallelism", "start")
def broadcast_forgotten() -> AbstractContextManager[None]:
    return planted(*((module, "broadcast_module", lambda model, **_: None) for module in MODULES))


@bug("fine-tuning: a layer replaced too late", "start")
def head_made_after_broadcast() -> AbstractContextManager[None]:
    original = manual_module.broadcast_module

    def broadcast(model: nn.Module, **group: Any) -> None:
        original(model, **group)
        with torch.no_grad():
            head = [p for p in trainable_parameters(model) if p.dim() > 1][-1]
            head.mul_(1 + 0.01 * dist.get_rank())  # rank 0 starts right, the others nearby

    return planted(*((module, "broadcast_module", broadcast) for module in MODULES))


# ---- sync --------------------------------------------------------------------------------------------------------


@bug("a bare training loop under torchrun; no_sync around all", "sync")
def never_reduced() -> AbstractContextManager[None]:
    def local(parameters: Iterable[nn.Parameter], divisor: Tensor) -> None:
        scale_and_check_gradients(parameters, dist.get_world_size() / divisor)

    def finish(self: Reducer, divisor: Tensor) -> None:
        local(self._parameters, divisor)

    return planted(
        (manual_module, "all_reduce_gradients", local),
        (Reducer, "_on_gradient", lambda self, parameter: None),
        (Reducer, "finish", finish),
        *wrong_sync_points(lambda number, is_last: False, DDP),  # no_sync around every micro-batch, the last one too
    )


@bug("DDP: no_sync the wrong way round", "sync", strategies="ddp")
def no_sync_wrong_microbatch() -> AbstractContextManager[None]:
    return planted(*wrong_sync_points(lambda number, is_last: number == 0, DDP))


@bug("DDP: a parameter it was told to ignore, or never saw", "sync")
def one_gradient_forgotten() -> AbstractContextManager[None]:
    right_reduce, right_buckets, right_ddp = (
        all_reduce_gradients,
        torch_communicator.group_into_buckets,
        ddp_module.DistributedDataParallel,
    )

    def all_but_last(parameters: Sequence[nn.Parameter], divisor: Tensor) -> None:
        right_reduce(parameters[:-1], divisor)
        scale_and_check_gradients(parameters[-1:], dist.get_world_size() / divisor)

    def finish_last(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        scale_and_check_gradients(trainable_parameters(right.model)[-1:], dist.get_world_size() / total_weight)
        right.sync_gradients(total_weight)

    @wraps(right_ddp)  # its signature is looked at
    def ignoring_last(module: nn.Module, **options: Any) -> nn.Module:
        right_ddp._set_params_and_buffers_to_ignore_for_model(module, [[n for n, _ in module.named_parameters()][-1]])
        return right_ddp(module, **options)

    return planted(
        (manual_module, "all_reduce_gradients", all_but_last),
        (torch_communicator, "group_into_buckets", lambda parameters, size: right_buckets(parameters[:-1], size)),
        *wrong_sync(finish_last, Bucketed),
        (ddp_module, "DistributedDataParallel", ignoring_last),
    )


@bug("a well-known teaching DP (famous tools)", "sync", strategies="manual")
def parameter_reduced_instead() -> AbstractContextManager[None]:
    @torch.no_grad()
    def all_reduce(parameters: Iterable[nn.Parameter], divisor: Tensor) -> None:
        for parameter in parameters:
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
            scale_and_check_gradients([parameter], dist.get_world_size() / divisor)

    return planted((manual_module, "all_reduce_gradients", all_reduce))


# ---- mean --------------------------------------------------------------------------------------------------------


@bug("DDP: averaged by it and by oneself", "mean")
def divided_by_world_size_too() -> AbstractContextManager[None]:
    return planted(*wrong_sync(lambda right, works, total: right.sync_gradients(total * right.world.size)))


@bug("all_reduce sums: means added up", "mean")
def not_divided_by_world_size() -> AbstractContextManager[None]:
    return planted(*wrong_sync(lambda right, works, total: right.sync_gradients(total / right.world.size)))


@bug("loss / accumulation_steps of a mean over the whole", "mean")
def divided_by_microbatches_too() -> AbstractContextManager[None]:
    return planted(*wrong_sync(lambda right, works, total: right.sync_gradients(total * ACCUMULATION)))


@bug("loss.sum() / batch_size, a constant", "mean")
def tail_divided_by_full_batch() -> AbstractContextManager[None]:
    largest = [0.0]

    def sync(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        samples = float(sum_over_ranks(samples_of(works), total_weight))
        largest[0] = max(largest[0], samples)
        right.sync_gradients(total_weight * (largest[0] / samples))

    return planted(*wrong_sync(sync))


@bug("accelerate 1.15 (famous tools)", "mean accumulation")
def incomplete_window() -> AbstractContextManager[None]:
    def sync(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        count = sum_over_ranks(len(works), total_weight, dist.ReduceOp.MAX)
        right.sync_gradients(total_weight * ACCUMULATION / count)

    return planted(*wrong_sync(sync))


@bug("padding tokens: divided by sequences", "mean loss", task="tokens")
def samples_not_weights() -> AbstractContextManager[None]:
    def sync(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        right.sync_gradients(sum_over_ranks(samples_of(works), total_weight))

    return planted(*wrong_sync(sync))


# ---- shares ------------------------------------------------------------------------------------------------------


@bug("002: mean of means 3-17 %", "shares")
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
            scale_and_check_gradients(trainable_parameters(right.model), torch.tensor(1 / count(), dtype=torch.float64))

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


@bug("transformers before 4.46: mean per micro-batch", "shares loss", task="tokens")
def mean_of_token_means() -> AbstractContextManager[None]:
    original = step_module.compute_losses_and_weights

    def compute_losses_and_weights(loss: Any, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        losses, weights = original(loss, outputs, targets)
        weights = torch.ones_like(losses) if weights is None else weights
        return losses, weights / weights.sum()

    return planted((step_module, "compute_losses_and_weights", compute_losses_and_weights))


# ---- accumulation ------------------------------------------------------------------------------------------------


@bug("zero_grad inside the accumulation loop", "accumulation")
def only_last_microbatch() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        def enter(batch: MicroBatch, is_last: bool) -> None:
            right.model.zero_grad(set_to_none=True)
            right.enter(batch, is_last)

        changed(right, enter=enter)

    return planted(*strategies(change))


@bug("own buckets: hooks armed on the wrong backward", "accumulation error", strategies="bucketed")
def first_microbatch_leaves() -> AbstractContextManager[None]:
    return planted(*wrong_sync_points(lambda number, is_last: number == 0, Bucketed))


@bug("sums communicated in every backward", "accumulation", strategies="manual")
def reduced_each_microbatch() -> AbstractContextManager[None]:
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


@bug("trap 1: zero_grad that does not reach them", "accumulation gradient")
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


@bug("trap 15's cure gone wrong: an idle rank's dummy batch", "accumulation gradient")
def stand_in_counted() -> AbstractContextManager[None]:
    return planted((base, "ignore_dummy_batch", lambda model, parameters: nullcontext()))


# ---- none --------------------------------------------------------------------------------------------------------


@bug("002; zero_grad(set_to_none=False)", "none", task="unused", strategies="manual bucketed")
def none_becomes_zero() -> AbstractContextManager[None]:
    def sync(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        right.sync_gradients(total_weight)
        for parameter in trainable_parameters(right.model):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    return planted(*wrong_sync(sync))


@bug("002: only ranks that have a gradient take the sum", "none sync")
def no_gradient_without_samples() -> AbstractContextManager[None]:
    def sync(right: Right, works: list[MicroBatchPlan], total_weight: Tensor) -> None:
        right.sync_gradients(total_weight)
        if samples_of(works) == 0:
            right.model.zero_grad(set_to_none=True)

    return planted(*wrong_sync(sync))


# ---- gradient ----------------------------------------------------------------------------------------------------


@bug("own buckets: packed last first, unpacked first first", "gradient", strategies="bucketed")
def unpacked_in_another_order() -> AbstractContextManager[None]:
    def unpack(bucket: PackedBucket, flat: Tensor, used_here: Sequence[bool]) -> None:
        original(PackedBucket(bucket._parameters[::-1]), flat, used_here[::-1])

    original = PackedBucket.unpack
    return planted((PackedBucket, "unpack", unpack))


@bug("famous tools: all-reduces swapped on one rank", "gradient sync", strategies="manual")
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


@bug("DDP's fp16_compress_hook", "gradient")
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


@bug("own SyncBatchNorm: forward synchronised, backward not", "gradient sync", policies="sync", task="batchnorm")
def statistics_gradient_local() -> AbstractContextManager[None]:
    class Normalise(batchnorm._Normalize):
        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
            with patch.object(batchnorm, "dist", SimpleNamespace(is_initialized=lambda: False)):
                return batchnorm_backward(ctx, grad_output)

    batchnorm_backward = batchnorm._Normalize.backward
    return planted((batchnorm, "_Normalize", Normalise))


# ---- scale -------------------------------------------------------------------------------------------------------


@bug(
    "the same, with a full backward hook",
    "scale",
    strategies="manual",
    task="module_hook",
    name="sum-back-propagated-module-hook",
)
@bug("any trainer that divides after the sum", "scale", strategies="manual", task="clamped")
def sum_back_propagated() -> AbstractContextManager[None]:
    """As every step was until hooks and autograd functions were thought of: sums, divided after they were added up."""
    return in_backward(lambda work: float(work.global_samples))


@bug("GradScaler: hooks see gradients before unscale_", "scale", strategies="manual", task="clamped")
def scaled_for_half_precision() -> AbstractContextManager[None]:
    return in_backward(lambda work: 2.0**10)


@bug(
    "DDP and accelerate: backward of each micro-batch's own mean",
    "scale",
    strategies="manual",
    policies="local",
    task="clamped_batchnorm",
)
def mean_of_each_microbatch() -> AbstractContextManager[None]:
    return in_backward(lambda work: work.global_samples / max(1, len(work.indices)))


@bug("hand-written data parallelism: a hook sees the gradient of a rank's micro-batch", "scale", task="parameter_hooks")
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


@bug("a clamp, and several micro-batches with a weight each: an error", "error", task="clamped_tokens")
def weight_known_too_late() -> AbstractContextManager[None]:
    return nullcontext()


# ---- clipping ----------------------------------------------------------------------------------------------------


@bug("clip_grad_norm_ before the all-reduce", "clipping", strategies="manual")
def clipped_before_sync() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        def sync_gradients(total_weight: Tensor) -> None:
            scale_and_check_gradients(trainable_parameters(right.model), right.world.size / total_weight)
            right.clip_grad_norm(1.0).result()
            right.sync_gradients(float(right.world.size))

        changed(
            right,
            sync_gradients=sync_gradients,
            clip_grad_norm=lambda _: known(float(nn.utils.get_total_norm(gradients_of(right)))),
        )

    return planted(*strategies(change, Manual))


@bug("the norm measured before the all-reduce", "clipping", strategies="manual bucketed")
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


@bug("a norm scaled along with something else", "clipping")
def clipped_to_twice_the_norm() -> AbstractContextManager[None]:
    return planted(*wrong_clip(lambda right, max_norm: right.clip_grad_norm(2 * max_norm).result()))


@bug("clip_grad_value_ for clip_grad_norm_", "clipping")
def clipped_by_value() -> AbstractContextManager[None]:
    def clip(right: Right, max_norm: float) -> float:
        norm = nn.utils.get_total_norm(gradients_of(right))
        nn.utils.clip_grad_value_(trainable_parameters(right.model), max_norm)
        return float(norm)

    return planted(*wrong_clip(clip))


@bug("clip_grad_norm_ in a loop over parameters", "clipping")
def clipped_each_tensor() -> AbstractContextManager[None]:
    def clip(right: Right, max_norm: float) -> float:
        norm = nn.utils.get_total_norm(gradients_of(right))
        for parameter in trainable_parameters(right.model):
            nn.utils.clip_grad_norm_([parameter], max_norm)
        return float(norm)

    return planted(*wrong_clip(clip))


@bug("a sharded trainer's norm on replicated gradients", "clipping")
def norm_summed_over_copies() -> AbstractContextManager[None]:
    def clip(right: Right, max_norm: float) -> float:
        squared = nn.utils.get_total_norm(gradients_of(right)).square()
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(trainable_parameters(right.model), max_norm, squared.sqrt())
        return float(squared.sqrt())

    return planted(*wrong_clip(clip))


# ---- optimizer ---------------------------------------------------------------------------------------------------


@bug("weight decay in the loop and in the optimizer", "optimizer")
def decayed_twice() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        @torch.no_grad()
        def decay(*_: Any) -> None:
            for group in right.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - group["lr"] * (group["weight_decay"] or 0.01))

        right.optimizer.register_step_pre_hook(decay)

    return planted(*strategies(change))


@bug("linear scaling with an unchanged global batch", "optimizer")
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


@bug("002: optimizer state of a resumed run on rank 0 only", "optimizer")
def optimizer_state_lost() -> AbstractContextManager[None]:
    def change(right: Right) -> None:
        if right.world.rank != 0:
            right.optimizer.register_step_pre_hook(lambda *_: right.optimizer.state.clear())

    return planted(*strategies(change))


@bug("`if rank == 0` around too much", "optimizer sync")
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


@bug("torch.manual_seed(seed + rank)", "random")
def seeded_by_rank() -> AbstractContextManager[None]:
    return planted((MicroBatchPlan, "random_seed", lambda self, seed: seed + dist.get_rank()))


@bug("torch.manual_seed(seed) on every rank", "random")
def same_stream_for_all() -> AbstractContextManager[None]:
    original = MicroBatchPlan.random_seed
    return planted((MicroBatchPlan, "random_seed", lambda w, seed: original(structs.replace(w, virtual_rank=0), seed)))


@bug("a seed made of step and rank", "random")
def same_stream_each_microbatch() -> AbstractContextManager[None]:
    original = MicroBatchPlan.random_seed
    return planted((MicroBatchPlan, "random_seed", lambda w, seed: original(structs.replace(w, micro_batch=0), seed)))


@bug("002: RNG differs", "random")
def not_seeded() -> AbstractContextManager[None]:
    return planted((SeededRngScope, "enter", lambda self, seed: None))


# ---- buffers -----------------------------------------------------------------------------------------------------


@bug("000, 004; DDP's broadcast_buffers", "buffers", policies="local", task="batchnorm")
def buffers_of_rank_0() -> AbstractContextManager[None]:
    def merge(self: VirtualRankBuffers) -> dict[str, Tensor]:
        own = self._of[min(self._of)] if self._of else self._initial
        taken = {name: own[name].clone() for name in self._initial}
        for buffer in taken.values():
            dist.broadcast(buffer, src=0)
        return taken

    return planted((VirtualRankBuffers, "_merge", merge))


@bug("000, 004: buffers differ by 0.097", "buffers", policies="local", task="batchnorm")
def buffers_of_each_rank() -> AbstractContextManager[None]:
    return planted((VirtualRankBuffers, "merged", lambda self: nullcontext()))


@bug("trap 15's cure gone wrong", "buffers", policies="local", task="batchnorm")
def stand_in_moves_buffers() -> AbstractContextManager[None]:
    original = VirtualRankBuffers.enter_micro_batch
    return planted(
        (VirtualRankBuffers, "enter_micro_batch", lambda self, w: original(self, structs.replace(w, is_counted=True)))
    )


@bug("SyncBatchNorm never converted", "buffers sync", policies="sync", task="batchnorm")
def statistics_not_synchronised() -> AbstractContextManager[None]:
    return planted((SyncBatchNorm, "forward", _BatchNorm.forward))


@bug("SyncBatchNorm on uneven shares: mean of means", "buffers", policies="sync", task="batchnorm")
def statistics_unweighted() -> AbstractContextManager[None]:
    def union(self: SyncBatchNorm, own: Moments) -> Moments:
        packed = torch.cat([own.size.reshape(1), own.mean, own.m2])
        gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, packed, group=self.group)
        filled = torch.stack([each for each in gathered if each[0] > 0])  # (ranks with samples, 1 + 2C)
        sizes, (means, m2s) = filled[:, :1], filled[:, 1:].split(self.num_features, 1)
        mean = means.mean(0)
        variance = (m2s / sizes + means.square()).mean(0) - mean.square()  # E[x^2] - E[x]^2, each a mean of means
        return Moments(sizes.sum(), mean, variance * sizes.sum())

    return planted((SyncBatchNorm, "_union", union))


@bug("SyncBatchNorm by hand: mean of variances", "buffers", policies="sync", task="batchnorm")
def spread_of_means_ignored() -> AbstractContextManager[None]:
    original = batchnorm.merge_moments
    return planted((batchnorm, "merge_moments", lambda a, b: original(a, b)._replace(m2=a.m2 + b.m2)))


@bug("BatchNorm by hand: no n / (n - 1)", "buffers", policies="sync", task="batchnorm")
def biased_running_variance() -> AbstractContextManager[None]:
    original = SyncBatchNorm._statistics

    def statistics(self: SyncBatchNorm, union: Moments, own_count: int) -> tuple[Tensor, Tensor]:
        result = original(self, union, own_count)
        if self.running_var is not None and self.momentum is not None and union.size > 1:
            too_much = union.m2 / (union.size - 1) - union.m2 / union.size
            self.running_var.sub_((self.momentum * too_much).to(self.running_var.dtype))
        return result

    return planted((SyncBatchNorm, "_statistics", statistics))


# ---- loss --------------------------------------------------------------------------------------------------------


@bug("padding tokens count like others", "loss", task="tokens")
def weights_ignored() -> AbstractContextManager[None]:
    original = step_module.compute_losses_and_weights
    return planted((step_module, "compute_losses_and_weights", lambda *arguments: (original(*arguments)[0], None)))


@bug("003: loss of rank 0", "loss")
def own_loss_reported() -> AbstractContextManager[None]:
    original = TotalsReducer.start

    def start(self: TotalsReducer) -> Callable[[], Totals]:
        loss, weight = float(sum(self._losses)), float(sum(self._weights))
        wait = original(self)

        def mine() -> Totals:
            right = wait()
            assert isinstance(right, Totals)
            if weight == 0:  # a rank without samples has no loss of its own
                return right
            return Totals(loss / weight * right.total_weight, right.total_weight, right.votes)

        return mine

    return planted((TotalsReducer, "start", start))


# ---- error -------------------------------------------------------------------------------------------------------


@bug("002: reduction='mean'", "error")
def loss_averages() -> AbstractContextManager[None]:
    original = step_module.compute_losses_and_weights

    def compute_losses_and_weights(loss: Any, outputs: Any, targets: Any) -> Any:
        return original(lambda *arguments: loss(*arguments).mean(), outputs, targets)

    return planted((step_module, "compute_losses_and_weights", compute_losses_and_weights))


@bug("own buckets without no_sync", "error", strategies="bucketed")
def pause_forgotten() -> AbstractContextManager[None]:
    original = Reducer.begin_backward
    return planted(
        (Reducer, "begin_backward", lambda self, virtual_rank, **_: original(self, virtual_rank, is_last=True))
    )


# ---- controls -----------------------------------------------------------------------------------------------------


CONTROL = Mutation("control", "no bug: no finding", nullcontext, frozenset())

CONTROLS_OF_SCALE = [
    replace(CONTROL, name=f"{task}-control", task=task)
    for task in ("clamped", "clamped_batchnorm", "module_hook", "parameter_hooks")
]
"""no bug, in models whose gradient path is not linear"""
