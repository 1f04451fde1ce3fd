"""Finds a step whose loss or gradient is not finite, and names the ranks, parameters and samples that made it so.

The sum of each reduced gradient shows whether there is an infinity or NaN in it. Where all ranks hold the same
gradients, all decide alike without asking; where each holds a share, they vote; where gradients are clipped, their norm
is the vote. Only then, and before the optimizer runs, is the step examined: each rank computes its own micro-batches
again, alone, and finds the bad samples by halving. The run then ends, leaves the step out, or goes back.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.collectives.buckets import trainable
from paceline.collectives.control import (
    Gather,
    Pending,
    are_finite,
    are_finite_here,
    costs,
    sent,
    sum_over_ranks,
    told_once,
)
from paceline.data.loader import MicroBatch
from paceline.errors import ExitCode, TrainingError, first_few
from paceline.nested import mapped
from paceline.rank.world import World
from paceline.strategies.base import Strategy

MAX_NAMED = 8  # samples of a rank in a message
MAX_PARAMETERS = 3
MAX_RUNS = 64  # forward and backward passes in search of the samples of one micro-batch

MOST, OF_STEPS = 10, 200  # one bad sample may come once in an epoch; more is a training that has broken down

Policy = Literal["stop", "skip", "rollback"]
Forward = Callable[[Any, Any], Tensor]
"""(inputs, targets) -> the weighted sum of their losses"""
UNCHANGED = " The parameters are still those before this step."
Seen = list[tuple[MicroBatch, Tensor]]
"""What this rank has computed: micro-batches that count, and their losses, one for each sample or one for all."""


@dataclass(frozen=True)
class NotFinite:
    """What was found, the same on all ranks."""

    words: str
    samples: list[int] = field(default_factory=list[int])
    told_by: int = 0
    """the first rank that made it so"""
    by_scale: bool = False
    """whether only the loss scale was too large: in fp16 that is nothing to worry about"""


def gradients_are_finite(replica: Strategy) -> bool | Pending[bool]:
    """Whether no gradient holds an infinity or NaN, on all ranks alike (a collective where they are sharded)."""
    gradients, device = [held.tensor for held in replica.gradients()], replica.world.device
    is_here = not replica.sharded or replica.world.size == 1
    if is_here and not costs(device):
        return are_finite_here(gradients)
    finite = are_finite(gradients, device)
    if is_here:
        return finite

    def over_ranks(bad: Tensor) -> Pending[bool]:
        return Pending(sum_over_ranks(bad.double(), "gradients that are not finite"), lambda ranks: ranks[0] == 0)

    def looked_at(fine: bool) -> bool:  # the same on all ranks
        return fine or over_ranks(sent([not finite.now()], device)).now()

    return over_ranks(finite.numbers).then(looked_at)


def losses_not_finite(seen: Seen, where: str, gather: Gather) -> NotFinite:
    """Find whose losses of those `seen` are not finite (a collective of those who `gather`)."""
    mine: list[int] = []
    among = ""
    for batch, losses in seen:
        bad, indices = ~losses.isfinite(), batch.work.indices
        if losses.ndim and len(losses) == len(indices):
            mine += indices[bad.reshape(len(losses), -1).any(1).cpu()].tolist()
        elif bool(bad.any()):  # a mean of all of them, say
            mine, among = [*mine, *indices.tolist()], "among "
    told = gather([mine, among])
    guilty = {rank: found for rank, found in told.items() if found[0]}
    named = "; ".join(f"rank {rank}: {among}{_samples(bad)}" for rank, (bad, among) in guilty.items())
    words = f"the loss is not finite at {where}; {named or 'each loss is finite, but not their sum'}"
    return NotFinite(words, [i for bad, _ in guilty.values() for i in bad], min(guilty or told))


def gradients_not_finite(
    replicas: Mapping[str, Strategy],
    seen: Seen,
    forward: Forward | None,
    where: str,
    progress: Callable[[], object],
    gather: Gather,
) -> NotFinite:
    """Find whose samples made the gradients so (a collective of those who `gather`).

    The replicas, by what begins the names of their parameters, still have their reduced gradients. `forward` is one of
    the one plain model, where it is known: its buffers must be those before the step, and change. `progress` is called
    before each pass, as the search may be long.
    """
    held = [(prefix + h.name, h.tensor) for prefix, replica in replicas.items() for h in replica.gradients()]
    mine: dict[str, Any] = {"names": [n for n, t in held if not bool(t.isfinite().all())], "samples": [], "why": ""}
    if forward is not None:
        (replica,) = replicas.values()
        with replica.gathered():
            try:
                for microbatch, _ in seen:
                    search = _Search(replica, microbatch, forward, progress)
                    mine["samples"] += microbatch.work.indices[search.bad()].tolist()
            except Exception as error:  # the samples stay unknown; the rest is reported all the same
                mine["why"] = f"{type(error).__name__}: {error}"[:300]
    told = gather(mine)
    hit = {name for found in told.values() for name in found["names"]}
    names = [prefix + n for prefix, r in replicas.items() for n, p in r.model.named_parameters() if p.requires_grad]
    guilty = {rank: found["samples"] for rank, found in told.items() if found["samples"]}
    why = next((found["why"] for found in told.values() if found["why"]), "")
    if guilty:
        who = "; ".join(f"rank {rank}: {_samples(bad)} (their loss is finite)" for rank, bad in guilty.items())
    elif forward is None:
        who = "each loss is finite"
    elif why:
        who = f"the samples are not known, because the step could not be computed again ({why})"
    else:
        who = (
            "computed again, each rank's own gradients are finite: either their sum overflows, or a device, memory "
            "or the network has failed"
        )
    words = f"the gradient of {_parameters([n for n in names if n in hit], len(names))} is not finite at {where}; {who}"
    return NotFinite(words, [i for bad in guilty.values() for i in bad], min(guilty or told))


def stopped(found: NotFinite, way_out: str, *, late: bool = False) -> TrainingError:
    """What ends a run whose step is not finite; `way_out` is what leaves such steps out; `late`: it was taken."""
    return TrainingError(
        exit_code=ExitCode.NOT_FINITE, code="not-finite", what=found.words, unchanged="" if late else UNCHANGED,
        way_out=way_out,
    )  # fmt: skip


class _Alone(TorchDispatchMode):
    """Inside, a collective is an error: the other ranks take no part in this, and would never answer."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise RuntimeError(f"its forward or backward uses a collective, {func.name()}")
        return func(*args, **(kwargs or {}))


