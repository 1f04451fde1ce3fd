"""Audits: in every N-th step a second rank also computes one micro-batch, and the bits must agree (docs/audit.md).

A bit that flips in a forward or a backward changes the sum of gradients, and so all replicas in the same way. Their
comparison cannot find it. An audit compares loss, gradients and buffers of one micro-batch before they are summed:

    counted     its rank computes it as in every step
    repeated    the second rank computes it before its own micro-batches; loss, gradients and buffers do not count
    disputed    the digests differ: the step is skipped, all ranks repeat the micro-batch, and the majority is right
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.checkpoint.shards import CHECKSUM_FACTOR, checksum
from paceline.collectives.communicator import get_communicator
from paceline.collectives.control import all_gather_object, error_on_one_rank
from paceline.data.loader import MicroBatch
from paceline.data.plan import BatchPlan, MicroBatchPlan
from paceline.errors import ExitCode, FaultyRankError, PacelineError, TrainingError, UsageError
from paceline.rank.world import World
from paceline.strategies.base import Strategy

LoadAgain = Callable[[BatchPlan, int, int, int], MicroBatch | None]
"""(plan, epoch, step, virtual rank) -> its first micro-batch, not counted; None if it has no samples."""
Digest = tuple[float, float]  # the halves of 64 bits
Cost = tuple[float, float]  # seconds of a repeated micro-batch, and of the digests in it
COUNTED, REPEATED = 0, 1
MEASURED_AUDITS = 3  # for the cost


class StepAuditor:
    """The audits of a training on this rank. All ranks make all calls at the same steps.

    Before its first audit each rank repeats one of its own micro-batches. If the bits differ, the body may not be
    repeatable, and every comparison would raise a false alarm. A third computation decides: a body that is not
    repeatable gives different bits again, and a rank that has computed wrongly once does not.
    """

    def __init__(
        self, every: int, world: World, virtual_ranks: int, on_audit: str, save: Callable[[], object],
        show: Callable[[str], object],
    ) -> None:  # fmt: skip
        """`on_audit`: the setting. `save` saves the state before the step (a collective). `show` prints on rank 0."""
        self._every, self._world, self.save, self._show = every, world, save, show
        self._error_class = FaultyRankError if on_audit == "exclude" else TrainingError
        self._shares = world.shares(virtual_ranks)
        self._agreed: dict[int, str] = {}  # the last audit of each rank in which the bits agreed
        self._load_again: LoadAgain | None = None
        self._hooks: list[RemovableHandle] = []
        self._zero = torch.zeros((), dtype=torch.int64, device=world.device)
        self._proven = set[LoadAgain]()
        self._costs: list[float] = []  # of the first audits: in repeated computations without digests
        self._is_measuring, self._began, self._seconds = False, 0.0, [0.0, 0.0]  # for the cost, of this rank
        self.is_proving = self.is_running = self.is_disputed = False
        """Whether the current step repeats a micro-batch on each rank, is audited, and has different digests."""

    def set_batch_source(self, reload_micro_batch: LoadAgain, plan: BatchPlan) -> None:
        """The next micro-batches are of this plan, and `reload_micro_batch` loads them."""
        self._load_again, self._plan = reload_micro_batch, plan

    def begin(self, replica: Strategy, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Begin a step. Returns this rank's micro-batches, with one to repeat (a collective if the step is audited)."""
        work = micro_batches[0].work
        turn, steps_since = divmod(work.epoch * self._plan.steps_per_epoch + work.step + 1, self._every)
        self.is_proving, self.is_disputed = self._load_again not in self._proven, False
        self.is_running = steps_since == 0 or self.is_proving
        if not self.is_running:
            return micro_batches
        self._is_measuring = not self.is_proving and len(self._costs) < MEASURED_AUDITS
        self._began, self._seconds = self._now(), [0.0, 0.0]
        size, rank = self._world.size, self._world.rank
        self._replica, self._place = replica, (work.epoch, work.step)
        self._digests = [self._zero, self._zero]
        if self.is_proving:
            self._virtual_rank, self._ranks = work.virtual_rank, (rank, rank)
        else:
            others, self._virtual_rank = divmod(turn, self._plan.virtual_ranks)
            owner = next(r for r, share in enumerate(self._shares) if self._virtual_rank in share)
            self._ranks = owner, (owner + 1 + others % (size - 1)) % size
            replica.buffers.broadcast_for_audit(self._virtual_rank, owner)
        batch = self.load_repeated_batch() if rank == self._ranks[1] else None
        return micro_batches if batch is None else [batch, *micro_batches]

    def load_repeated_batch(self) -> MicroBatch | None:
        assert self._load_again is not None
        return self._load_again(self._plan, *self._place, self._virtual_rank)

    def begin_backward(self, work: MicroBatchPlan, loss: Tensor, factor: float | Tensor) -> None:
        """Take digests of the loss, the buffers and, until `end_backward`, the gradients of the audited micro-batch."""
        if not self.is_running or work.virtual_rank != self._virtual_rank or work.micro_batch:
            return
        if not (work.is_counted or work.is_repeated):
            return
        self._role = REPEATED if work.is_repeated else COUNTED
        self._timed(self._begin_digest, loss, factor)

    def _begin_digest(self, loss: Tensor, factor: float | Tensor) -> None:
        factor = torch.as_tensor(factor, dtype=torch.float64, device=loss.device)
        self._parts = [checksum(values) for values in (loss, factor, *self._replica.model.buffers())]
        for parameter in self._replica.parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(partial(self._timed, self._take, len(self._parts))))
                self._parts.append(self._zero)

    def _take(self, number: int, values: Tensor) -> None:
        # a hook may run for each of several parts
        self._parts[number] = torch.add(checksum(values), self._parts[number], alpha=CHECKSUM_FACTOR)

    def end_backward(self) -> None:
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        if hooks:
            digest = checksum(torch.stack(self._parts))
            self._digests[self._role] = torch.add(digest, self._digests[self._role], alpha=CHECKSUM_FACTOR)
            if self._role == REPEATED:
                self._seconds[0] = self._now() - self._began

    def compare(self, where: str) -> bool:
        """Whether the ranks agree on the audited micro-batch of the step (a collective)."""
        digests = self._gather()
        if self.is_proving:
            self._unproven = {rank: own for rank, own in enumerate(digests) if own[COUNTED] != own[REPEATED]}
            self.is_disputed = self.is_proving = bool(self._unproven)
            assert self._load_again is not None
            self._proven.add(self._load_again)
            return not self.is_disputed
        owner, auditor = self._ranks
        self._first = {owner: digests[owner][COUNTED], auditor: digests[auditor][REPEATED]}
        self.is_disputed = len({*self._first.values()}) > 1
        if not self.is_disputed:
            self._agreed |= dict.fromkeys(self._ranks, where)
            if self._is_measuring:
                self._measure(*digests[auditor][2])
        return not self.is_disputed

    def _measure(self, repeated: float, digests: float) -> None:
        """Print what audits cost: the second computation, whose seconds include its digests, and those of its rank."""
        self._costs.append((repeated + digests) / max(repeated - digests, 1e-6))
        if len(self._costs) == MEASURED_AUDITS:
            cost = 100 * median(self._costs) / self._plan.accumulation / self._every
            computed, waited = cost / self._plan.virtual_ranks, cost / max(map(len, self._shares))
            words = f"about {computed:.2g} % more computation, steps at most {waited:.2g} % longer"
            self._show(f"audits: {words} (measured)")

    def _timed(self, act: Callable[..., object], *arguments: Any) -> None:
        began = self._now()
        act(*arguments)
        self._seconds[1] += self._now() - began

    def _now(self) -> float:
        device = self._world.device
        if not self._is_measuring:
            return 0.0
        if device.type == "cpu":
            return time.process_time()  # without that of other processes
        torch.get_device_module(device).synchronize(device)
        return time.monotonic()

    def judge(self, where: str) -> PacelineError:
        """The error after all ranks have repeated the disputed micro-batch (a collective)."""
        self.is_disputed = False
        again = [repeated for _, repeated, _ in self._gather()]
        if self.is_proving:
            return self._judge_proof(where, again)
        (right, votes), *_ = Counter(again).most_common()
        has_majority = 2 * votes > len(again)
        wrong = [r for r in range(len(again)) if right != again[r] or self._first.get(r, right) != right]
        named = wrong if has_majority else [*self._first]
        times = "always" if any(right != again[rank] for rank in named) else "once"
        return self._wrong_numbers(where, named, is_decided=has_majority, times=times)

    def _judge_proof(self, where: str, again: list[Digest]) -> PacelineError:
        unproven = self._unproven
        never_equal = [rank for rank, before in unproven.items() if again[rank] not in before]
        if 2 * len(never_equal) >= self._world.size:
            return error_on_one_rank(UsageError(code="audit-not-repeatable", ranks=never_equal), self._world)
        times = "always" if never_equal else "once"
        return self._wrong_numbers(where, never_equal or [*unproven], is_decided=True, times=times)

    def _wrong_numbers(self, where: str, ranks: list[int], *, is_decided: bool, times: str) -> PacelineError:
        hosts: list[str] = all_gather_object(os.uname().nodename, self._world)
        error = (self._error_class if is_decided else TrainingError)(
            code="audit-wrong-numbers" if is_decided else "audit-undecided", exit_code=ExitCode.DIVERGED,
            where=where, ranks=[f"{rank} ({hosts[rank]})" for rank in ranks], times=times,
            since=self._agreed.get(ranks[0], "the start"),
        )  # fmt: skip
        return error_on_one_rank(error, self._world, by=ranks[0])

    def _gather(self) -> list[tuple[Digest, Digest, Cost]]:
        """The digests of each rank, (counted, repeated), since the last call."""
        halves: list[int] = torch.stack(self._digests).view(torch.int32).tolist()  # a float64 holds 32 bits exactly
        own = [*map(float, halves), *self._seconds]
        self._digests, size = [self._zero, self._zero], self._world.size
        numbers = [0.0] * len(own) * size
        numbers[self._world.rank * len(own) : (self._world.rank + 1) * len(own)] = own
        gathered = get_communicator(self._world.group).start_float_sum(numbers, "digests of an audit")()
        by_rank = zip(*[iter(gathered)] * len(own), strict=True)
        return [((a, b), (c, d), (repeated, digests)) for a, b, c, d, repeated, digests in by_rank]
