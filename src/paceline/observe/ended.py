"""How has a start ended, by the word of node 0's agent? For whoever looks later: any script leaves no summary."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from paceline.disk import writing
from paceline.disk.reading import decode

ENDED = "ended.json"


class Ended(msgspec.Struct, frozen=True):
    """The content of attempt-N/ended.json: the exit code of the whole start, the same on all nodes."""

    exit: Annotated[int, msgspec.Meta(ge=-255, le=255)]


def write_ended(attempt_dir: Path, code: int) -> None:
    """Write it down, whole or not at all; a full disk does not change how a run ends."""
    with suppress(OSError):
        writing.replace(attempt_dir / ENDED, msgspec.json.encode(Ended(code)))


def read_ended(attempt_dir: Path) -> int | None:
    """The exit code; None where the agent has written none: it still runs, or was killed."""
    with suppress(OSError):
        return decode(attempt_dir / ENDED, Ended).exit
    return None
