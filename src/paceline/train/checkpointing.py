"""Keeps a training's state safe between steps: compares replicas, takes snapshots, writes and publishes checkpoints.

A checkpoint is a copy, taken between two steps, that a thread of each rank writes while training continues. Ranks agree
in a later step's totals (`votes`) that all files are there, and rank 0 publishes the checkpoint. No thread uses a
collective: their order would differ between ranks.

If a rank hangs and never answers, the guard breaks up the collective in which the others wait. A collective is then no
longer possible, so the lowest rank that is not guilty saves the state alone (`save_alone`), if it holds all of it: its
parameters are those after the last complete step, its buffers are restored.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from paceline.checkpoint.format import FORMAT, Manifest, ShardFile, shard_name
from paceline.checkpoint.manager import Checkpoints, Claim, Report
from paceline.checkpoint.resume import ResumePoint, RunLocation, TrainerState, newest_state
from paceline.checkpoint.shards import ShardLayout, fill, layout, rank_part
from paceline.checkpoint.snapshots import OtherHosts, SnapshotWriter, inherited
from paceline.checkpoint.state import TensorShard
from paceline.collectives.control import gather_words, together
from paceline.errors import ExitCode, PacelineError, TrainingError
from paceline.protocol.evidence import Phase
from paceline.rank.guard import Guard
from paceline.rank.world import World
from paceline.runs import events
from paceline.runs.folder import CHECKPOINTS
from paceline.runs.writers import EventWriter
from paceline.runs.writing import write_new
from paceline.stepping.totals import Votes
from paceline.stepping.trained_model import TrainedModel
from paceline.train.alike import check_replicas

WRONG = (ExitCode.DIVERGED,)  # ends after which the state is not worth keeping
NOBODY = '{"guilty": []}'  # the guard's message if no rank is guilty


@dataclass(frozen=True)
class StateCollection:
    """All models of a training, as one state to be saved."""

    parts: Sequence[TrainedModel]
    world: World
    virtual_ranks: int
    others: Callable[[], list[TensorShard]] = list
    """gives the tensors that are saved in addition to models, the same on all ranks"""

    @property
    def sharded(self) -> bool:
        """Whether a rank holds only a shard of any of them."""
        return any(part.replica.sharded for part in self.parts)

    def state(self) -> list[TensorShard]:
        """All tensors of all models, and the others."""
        return [*(held for part in self.parts for held in part.state()), *self.others()]


# ---- write a checkpoint


@dataclass
class _Writing:
    """A checkpoint that is being written; the thread sets `shard` or `failure`."""

    step: int
    content: TrainerState
    folder: Path
    stall_seconds: float
    began: float
    thread: threading.Thread = field(init=False)
    shard: ShardFile | None = None
    failure: str = ""


class _Release(msgspec.Struct, frozen=True):
    """The part of the agent's message to an unblocked rank that is needed here."""

    guilty: tuple[int, ...] | None = None


def is_writer(word: str, rank: int, world_size: int) -> bool:
    """Whether `rank` is the one to save alone, by the agent's message `word`, which all unblocked ranks get."""
    try:
        guilty = msgspec.json.decode(word, type=_Release).guilty
    except msgspec.MsgspecError:
        return False
    return guilty is not None and rank == min(set(range(world_size)) - {*guilty}, default=None)


def save_alone(
    holder: StateCollection, step: int, content: TrainerState, checkpoints: Checkpoints, claim: Claim, *,
    keep: int, say: Report,
) -> Path:  # fmt: skip
    """Write and publish the state after `step`; return the folder. No collective.

    Raises:
        TrainingError: if a part of the state is on other ranks only, or a newer generation has taken over.
        OSError: if it cannot be written.
    """
    held, world = holder.state(), holder.world
    elsewhere = next((f" (as {one.name} is on this one)" for one in held if not one.replicated), None)
    if holder.sharded and elsewhere is None:  # of a small model a rank may hold no shard at all
        elsewhere = ""
    if elsewhere is not None and world.size > 1:
        raise TrainingError(code="state-on-other-ranks", elsewhere=elsewhere)
    shard = layout(held)
    buffer = torch.empty(shard.total_bytes, dtype=torch.uint8)
    _fill(buffer, shard, step, content, 0, 1)
    folder = checkpoints.begin_alone(step, claim, world.rank)
    file = _write_shard(folder, buffer, shard, 0, 1)
    return checkpoints.commit(folder, _manifest(step, content, claim, holder.virtual_ranks, file), keep, say)


