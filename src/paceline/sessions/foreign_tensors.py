"""Detects tensors that a loop trains without a prepared model: each rank would have a different gradient."""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.sessions.assumptions import PARAMETERS
from paceline.sessions.registered import instances


class ForeignTensors:
    """The tensors outside of prepared models on which losses depend, in two consecutive steps."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, int]] = {}  # by id: a weak reference and the version
        self._others: dict[int, Any] = {}  # all other leaves that require a gradient, at the end of the previous step

    def compare(self, leaves: Sequence[Tensor]) -> None:
        """Raise UsageError for a leaf that was changed or replaced since `keep`."""
        for leaf in leaves:
            record, other_ref = self._seen.get(id(leaf)), self._others.get(id(leaf))
            is_changed = record is not None and record[0]() is leaf and record[1] != leaf._version  # pyright: ignore[reportPrivateUsage]
            if is_changed or (other_ref is not None and other_ref() is leaf):
                raise PARAMETERS.error(
                    f"the loss depends on a tensor of shape {tuple(leaf.shape)} that the loop itself updates. Make it "
                    "an nn.Parameter of a module, and prepare this module with an optimizer"
                )
        self._seen, self._others = {}, {}

    def keep(self, leaves: Sequence[Tensor]) -> None:
        """Record the tensors at the end of a step."""
        self._seen = {id(leaf): (weakref.ref(leaf), leaf._version) for leaf in leaves}  # pyright: ignore[reportPrivateUsage]
        tensors = instances(Tensor) if leaves else []
        others = (t for t in tensors if t.requires_grad and t.is_leaf and id(t) not in self._seen)
        self._others = {id(tensor): weakref.ref(tensor) for tensor in others}
