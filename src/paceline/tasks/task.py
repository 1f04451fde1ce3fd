"""A task is what a user brings: a model, data and a loss, which know nothing of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.data import Dataset

Split = Literal["train", "test"]
Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
"""(outputs, targets) -> one loss per sample, shape (B, ...), or (losses, weights) of equal shapes (B, ...)."""
Metric = Callable[[Any, Any], Tensor]
"""(outputs, targets) -> one number per sample, shape (B,), averaged over the data."""


@dataclass(frozen=True)
class Task:
    """A single-device training, ready to be run on any number of ranks.

    The loss must not average: paceline sums over samples (or tokens: losses and weights of shape (B, T)), over
    micro-batches and over ranks, and divides once by the total weight. Only so is an uneven batch weighted right.
    """

    make_model: Callable[[], nn.Module]
    make_dataset: Callable[[Split], Dataset[Any]]
    """a map-style dataset of (input, target) pairs, the same on every rank; the split "test" is evaluated"""
    loss: Loss
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    collate: Callable[[list[Any]], Any] | None = None
    """samples -> batch, by default torch's default_collate"""
