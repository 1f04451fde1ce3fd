"""How long nobody in a run may move until it counts as a stall; `guard.detectors` measures, and has the table."""

from __future__ import annotations

import math
import re
from enum import IntEnum

import msgspec

from paceline.errors import UsageError

GAP_FACTOR = 5.0
WARM_UP_STEPS = 5
EXPLICIT_FACTOR, EXPLICIT_FLOOR_SECONDS = 4.0, 60.0
JUMP_SECONDS = 5.0  # an agent that was not asked for so long was suspended, and perhaps its workers with it
MAX_SECONDS = 7 * 24 * 3600.0


class Stage(IntEnum):
    """What decides about the window; where ranks are in several, the last of them here."""

    STEP = 1
    DATA = 2
    WARM_UP = 3
    LONG = 4  # init, the first step, evaluate, checkpoint, close
    USER = 5


LEARNED = {  # floor and cap in seconds
    Stage.STEP: (10.0, 300.0),
    Stage.DATA: (30.0, 300.0),
    Stage.WARM_UP: (300.0, 1800.0),
    Stage.LONG: (300.0, 1800.0),
    Stage.USER: (300.0, 1800.0),
}
OF_STEPS = (Stage.STEP, Stage.DATA, Stage.WARM_UP)  # learn together: a phase that was short may be long the next time


class Windows(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the user has said about windows: `seconds` is None where the run shall tell by itself."""

    seconds: float | None = None
    off: bool = False

    @classmethod
    def parse(cls, text: str) -> Windows:
        """What `--stall-after TEXT` means: auto, off, or seconds such as 30, 7.5 or 30s.

        Raises:
            UsageError: names the choices.
        """
        word = text.strip().lower()
        if word in ("auto", "off"):
            return cls(off=True) if word == "off" else AUTO
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?s?", word)
        if match is None or not 0 < float(match[1]) <= MAX_SECONDS:
            raise UsageError(
                "--stall-after must be auto, off, or a number of seconds above 0 and up to a week (30, 7.5, 30s), "
                f"got {text!r}"
            )
        return cls(float(match[1]))

    def of(self, stage: Stage, largest_gap_seconds: float = 0.0) -> float:
        """How long nobody may move, in seconds, where the longest gap of this stage so far is known."""
        if self.off:
            return math.inf
        if self.seconds is not None:
            return max(EXPLICIT_FLOOR_SECONDS, EXPLICIT_FACTOR * self.seconds) if stage is Stage.LONG else self.seconds
        floor, cap = LEARNED[stage]
        return min(max(GAP_FACTOR * largest_gap_seconds, floor), cap)


AUTO = Windows()  # one object, which a plan leaves out as its default
