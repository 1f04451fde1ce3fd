"""A node's part in the guard: it finds out for the head what exactly its workers do."""

from __future__ import annotations

import time

from paceline.agent.channel import Link
from paceline.agent.messages import Ask, Release, Shown
from paceline.agent.workers import Workers
from paceline.guard.collect import Collection
from paceline.observe.terminal import say


class Answering:
    """Of one node that is not the head's. It never waits, and whatever goes wrong in it harms nobody else."""

    def __init__(self) -> None:
        self._collection: Collection | None = None

    @property
    def busy(self) -> bool:
        """Whether `work` is to be called again within ADVANCE_SECONDS."""
        return self._collection is not None

    def hear(self, message: Ask | Release, workers: Workers) -> None:
        """Start what the head asks for."""
        try:
            match message:
                case Ask(question, patience_seconds):
                    self._collection = workers.collect(question, patience_seconds)
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
        if self._collection is not None and self._collection.advance():
            collection, self._collection = self._collection, None
            now = time.monotonic()
            for evidence in collection.evidence(workers.samples()):
                link.send(Shown(collection.question, evidence.turned(now)))
            link.send(Shown(collection.question, None))

    def _give_up(self, error: Exception) -> None:
        self._collection = None
        say(f"warning: the guard of this node has failed, and is off: {type(error).__name__}: {error}")
