"""Tensors that a loop trains by hand, without a model or an optimizer: each rank would have a gradient of its own."""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.sessions.assumptions import PARAMETERS
from paceline.sessions.registered import instances


class ForeignTensors:
    """The tensors that are in no prepared model and that losses depend on, in two steps that follow each other."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, int]] = {}  # by id: a weak reference, and its version
        self._others: dict[int, Any] = {}  # all others that require a gradient, at the end of the step before

    def compare(self, found: Sequence[Tensor]) -> None:
        """Raise UsageError for one that was changed since `keep`, or was put in the place of one that was there."""
        for leaf in found:
            seen, other = self._seen.get(id(leaf)), self._others.get(id(leaf))
            is_changed = seen is not None and seen[0]() is leaf and seen[1] != leaf._version  # pyright: ignore[reportPrivateUsage]
            if is_changed or (other is not None and other() is leaf):
                raise PARAMETERS.error(
                    f"the loss depends on a tensor of shape {tuple(leaf.shape)} that the loop trains by hand. Make it "
                    "an nn.Parameter of a module, and prepare that with an optimizer"
                )
        self._seen, self._others = {}, {}

    def keep(self, found: Sequence[Tensor]) -> None:
        """Note what is there at the end of a step."""
        self._seen = {id(leaf): (weakref.ref(leaf), leaf._version) for leaf in found}  # pyright: ignore[reportPrivateUsage]
        tensors = instances(Tensor) if found else []
        self._others = {
            id(one): weakref.ref(one)
            for one in tensors
            if one.requires_grad and one.is_leaf and id(one) not in self._seen
        }
