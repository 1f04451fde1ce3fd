"""Who speaks for a worker whose main thread is stuck? A thread of its own, four times a second.

It says that the interpreter still runs, counts the collectives that torch has called from C++, answers the agent's
question for stacks and collectives, and cuts the connections of a collective that will never end. It holds no lock that
the main thread may want, imports nothing, and whatever goes wrong in it ends there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from paceline.contract.box import WATCHED, Box
from paceline.contract.evidence import Answer
from paceline.worker import recorder
from paceline.worker.ledger import Ledger
from paceline.worker.native import NativeStacks
from paceline.worker.release import Connections, abort_nccl

WAKE_SECONDS = 0.25


class Watcher:
    """The thread's state; `start` begins it, `stop` ends it."""

    def __init__(
        self,
        box: Box,
        ledger: Ledger,
        connections: Connections,
        native: NativeStacks | None,
        complain: Callable[[BaseException], None],
    ) -> None:
        self._box, self._ledger, self._connections, self._native = box, ledger, connections, native
        self._complain = complain
        self._main = threading.main_thread().ident or 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-guard", daemon=True)
        self._last, self._still, self._answered = (0, 0), 0, 0

    def start(self) -> None:
        """Begin."""
        self._box.put("ready", WATCHED if self._native is None else self._native.ready())
        self._thread.start()

    def stop(self) -> None:
        """End it before the process ends, so that it is not within torch when torch is taken down."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.wait(WAKE_SECONDS):
            for part in (self._beat, self._reply, self._release):
                try:
                    part()
                except Exception as error:
                    self._complain(error)

    def _beat(self) -> None:
        box = self._box
        box.put("beat_ns", time.monotonic_ns())
        if self._native is not None:
            box.put("ready", self._native.ready())
        self._ledger.end_completed()
        now = (sum(recorder.numbers().values()), box.get("ops"))
        self._still = self._still + 1 if now == self._last else 0
        self._last = now
        box.put("enqueued", now[0])
        box.put("waiting", self._ledger.waiting or (self._still > 0 and recorder.in_flight()))

    def _reply(self) -> None:
        asked = self._box.get("asked")
        if asked <= self._answered:
            return
        self._answered = asked
        groups = {group.name: group for group in [*self._ledger.groups.values()] if group.still_there() is not None}
        stacks = recorder.stacks(self._main)
        answer = Answer(
            ops=tuple(recorder.merged(self._box.ring(), groups, stacks[0] if stacks else None)),
            groups={group.name: group.members for group in groups.values()} | recorder.members(),
            stacks=stacks,
            enqueued=self._last[0],
        )
        self._box.answer(asked, msgspec.json.encode(answer))

    def _release(self) -> None:
        if not self._box.get("released"):
            return
        self._connections.shut()
        if (module := recorder.distributed()) is not None:
            abort_nccl(module)
