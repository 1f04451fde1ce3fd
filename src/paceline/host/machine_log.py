"""Writes down once a second what this machine does, in a thread of its own: machine-<node>.jsonl in a run's folder.

It is never the cause of anything: whatever goes wrong in it ends it, with a line, and the run goes on.
"""

import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paceline.contract.orders import STOP_SIGNALS
from paceline.host.sampling import Sampler
from paceline.observe.bounded import BoundedWriter
from paceline.observe.machine import file_name
from paceline.observe.terminal import say

EVERY_SECONDS = 1.0
END_SECONDS = 0.5  # for a sample that is just being taken


class MachineLog:
    """The log of one node, as long as it is open; see `start`."""

    def __init__(self, run_dir: Path, node: int, pids: Mapping[int, int]) -> None:
        """`pids` are those of the ranks here: rank -> pid."""
        self._writer = BoundedWriter(run_dir / file_name(node))
        self._pids, self._over = dict(pids), threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-machine", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def write(self, record: msgspec.Struct) -> None:
        """Add a record of the caller's own."""
        self._writer.write(record)

    def close(self) -> None:
        """Write no more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(END_SECONDS)
        self._writer.close()

    def _run(self) -> None:
        # signals are for the main thread: it blocks them when its exit code is decided
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            sampler = Sampler()
            while not self._over.wait(EVERY_SECONDS) and not self._writer.failed:
                self._writer.write(sampler.sample(self._pids))
        except Exception as error:  # a kernel whose /proc is another: nothing is known then, and nothing else happens
            say(f"warning: what this machine does is not recorded: {type(error).__name__}: {error}")
