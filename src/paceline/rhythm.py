"""How often a checkpoint is due, as users say it: 500 steps, or 10min (no torch here)."""

import re

from paceline.errors import UsageError

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def steps_or_seconds(checkpoint_every: int | str | None) -> tuple[int | None, float | None]:
    """(steps, seconds) between two checkpoints, one of them None, or both.

    Raises:
        UsageError: for a text that is no time.
    """
    if not isinstance(checkpoint_every, str):
        return checkpoint_every, None
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|min|h)", checkpoint_every)
    if found is None or not float(found[1]):
        raise UsageError(code="checkpoint-every-not-a-time", value=checkpoint_every)
    return None, float(found[1]) * _UNITS[found[2]]
