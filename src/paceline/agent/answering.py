"""A node's part in the guard: it reports to the head each second how its workers get on, and more when it is asked."""

from __future__ import annotations

import time

from paceline.agent.channel import Link
from paceline.agent.messages import Ask, Pulses, Release, Shown
from paceline.agent.workers import Workers
from paceline.contract.windows import Windows
from paceline.guard.collect import ADVANCE_SECONDS, Collection
from paceline.guard.pulse import sample_seconds
from paceline.observe.terminal import say


class Answering:
    """Of one node that is not the head's. It never waits, and whatever goes wrong in it harms nobody else."""

    def __init__(self, windows: Windows, *, look_seconds: float) -> None:
        self._sample_seconds = min(look_seconds, sample_seconds(windows))
        self._on = not windows.off
        self._sampled_seconds = 0.0
        self._collection: Collection | None = None

    @property
    def wait_seconds(self) -> float:
        """How long its owner may wait until `work` is to be called again."""
        return ADVANCE_SECONDS if self._collection else self._sample_seconds

    def hear(self, message: Ask | Release, workers: Workers) -> None:
        """Start what the head asks for."""
        try:
            match message:
                case Ask(question, patience_seconds):
                    self._collection = Collection(workers.watched(), question, patience_seconds=patience_seconds)
                case Release(ranks, word):
                    workers.release(ranks, word.encode())
        except Exception as error:  # the guard is never the cause
            self._give_up(error)

    def work(self, link: Link, workers: Workers) -> None:
        """Say what there is to say now."""
        try:
            self._work(link, workers)
        except Exception as error:  # the guard is never the cause
            self._give_up(error)

    def _work(self, link: Link, workers: Workers) -> None:
        now = time.monotonic()
        if self._on and now >= self._sampled_seconds + self._sample_seconds / 2:
            self._sampled_seconds = now
            link.send(Pulses(workers.number, tuple(workers.pulses())))
        if self._collection is not None and self._collection.advance():
            collection, self._collection = self._collection, None
            for evidence in collection.evidence(workers.watched()):
                link.send(Shown(collection.question, evidence))
            link.send(Shown(collection.question, None))

    def _give_up(self, error: Exception) -> None:
        self._on, self._collection = False, None
        say(f"warning: the guard of this node has failed, and is off: {type(error).__name__}: {error}")
