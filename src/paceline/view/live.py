"""Reads a run while it goes on: what is new since the last look, and of long files only the end.

The head agent of a run, if it is asked, writes how each rank gets on at this moment (`Live` in contract/evidence.py).
Other runs have what the ranks themselves write: their last step, and for how long nothing has come.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from paceline.contract.evidence import LIVE, MAX_LIVE_BYTES, WATCHED, Live
from paceline.disk import writing
from paceline.disk.owners import opened
from paceline.disk.reading import decode
from paceline.guard.detectors import Spent, slow_rank
from paceline.observe.events import Checkpointed, Event, Started, Step, decode_event, event_files
from paceline.observe.machine import MachineUse, decode_record, machine_files
from paceline.view.rank_now import HISTORY, History, RankNow
from paceline.view.words import one_line

FIRST_BYTES, LOOK_BYTES = 1 << 16, 1 << 20  # from its end at first, then at most at each look
SILENT_SECONDS = 5.0  # an agent that writes each second
WINDOW_STEPS = 50


class Growing:
    """The new lines of a file, at each look; at the first one those at its end."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor, self._offset, self._rest = path, -1, 0, b""

    def lines(self) -> Sequence[bytes]:
        """The whole lines that are new."""
        with suppress(OSError):
            if self._descriptor < 0:
                self._open()
            elif self._path.lstat().st_ino != os.fstat(self._descriptor).st_ino:  # thinned: old ones are put together
                self.close()
                self._open()
                self._offset, self._rest = os.fstat(self._descriptor).st_size, b""
            size = os.fstat(self._descriptor).st_size
            if size - self._offset > LOOK_BYTES:  # more than anybody reads in a second: what is old is left out
                self._offset, self._rest = size - LOOK_BYTES, b""
            data = os.pread(self._descriptor, LOOK_BYTES, self._offset)
            self._offset += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > LOOK_BYTES:
                self._rest = b""
            return whole
        return ()

    def _open(self) -> None:
        with opened(self._path) as it:
            self._descriptor, self._offset = os.dup(it.descriptor), max(0, it.found.st_size - FIRST_BYTES)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


@dataclass(frozen=True)
class RunNow:
    """A run as it is shown: its ranks, and what rank 0 has written of its steps."""

    ranks: tuple[RankNow, ...] = ()
    live: bool = False  # by the word of its agent
    step: int | None = None
    losses: tuple[float, ...] = ()
    samples_per_second: float | None = None
    steps_per_second: float | None = None
    saved_step: int | None = None  # of the last checkpoint on disk
    machines: dict[int, MachineUse] = field(default_factory=dict[int, MachineUse])
    words: str = ""  # who is slow


