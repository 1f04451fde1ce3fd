"""Keeps a training's state safe between two steps: compares replicas, takes snapshots, saves checkpoints."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from paceline.checkpoint.across import OtherHosts
from paceline.checkpoint.snapshot import SnapshotWriter, inherited
from paceline.checkpoint.state import Held
from paceline.collectives.control import gather_words, together
from paceline.contract.evidence import Phase
from paceline.errors import ExitCode, PacelineError
from paceline.observe import events
from paceline.observe.folder import CHECKPOINTS
from paceline.observe.writers import EventWriter
from paceline.stepping.votes import Votes
from paceline.store.store import Checkpoints, Claim
from paceline.train.alike import check_replicas
from paceline.train.resume import Content, Holder, Origin, Place, newest_origin
from paceline.train.saving import Saver, is_writer, save_alone
from paceline.worker.guard import Guard
from paceline.worker.world import World

WRONG = (ExitCode.DIVERGED,)  # ends after which the state is not worth keeping
NOBODY = '{"guilty": []}'  # what the guard would say where none is to blame


@dataclass(frozen=True)
class Rhythm:
    """After how many steps each is due; None: not by itself."""

    watch: int
    snapshot: int
    checkpoint: int | None
    seconds: float | None = None
    """between two checkpoints"""
    keep: int = 2
    """so many checkpoints stay"""


class Keeping:
    """This rank's side of it; all calls are at the same steps on all ranks."""

    def __init__(
        self,
        holder: Holder,
        place: Place,
        origin: Origin | None,
        rhythm: Rhythm,
        *,
        writer: EventWriter,
        say: Callable[[str], None],
        enter: Callable[[Phase], object],
    ) -> None:
        """A collective.

        Raises:
            UsageError: if the folder for checkpoints cannot be taken; ToldElsewhere on all ranks but one.
        """
        self._holder, self._world, self._rhythm, self._writer, self._say = holder, holder.world, rhythm, writer, say
        self._enter = enter
        self._folder, self._checkpoints = place.folder, Checkpoints(place.folder / CHECKPOINTS)
        self._claim = Claim(place.attempt, place.generation)
        with together(self._world):
            if self._world.rank == 0:
                # Also where none is due: the run may be asked to stop, and a rank left of an older generation must
                # not publish any more.
                self._checkpoints.claim(*self._claim, place.notices.append)
                if origin is not None and origin.files and (unwritten := self._unwritten(origin.step)):
                    writer.write(events.Vouched(origin.step, unwritten))  # for the start before: this one has none yet
        self._saver = Saver(
            self._checkpoints, self._world, holder.virtual_ranks, self._claim,
            keep=rhythm.keep, flush_events=writer.flush, say=say,
        )  # fmt: skip
        self._snapshot_writer = _snapshot_writer(place, origin, self._world)
        self._takes_snapshots = all(gather_words(self._snapshot_writer is not None, self._world))
        self._across: OtherHosts | None = None
        self._snapshots, self._snapshot_seconds, self._snapshot_bytes = 0, 0.0, 0
        self._saved_at = time.monotonic()
        self.failed = ""
        """why the last checkpoint could not be written; empty if it could. The same on all ranks, after `end`"""

    def votes(self) -> Votes:
        """For the totals of the next step."""
        votes, seconds = self._saver.votes(), self._rhythm.seconds
        if seconds is None or self._world.rank:  # one clock, or ranks would save different steps
            return votes
        return votes._replace(due=float(time.monotonic() - self._saved_at >= seconds))

    def between(self, step: int, votes: Votes, content: Callable[[], Content], *, save: bool) -> float:
        """Do what is due after `step` (a collective); `votes` are the last step's, added up, `content` is asked if due.

        Returns:
            The seconds that training stood still.

        Raises:
            TrainingError: if the replicas differ.
        """
        began = time.perf_counter()
        rhythm = self._rhythm
        self._enter(Phase.CHECKPOINT)
        self._saver.agreed(votes)
        save = save or votes.due > 0 or bool(rhythm.checkpoint and step % rhythm.checkpoint == 0)
        snapshot = self._takes_snapshots and step % rhythm.snapshot == 0
        watch = step % rhythm.watch == 0
        if not (save or snapshot or watch):
            self._report()
            return 0.0
        held = self._holder.state()
        if save or watch:  # never keep what is damaged already
            try:
                check_replicas(held, self._world, step, [part.replica.optimizer for part in self._holder.parts])
            except PacelineError:
                self._saver.settle()  # the checkpoint on its way is of a step when all was well
                raise
        if save:
            self._saver.begin(held, step, content())
            self._saved_at = time.monotonic()
        if snapshot:
            self._snapshot(held, step, content())
        self._report()
        return time.perf_counter() - began

    def end(self) -> None:
        """Wait until the last checkpoint is on disk (a collective)."""
        self.settle()
        if self._snapshots:
            size = self._snapshot_bytes
            self._writer.write(events.Snapshotted(self._snapshots, self._snapshot_seconds, size))
        self.failed = gather_words(self._saver.failed, self._world)[0]

    def settle(self) -> float:
        """Wait until no checkpoint is on its way any more; the seconds that took (a collective)."""
        began = time.perf_counter()
        self._enter(Phase.CHECKPOINT)
        self._saver.settle()
        self._report()
        return time.perf_counter() - began

    @property
    def can_go_back(self) -> bool:
        """Whether states are kept on the way."""
        rhythm = self._rhythm
        return bool(rhythm.checkpoint or rhythm.seconds or self._takes_snapshots)

    def newest(self) -> Origin | None:
        """The newest state that is kept (a collective)."""
        self.settle()
        return newest_origin(self._checkpoints, self._world, self._say, memory=True)

    def save_after(self, error: BaseException, step: int, content: Callable[[], Content]) -> None:
        """After an error: publish the state after `step`, unless that is what is wrong.

        If the guard's word that has freed this rank (if any) makes it the writer. No collective: a rank that stands
        still would not come.
        """
        if getattr(error, "exit_code", None) in WRONG:
            return
        world, word, found = self._world, Guard.of_process().released(), content()
        there = any(saved == step for saved, _ in self._checkpoints.entries())
        if there or not is_writer(word or NOBODY, world.rank, world.size):
            return
        self._enter(Phase.CHECKPOINT)  # the agent waits for a rank that it sees at work
        try:
            if unwritten := self._unwritten(step):
                self._writer.write(events.Vouched(step, unwritten))
            self._writer.flush()
            path = save_alone(
                self._holder, step, found, self._checkpoints, self._claim, keep=self._rhythm.keep, say=self._say
            )
            words = f"the state after step {step} is saved: {path}"
        except Exception as error:  # the run ends with the stall, whatever this is
            words = f"the state after step {step} cannot be saved: {error}"
        print(f"rank {world.rank}: {words}", file=sys.stderr, flush=True)

    def _unwritten(self, step: int) -> list[int]:
        """The ranks that have not written down `step`, of which the state here has their part."""
        others: set[int] = set()
        with suppress(OSError):
            files = events.event_files(self._folder)
            others = {*files, *range(self._world.size)} - {self._world.rank}
            for rank, path in files.items():
                own = (e for e in events.last_events(path) if isinstance(e, events.Step | events.Started))
                if isinstance(newest := next(own, None), events.Step) and newest.step >= step:
                    others.discard(rank)
        return sorted(others)

    def abandon(self) -> None:
        """After an error: wait for the threads; what is not published never will be."""
        self._saver.abandon()

    def _snapshot(self, held: Sequence[Held], step: int, content: Content) -> None:
        began, world = time.perf_counter(), self._world
        if world.local_size < world.size:  # a host that is lost takes with it what only its ranks hold
            if self._across is None:
                self._across = OtherHosts(held, world)
                if why := self._across.why_not:
                    self._takes_snapshots = False
                    self._say(f"no snapshots in memory: {why}. A restart goes on from a checkpoint on disk")
            others = self._across.bring(held) if self._takes_snapshots else None
            if others is None:
                return
            held = [*held, *others]
        if self._snapshot_writer is None:  # there was no memory
            return
        try:
            self._snapshot_bytes = self._snapshot_writer.write(held, step, msgspec.to_builtins(content))
        except OSError as error:
            self._snapshot_writer = None
            self._say(
                f"no snapshots from now on: rank {world.rank} has no memory for them ({error.strerror}). "
                "Restarted workers will resume from a checkpoint on disk."
            )
            return
        self._snapshots += 1
        self._snapshot_seconds += time.perf_counter() - began

    def _report(self) -> None:
        for done in self._saver.take_done():
            self._writer.write(done)
            if done.failure:
                self._say(f"WARNING: the checkpoint of step {done.step} could not be written: {done.failure}")


def _snapshot_writer(place: Place, origin: Origin | None, world: World) -> SnapshotWriter | None:
    files = inherited()
    if world.local_rank >= len(files):
        return None
    pair = files[world.local_rank]
    spared = next((file for file in pair if origin and file in origin.files), None)
    return SnapshotWriter(pair, world.local_rank, world.local_size, place.generation, spared=spared)
