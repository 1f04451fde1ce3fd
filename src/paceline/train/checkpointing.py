"""Comparisons of replicas, snapshots in memory and asynchronous checkpoints on disk, all between steps.

Each rank copies its state between two steps. A thread then writes the copy to disk while training continues. In the
totals of a later step (`votes`) the ranks agree that all files are complete, and rank 0 publishes the checkpoint. No
thread uses a collective, because the order of collectives would differ between ranks.

If a rank hangs, the guard aborts the collective in which the other ranks wait. No collective is possible after that.
The lowest rank that did not cause the hang then saves the state (`save_on_one_rank`), if it holds the full state. Its
parameters are those after the last complete step, and its buffers are restored.
"""

import socket
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
from torch.optim import Optimizer

from paceline.checkpoint.manager import Checkpoints, MessageCallback, PublishClaim
from paceline.checkpoint.memory_snapshots import InterNodeExchange, SnapshotWriter, inherited_memory_files
from paceline.checkpoint.resume import find_newest_state
from paceline.checkpoint.shards import ShardFileLayout, make_shard_layout, select_shards_to_save, serialize_shard_file
from paceline.checkpoint.state import LockedRun, ResumePoint, TensorShard, TrainerState
from paceline.collectives.control import all_gather_object, error_on_one_rank, raise_on_all_ranks
from paceline.config.choices import CheckpointIntervals
from paceline.errors import ExitCode, PacelineError, TrainingError, UsageError
from paceline.protocol.control import WorkerSpec, has_separate_folder, request_transfer
from paceline.protocol.evidence import Phase
from paceline.rank.guard import HangGuard
from paceline.rank.world import World
from paceline.runs import events
from paceline.runs.checkpoint_format import FORMAT_VERSION, Manifest, ShardFile, shard_name
from paceline.runs.folder import CHECKPOINTS
from paceline.runs.writers import EventWriter
from paceline.runs.writing import make_folder, write_new_file
from paceline.stepping.totals import ControlFlags
from paceline.stepping.trained_model import ModelInTraining
from paceline.train.consistency import check_replicas

BAD_STATE_CODES = (ExitCode.DIVERGED,)  # after these errors the state itself is wrong
NO_CAUSE_MESSAGE = '{"causes": []}'  # the guard's message if no rank caused the hang


@dataclass(frozen=True)
class CheckpointedModels:
    models: Sequence[ModelInTraining]
    world: World
    virtual_ranks: int
    extra_shards: Callable[[], list[TensorShard]] = list
    """Returns the tensors to save in addition to the models. They are equal on all ranks."""

    @property
    def sharded(self) -> bool:
        return any(part.replica.sharded for part in self.models)

    def state(self) -> list[TensorShard]:
        return [*(shard for part in self.models for shard in part.state()), *self.extra_shards()]


# ---- write a checkpoint


@dataclass
class _Writing:
    """A checkpoint that a thread is writing. The thread sets `shard` or `failure` at its end."""

    step: int
    content: TrainerState
    folder: Path
    stall_seconds: float
    began: float
    thread: threading.Thread = field(init=False)
    shard: ShardFile | None = None
    failure: str = ""


class _UnblockMessage(msgspec.Struct, frozen=True):
    """The field that is needed here of the agent's message to the ranks that it has unblocked."""

    causes: tuple[int, ...] | None = None


def must_save_after_failure(message: str, rank: int, world_size: int) -> bool:
    try:
        causes = msgspec.json.decode(message, type=_UnblockMessage).causes
    except msgspec.MsgspecError:
        return False
    return causes is not None and rank == min(set(range(world_size)) - {*causes}, default=None)


def save_on_one_rank(
    holder: CheckpointedModels, step: int, content: TrainerState, checkpoints: Checkpoints, claim: PublishClaim, *,
    keep: int, say: MessageCallback,
) -> Path:  # fmt: skip
    """Write and publish the state after `step` without any collective. Return the checkpoint's folder.

    TrainingError: only other ranks hold a part of the state, or a newer generation owns the checkpoints.
    """
    shards, world = holder.state(), holder.world
    elsewhere = next((f" (this one has only a part, e.g. {part.name})" for part in shards if not part.replicated), None)
    if holder.sharded and elsewhere is None:  # a rank can hold no shard at all of a small model
        elsewhere = ""
    if elsewhere is not None and world.size > 1:
        raise TrainingError(code="state-on-other-ranks", elsewhere=elsewhere)
    shard = make_shard_layout(shards)
    buffer = torch.empty(shard.total_bytes, dtype=torch.uint8)
    _fill(buffer, shard, step, content, 0, 1)
    folder = checkpoints.begin(step, alone=(claim, world.rank))
    file = _write_shard(folder, buffer, shard, 0, 1)
    return checkpoints.commit(folder, _manifest(step, content, claim, holder.virtual_ranks, file), keep, say)


