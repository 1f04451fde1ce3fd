"""Keeping the state while training goes on: checkpoints on disk, snapshots in memory.

A checkpoint is a copy, taken between two steps, that a thread of each rank writes out while training goes on. That all
ranks' files are there is agreed on in a later step's totals (`votes`), and rank 0 publishes the whole. No thread uses
a collective: between ranks their order would be anybody's guess.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from paceline.checkpoint.shard import Layout, fill, layout, rank_part
from paceline.checkpoint.state import Held
from paceline.errors import PacelineError
from paceline.store.files import room_for
from paceline.store.manifest import FORMAT, Manifest, ShardFile
from paceline.store.store import Checkpoints, Claim, write_file
from paceline.sums import gather_words
from paceline.train.resume import Content
from paceline.train.votes import Votes
from paceline.worker.world import World

Say = Callable[[str], None]


@dataclass(frozen=True)
class Saved:
    """What became of a checkpoint, as rank 0 knows it."""

    step: int
    path: Path | None
    """None if it failed"""
    failure: str
    stall_seconds: float
    """that training stood still for it"""
    write_seconds: float
    size_bytes: int


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


def manifest_of(
    step: int, content: Content, claim: Claim, virtual_ranks: int, files: tuple[ShardFile, ...]
) -> Manifest:
    """What is written down of the state after `step`, which lies in `files`."""
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
        scalars={"evaluated": content.evaluated},
        files=files,
    )


class Saver:
    """This rank's side of the run's checkpoints: one at a time on its way, all calls at the same steps on all ranks."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        world: World,
        virtual_ranks: int,
        claim: Claim,
        *,
        keep: int,
        flush_events: Callable[[], None],
        say: Say,
    ) -> None:
        self._checkpoints, self._world, self._virtual_ranks, self._claim = checkpoints, world, virtual_ranks, claim
        self._keep, self._flush_events, self._say = keep, flush_events, say
        self._buffer: Tensor | None = None
        self._writing: _Writing | None = None
        self._publishing: threading.Thread | None = None
        self._done: list[Saved] = []
        self.failed = ""
        """why the last checkpoint could not be written; empty if it could (rank 0 knows)"""

    def votes(self) -> Votes:
        """What this rank has to say of the checkpoint on its way."""
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
            self._note(Saved(step, None, prepared["failure"], time.perf_counter() - began, 0.0, sum(sizes)))
            return
        buffer = self._copied(part, places, content, step)
        stall = time.perf_counter() - began
        writing = _Writing(step, content, Path(prepared["folder"]), stall, time.perf_counter())
        pieces = places.pieces
        # No daemon: the interpreter waits for a file that is half written.
        writing.thread = threading.Thread(
            target=self._write, args=(writing, buffer, pieces), name="paceline-checkpoint"
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

    def take_done(self) -> list[Saved]:
        """What has ended since the last call, on rank 0."""
        done, self._done = self._done, []
        return done

    def abandon(self) -> None:
        """After an error: let the thread end; what it writes is never published, and removed by the next claim."""
        for thread in (self._writing.thread if self._writing else None, self._publishing):
            if thread is not None:
                thread.join()

    def _prepare(self, step: int, size_bytes: int) -> dict[str, str]:
        if self._publishing is not None:
            self._publishing.join()
            self._publishing = None
        try:
            failure = room_for(self._checkpoints.root, size_bytes)
            return {"failure": failure or "", "folder": "" if failure else str(self._checkpoints.begin(step))}
        except (OSError, PacelineError) as error:
            return {"failure": str(error), "folder": ""}

    def _copied(self, part: Sequence[Held], places: Layout, content: Content, step: int) -> Tensor:
        if self._buffer is None or len(self._buffer) != places.total_bytes:
            on_gpu = self._world.device.type == "cuda"
            self._buffer = torch.empty(places.total_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        meta = {"step": step, "rank": self._world.rank, "world_size": self._world.size}
        fill(self._buffer, part, places, {**meta, "samples_seen": content.samples_seen})
        return self._buffer

    def _write(self, writing: _Writing, buffer: Tensor, pieces: Sequence[object]) -> None:
        name = f"shard-{self._world.rank}-of-{self._world.size}.safetensors"
        try:
            self._flush_events()  # the ledger must know of every step that a checkpoint stands on
            size, sha256 = write_file(writing.folder / name, [buffer.numpy().data])
            writing.shard = ShardFile(name, size, sha256, tuple(pieces))  # pyright: ignore[reportArgumentType]
        except Exception as error:  # told by rank 0, whatever it is
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
            self._note(self._ended(writing, None, failure, 0))
            return
        files = tuple(msgspec.convert(shard, ShardFile) for _, shard in told)
        manifest = manifest_of(writing.step, writing.content, self._claim, self._virtual_ranks, files)
        self._publishing = threading.Thread(target=self._commit, args=(writing, manifest), name="paceline-publish")
        self._publishing.start()

    def _commit(self, writing: _Writing, manifest: Manifest) -> None:
        size = sum(file.bytes for file in manifest.files)
        try:
            path = self._checkpoints.commit(writing.folder, manifest, self._keep, self._say)
            self._note(self._ended(writing, path, "", size))
        except Exception as error:  # a full disk, a newer generation: training goes on, and says so
            self._note(self._ended(writing, None, f"{type(error).__name__}: {error}", size))

    def _ended(self, writing: _Writing, path: Path | None, failure: str, size_bytes: int) -> Saved:
        seconds = time.perf_counter() - writing.began
        return Saved(writing.step, path, failure, writing.stall_seconds, seconds, size_bytes)

    def _note(self, saved: Saved) -> None:
        self.failed = saved.failure
        self._done.append(saved)
