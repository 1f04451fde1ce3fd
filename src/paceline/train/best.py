"""Which evaluation of a run is the best so far, and whether the run has waited long enough for a better one."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from paceline.errors import unknown

LESS_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer", "cer")


class Best:
    """The best evaluation so far. All ranks find the same, as their metrics are the same."""

    def __init__(
        self, keep: str | None, patience: int | None, names: Collection[str], saved: Mapping[str, Any]
    ) -> None:
        """From --keep-best, --patience, the names of what is evaluated, and `as_json` of an earlier start.

        Raises:
            UsageError: nothing of that name is evaluated.
        """
        self.keeps, self._patience = keep is not None, patience
        direction, _, self.name = (keep or "loss").rpartition(":")
        if direction not in ("", "min", "max") or self.name.partition("/")[0] not in names:
            raise unknown("metric for --keep-best", keep or "loss", [*names, *(f"max:{name}" for name in names)])
        less = any(word in LESS_IS_BETTER for word in self.name.lower().replace("/", "_").split("_"))
        self._sign = -1.0 if (direction or ("min" if less else "max")) == "min" else 1.0
        self.step: int = saved.get("step", 0)
        self.value: float | None = saved.get("value")
        self.since: int = saved.get("since", 0)
        """evaluations after it that were not better"""

    def judge(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the evaluation after `step` is the best so far.

        Raises:
            UsageError: it has not found what is to be compared.
        """
        if self.name not in metrics:
            raise unknown("metric for --keep-best", self.name, metrics)
        value = metrics[self.name]
        better = math.isfinite(value) and (self.value is None or self._sign * (value - self.value) > 0)
        if better:
            self.step, self.value, self.since = step, value, 0
        else:
            self.since += 1
        return better

    @property
    def is_over(self) -> bool:
        """Whether --patience is at its end."""
        return self._patience is not None and self.since >= self._patience

    @property
    def words(self) -> str:
        """Why the run ends."""
        return f"no better {self.name} in {self.since} evaluations: the best was {self.value} after step {self.step}"

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"step": self.step, "value": self.value, "since": self.since}
