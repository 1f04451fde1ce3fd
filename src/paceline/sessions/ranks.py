"""What the ranks of a session tell each other: sums, means, agreements, and what one does for all."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.control import gather_tensors, sum_over_ranks, together, told_once
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.sessions.observer import Observer
from paceline.tasks.metric import is_torchmetric, metric_members
from paceline.train.metrics import gathered_order, result_of, sort_rows, state_of


class Ranks:
    """The part of a session that knows nothing of training."""

    world: World
    _observer: Observer | None = None
    _evaluated_batch = 0
    """samples of the batch that is evaluated; 0: none is"""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.world.size

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device

    def sum(self, *numbers: float | Tensor) -> Any:
        """Each number added up over all ranks, as a float; several come back as a tuple (a collective)."""
        self._check_all_here()
        values = [float(number) for number in numbers]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = sum_over_ranks(mine, "numbers of the loop", where=self._moment)
        added: list[float] = found.tolist()
        return added[0] if len(added) == 1 else tuple(added)

    def mean(self, total: float | Tensor, count: float | Tensor) -> float:
        """The sum of `total` over all ranks, divided by that of `count` (a collective)."""
        total, count = self.sum(total, count)
        if count == 0:
            raise UsageError(code="mean-of-nothing")
        found = float(total / count)
        if self._observer is not None:
            self._observer.on_numbers({"s.mean": found})
        return found

    def any(self, flag: bool | Tensor) -> bool:
        """Whether any rank says so: all get the same answer (a collective)."""
        return self.sum(float(bool(flag))) > 0

    def gather(self, values: Tensor) -> Tensor:
        """(n, ...) of each rank -> (sum of n, ...) on every rank, in the order of ranks, nothing padded (a collective).

        In an evaluation loop, where they are one for each sample of the batch: in the order of the batch.
        """
        self._check_all_here()
        values = values.detach()
        with together(self.world):
            if values.ndim == 0:
                raise UsageError(code="gather-of-number")
        parts: list[Tensor] = gather_tensors(values, self.world, "tensors of the loop", where=self._moment)
        shapes = [([*part.shape], str(part.dtype)) for part in parts]
        if len({(tuple(shape[1:]), kind) for shape, kind in shapes}) > 1:
            raise told_once(UsageError(code="gather-shapes-differ", shapes=shapes), self.world)
        return sort_rows(parts, gathered_order(self._evaluated_batch, self.size))

    @property
    def _moment(self) -> tuple[int, ...]:
        """Where in the training the loop is: the same on all ranks that call one of these."""
        return ()

    def _check_all_here(self) -> None:
        """Raise UsageError in the body of an evaluation loop that some ranks do not run."""
        if 0 < self._evaluated_batch < self.size:
            raise UsageError(code="collective-in-evaluation", samples=self._evaluated_batch, ranks=self.size)

    def compute(self, metric: Any) -> Any:
        """What an object of torchmetrics, or a collection, comes to over the states of all ranks (a collective).

        Each rank has updated its own on its share. It stays as it is: reset it before the next evaluation.

        Returns:
            What `metric.compute()` gives on one process, the same on all ranks.

        Raises:
            UsageError: for anything else, and if no rank has updated it.
        """
        with together(self.world):
            if not is_torchmetric(metric):
                raise UsageError(code="compute-not-torchmetrics", kind=type(metric).__name__)
        members = metric_members(metric)
        states = {name: state_of(one) for name, one in members.items()}
        told = gather_tensors(states, self.world, "states of metrics", where=self._moment)
        with together(self.world, prepares=False):
            found = {name: result_of(one, [of_rank[name] for of_rank in told]) for name, one in members.items()}
        return found.get("", found)

    def main(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call `act` on rank 0 while the others wait; its result there, None elsewhere (a collective).

        What it raises is raised on rank 0, and ends the other ranks.
        """
        with together(self.world, prepares=False):
            return act(*arguments) if self.rank == 0 else None

    def print(self, *words: Any) -> None:
        """Print, on rank 0 only."""
        if self._observer is not None:
            self._observer.on_print(words)
        elif self.world.rank == 0:
            print(*words, flush=True)
