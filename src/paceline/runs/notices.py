"""What the head's agent has found in a script while it ran: attempt-N/notices.jsonl, a line for each."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from paceline.runs import writing
from paceline.runs.reading import read_lines
from paceline.runs.terminal import clean

NOTICES = "notices.jsonl"
MOST, MOST_CHARS = 100, 500


class Noted(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line."""

    unix_time: float
    words: str
    step: int = 0
    kind: str = ""
    """what was found: "diverged", "swallowed", ...; empty for what says nothing of the script"""


def note(attempt_dir: Path, noted: Noted) -> None:
    """Add one; a full disk does not keep a run from going on."""
    with suppress(OSError), os.fdopen(writing.keep(attempt_dir / NOTICES, append=True), "ab", 0) as file:
        file.write(msgspec.json.encode(noted) + b"\n")


def notices(attempt_dir: Path) -> Iterator[Noted]:
    """What was found, the oldest first; at most a hundred."""
    with suppress(OSError):
        for _, line in zip(range(MOST), read_lines(attempt_dir / NOTICES), strict=False):
            with suppress(msgspec.MsgspecError):
                found = msgspec.json.decode(line, type=Noted)
                yield replace(found, words=clean(found.words)[:MOST_CHARS])