class LiveReader:
    """Reads one run, look by look. Without `may_ask` nothing is written into its folder."""

    def __init__(self, run_dir: Path, *, may_ask: bool) -> None:
        self.run_dir, self.may_ask = run_dir, may_ask
        self._attempt: Path | None = None
        self._live_time, self._live_seconds = 0.0, float("-inf")  # its agent's clock, and when we saw that change
        self._seen_live = False  # once: what was there before we came is old
        self._events: dict[int, Growing] = {}
        self._ranks: dict[int, History] = {}
        self._steps: deque[Step] = deque(maxlen=HISTORY)
        self._saved: int | None = None

    def look(self, attempt: Path | None) -> RunNow:
        """The run now; `attempt` is its newest start's folder."""
        if attempt != self._attempt:
            self._attempt, self._seen_live, self._live_seconds = attempt, False, float("-inf")
            self._ranks = {}
        if self.may_ask and attempt is not None:
            with suppress(OSError):  # a full disk: then we see what the ranks write
                refresh(attempt / WATCHED)
        live = self._read_live(attempt) if attempt is not None else None
        with suppress(OSError):
            self._read_events(all_ranks=live is None)
        for one in live.ranks if live is not None else ():
            self._ranks.setdefault(one.rank, History(one.rank)).see_live(one)
        machines = self._read_machines()
        speed = rates(self._steps)
        ranks = [history.now() for _, history in sorted(self._ranks.items())]
        hosts = {rank: one_line(history.host, 30) for rank, history in self._ranks.items()}
        slow = slow_rank(spent, hosts) if len(spent := self._spent()) > 1 else None
        return RunNow(
            ranks=tuple(_with_use(one, machines, self._ranks[one.rank], slow and slow.rank) for one in ranks),
            live=live is not None,
            step=self._steps[-1].step if self._steps else None,
            losses=tuple(step.loss for step in self._steps),
            samples_per_second=speed[0],
            steps_per_second=speed[1],
            saved_step=self._saved,
            machines=machines,
            words=slow.words if slow is not None else "",
        )

    def close(self) -> None:
        """Let go of the files."""
        for file in self._events.values():
            file.close()
        self._events = {}

    def _read_live(self, attempt: Path) -> Live | None:
        try:
            found = decode(attempt / LIVE, Live, limit_bytes=MAX_LIVE_BYTES)
        except OSError:
            return None
        now = time.monotonic()
        if found.unix_time != self._live_time:  # clocks of two machines are not compared: it has changed, that counts
            if self._seen_live:
                self._live_seconds = now
            self._live_time = found.unix_time
        self._seen_live = True
        return found if now < self._live_seconds + SILENT_SECONDS else None

    def _read_events(self, *, all_ranks: bool) -> None:
        for rank in event_files(self.run_dir) if all_ranks else [0]:
            file = self._events.setdefault(rank, Growing(self.run_dir / f"events-{rank}.jsonl"))
            for line in file.lines():
                if (event := decode_event(line)) is not None:
                    self._take(rank, event, all_ranks=all_ranks)

    def _take(self, rank: int, event: Event, *, all_ranks: bool) -> None:
        history = self._ranks.setdefault(rank, History(rank)) if all_ranks else None
        match event:
            case Step():
                if rank == 0:
                    self._steps.append(event)
                if history is not None:
                    history.see_step(event)
            case Started():
                if rank == 0:
                    self._steps.clear()
                if history is not None:
                    history.host = event.host
            case Checkpointed() if not event.failure:
                self._saved = event.step
            case _:
                pass

    def _read_machines(self) -> dict[int, MachineUse]:
        found: dict[int, MachineUse] = {}
        with suppress(OSError):
            for node, path in machine_files(self.run_dir).items():
                with closing(Growing(path)) as file:
                    records = (decode_record(line) for line in reversed(file.lines()))
                    newest = next((record for record in records if isinstance(record, MachineUse)), None)
                if newest is not None:
                    found[node] = newest
        return found

    def _spent(self) -> Spent:
        found = {rank: spent for rank, history in self._ranks.items() if (spent := history.spent()) is not None}
        return found if len(found) == len(self._ranks) else {}


def rates(steps: Sequence[Step]) -> tuple[float | None, float | None]:
    """Samples and steps a second over the last steps; evaluations and checkpoints take their time, too."""
    recent = [*steps][-WINDOW_STEPS:]
    seconds = recent[-1].unix_time - recent[0].unix_time if recent else 0.0
    if not seconds > 0:
        return None, None
    return sum(later.samples for _, later in pairwise(recent)) / seconds, (len(recent) - 1) / seconds


def _with_use(one: RankNow, machines: dict[int, MachineUse], history: History, slowest: int | None) -> RankNow:
    one = replace(one, slowest=slowest == one.rank)
    nodes = sorted(machines, key=lambda node: node != history.node)
    machine = next((machines[node] for node in nodes if one.rank in machines[node].ranks), None)
    if machine is None:
        return one
    place = sorted(machine.ranks).index(one.rank)  # ranks take the GPUs of their node in order
    gpu = machine.gpus[place] if len(machine.gpus) >= len(machine.ranks) else None
    return replace(one, host=one.host or machine.host, use=machine.ranks[one.rank], gpu=gpu)


def refresh(path: Path) -> None:
    """Make a file of ours, or make it younger.

    Raises:
        OSError: it cannot be done.
    """
    with os.fdopen(writing.keep(path), "r+b", 0) as file:
        os.utime(file.fileno())
