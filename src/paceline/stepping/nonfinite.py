"""Detects a step whose loss or gradient is not finite, and finds the ranks, parameters and samples that caused it.

The sum of each reduced gradient shows whether it contains an infinity or NaN. If all ranks have the same gradients, all
come to the same result without communication. If gradients are sharded, the ranks exchange their results. If gradients
are clipped, their norm is the result. Such a step is examined before the optimizer runs: each rank computes its
micro-batches again, without collectives, and finds the bad samples by bisection. Then the run ends, skips the step, or
returns to an older state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.collectives import control
from paceline.collectives.buckets import trainable_parameters
from paceline.data.loader import MicroBatch
from paceline.errors import ExitCode, TrainingError, first_few
from paceline.nested import map_tensors
from paceline.rank.world import World
from paceline.strategies.base import Strategy

MAX_NAMED_SAMPLES = 8  # samples of a rank in a message
MAX_PARAMETERS = 3
MAX_SEARCH_PASSES = 64  # forward and backward passes in search of the samples of one micro-batch

MAX_SKIPPED_STEPS, SKIP_WINDOW_STEPS = 10, 200
# a bad sample occurs once per epoch; if more steps fail, training has diverged

NonFinitePolicy = Literal["stop", "skip", "rollback"]
LossSumFunction = Callable[[Any, Any], Tensor]
"""(inputs, targets) -> the weighted sum of their losses"""
PARAMETERS_UNCHANGED_TEXT = " The parameters are still those before this step."
BatchLosses = list[tuple[MicroBatch, Tensor]]
"""The counted micro-batches of this rank, each with its losses: one per sample, or one for the micro-batch."""


@dataclass(frozen=True)
class NonFiniteCause:
    """The cause of a step that is not finite, the same on all ranks."""

    message: str
    samples: list[int] = field(default_factory=list[int])
    first_rank: int = 0
    """the first rank that caused it"""
    is_loss_scale_overflow: bool = False
    """whether only the loss scale was too large, which is expected in fp16"""


def gradients_are_finite(replica: Strategy) -> bool | control.Deferred[bool]:
    """Whether all gradients are finite, the same result on all ranks (a collective if they are sharded)."""
    device = replica.world.device
    if replica.sharded:
        gradients = [shard.tensor for shard in replica.gradients()]
    else:
        gradients = [p.grad for p in replica.parameters if p.grad is not None]
    is_here = not replica.sharded or replica.world.size == 1
    if is_here and not control.is_async_device(device):
        return control.are_finite_on_cpu(gradients)
    finite = control.are_finite(gradients, device)
    if is_here:
        return finite

    def over_ranks(bad: Tensor) -> control.Deferred[bool]:
        total = control.sum_over_ranks(bad.double(), "gradients that are not finite")
        return control.Deferred(total, lambda ranks: ranks[0] == 0)

    def looked_at(fine: bool) -> bool:  # the same on all ranks
        return fine or over_ranks(control.to_device_async([not finite.result()], device)).result()

    return over_ranks(finite.numbers).map(looked_at)


def nonfinite_samples(values: Tensor, indices: Tensor) -> tuple[list[int], bool]:
    """The samples `indices` whose values are not finite, and whether each of them is a cause.

    If `values` has no row per sample (for example, a mean over all samples), any sample can be the cause.
    """
    if values.ndim and len(values) == len(indices):
        bad = ~values.detach().isfinite().reshape(len(values), -1).all(1)
        return indices[bad.cpu()].tolist(), True
    is_finite = bool(values.detach().isfinite().all())
    return [] if is_finite else indices.tolist(), is_finite


def find_nonfinite_loss_cause(seen: BatchLosses, where: str, gather: control.GatherFunction) -> NonFiniteCause:
    """Find the ranks and samples whose losses are not finite (a collective of the ranks of `gather`)."""
    bad_indices: list[int] = []
    among = ""
    for batch, losses in seen:
        bad, is_known = nonfinite_samples(losses, batch.work.indices)
        bad_indices += bad
        among = among if is_known else "among "
    reports = gather([bad_indices, among])
    causes = {rank: report for rank, report in reports.items() if report[0]}
    culprits = "; ".join(f"rank {rank}: {among}{_samples(bad)}" for rank, (bad, among) in causes.items())
    message = f"the loss is not finite at {where}; {culprits or 'each loss is finite, but not their sum'}"
    return NonFiniteCause(message, [i for bad, _ in causes.values() for i in bad], min(causes or reports))


def find_nonfinite_gradient_cause(
    replicas: Mapping[str, Strategy], seen: BatchLosses, forward: LossSumFunction | None, where: str,
    progress: Callable[[], object], gather: control.GatherFunction,
) -> NonFiniteCause:  # fmt: skip
    """Find the samples that made the gradients non-finite (a collective of the ranks of `gather`).

    `replicas`: by the prefix of the names of their parameters. `seen`: the micro-batches of this rank. `forward`: of
    the plain model, if there is only one; the buffers must be those before the step, and change. `progress` is called
    before each pass, because the search may be long.
    """
    grads = [(prefix + h.name, h.tensor) for prefix, replica in replicas.items() for h in replica.gradients()]
    mine: dict[str, Any] = {"names": [n for n, t in grads if not bool(t.isfinite().all())], "samples": [], "why": ""}
    if forward is not None:
        (replica,) = replicas.values()
        with replica.gathered():
            try:
                for microbatch, _ in seen:
                    search = _BadSampleSearch(replica, microbatch, forward, progress)
                    mine["samples"] += microbatch.work.indices[search.find_bad_positions()].tolist()
            except Exception as error:  # the samples stay unknown; the rest is reported
                mine["why"] = f"{type(error).__name__}: {error}"[:300]
    reports = gather(mine)
    hit = {name for report in reports.values() for name in report["names"]}
    names = [prefix + n for prefix, r in replicas.items() for n, p in r.model.named_parameters() if p.requires_grad]
    causes = {rank: report["samples"] for rank, report in reports.items() if report["samples"]}
    why = next((report["why"] for report in reports.values() if report["why"]), "")
    if causes:
        note = "; ".join(f"rank {rank}: {_samples(bad)} (their loss is finite)" for rank, bad in causes.items())
    elif forward is None:
        note = "each loss is finite"
    elif why:
        note = f"the samples are not known, because the step could not be computed again ({why})"
    else:
        note = (
            "computed again, the gradients of each rank are finite: either their sum overflows, or a device, memory "
            "or the network has failed"
        )
    parameters = _parameters([n for n in names if n in hit], len(names)) or "a parameter"
    text = f"the gradient of {parameters} is not finite at {where}; {note}"
    return NonFiniteCause(text, [i for bad in causes.values() for i in bad], min(causes or reports))


def nonfinite_error(cause: NonFiniteCause, way_out: str, *, late: bool = False) -> TrainingError:
    """The error that ends a run. `way_out`: the option that skips such steps. `late`: the parameters have changed."""
    return TrainingError(
        exit_code=ExitCode.NOT_FINITE, code="not-finite", what=cause.message,
        unchanged="" if late else PARAMETERS_UNCHANGED_TEXT, way_out=way_out,
    )  # fmt: skip


class _ForbidCollectives(TorchDispatchMode):
    """Inside, a collective raises an error: the other ranks would never join it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise RuntimeError(f"its forward or backward uses a collective, {func.name()}")
        return func(*args, **(kwargs or {}))


