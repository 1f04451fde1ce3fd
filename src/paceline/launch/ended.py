"""How has a start ended, by the word of node 0's agent? For whoever looks later: any script leaves no summary."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

ENDED = "ended.json"


class Ended(msgspec.Struct, frozen=True):
    """The content of attempt-N/ended.json: the exit code of the whole start, the same on all nodes."""

    exit: int


def write_ended(attempt_dir: Path, code: int) -> None:
    """Write it down, whole or not at all; a full disk does not change how a run ends."""
    partial = attempt_dir / f".{ENDED}.partial"
    with suppress(OSError):
        partial.write_bytes(msgspec.json.encode(Ended(code)))
        partial.replace(attempt_dir / ENDED)


def read_ended(attempt_dir: Path) -> int | None:
    """The exit code; None where the agent has written none: it still runs, or was killed."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((attempt_dir / ENDED).read_bytes(), type=Ended).exit
    return None
