"""Writes checkpoints while training goes on.

A checkpoint is a copy, taken between two steps, that a thread of each rank writes out while training goes on. Ranks
agree in a later step's totals (`votes`) that all files are there, and rank 0 publishes the whole. No thread uses a
collective: their order would differ between ranks.

Where a rank stands still and never answers, the guard breaks up the collective in which the others wait. A collective
is then no longer possible, so the lowest rank that is not guilty saves the state alone (`save_alone`), if it holds all
of it: its parameters are those after the last complete step, its buffers are put back.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from paceline.checkpoint.files import room_for
from paceline.checkpoint.format import FORMAT, Manifest, Piece, ShardFile
from paceline.checkpoint.manager import Checkpoints, Claim, Report, write_file
from paceline.checkpoint.resume import Content
from paceline.checkpoint.shards import ShardLayout, fill, layout, rank_part
from paceline.checkpoint.state import Held
from paceline.collectives.control import gather_words
from paceline.errors import PacelineError, TrainingError
from paceline.observe.events import Checkpointed
from paceline.stepping.trainee import Trainee
from paceline.stepping.votes import Votes
from paceline.worker.world import World


@dataclass(frozen=True)
class Holder:
    """All models of a training, as one state to be saved."""

    parts: Sequence[Trainee]
    world: World
    virtual_ranks: int
    others: Callable[[], list[Held]] = list
    """gives the tensors of what is saved beside models, the same on all ranks"""

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a share only of any of them."""
        return any(part.replica.sharded for part in self.parts)

    def state(self) -> list[Held]:
        """All tensors of all models, and the others."""
        return [*(held for part in self.parts for held in part.state()), *self.others()]


@dataclass
class _Writing:
    """A checkpoint on its way; `shard` or `failure` is set by the thread."""

    step: int
    content: Content
    folder: Path
    stall_seconds: float
    began: float
    thread: threading.Thread | None = None
    shard: ShardFile | None = None
    failure: str = ""


class _Release(msgspec.Struct, frozen=True):
    """What the agent says when it frees a rank, as far as it matters here."""

    guilty: tuple[int, ...] | None = None


def is_writer(word: str, rank: int, world_size: int) -> bool:
    """Whether `rank` is the one to save alone, by the agent's `word`, which all freed ranks get."""
    try:
        guilty = msgspec.json.decode(word, type=_Release).guilty
    except msgspec.MsgspecError:
        return False
    return guilty is not None and rank == min(set(range(world_size)) - {*guilty}, default=None)


def save_alone(
    holder: Holder, step: int, content: Content, checkpoints: Checkpoints, claim: Claim, *, keep: int, say: Report
) -> Path:
    """Write and publish the state after `step`; return the folder. No collective.

    Raises:
        TrainingError: if a part of the state is on other ranks only, or a newer generation has taken over.
        OSError: if it cannot be written.
    """
    held, world = holder.state(), holder.world
    elsewhere = next((f" (as {one.name} is on this one)" for one in held if not one.replicated), None)
    if holder.sharded and elsewhere is None:  # of a small model a rank may hold no share at all
        elsewhere = ""
    if elsewhere is not None and world.size > 1:
        raise TrainingError(code="state-on-other-ranks", elsewhere=elsewhere)
    part, places = layout(held)
    buffer = torch.empty(places.total_bytes, dtype=torch.uint8)
    fill(buffer, part, places, {"step": step, "rank": 0, "world_size": 1, "samples_seen": content.samples_seen})
    folder = checkpoints.begin_alone(step, claim, world.rank)
    files = (_write_shard(folder, 0, 1, buffer, places.pieces),)
    return checkpoints.commit(folder, _manifest(step, content, claim, holder.virtual_ranks, files), keep, say)


def _write_shard(folder: Path, rank: int, world_size: int, buffer: Tensor, pieces: tuple[Piece, ...]) -> ShardFile:
    name = f"shard-{rank}-of-{world_size}.safetensors"
    size, sha256 = write_file(folder / name, [buffer.numpy().data])
    return ShardFile(name, size, sha256, pieces)


def _manifest(step: int, content: Content, claim: Claim, virtual_ranks: int, files: tuple[ShardFile, ...]) -> Manifest:
    """The description of the state after `step`, which lies in `files`."""
    return Manifest(
        format=FORMAT,
        step=step,
        attempt=claim.attempt,
        generation=claim.generation,
        world_size=len(files),
        virtual_ranks=virtual_ranks,
        definition=content.definition,
        metrics=content.metrics,
        samples_seen=content.samples_seen,
        scalars={"evaluated": content.evaluated}
        | {name: value for name, value in (("names", content.names), ("loop", content.loop)) if value},
        files=files,
    )


