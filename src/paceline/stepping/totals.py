"""Totals of a step over micro-batches and ranks: losses, weights and votes. They give the divisor of the losses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from operator import add
from typing import Any, TypeVar

import torch
from msgspec import Struct
from msgspec.structs import astuple, replace
from torch import Tensor

from paceline.collectives.communicator import get_communicator
from paceline.collectives.control import (
    Deferred,
    PinnedNumberBuffers,
    error_on_one_rank,
    is_async_device,
    resolve_deferred,
)
from paceline.collectives.sum_tree import tree_sum
from paceline.collectives.torch_communicator import Communicator
from paceline.errors import ExitCode, ReportedByPeer, TrainingError, UsageError
from paceline.protocol.evidence import Phase
from paceline.rank.guard import HangGuard
from paceline.rank.world import World
from paceline.stepping.micro_step import MicroStep, Reduction, WeightedLoss
from paceline.stepping.nonfinite import BatchLosses, NonFiniteCause, find_nonfinite_loss_cause, nonfinite_error
from paceline.stepping.order import CollectiveOrderCheck


class ControlFlags(Struct, frozen=True):
    """Each field is 1 or 0 on one rank. The sum over ranks counts the votes. The totals have them in this order."""

    stop: float = 0.0
    """the run must end"""
    shard_written: float = 0.0
    """this rank has written its shard of the pending checkpoint"""
    shard_failed: float = 0.0
    """this rank could not write its shard"""
    checkpoint_due: float = 0.0
    """the time for a checkpoint has come; only rank 0 reads its clock"""
    ended_by_callback: float = 0.0
    """a callback has ended the training"""
    save: float = 0.0
    """a checkpoint must be saved now"""
    next_batch_samples: float = 0.0
    """samples of a stream that this rank has for the next global batch; 0 if the data are not a stream"""


NO_VOTES = ControlFlags()
NUM_VOTES = len(astuple(NO_VOTES))
TOTALS_NAME = "totals of the step"
LARGE = 1e300  # infinite as float32


class Totals(Struct, frozen=True):
    """The sums of losses and of weights over virtual ranks, and of votes over ranks."""

    loss_sum: float
    total_weight: float
    votes: list[float]


@dataclass(frozen=True)
class DeferredTotals(Deferred[Totals]):
    """Totals that the host has not read from the device."""

    weights: float | Tensor
    """by virtual rank, (V,); a number if the host knows their sum"""

    @property
    def total_weight(self) -> float | Tensor:
        return _tree_sum(self.weights.unbind()) if isinstance(self.weights, Tensor) else self.weights


AwaitTotals = Callable[[], Totals | DeferredTotals]
"""waits for the other ranks, but not for the device; to be called once"""
_N = TypeVar("_N", float, Tensor, float | Tensor)
_sum: Any = partial(reduce, add)  # from left to right: the builtin rounds differently


class StepResult(Struct):
    """The result of a step over all ranks."""

    loss: float = 0.0
    """the mean of the global batch"""
    total_weight: float = 0.0
    """the sum of all weights, by which the sum of losses is divided"""
    grad_norm: float | None = None
    """before clipping; None: not computed"""
    votes: ControlFlags = NO_VOTES
    """the sum over ranks"""
    skip_cause: NonFiniteCause | None = None
    """the reason if the step did not change the parameters"""
    unread: "UnreadStep | None" = None
    """if the host has not read the loss, the norm and `skip_cause` from the device"""


class UnreadStep:
    """A step whose loss, votes and finiteness the host has not read from the device."""

    def __init__(
        self, result: StepResult, found_inf: Tensor, wait: Callable[[], list[float]],
        read_totals: Callable[[list[float], bool], Totals], norm_at: int | None,
    ) -> None:  # fmt: skip
        """`found_inf` is () float32 on the device: 1 if a number of the step may not be finite, else 0.

        `wait` returns the numbers for `read_totals` (see `TotalsReducer.defer`), at `norm_at` the norm of the gradients
        if they are clipped, and at the end `found_inf`.
        """
        self.result, self.found_inf, self._wait = result, found_inf, wait
        self._read_totals, self._norm_at = read_totals, norm_at

    def read(self, *, alone: bool = False) -> bool:
        """Wait for the device, and complete the result. False: the step has changed nothing, and must be repeated.

        A collective if the ranks have called different collectives, unless `alone`: this rank has failed.

        Raises:
            StallError: the guard has aborted a collective of the step, which has changed nothing.
        """
        *numbers, found_inf = self._wait()
        if found_inf:  # otherwise all its collectives have ended before an abort
            HangGuard.of_process().check_not_released()
        totals = self._read_totals(numbers, alone)
        if found_inf == 0:
            self.result.loss += totals.loss_sum / self.result.total_weight
            self.result.grad_norm = None if self._norm_at is None else numbers[self._norm_at]
            self.result.unread = None
        return found_inf == 0


class TotalsReducer:
    """The totals of a step: counted on this rank, summed over all ranks, awaited before or after the update."""

    def __init__(
        self, world: World, virtual_ranks: int, votes: Callable[[], ControlFlags], order: CollectiveOrderCheck | None,
        *, same_bits: bool = False,
    ) -> None:  # fmt: skip
        """`same_bits`: the bits, and so the scale, must not depend on which rank computes a virtual rank."""
        self._world, self._virtual_ranks, self._votes, self._same_bits = world, virtual_ranks, votes, same_bits
        self._order = order if world.size > 1 else None
        self._exchange: Communicator | None = None  # until the first exchange
        self._on_device, self.result = is_async_device(world.device), StepResult()
        self._to_device = PinnedNumberBuffers(world.device)
        # infinite once the guard aborts collectives: those of NCCL then end without an error
        self._aborted = torch.zeros(1, dtype=torch.float64, pin_memory=world.device.type == "cuda")
        self._guess = 0.0  # the weight of the previous step; 0 if there is none
        self.refusal = 1.0
        """0 if the next step may be unread for this rank"""
        self.refusals = 1.0
        """votes and refusals of all ranks in the last totals that were read; infinite: they do not count"""

    def begin(self, where: object, *, one_each: bool = False, alone: bool = False) -> StepResult:
        """Begin a step, which `str(where)` names in errors. Returns its result, which is set later.

        `one_each`: each rank computes one micro-batch, with separate weights. `alone`: one micro-batch on one rank.
        """
        self.is_alone, self._where, self._one_each = alone and not self._same_bits, where, one_each
        self._guess = self.result.total_weight or self._guess
        self.result = StepResult()
        self._losses: list[float | Tensor | WeightedLoss] = [0.0] * self._virtual_ranks
        self._weights: list[float | Tensor] = [0.0] * self._virtual_ranks
        self._is_counted = False  # whether they are those of a round that is over
        self.divisor: float | None = None
        """the sum of all weights; None: not known yet"""
        self._counted_before: float | None = None  # the weight of this round, if the first round has counted it
        self.in_round = 0
        """backwards of this micro-batch since the last exchange"""
        self.scale: float | Tensor | None = None
        """divisor of losses before their backward, the same on all ranks; None before the first loss"""
        self.is_guess = False
        """whether `scale` only approximates the weight of the global batch, which is not known yet"""
        self.was_scaled = True
        """whether the gradients of the last backward were those of the global batch's mean"""
        self.seen: BatchLosses = []
        self.without_gradient = False
        """whether a loss of this rank was constant or had weight 0"""
        self._samples, self._plain, self._counts_all = 0, True, True
        self._reduction: Reduction | None = None
        self.awaited: AwaitTotals | None = None
        """totals to be read after the update, if hosts step separately"""
        self._said_scale = 0.0
        self.rest = 1.0
        """remaining divisor of the summed gradients, after `read_totals`"""
        return self.result

    def add_loss(
        self, loss: Tensor, weighed: WeightedLoss, reduction: Reduction, micro_step: MicroStep, *, plain: bool,
        is_last: bool = False, may_wait: bool = False,
    ) -> tuple[float | Tensor | None, bool]:  # fmt: skip
        """Add a loss and its weight to the totals. Backwards with a common divisor must have the same weight.

        `plain`: each sample weighs 1, according to the form of the loss, which is the same on all ranks. `is_last`:
        `start` is called next. `may_wait`: the last backward may wait for the totals.

        Returns the divisor of the loss before backward, which makes gradients inside backward those of the mean; and
        whether the loss may have a gradient: it has none if its factor is 0. A GPU is not asked, because the host would
        wait. The divisor is the weight of the global batch if this is known: from the plan, or because this rank has
        all of it. None: it is the weight in the totals over ranks, if the backward waits for them. Otherwise it is a
        power of two near the weight of the last step, which changes no bit of the sum, and the gradients are divided by
        the rest later.
        """
        factor = weighed.factor
        is_weightless = (not isinstance(factor, Tensor) or factor.device.type == "cpu") and float(factor) == 0
        is_shared = bool(micro_step.weights) and (self.in_round > 0 or not self._one_each)
        if reduction != (self._reduction or reduction) and (is_shared or not self._one_each):
            raise UsageError(code="reductions-differ")
        self._reduction = reduction
        self._samples, self._plain = micro_step.work.global_samples, self._plain and plain
        self._counts_all = self._counts_all and weighed.has_unit_sample_weights and micro_step.batch.samples is None
        first, other = micro_step.weights[-1] if is_shared else weighed.weight, weighed.weight
        if first is not other and torch.as_tensor(first) != torch.as_tensor(other):  # in float32
            raise UsageError(code="weights-differ", first=float(first), other=float(other))
        if self._is_counted:
            self._losses, self._weights = [0.0] * self._virtual_ranks, [0.0] * self._virtual_ranks
            self._is_counted = False
        if micro_step.work.is_counted and self._world.is_replica_leader:  # of several that compute the same
            virtual_rank, weight = micro_step.work.virtual_rank, weighed.weight
            if virtual_rank >= self._virtual_ranks:
                raise UsageError(code="wrong-virtual-ranks", virtual_rank=virtual_rank, rows=self._virtual_ranks)
            if not is_weightless:  # a mean over nothing is NaN
                total = self._losses[virtual_rank]
                if self._on_device and is_last and isinstance(total, float):  # `start` adds it to what it sends
                    self._losses[virtual_rank] = replace(weighed, value=weighed.value.detach())
                elif self._on_device:  # now: the loop may write into the loss, and a CUDA graph into its output
                    self._losses[virtual_rank] = weighed.add_to(_number(total))
                else:  # a product with a number of the host has the same bits
                    assert isinstance(total, float)
                    value = weighed.value.detach() if isinstance(factor, Tensor) else weighed.value.item()
                    self._losses[virtual_rank] = total + float(value * factor)
                self.seen.append((micro_step.batch, loss.detach()))
            if not self.in_round:  # only once for several backwards
                self._weights[virtual_rank] += (
                    weight.double() if isinstance(weight, Tensor) and self._on_device else float(weight)
                )
        self.in_round += 1
        micro_step.weights.append(weighed.weight)
        if self.scale is None:
            if reduction == "sum":
                self.scale = 1.0
            elif self.is_alone:
                weight = weighed.weight
                self.scale = weight if isinstance(weight, Tensor) else weight or 1.0  # 0: `read_totals` raises
            elif weighed.is_weight_num_samples and self._samples:
                self.scale = float(self._samples)
            elif not (self._one_each and is_last and may_wait) or self._same_bits:
                self.guess_loss_divisor(self._samples)
                self.is_guess = True
        return self.scale, not is_weightless

    def guess_loss_divisor(self, samples: int) -> float:
        """Take a power of two near the weight of the global batch as the divisor before backward."""
        weight = self._guess or samples
        self.scale = scale = 2.0 ** round(math.log2(weight)) if weight > 0 else 1.0
        return scale

    def remaining_divisor(self, totals: DeferredTotals) -> float | Tensor:
        """The remaining divisor of the summed gradients, before `read_totals`: the weight is still on the device."""
        if isinstance(totals.weights, Tensor) and self._is_weight_known:
            return 1.0  # `read_totals` compares
        known_weight = 1.0 if self._reduction == "sum" else self._counted_before
        weight = totals.total_weight if known_weight is None else known_weight
        return weight / (1.0 if self.scale is None else self.scale)

    @property
    def samples_if_weight(self) -> int:
        """Samples of the global batch, if they are its weight by the form of all losses so far; else 0."""
        return self._samples if self._plain and self.divisor is None else 0

    def start(self) -> AwaitTotals:
        """Start the sum over ranks. The first one in a step includes the votes."""
        # Were all losses divided by the number of samples, which is the weight of the global batch? The answer is the
        # same on all ranks. It is no if a collate function may have dropped samples.
        self._is_weight_known = self._counts_all and not isinstance(self.scale, Tensor) and self.scale == self._samples
        hashes = self._order.hashes() if self._order is not None and self.divisor is None else ()
        votes = [*astuple(self._votes()), *hashes] if self.divisor is None else []
        losses: list[Any] = self._losses
        weights = self._weights
        if self._world.size == 1:
            losses = [*map(_number, losses)] if self._on_device else losses
            loss, weight = (losses[0], weights[0]) if len(losses) == 1 else (_tree_sum(losses), _tree_sum(weights))
            if isinstance(loss, Tensor) or isinstance(weight, Tensor):
                self.refusals = self.refusal + sum(votes) + isinstance(weight, Tensor)
                return lambda: _deferred_totals(loss, weight, votes)
            return partial(Totals, loss, weight, votes)
        self._said_scale = float(self.scale or 0)
        # One slot for each virtual rank: all others add zeros, so each rank gets the numbers unchanged. They are added
        # in the order of the tree: the bits do not depend on the world size.
        # An infinite refusal: this step cannot be unread. If it is nevertheless, the device skips it on all ranks.
        others = (self.refusal if self._is_weight_known else math.inf, self._said_scale)
        numbers: list[Any] = [*chain.from_iterable(zip(losses, weights, strict=True)), *votes, *others]
        self._exchange = self._exchange or get_communicator()
        if self._on_device:
            return self._start_on_device(self._exchange, numbers)
        return partial(self._totals, self._exchange.start_float_sum(numbers, TOTALS_NAME))

    def _start_on_device(self, exchange: Communicator, numbers: Sequence[float | Tensor | WeightedLoss]) -> AwaitTotals:
        on_host = [0.0 if isinstance(number, (Tensor, WeightedLoss)) else number for number in numbers]
        slots = self._to_device.to_device(on_host)
        for index, number in enumerate(numbers):
            if isinstance(number, Tensor):
                slots[index] = number
            elif isinstance(number, WeightedLoss):
                number.add_to(slots[index], out=slots[index])
        finish = exchange.start_sum(slots, TOTALS_NAME)

        def totals() -> DeferredTotals:
            slots = finish()
            weights = slots[1 : 2 * self._virtual_ranks : 2]
            return DeferredTotals(slots, lambda numbers: self._totals(lambda: numbers), weights)

        return totals

    def _totals(self, read: Callable[[], list[float]]) -> Totals:
        numbers, ranks = read(), self._virtual_ranks
        pairs, votes = numbers[: 2 * ranks], numbers[2 * ranks :]
        total: Callable[[list[float]], float] = _sum if ranks <= 2 else _tree_sum  # the same order
        return Totals(total(pairs[::2]), total(pairs[1::2]), votes)

    def read_awaited(self, enter: Callable[[Phase], object], way_out: str) -> None:
        """After the update, read the totals that are `awaited`."""
        if self.awaited is None:
            return
        enter(Phase.SYNC)
        wait, self.awaited, samples = self.awaited, None, self.samples_if_weight
        try:
            if not math.isfinite(self.read_totals(resolve_deferred(wait()), late=True)):
                if all(math.isfinite(float(_number(loss))) for loss in self._losses):
                    raise ReportedByPeer("another rank tells whose loss is not finite", ExitCode.NOT_FINITE)
                # other hosts may have left already: each rank reports for itself
                cause = find_nonfinite_loss_cause(self.seen, str(self._where), lambda value: {self._world.rank: value})
                raise nonfinite_error(cause, way_out, late=True)
            if self.result.total_weight != samples:
                raise TrainingError(
                    code="loss-weight-wrong", place=str(self._where), weight=self.result.total_weight, samples=samples
                )
        except BaseException:
            enter(Phase.OPTIMIZER)  # a reader of the phase must not think that the update has not begun
            raise

    def read_totals(self, totals: Totals, *, late: bool = False) -> float:
        """Read the totals over ranks. Returns the mean loss, and sets `rest`. `late`: parameters have changed."""
        *votes, refusals, scales = totals.votes if self._world.size > 1 else (*totals.votes, 0.0, 0.0)
        if self.divisor is None:
            self.result.votes, hashes = ControlFlags(*votes[:NUM_VOTES]), votes[NUM_VOTES:]
            self.refusals = refusals + sum(votes[:NUM_VOTES])
            if self._order is not None and hashes:
                self._order.check(hashes, self._where, late=late)
        if self._world.size > 1 and scales != self._said_scale * self._world.size:
            raise error_on_one_rank(UsageError(code="loss-forms-differ", place=str(self._where)), self._world)
        weight_total = totals.total_weight if self._counted_before is None else self._counted_before
        if weight_total == 0:
            raise error_on_one_rank(UsageError(code="loss-weights-zero", place=str(self._where)), self._world)
        if self._is_weight_known and weight_total != self._samples:
            place = str(self._where)
            raise TrainingError(code="loss-weight-wrong", place=place, weight=weight_total, samples=self._samples)
        is_sum, scale = self._reduction == "sum", self.scale
        self.was_scaled = is_sum or scale is None or isinstance(scale, Tensor) or scale == weight_total
        self.rest = float((1.0 if is_sum else weight_total) / (1.0 if scale is None else scale))
        self.divisor = weight_total
        self._counted_before = None if self._one_each else weight_total
        self.in_round, self._is_counted = 0, True  # the next backward begins a new round
        if self._one_each:
            self.scale, self.is_guess = None, False
        self.result.total_weight = weight_total
        self.result.loss += (loss := totals.loss_sum / weight_total)
        return loss

    def defer(self, totals: DeferredTotals) -> tuple[Callable[[list[float], bool], Totals], list[Tensor]] | None:
        """Let the totals be read in the next step. None: they must be read now, on all ranks.

        All ranks decide alike, by the last totals that they have read. Votes do not count in such a step: the ranks
        send them again in the next one, which is then read at once.

        Returns the function that reads them, and numbers on the device: not finite if the device must skip the step.
        """
        if self.refusals:
            return None
        size, where, order = self._world.size, self._where, self._order
        if size == 1:
            self.read_totals(totals.compute([0.0]))
            return lambda numbers, alone: totals.compute(numbers), []
        self.read_totals(Totals(0.0, float(self._samples), [*astuple(NO_VOTES), 0.0, self._said_scale * size]))
        self.was_scaled = True  # otherwise the device skips the step
        calls = [] if order is None else order.last_calls()

        def read(numbers: list[float], alone: bool) -> Totals:
            found = totals.compute(numbers[: len(totals.numbers)])
            *votes, refusals, _ = found.votes
            hashes = votes[NUM_VOTES:]
            self.refusals = refusals + sum(votes[:NUM_VOTES]) + (math.inf if len({*hashes}) > 1 else 0)
            if order is not None and not alone:
                order.check(hashes, where, calls=calls)
            return found

        HangGuard.of_process().before_abort = partial(self._aborted.fill_, math.inf)
        others = [self._aborted.to(totals.numbers.device, non_blocking=True, copy=True)]  # after the collectives
        if order is not None:
            low, high = totals.numbers[2 * self._virtual_ranks + NUM_VOTES : -2].aminmax()
            others.append(((high - low) * LARGE).view(1))
        return read, others


def _deferred_totals(loss: float | Tensor, weight: float | Tensor, votes: list[float]) -> DeferredTotals:
    """The totals of a single rank on a device: the host reads only the numbers that it does not know."""
    on_device = [number for number in (loss, weight) if isinstance(number, Tensor)]

    def totals(numbers: list[float]) -> Totals:
        rest = iter(numbers)
        loss_sum, total_weight = (next(rest) if isinstance(number, Tensor) else number for number in (loss, weight))
        return Totals(loss_sum, total_weight, votes)

    numbers = on_device[0].view(1) if len(on_device) == 1 else torch.stack(on_device)
    return DeferredTotals(numbers, totals, weight.view(1) if isinstance(weight, Tensor) else weight)


def _number(loss: float | Tensor | WeightedLoss) -> float | Tensor:
    return loss.add_to(0.0) if isinstance(loss, WeightedLoss) else loss


def _tree_sum(numbers: Sequence[_N]) -> _N:
    return tree_sum({(v, v + 1): number for v, number in enumerate(numbers)}, lambda a, b: a + b, len(numbers))
