"""Loss scaling for fp16: gradients below 6e-8 would be zeros there, and above 65,504 infinite.

Losses are scaled before each backward of a step, and gradients after their sum, where they are divided by the weight
anyway. All ranks judge the sum, so an overflow on one leaves the step out on all, and halves the scale. It is a power
of two: it changes no bit of a gradient that is neither too small nor too large, at any world size.
"""

from collections.abc import Mapping
from typing import Any

FIRST = 2.0**16
LARGEST, SMALLEST = 2.0**24, 2.0**-14
STEPS_UNTIL_DOUBLED = 2000


def loss_scale(precision: str) -> "LossScale | None":
    """The scale to begin with, where there is one."""
    return LossScale() if precision == "fp16" else None


class LossScale:
    """The same on all ranks, since all have judged the same sums."""

    def __init__(self) -> None:
        self.value = FIRST
        self.left_out = 0
        """steps of the run that have overflowed"""
        self._good = 0  # steps since the scale has changed

    def overflow(self, where: str) -> str:
        """Halve the scale, as gradients of the step at `where` are not finite; in words, empty where it cannot help."""
        if self.value <= SMALLEST:
            return ""
        self.value, self._good, self.left_out = self.value / 2, 0, self.left_out + 1
        return f"a gradient is beyond fp16's range at {where}: the loss scale is now {self.value:g}"

    def good(self) -> None:
        """A step was taken."""
        self._good += 1
        if self._good == STEPS_UNTIL_DOUBLED and self.value < LARGEST:
            self.value, self._good = self.value * 2, 0

    def numbers(self) -> dict[str, Any]:
        """What `take` goes on with."""
        return {"loss_scale": [self.value, self._good, self.left_out]}

    def take(self, found: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; one of another precision has no scale."""
        self.value, self._good, self.left_out = found.get("loss_scale", (FIRST, 0, 0))