class Saver:
    """This rank's side of the run's checkpoints, one at a time; all calls are at the same steps on all ranks."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        world: World,
        virtual_ranks: int,
        claim: Claim,
        *,
        keep: int,
        flush_events: Callable[[], None],
        say: Report,
    ) -> None:
        self._checkpoints, self._world, self._virtual_ranks, self._claim = checkpoints, world, virtual_ranks, claim
        self._keep, self._flush_events, self._say = keep, flush_events, say
        self._buffer: Tensor | None = None
        self._writing: _Writing | None = None
        self._publishing: threading.Thread | None = None
        self._done: list[Checkpointed] = []
        self.failed = ""
        """why the last checkpoint could not be written; empty if it could (rank 0 knows)"""

    def votes(self) -> Votes:
        """This rank's votes on the checkpoint on its way."""
        writing = self._writing
        return Votes(written=float(bool(writing and writing.shard)), failed=float(bool(writing and writing.failure)))

    def begin(self, held: Sequence[Held], step: int, content: Content) -> None:
        """Copy the state after `step` and start to write it (a collective)."""
        began = time.perf_counter()
        self.settle()
        part, places = layout(rank_part(held, self._world.rank, self._world.size))
        sizes = gather_words(places.total_bytes, self._world)
        prepared = gather_words(self._prepare(step, sum(sizes)) if self._world.rank == 0 else "", self._world)[0]
        if prepared["failure"]:
            self._note(Checkpointed(step, prepared["failure"], time.perf_counter() - began, 0.0, sum(sizes)))
            return
        buffer = self._copied(part, places, content, step)
        stall = time.perf_counter() - began
        writing = _Writing(step, content, Path(prepared["folder"]), stall, time.perf_counter())
        # No daemon: the interpreter waits for a file that is half written.
        writing.thread = threading.Thread(
            target=self._write, args=(writing, buffer, places.pieces), name="paceline-checkpoint"
        )
        self._writing = writing
        writing.thread.start()

    def agreed(self, votes: Votes) -> None:
        """Go on with the checkpoint on its way, as far as the summed `votes` of all ranks allow (a collective)."""
        if self._writing is not None and votes.written + votes.failed == self._world.size:
            self._publish()

    def settle(self) -> None:
        """Wait until no checkpoint is on its way any more (a collective)."""
        if self._writing is not None:
            assert self._writing.thread is not None
            self._writing.thread.join()
            self._publish()
        if self._publishing is not None:
            self._publishing.join()
            self._publishing = None

    def take_done(self) -> list[Checkpointed]:
        """The checkpoints that have ended, well or not, since the last call; on rank 0."""
        done, self._done = self._done, []
        return done

    def abandon(self) -> None:
        """After an error: wait for the threads; an unpublished checkpoint stays so, and the next claim removes it."""
        for thread in (self._writing.thread if self._writing else None, self._publishing):
            if thread is not None:
                thread.join()

    def _prepare(self, step: int, size_bytes: int) -> dict[str, str]:
        try:
            failure = room_for(self._checkpoints.root, size_bytes)
            return {"failure": failure or "", "folder": "" if failure else str(self._checkpoints.begin(step))}
        except (OSError, PacelineError) as error:
            return {"failure": str(error), "folder": ""}

    def _copied(self, part: Sequence[Held], places: ShardLayout, content: Content, step: int) -> Tensor:
        if self._buffer is None or len(self._buffer) != places.total_bytes:
            on_gpu = self._world.device.type != "cpu"
            self._buffer = torch.empty(places.total_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        meta = {"step": step, "rank": self._world.rank, "world_size": self._world.size}
        fill(self._buffer, part, places, {**meta, "samples_seen": content.samples_seen})
        return self._buffer

    def _write(self, writing: _Writing, buffer: Tensor, pieces: tuple[Piece, ...]) -> None:
        try:
            self._flush_events()  # the ledger must know every step that a checkpoint contains
            writing.shard = _write_shard(writing.folder, self._world.rank, self._world.size, buffer, pieces)
        except Exception as error:  # reported by rank 0, whatever it is
            writing.failure = f"rank {self._world.rank}: {type(error).__name__}: {error}"

    def _publish(self) -> None:
        """All ranks have ended writing (a collective); rank 0 publishes in a thread."""
        writing, self._writing = self._writing, None
        assert writing is not None
        told = gather_words([writing.failure, msgspec.to_builtins(writing.shard)], self._world)
        failure = next((failure for failure, _ in told if failure), "")
        if self._world.rank != 0:
            return
        if failure:
            self._end(writing, failure, 0)
            return
        files = tuple(msgspec.convert(shard, ShardFile) for _, shard in told)
        manifest = _manifest(writing.step, writing.content, self._claim, self._virtual_ranks, files)
        self._publishing = threading.Thread(target=self._commit, args=(writing, manifest), name="paceline-publish")
        self._publishing.start()

    def _commit(self, writing: _Writing, manifest: Manifest) -> None:
        failure = ""
        try:
            self._checkpoints.commit(writing.folder, manifest, self._keep, self._say)
        except Exception as error:  # a full disk, a newer generation: training goes on, and says so
            failure = f"{type(error).__name__}: {error}"
        self._end(writing, failure, sum(file.bytes for file in manifest.files))

    def _end(self, writing: _Writing, failure: str, size_bytes: int) -> None:
        seconds = time.perf_counter() - writing.began
        self._note(Checkpointed(writing.step, failure, writing.stall_seconds, seconds, size_bytes))

    def _note(self, done: Checkpointed) -> None:
        self.failed = done.failure
        self._done.append(done)
