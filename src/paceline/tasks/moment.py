"""What a task's own functions are told while it is trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Moment:
    """A training between two steps. On every rank the same, but for `rank`."""

    step: int
    """optimizer steps done"""
    total_steps: int
    """of the run; 0 where nobody knows, of passes over a stream"""
    epoch: int
    """that step's, from 0"""
    loss: float
    """mean of that step's global batch"""
    lr: float
    grad_norm: float | None
    """global, before clipping; None where nothing is clipped"""
    metrics: Mapping[str, float]
    """of the newest evaluation; empty before the first"""
    model: nn.Module
    """the plain model; under fsdp its parameters are shares"""
    rank: int
    world_size: int
    stop: Callable[[], None]
    """end the training after the next step, on all ranks, as if that had been its last; one rank may ask alone"""


Callback = Callable[[Moment], object]