def _fill(buffer: Tensor, shard: ShardFileLayout, step: int, content: TrainerState, rank: int, world_size: int) -> None:
    meta = {"step": step, "rank": rank, "world_size": world_size, "samples_seen": content.samples_seen}
    serialize_shard_file(buffer, shard, meta)


def _write_shard(folder: Path, buffer: Tensor, shard: ShardFileLayout, rank: int, world_size: int) -> ShardFile:
    name = shard_name(rank, world_size)
    size, sha256 = write_new_file(folder / name, [buffer.numpy().data])
    return ShardFile(name, size, sha256, shard.pieces)


def _manifest(step: int, content: TrainerState, claim: PublishClaim, virtual_ranks: int, *files: ShardFile) -> Manifest:
    optional = {"names": content.names, "loop": content.loop}
    return Manifest(
        format=FORMAT_VERSION, step=step, attempt=claim.attempt, generation=claim.generation, world_size=len(files),
        virtual_ranks=virtual_ranks, definition=content.definition, metrics=content.metrics,
        samples_seen=content.samples_seen, files=files,
        scalars={"evaluated": content.evaluated} | {name: value for name, value in optional.items() if value},
    )  # fmt: skip


class CheckpointWriter:
    """Writes this rank's shards, one checkpoint at a time. All ranks make all calls at the same steps."""

    def __init__(
        self, checkpoints: Checkpoints, world: World, virtual_ranks: int, claim: PublishClaim, *,
        keep: int, flush_events: Callable[[], None], say: MessageCallback,
    ) -> None:  # fmt: skip
        self._checkpoints, self._world, self._virtual_ranks, self._claim = checkpoints, world, virtual_ranks, claim
        self._keep, self._flush_events, self._say = keep, flush_events, say
        self._buffer: Tensor | None = None
        self._writing: _Writing | None = None
        self._publishing: threading.Thread | None = None
        self._is_waiting = False
        self._done: list[events.Checkpointed] = []
        self.failed = ""
        """Why the last checkpoint could not be written; empty if it could. Set on rank 0 only."""

    def shard_write_status(self) -> tuple[float, float]:
        """The fields `shard_written` and `shard_failed` of ControlFlags for the pending checkpoint."""
        writing = self._writing
        return float(bool(writing and writing.shard)), float(bool(writing and writing.failure))

    def begin(self, shards: Sequence[TensorShard], step: int, content: TrainerState) -> None:
        """Copy the state after `step` and start to write it (collective)."""
        began = time.perf_counter()
        self.wait()
        world = self._world
        shard = make_shard_layout(select_shards_to_save(shards, world.rank, world.size))
        size_bytes = sum(all_gather_object(shard.total_bytes, world))
        folder, failure = all_gather_object(self._prepare(step, size_bytes) if world.rank == 0 else None, world)[0]
        if failure:
            self._note(events.Checkpointed(step, failure, time.perf_counter() - began, 0.0, size_bytes))
            return
        if self._buffer is None or len(self._buffer) != shard.total_bytes:
            on_gpu = world.device.type != "cpu"
            self._buffer = torch.empty(shard.total_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        _fill(self._buffer, shard, step, content, world.rank, world.size)
        now = time.perf_counter()
        writing = self._writing = _Writing(step, content, Path(folder), now - began, now)
        # Not a daemon thread: the interpreter must wait until the file is complete.
        args = writing, self._buffer, shard
        writing.thread = threading.Thread(target=self._write, args=args, name="paceline-checkpoint")
        writing.thread.start()

    def publish_if_written(self, votes: ControlFlags) -> None:
        """Publish the pending checkpoint if all ranks have voted that their shards are done (collective)."""
        if self._writing is not None and votes.shard_written + votes.shard_failed == self._world.size:
            self._publish()

    def wait(self) -> None:
        if self._writing is not None:
            self._is_waiting = True
            self._writing.thread.join()
            self._is_waiting = False
            self._publish()
        if self._publishing is not None:
            self._publishing.join()
            self._publishing = None

    def take_done(self) -> list[events.Checkpointed]:
        done, self._done = self._done, []
        return done

    def join_threads(self) -> None:
        for thread in (self._writing.thread if self._writing else None, self._publishing):
            if thread is not None:
                thread.join()

    def _prepare(self, step: int, size_bytes: int) -> tuple[str, str]:
        try:
            failure = self._checkpoints.find_space_shortage(size_bytes)
            return ("", failure) if failure else (str(self._checkpoints.begin(step)), "")
        except (OSError, PacelineError) as error:
            return "", str(error)

    def _write(self, writing: _Writing, buffer: Tensor, shard: ShardFileLayout) -> None:
        try:
            self._flush_events()  # the event files must contain every step that the checkpoint contains
            if has_separate_folder(self._checkpoints.root.parent):
                make_folder(writing.folder, exist_ok=True)
                # of the same step before a rollback: only node 0 has begun with an empty folder
                (writing.folder / shard_name(self._world.rank, self._world.size)).unlink(missing_ok=True)
            file = _write_shard(writing.folder, buffer, shard, self._world.rank, self._world.size)
            if failure := request_transfer("send", writing.folder / file.name, self._on_transfer):
                raise TrainingError(code="shard-not-sent", reason=failure)
            writing.shard = file
        except Exception as error:  # rank 0 reports any error
            writing.failure = f"rank {self._world.rank}: {type(error).__name__}: {error}"

    def _on_transfer(self) -> None:
        if self._is_waiting:  # for a transfer over a slow network, which is no hang
            HangGuard.of_process().page.tick()

    def _publish(self) -> None:
        """Collect the results of all ranks (collective). Rank 0 publishes the checkpoint in a thread."""
        writing, self._writing = self._writing, None
        assert writing is not None
        by_rank = all_gather_object([writing.failure, msgspec.to_builtins(writing.shard)], self._world)
        failure = next((failure for failure, _ in by_rank if failure), "")
        if self._world.rank != 0:
            return
        if failure:
            self._end(writing, failure, 0)
            return
        files = [msgspec.convert(shard, ShardFile) for _, shard in by_rank]
        manifest = _manifest(writing.step, writing.content, self._claim, self._virtual_ranks, *files)
        self._publishing = threading.Thread(target=self._commit, args=(writing, manifest), name="paceline-publish")
        self._publishing.start()

    def _commit(self, writing: _Writing, manifest: Manifest) -> None:
        failure = ""
        try:
            self._checkpoints.commit(writing.folder, manifest, self._keep, self._say)
        except Exception as error:  # e.g. a full disk: paceline warns and training continues
            failure = f"{type(error).__name__}: {error}"
        self._end(writing, failure, sum(file.bytes for file in manifest.files))

    def _end(self, writing: _Writing, failure: str, size_bytes: int) -> None:
        seconds = time.perf_counter() - writing.began
        self._note(events.Checkpointed(writing.step, failure, writing.stall_seconds, seconds, size_bytes))

    def _note(self, event: events.Checkpointed) -> None:
        self.failed = event.failure
        self._done.append(event)


# ---- space for the copies of nodes with separate run folders


def check_space(holder: CheckpointedModels, checkpoints: Checkpoints, keep: int) -> None:
    """Raise an error if node 0, or the node that keeps a second copy, lacks space for checkpoints (a collective).

    Checks nothing if all nodes see one run folder.
    """
    world, spec = holder.world, WorkerSpec.from_environment()
    if world.local_size == world.size:
        return
    own_bytes = sum(shard.tensor.nbytes for shard in select_shards_to_save(holder.state(), world.rank, world.size))
    optimizers = [one for part in holder.models for one in part.replica.optimizers]
    if not any(one.state for one in optimizers):  # it is made in the first step
        own_bytes *= 1 + max((_num_states(one) for one in optimizers), default=0)
    is_separate, keeps_copy = has_separate_folder(checkpoints.root.parent), spec is not None and spec.keeps_copy
    usable_bytes = checkpoints.usable_bytes(keep)
    mine = [own_bytes, is_separate, keeps_copy or world.rank == 0, usable_bytes, socket.gethostname()]
    by_rank = all_gather_object(mine, world)
    if not any(separate for _, separate, *_ in by_rank):
        return
    size_bytes = sum(bytes for bytes, *_ in by_rank)
    needed_bytes = (keep + 1) * size_bytes
    for _, _, keeps, usable, host in by_rank:
        if keeps and usable < needed_bytes:
            error = UsageError(
                code="no-space-for-checkpoints", host=host, folder=checkpoints.root, usable=usable, needed=needed_bytes,
                count=keep + 1, size=size_bytes, keep_checkpoints=keep,
            )  # fmt: skip
            raise error_on_one_rank(error, world)


def _num_states(optimizer: Optimizer) -> int:
    """The number of tensors that a known optimizer will keep for each parameter; 0 for others."""
    group = optimizer.param_groups[0]
    return 2 if "betas" in group else int(bool(group.get("momentum")))


# ---- work between steps


class CheckpointManager:
    """Compares replicas, takes snapshots and saves checkpoints. All ranks make all calls at the same steps."""

    def __init__(
        self, holder: CheckpointedModels, place: LockedRun, origin: ResumePoint | None,
        intervals: CheckpointIntervals, *, writer: EventWriter, say: MessageCallback, enter: Callable[[Phase], object],
    ) -> None:  # fmt: skip
        """Claim the folder of checkpoints for this start of the run (collective)."""
        self._holder, self._world, self._intervals = holder, holder.world, intervals
        self._writer, self._say, self._enter = writer, say, enter
        self._folder, self._checkpoints = place.folder, Checkpoints(place.folder / CHECKPOINTS)
        self._claim = PublishClaim(place.attempt, place.generation)
        with raise_on_all_ranks(self._world):
            if self._world.rank == 0:
                # Needed even without regular saves: a signal can request a checkpoint before the run stops, and a
                # process of an older generation must not publish one.
                self._checkpoints.claim_publishing(*self._claim, place.notices.append)
                if (
                    origin is not None
                    and origin.memory_file_descriptors
                    and (unwritten := self._ranks_missing_step(origin.step))
                ):
                    writer.write(events.UnloggedRanks(origin.step, unwritten))  # on behalf of the previous start
        check_space(holder, self._checkpoints, intervals.keep)
        self._checkpoint_writer = CheckpointWriter(
            self._checkpoints, self._world, holder.virtual_ranks, self._claim,
            keep=intervals.keep, flush_events=writer.flush, say=say,
        )  # fmt: skip
        self._snapshot_writer: SnapshotWriter | None = None
        files, local_rank = inherited_memory_files(), self._world.local_rank
        if local_rank < len(files):  # never overwrite the snapshot from which this start has resumed
            resumed = origin.memory_file_descriptors if origin else ()
            spared = next((file for file in files[local_rank] if file in resumed), None)
            size = self._world.local_size
            self._snapshot_writer = SnapshotWriter(files[local_rank], local_rank, size, place.generation, spared=spared)
        self._takes_snapshots = all(all_gather_object(self._snapshot_writer is not None, self._world))
        self._other_hosts: InterNodeExchange | None = None
        self._snapshots, self._snapshot_seconds, self._snapshot_bytes = 0, 0.0, 0
        self._saved_at = time.monotonic()
        self.failed = ""
        """Why the last checkpoint could not be written; empty if it could. Set by `end`, on all ranks."""

    def votes(self) -> tuple[float, float, float]:
        """The fields `shard_written`, `shard_failed` and `checkpoint_due` of the ControlFlags of the next step."""
        seconds = self._intervals.checkpoint_seconds
        # only rank 0 reads its clock; otherwise the ranks would save different steps
        is_due = seconds is not None and not self._world.rank and time.monotonic() - self._saved_at >= seconds
        return *self._checkpoint_writer.shard_write_status(), float(is_due)

    def is_due(self, step: int) -> bool:
        """Whether this compares, snapshots or saves the state after `step`, without any vote."""
        return any(self._due(step))

    def _due(self, step: int) -> tuple[bool, bool, bool]:
        intervals = self._intervals
        save = bool(intervals.checkpoint_every and step % intervals.checkpoint_every == 0)
        snapshot = self._takes_snapshots and step % intervals.snapshot_every == 0
        return save, snapshot, step % intervals.compare_every == 0

    def after_step(self, step: int, votes: ControlFlags, content: Callable[[], TrainerState], *, save: bool) -> float:
        """Compare, snapshot or save as due after `step` (collective). `save`: save in any case.

        Returns the seconds for which training was paused.
        """
        began = time.perf_counter()
        self._enter(Phase.CHECKPOINT)
        self._checkpoint_writer.publish_if_written(votes)
        save_due, snapshot, compare = self._due(step)
        save = save or save_due or votes.checkpoint_due > 0
        if not (save or snapshot or compare):
            self._report()
            return 0.0
        shards = self._holder.state()
        if save or compare:  # never save a damaged state
            try:
                check_replicas(shards, self._world, step, [part.replica.optimizer for part in self._holder.models])
            except PacelineError:
                self._checkpoint_writer.wait()  # the pending checkpoint was copied before the damage
                raise
        if save:
            self._checkpoint_writer.begin(shards, step, content())
            self._saved_at = time.monotonic()
        if snapshot:
            self._snapshot(shards, step, content())
        self._report()
        return time.perf_counter() - began

    def end(self) -> None:
        self.wait()
        if self._snapshots:
            size = self._snapshot_bytes
            self._writer.write(events.SnapshotTotals(self._snapshots, self._snapshot_seconds, size))
        self.failed = all_gather_object(self._checkpoint_writer.failed, self._world)[0]

    def wait(self) -> float:
        """Wait until no checkpoint is being written (collective). Return the seconds that it took."""
        began = time.perf_counter()
        self._enter(Phase.CHECKPOINT)
        self._checkpoint_writer.wait()
        self._report()
        return time.perf_counter() - began

    @property
    def can_roll_back(self) -> bool:
        intervals = self._intervals
        return bool(intervals.checkpoint_every or intervals.checkpoint_seconds or self._takes_snapshots)

    def newest_resume_point(self) -> ResumePoint | None:
        self.wait()
        return find_newest_state(self._checkpoints, self._world, self._say, memory=True)

    def save_after_error(self, error: BaseException, step: int, content: Callable[[], TrainerState]) -> None:
        """Save the state after `step` when an error ends the run, unless the error is that the state is wrong.

        Only one rank saves. If the guard has unblocked the ranks, its message names the ranks to exclude. There is no
        collective, because a rank that hangs would not take part.
        """
        if getattr(error, "exit_code", None) in BAD_STATE_CODES:
            return
        world, message, trainer_state = self._world, HangGuard.of_process().release_reason(), content()
        is_saved = any(saved_step == step for saved_step, _ in self._checkpoints.entries())
        if is_saved or not must_save_after_failure(message or NO_CAUSE_MESSAGE, world.rank, world.size):
            return
        self._enter(Phase.CHECKPOINT)  # the agent does not kill a rank that makes progress
        try:
            if unwritten := self._ranks_missing_step(step):
                self._writer.write(events.UnloggedRanks(step, unwritten))
            self._writer.flush()
            path = save_on_one_rank(
                self._holder, step, trainer_state, self._checkpoints, self._claim,
                keep=self._intervals.keep, say=self._say,
            )  # fmt: skip
            result = f"the state after step {step} is saved: {path}"
        except Exception as error:  # the run ends with the original error in any case
            result = f"the state after step {step} cannot be saved: {error}"
        print(f"rank {world.rank}: {result}", file=sys.stderr, flush=True)

    def _ranks_missing_step(self, step: int) -> list[int]:
        """The ranks whose event files lack `step`, although this rank's state includes their part of the step."""
        unwritten_ranks: set[int] = set()
        with suppress(OSError):
            files = events.event_files(self._folder)
            unwritten_ranks = {*files, *range(self._world.size)} - {self._world.rank}
            for rank, path in files.items():
                relevant = (e for e in events.last_events(path) if isinstance(e, events.Step | events.Started))
                if isinstance(newest := next(relevant, None), events.Step) and newest.step >= step:
                    unwritten_ranks.discard(rank)
        return sorted(unwritten_ranks)

    def join_threads(self) -> None:
        self._checkpoint_writer.join_threads()

    def _snapshot(self, shards: Sequence[TensorShard], step: int, content: TrainerState) -> None:
        began, world = time.perf_counter(), self._world
        if world.local_size < world.size:  # each node also needs the shards that only other nodes hold
            if self._other_hosts is None:
                self._other_hosts = InterNodeExchange(shards, world)
                if why := self._other_hosts.why_not:
                    self._takes_snapshots = False
                    self._say(f"no snapshots in memory: {why}. A restart resumes from a checkpoint on disk")
            others = self._other_hosts.exchange_missing_shards(shards) if self._takes_snapshots else None
            if others is None:
                return
            shards = [*shards, *others]
        if self._snapshot_writer is None:  # an earlier snapshot did not fit into memory
            return
        try:
            self._snapshot_bytes = self._snapshot_writer.write(shards, step, msgspec.to_builtins(content))
        except OSError as error:
            self._snapshot_writer = None
            self._say(
                f"no more snapshots: rank {world.rank} has no memory for them ({error.strerror}). "
                "A restart resumes from a checkpoint on disk"
            )
            return
        self._snapshots += 1
        self._snapshot_seconds += time.perf_counter() - began

    def _report(self) -> None:
        for event in self._checkpoint_writer.take_done():
            self._writer.write(event)
            if event.failure:
                self._say(f"WARNING: the checkpoint of step {event.step} could not be written: {event.failure}")
