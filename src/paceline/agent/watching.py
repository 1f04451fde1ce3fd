"""The head's part of `paceline watch`: while somebody watches it says how all ranks are, and passes on what is asked.

Like the guard it is never the cause of anything: what goes wrong in here ends it, and the run goes on.
"""

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from paceline.agent.generation import Generation
from paceline.contract.evidence import Sample
from paceline.contract.live import CHECKPOINT_ASK, LIVE, WATCHED, Live, LiveRank
from paceline.disk import writing
from paceline.observe.terminal import say

LOOK_SECONDS = 0.9  # the head comes by once a second
WATCHED_SECONDS = 15.0  # since the last touch
CHECKPOINT = re.compile(f"{CHECKPOINT_ASK}(.*)", re.DOTALL)


class Watching:
    """Of one generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._folder = Path(generation.plan.attempt_dir)
        self._looked_seconds = 0.0
        self._touched, self._touched_seconds = 0, float("-inf")  # as its file system has it, and when we saw that
        self._off = not generation.plan.attempt_dir

    def look(self, ranks: Sequence[Sample]) -> None:
        """Do what is to be done now."""
        now = time.monotonic()
        if self._off or now < self._looked_seconds + LOOK_SECONDS:
            return
        self._looked_seconds = now
        try:
            if self._is_watched(now):
                live = Live(round(time.time(), 3), self._generation.own.number, tuple(LiveRank.of(r) for r in ranks))
                writing.replace(self._folder / LIVE, msgspec.json.encode(live))
            if [*take_asks(self._folder, CHECKPOINT)]:
                self._generation.own.ask_to_save()  # rank 0 is ours, and votes on it with all others
        except Exception as error:
            self._off = True
            say(f"warning: paceline watch sees this run no more: {type(error).__name__}: {error}")

    def _is_watched(self, now_seconds: float) -> bool:
        """No two machines' clocks are compared: what counts is that the file's time has changed."""
        try:
            touched = (self._folder / WATCHED).lstat().st_mtime_ns
        except FileNotFoundError:
            return False
        if touched != self._touched:
            self._touched, self._touched_seconds = touched, now_seconds
        return now_seconds < self._touched_seconds + WATCHED_SECONDS


def take_asks(folder: Path, ask: re.Pattern[str]) -> Iterator[str]:
    """Remove the files by which somebody asks for something, one by one: what their names say of who asks."""
    with os.scandir(folder) as entries:
        for entry in entries:
            match = ask.fullmatch(entry.name)
            if match is not None and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                Path(entry.path).unlink()
                yield match[1]