def _fill(buffer: Tensor, shard: ShardLayout, step: int, content: TrainerState, rank: int, world_size: int) -> None:
    meta = {"step": step, "rank": rank, "world_size": world_size, "samples_seen": content.samples_seen}
    fill(buffer, shard, meta)


def _write_shard(folder: Path, buffer: Tensor, shard: ShardLayout, rank: int, world_size: int) -> ShardFile:
    name = shard_name(rank, world_size)
    size, sha256 = write_new(folder / name, [buffer.numpy().data])
    return ShardFile(name, size, sha256, shard.pieces)


def _manifest(step: int, content: TrainerState, claim: Claim, virtual_ranks: int, *files: ShardFile) -> Manifest:
    """The description of the state after `step`, which is in `files`."""
    optional = {"names": content.names, "loop": content.loop}
    return Manifest(
        format=FORMAT, step=step, attempt=claim.attempt, generation=claim.generation, world_size=len(files),
        virtual_ranks=virtual_ranks, definition=content.definition, metrics=content.metrics,
        samples_seen=content.samples_seen, files=files,
        scalars={"evaluated": content.evaluated} | {name: value for name, value in optional.items() if value},
    )  # fmt: skip


class Saver:
    """This rank's side of the run's checkpoints, one at a time; all calls are at the same steps on all ranks."""

    def __init__(
        self, checkpoints: Checkpoints, world: World, virtual_ranks: int, claim: Claim, *,
        keep: int, flush_events: Callable[[], None], say: Report,
    ) -> None:  # fmt: skip
        self._checkpoints, self._world, self._virtual_ranks, self._claim = checkpoints, world, virtual_ranks, claim
        self._keep, self._flush_events, self._say = keep, flush_events, say
        self._buffer: Tensor | None = None
        self._writing: _Writing | None = None
        self._publishing: threading.Thread | None = None
        self._done: list[events.Checkpointed] = []
        self.failed = ""
        """why the last checkpoint could not be written; empty if it could (rank 0 knows)"""

    def votes(self) -> tuple[float, float]:
        """This rank's votes on the checkpoint that is being written: `written` and `failed`, as in Votes."""
        writing = self._writing
        return float(bool(writing and writing.shard)), float(bool(writing and writing.failure))

    def begin(self, held: Sequence[TensorShard], step: int, content: TrainerState) -> None:
        """Copy the state after `step` and start to write it (a collective)."""
        began = time.perf_counter()
        self.settle()
        world = self._world
        shard = layout(rank_part(held, world.rank, world.size))
        size_bytes = sum(gather_words(shard.total_bytes, world))
        folder, failure = gather_words(self._prepare(step, size_bytes) if world.rank == 0 else None, world)[0]
        if failure:
            self._note(events.Checkpointed(step, failure, time.perf_counter() - began, 0.0, size_bytes))
            return
        if self._buffer is None or len(self._buffer) != shard.total_bytes:
            on_gpu = world.device.type != "cpu"
            self._buffer = torch.empty(shard.total_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        _fill(self._buffer, shard, step, content, world.rank, world.size)
        now = time.perf_counter()
        writing = self._writing = _Writing(step, content, Path(folder), now - began, now)
        # Not a daemon: the interpreter waits for a partial file.
        writing.thread = threading.Thread(
            target=self._write, args=(writing, self._buffer, shard), name="paceline-checkpoint"
        )
        writing.thread.start()

    def agreed(self, votes: Votes) -> None:
        """Continue with the checkpoint as far as the summed `votes` of all ranks allow (a collective)."""
        if self._writing is not None and votes.written + votes.failed == self._world.size:
            self._publish()

    def settle(self) -> None:
        """Wait until no checkpoint is being written or published (a collective)."""
        if self._writing is not None:
            self._writing.thread.join()
            self._publish()
        if self._publishing is not None:
            self._publishing.join()
            self._publishing = None

    def take_done(self) -> list[events.Checkpointed]:
        """The checkpoints that have succeeded or failed since the last call; on rank 0."""
        done, self._done = self._done, []
        return done

    def abandon(self) -> None:
        """After an error: wait for the threads. The next claim removes an unpublished checkpoint."""
        for thread in (self._writing.thread if self._writing else None, self._publishing):
            if thread is not None:
                thread.join()

    def _prepare(self, step: int, size_bytes: int) -> tuple[str, str]:
        """The folder to write into, or why there is none."""
        try:
            failure = self._checkpoints.room_for(size_bytes)
            return ("", failure) if failure else (str(self._checkpoints.begin(step)), "")
        except (OSError, PacelineError) as error:
            return "", str(error)

    def _write(self, writing: _Writing, buffer: Tensor, shard: ShardLayout) -> None:
        try:
            self._flush_events()  # the ledger must know every step that a checkpoint contains
            writing.shard = _write_shard(writing.folder, buffer, shard, self._world.rank, self._world.size)
        except Exception as error:  # rank 0 reports any error
            writing.failure = f"rank {self._world.rank}: {type(error).__name__}: {error}"

    def _publish(self) -> None:
        """All ranks have finished writing (a collective); rank 0 publishes in a thread."""
        writing, self._writing = self._writing, None
        assert writing is not None
        ranks = gather_words([writing.failure, msgspec.to_builtins(writing.shard)], self._world)
        failure = next((failure for failure, _ in ranks if failure), "")
        if self._world.rank != 0:
            return
        if failure:
            self._end(writing, failure, 0)
            return
        files = [msgspec.convert(shard, ShardFile) for _, shard in ranks]
        manifest = _manifest(writing.step, writing.content, self._claim, self._virtual_ranks, *files)
        self._publishing = threading.Thread(target=self._commit, args=(writing, manifest), name="paceline-publish")
        self._publishing.start()

    def _commit(self, writing: _Writing, manifest: Manifest) -> None:
        failure = ""
        try:
            self._checkpoints.commit(writing.folder, manifest, self._keep, self._say)
        except Exception as error:  # a full disk, a newer generation: training continues, and reports it
            failure = f"{type(error).__name__}: {error}"
        self._end(writing, failure, sum(file.bytes for file in manifest.files))

    def _end(self, writing: _Writing, failure: str, size_bytes: int) -> None:
        seconds = time.perf_counter() - writing.began
        self._note(events.Checkpointed(writing.step, failure, writing.stall_seconds, seconds, size_bytes))

    def _note(self, done: events.Checkpointed) -> None:
        self.failed = done.failure
        self._done.append(done)


# ---- what is due between two steps


@dataclass(frozen=True)
class Rhythm:
    """The number of steps after which each is due; None: only on request."""

    watch: int
    snapshot: int
    checkpoint: int | None
    seconds: float | None = None
    """between two checkpoints"""
    keep: int = 2
    """the number of checkpoints to keep"""


class Keeping:
    """This rank's snapshots, checkpoints and comparisons; all calls are at the same steps on all ranks."""

    def __init__(
        self, holder: StateCollection, place: RunLocation, origin: ResumePoint | None, rhythm: Rhythm, *,
        writer: EventWriter, say: Report, enter: Callable[[Phase], object],
    ) -> None:  # fmt: skip
        """A collective.

        Raises:
            UsageError: if the folder of checkpoints cannot be claimed; ReportedByPeer on all ranks but one.
        """
        self._holder, self._world, self._rhythm, self._writer, self._say = holder, holder.world, rhythm, writer, say
        self._enter = enter
        self._folder, self._checkpoints = place.folder, Checkpoints(place.folder / CHECKPOINTS)
        self._claim = Claim(place.attempt, place.generation)
        with together(self._world):
            if self._world.rank == 0:
                # Also if none is due: the run may be asked to stop, and a rank of an older generation must not publish.
                self._checkpoints.claim(*self._claim, place.notices.append)
                if origin is not None and origin.files and (unwritten := self._unwritten(origin.step)):
                    writer.write(
                        events.UnloggedStep(origin.step, unwritten)
                    )  # for the start before: this one has none yet
        self._saver = Saver(
            self._checkpoints, self._world, holder.virtual_ranks, self._claim,
            keep=rhythm.keep, flush_events=writer.flush, say=say,
        )  # fmt: skip
        self._snapshot_writer: SnapshotWriter | None = None
        files, local = inherited(), self._world.local_rank
        if local < len(files):
            spared = next((file for file in files[local] if origin and file in origin.files), None)
            size = self._world.local_size
            self._snapshot_writer = SnapshotWriter(files[local], local, size, place.generation, spared=spared)
        self._takes_snapshots = all(gather_words(self._snapshot_writer is not None, self._world))
        self._other_hosts: OtherHosts | None = None
        self._snapshots, self._snapshot_seconds, self._snapshot_bytes = 0, 0.0, 0
        self._saved_at = time.monotonic()
        self.failed = ""
        """why the last checkpoint could not be written; empty if it could. The same on all ranks, after `end`"""

    def votes(self) -> tuple[float, float, float]:
        """For the totals of the next step: `written`, `failed` and `due`, as in Votes."""
        seconds = self._rhythm.seconds
        # one clock, or ranks would save different steps
        is_due = seconds is not None and not self._world.rank and time.monotonic() - self._saved_at >= seconds
        return *self._saver.votes(), float(is_due)

    def between(self, step: int, votes: Votes, content: Callable[[], TrainerState], *, save: bool) -> float:
        """Do what is due after `step` (a collective); `votes` are the sum of the last step's votes.

        Returns:
            The seconds for which training was stopped.

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
        if save or watch:  # never save a damaged state
            try:
                check_replicas(held, self._world, step, [part.replica.optimizer for part in self._holder.parts])
            except PacelineError:
                self._saver.settle()  # the checkpoint that is being written is of an intact state
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
        """Wait until no checkpoint is being written; return the seconds (a collective)."""
        began = time.perf_counter()
        self._enter(Phase.CHECKPOINT)
        self._saver.settle()
        self._report()
        return time.perf_counter() - began

    @property
    def can_go_back(self) -> bool:
        """Whether older states are kept."""
        rhythm = self._rhythm
        return bool(rhythm.checkpoint or rhythm.seconds or self._takes_snapshots)

    def newest(self) -> ResumePoint | None:
        """The newest state in memory or on disk (a collective)."""
        self.settle()
        return newest_state(self._checkpoints, self._world, self._say, memory=True)

    def save_after(self, error: BaseException, step: int, content: Callable[[], TrainerState]) -> None:
        """After an error: publish the state after `step`, unless this state is the error.

        Only one rank does so, which the guard's message names if the guard has unblocked the ranks. No collective: a
        rank that hangs would not take part.
        """
        if getattr(error, "exit_code", None) in WRONG:
            return
        world, word, found = self._world, Guard.of_process().released(), content()
        there = any(saved == step for saved, _ in self._checkpoints.entries())
        if there or not is_writer(word or NOBODY, world.rank, world.size):
            return
        self._enter(Phase.CHECKPOINT)  # the agent waits for a rank that makes progress
        try:
            if unwritten := self._unwritten(step):
                self._writer.write(events.UnloggedStep(step, unwritten))
            self._writer.flush()
            path = save_alone(
                self._holder, step, found, self._checkpoints, self._claim, keep=self._rhythm.keep, say=self._say
            )
            words = f"the state after step {step} is saved: {path}"
        except Exception as error:  # the run ends with the stall in any case
            words = f"the state after step {step} cannot be saved: {error}"
        print(f"rank {world.rank}: {words}", file=sys.stderr, flush=True)

    def _unwritten(self, step: int) -> list[int]:
        """The ranks whose event files do not have `step`, although this rank's state includes their part of it."""
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
        """After an error: wait for the threads. An unpublished checkpoint is never published."""
        self._saver.abandon()

    def _snapshot(self, held: Sequence[TensorShard], step: int, content: TrainerState) -> None:
        began, world = time.perf_counter(), self._world
        if world.local_size < world.size:  # the state that only this host's ranks hold must survive its loss
            if self._other_hosts is None:
                self._other_hosts = OtherHosts(held, world)
                if why := self._other_hosts.why_not:
                    self._takes_snapshots = False
                    self._say(f"no snapshots in memory: {why}. A restart goes on from a checkpoint on disk")
            others = self._other_hosts.bring(held) if self._takes_snapshots else None
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