class _BadSampleSearch:
    """Finds the samples of a micro-batch without which its gradient would be finite."""

    def __init__(
        self, replica: Strategy, microbatch: MicroBatch, forward: LossSumFunction, progress: Callable[[], object]
    ) -> None:
        self._replica, self._batch, self._forward, self._progress = replica, microbatch, forward, progress
        self._parameters = trainable_parameters(replica.model)
        self._runs = 0

    def find_bad_positions(self) -> list[int]:
        """Their positions in the micro-batch; a group if only the group is bad, or if the search is too long."""
        everything = [*range(len(self._batch.work.indices))]
        return self._bad_of(everything) if self._is_bad(everything) else []

    def _bad_of(self, positions: list[int]) -> list[int]:
        if len(positions) == 1 or self._runs >= MAX_SEARCH_PASSES:
            return positions
        half = len(positions) // 2
        bad = [part for part in (positions[:half], positions[half:]) if self._is_bad(part)]
        return [i for part in bad for i in self._bad_of(part)] or positions

    def _is_bad(self, positions: list[int]) -> bool:
        is_whole_batch = len(positions) == len(self._batch.work.indices)
        try:
            return self._has_nonfinite_gradient(None if is_whole_batch else positions)
        except (ValueError, RuntimeError):
            if len(positions) > 1:
                raise
            return self._has_nonfinite_gradient(positions * 2)  # batch norm needs two

    def _has_nonfinite_gradient(self, positions: list[int] | None) -> bool:
        self._progress()
        self._runs += 1
        batch = self._batch
        size = len(batch.work.indices)
        inputs, targets = (
            p if positions is None else select_samples(p, positions, size) for p in (batch.inputs, batch.targets)
        )
        # not .backward(), because hooks would send the gradients to the other ranks
        with self._replica.alone(batch), _ForbidCollectives():
            loss_sum = self._forward(inputs, targets)
            # an unused parameter gets zeros
            gradients = torch.autograd.grad(loss_sum, self._parameters, allow_unused=True, materialize_grads=True)
        return not all(bool(gradient.isfinite().all()) for gradient in gradients)


def select_samples(batch: Any, positions: list[int], size: int) -> Any:
    return map_tensors(batch, lambda tensor: tensor[positions] if tensor.ndim and len(tensor) == size else tensor)


def _samples(indices: Sequence[int]) -> str:
    return f"samples {first_few([*map(str, indices)], MAX_NAMED_SAMPLES)}"


def _parameters(names: Sequence[str], of: int) -> str:
    """The last ones first, because backward propagates an infinity or NaN from there to earlier parameters."""
    return f"all {of} parameters" if len(names) == of > 1 else first_few(names[::-1], MAX_PARAMETERS)


class SkippedSteps:
    """The skipped steps, the same on all ranks."""

    def __init__(self, policy: NonFinitePolicy, world: World, say: Callable[[str], None]) -> None:
        self._policy, self._world, self._say = policy, world, say
        self._steps: set[int] = set()

    def record_skip(self, step: int, cause: NonFiniteCause) -> bool:
        """Record that `step` was skipped, and why; return whether to resume from an older state.

        A run returns once per step, because parameters or memory may have been damaged before it. If the step is not
        finite the second time either, it is skipped.
        """
        if cause.is_loss_scale_overflow:
            self._say(f"step {step} is skipped: {cause.message}")
            return False
        again = step in self._steps
        self._steps.add(step)
        if sum(step - SKIP_WINDOW_STEPS < skipped <= step for skipped in self._steps) > MAX_SKIPPED_STEPS:
            error = TrainingError(
                code="too-many-not-finite", exit_code=ExitCode.NOT_FINITE, what=cause.message,
                most=MAX_SKIPPED_STEPS, steps=SKIP_WINDOW_STEPS,
            )  # fmt: skip
            raise control.error_on_one_rank(error, self._world, by=cause.first_rank)
        back = self._policy == "rollback" and not again
        self._say(f"step {step}: {cause.message}" if back else f"step {step} is skipped: {cause.message}")
        return back
