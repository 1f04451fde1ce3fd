"""Numbers that a device has still to compute: a step reads all of them at once, and waits for a GPU one time only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from paceline.worker.guard import Guard

_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True)
class Pending(Generic[_T]):
    """What the host makes of `numbers`, (n,) float64 on any device, once it has read them."""

    numbers: Tensor
    made: Callable[[list[float]], _T]
    """where all ranks have read the same numbers all call it, as it may be a collective"""

    def then(self, change: Callable[[_T], _U]) -> "Pending[_U]":
        """The same numbers, of which `change` makes something else."""
        return Pending(self.numbers, lambda numbers: change(self.made(numbers)))

    def now(self) -> _T:
        """Read them (see `read_at_once`)."""
        return self.made(read_at_once([self])[0])


def read_at_once(pending: Sequence[Pending[Any]]) -> list[list[float]]:
    """The numbers of each; the host waits for the device at most once.

    Raises:
        StallError: if the guard has freed this rank: then the numbers are none.
    """
    everything = [one.numbers for one in pending]
    far = [numbers for numbers in everything if costs(numbers.device)]
    told: list[float] = torch.cat(far).tolist() if far else []
    Guard.of_process().check_freed()
    rest = iter(told)
    return [[*islice(rest, len(numbers))] if costs(numbers.device) else numbers.tolist() for numbers in everything]


def costs(device: torch.device) -> bool:
    """Whether the host has to wait for `device` to read a number there."""
    return device.type != "cpu"


def sent(numbers: Sequence[float], device: torch.device) -> Tensor:
    """(n,) float64 on `device`, without waiting for it."""
    here = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)
