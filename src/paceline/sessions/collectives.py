"""The collectives of a session: sums, means, gathers, metrics, and calls on rank 0."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.control import gather_tensors, raise_on_all_ranks, report_on_one_rank, sum_over_ranks
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.sessions.observer import Observer
from paceline.tasks.metric import is_torchmetric, metric_members
from paceline.train.metrics import gathered_order, result_of, sort_rows, state_of


class SessionCollectives:
    """The methods of a session that do not depend on training."""

    world: World
    _observer: Observer | None = None
    _evaluated_batch = 0  # samples of the current batch of an evaluation; 0 outside of an evaluation

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.world.size

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    def sum(self, *numbers: float | Tensor) -> Any:
        """The sum of a number over all ranks, as a float. For several numbers, a tuple of sums (a collective)."""
        self._check_all_here()
        values = [float(number) for number in numbers]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        sums: list[float] = sum_over_ranks(tensor, "numbers of the loop", where=self._moment).tolist()
        return sums[0] if len(sums) == 1 else tuple(sums)

    def mean(self, total: float | Tensor, count: float | Tensor) -> float:
        """The sum of `total` over all ranks, divided by that of `count` (a collective)."""
        total, count = self.sum(total, count)
        if count == 0:
            raise UsageError(code="mean-of-nothing")
        mean = float(total / count)
        if self._observer is not None:
            self._observer.on_numbers({"s.mean": mean})
        return mean

    def any(self, flag: bool | Tensor) -> bool:
        """Whether `flag` is true on any rank; the same result on all ranks (a collective)."""
        return self.sum(float(bool(flag))) > 0

    def gather(self, values: Tensor) -> Tensor:
        """(n, ...) on each rank -> (sum of n, ...) on every rank, in rank order, without padding (a collective).

        In an evaluation loop, for one value per sample of the batch, the result is in the order of the batch.
        """
        self._check_all_here()
        values = values.detach()
        with raise_on_all_ranks(self.world):
            if values.ndim == 0:
                raise UsageError(code="gather-of-number")
        parts: list[Tensor] = gather_tensors(values, self.world, "tensors of the loop", where=self._moment)
        shapes = [([*part.shape], str(part.dtype)) for part in parts]
        if len({(tuple(shape[1:]), dtype) for shape, dtype in shapes}) > 1:
            raise report_on_one_rank(UsageError(code="gather-shapes-differ", shapes=shapes), self.world)
        return sort_rows(parts, gathered_order(self._evaluated_batch, self.size))

    @property
    def _moment(self) -> tuple[int, ...]:
        """The position of the loop in the training. It must be equal on all ranks that call a collective."""
        return ()

    def _check_all_here(self) -> None:
        """Raise UsageError in the body of an evaluation loop that some ranks do not run."""
        if 0 < self._evaluated_batch < self.size:
            raise UsageError(code="collective-in-evaluation", samples=self._evaluated_batch, ranks=self.size)

    def compute(self, metric: Any) -> Any:
        """Compute a torchmetrics object or collection from the states of all ranks (a collective).

        Each rank has updated its object with its samples. The object does not change: reset it before the next
        evaluation.

        Returns:
            The result of `metric.compute()` on one process, equal on all ranks.

        Raises:
            UsageError: for any other object, and if no rank has updated it.
        """
        with raise_on_all_ranks(self.world):
            if not is_torchmetric(metric):
                raise UsageError(code="compute-not-torchmetrics", kind=type(metric).__name__)
        members = metric_members(metric)
        states = {name: state_of(member) for name, member in members.items()}
        states_by_rank = gather_tensors(states, self.world, "states of metrics", where=self._moment)
        with raise_on_all_ranks(self.world, prepares=False):
            results = {name: result_of(m, [state[name] for state in states_by_rank]) for name, m in members.items()}
        return results.get("", results)

    def main(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call `act` on rank 0 while the other ranks wait (a collective).

        Returns its result on rank 0, and None on other ranks. An error in it ends all ranks.
        """
        with raise_on_all_ranks(self.world, prepares=False):
            return act(*arguments) if self.rank == 0 else None

    def print(self, *words: Any) -> None:
        """Print, on rank 0 only."""
        if self._observer is not None:
            self._observer.on_print(words)
        elif self.world.rank == 0:
            print(*words, flush=True)