class _Search:
    """The samples of one micro-batch without which its gradient would be finite."""

    def __init__(
        self, replica: Strategy, microbatch: MicroBatch, forward: Forward, progress: Callable[[], object]
    ) -> None:
        self._replica, self._batch, self._forward, self._progress = replica, microbatch, forward, progress
        self._parameters = trainable(replica.model)
        self._runs = 0

    def bad(self) -> list[int]:
        """Their positions in the micro-batch; a whole group where it is bad only together, or the search too long."""
        everything = [*range(len(self._batch.work.indices))]
        return self._bad_of(everything) if self._is_bad(everything) else []

    def _bad_of(self, positions: list[int]) -> list[int]:
        """Of a group that is bad."""
        if len(positions) == 1 or self._runs >= MAX_RUNS:
            return positions
        half = len(positions) // 2
        bad = [part for part in (positions[:half], positions[half:]) if self._is_bad(part)]
        return [i for part in bad for i in self._bad_of(part)] or positions

    def _is_bad(self, positions: list[int]) -> bool:
        whole = len(positions) == len(self._batch.work.indices)
        try:
            return self._computed(None if whole else positions)
        except (ValueError, RuntimeError):
            if len(positions) > 1:
                raise
            return self._computed(positions * 2)  # batch norm needs two

    def _computed(self, positions: list[int] | None) -> bool:
        self._progress()
        self._runs += 1
        batch = self._batch
        size = len(batch.work.indices)
        inputs, targets = (p if positions is None else _only(p, positions, size) for p in (batch.inputs, batch.targets))
        # not .backward(): hooks would send the gradients to the other ranks
        with self._replica.alone(batch), _Alone():
            loss_sum = self._forward(inputs, targets)
            # a parameter that was not used gets zeros
            gradients = torch.autograd.grad(loss_sum, self._parameters, allow_unused=True, materialize_grads=True)
        return not all(bool(gradient.isfinite().all()) for gradient in gradients)


def _only(batch: Any, positions: list[int], size: int) -> Any:
    """The samples at `positions` of a batch of `size` samples."""
    return mapped(batch, lambda tensor: tensor[positions] if tensor.ndim and len(tensor) == size else tensor)


def _samples(indices: Sequence[int]) -> str:
    return f"samples {first_few([*map(str, indices)], MAX_NAMED)}"


def _parameters(names: Sequence[str], of: int) -> str:
    """The last ones first: from there backward carries what is not finite to those before."""
    return f"all {of} parameters" if len(names) == of > 1 else first_few(names[::-1], MAX_PARAMETERS)


def too_many(left_out: Collection[int], step: int) -> bool:
    """Whether more than MOST of the last OF_STEPS steps up to `step` were left out."""
    return sum(step - OF_STEPS < one <= step for one in left_out) > MOST


class LeftOut:
    """The steps that have changed nothing; the same on all ranks, because all find the same."""

    def __init__(self, policy: Policy, world: World, say: Callable[[str], None]) -> None:
        self._policy, self._world, self._say = policy, world, say
        self._steps: set[int] = set()

    def goes_back(self, step: int, found: NotFinite) -> bool:
        """Note that `step` was left out, and why; return whether to go on from an older state.

        A step goes back once, as parameters or memory may have been damaged before it. If it is not finite the second
        time either, it is left out for good.

        Raises:
            TrainingError: with NOT_FINITE, if there were too many; ReportedByPeer on all ranks but one.
        """
        if found.by_scale:
            self._say(f"step {step} is left out: {found.words}")
            return False
        again = step in self._steps
        self._steps.add(step)
        if too_many(self._steps, step):
            error = TrainingError(
                code="too-many-not-finite", exit_code=ExitCode.NOT_FINITE, most=MOST, steps=OF_STEPS, what=found.words
            )
            raise told_once(error, self._world, by=found.told_by)
        back = self._policy == "rollback" and not again
        self._say(f"step {step}: {found.words}" if back else f"step {step} is left out: {found.words}")
        return back
