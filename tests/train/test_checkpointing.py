"""A checkpoint is the state of its step, published when all ranks have agreed, and its failure stops nothing."""

import errno
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run_ranks import run_ranks
from tests.worlds import world_of

from paceline.checkpoint.manager import Checkpoints, PublishClaim
from paceline.checkpoint.resume import TrainerState
from paceline.checkpoint.shards import ShardFileSource
from paceline.checkpoint.state import TensorShard
from paceline.rank.world import World
from paceline.runs.events import Checkpointed, Step, read_events
from paceline.stepping.totals import ControlFlags
from paceline.train import checkpointing
from paceline.train.checkpointing import CheckpointWriter

SIZE = 20_000
CONTENT = TrainerState(samples_seen=5, metrics={"loss": 0.5}, definition={"seed": 0})


@dataclass
class Rank:
    """One rank's saver, a state to save, and what it was told."""

    saver: CheckpointWriter
    world: World
    state: torch.Tensor
    checkpoints: Checkpoints
    told: list[str] = field(default_factory=list)

    def held(self) -> list[TensorShard]:
        shared, own = self.state[: SIZE // 2], self.state[SIZE // 2 :]
        return [TensorShard("model/w", shared), TensorShard(f"buffers/{self.world.rank}/b", own, replicated=False)]

    def step(self, number: int) -> ControlFlags:
        """Change the state, and agree on the votes as a training step's totals do."""
        self.state[: SIZE // 2] = number
        self.state[SIZE // 2 :] = number + self.world.rank / 10
        votes = torch.tensor(self.saver.shard_write_status())
        torch.distributed.all_reduce(votes)
        written, failed = votes.tolist()
        return ControlFlags(shard_written=written, shard_failed=failed)

    def begin(self, step: int) -> None:
        self.saver.begin(self.held(), step, CONTENT)

    def done(self) -> list[tuple[int, str]]:
        return [(saved.step, saved.failure) for saved in self.saver.take_done()]


def rank_of(world: World, root: Path, flush_events: Callable[[], None] = lambda: None, keep: int = 9) -> Rank:
    checkpoints = Checkpoints(root)
    if world.rank == 0:
        checkpoints.claim_publishing(1, 0)
    told: list[str] = []
    saver = CheckpointWriter(
        checkpoints, world, world.size, PublishClaim(1, 0), keep=keep, flush_events=flush_events, say=told.append
    )  # fmt: skip
    return Rank(saver, world, torch.zeros(SIZE), checkpoints, told)


def published(root: Path) -> dict[int, dict[str, float]]:
    """By step: of each tensor the one value that all its elements have."""
    found: dict[int, dict[str, float]] = {}
    checkpoints = Checkpoints(root)
    for step, path in checkpoints.entries():
        manifest = checkpoints.check(path)
        source = ShardFileSource.from_checkpoint(path, manifest)
        values = {name: source.tensor(name) for name in source.names("")}
        assert all(v is not None and bool((v == v[0]).all()) for v in values.values()), "torn"
        found[step] = {name: round(float(v[0]), 1) for name, v in values.items() if v is not None}
    return found


# ---- ranks -------------------------------------------------------------------------------------------------------


def protocol(rank: int, size: int, root: Path) -> Any:
    """Save step 1; go on, with votes, until it is published; save 20 and 21 without a step in between."""
    this = rank_of(world_of(rank, size), root)
    assert this.saver.shard_write_status() == (0.0, 0.0)
    this.step(1)
    this.begin(1)
    number, on_its_way = 1, True
    while on_its_way and number < 10_000:  # 10 s; the state changes while it is written
        time.sleep(0.001)
        number += 1
        votes = this.step(number)
        this.saver.publish_if_written(votes)
        on_its_way = this.saver._writing is not None
        assert on_its_way == (votes != ControlFlags(shard_written=float(size)))  # on all ranks at the same step
    assert this.saver.shard_write_status() == (0.0, 0.0)
    for step in (20, 21):  # what is on its way is ended first
        this.step(step)
        this.begin(step)
    this.state.fill_(-1)
    this.saver.wait()
    assert this.saver._writing is None and this.saver._publishing is None
    return {"number": number, "done": this.done(), "failed": this.saver.failed}


def failing(rank: int, size: int, root: Path) -> Any:
    """On rank 1 the events of step 1 cannot be flushed, and the shard of step 3 is larger than a file may be."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    flushed: list[int] = []

    def flush_events() -> None:
        flushed.append(step)
        assert not list(root.glob(f".tmp-{step}-*/shard-{rank}-of-*"))  # before the shard is written
        if rank == 1 and step == 1:
            raise OSError(errno.EIO, "the disk is broken")

    this = rank_of(world_of(rank, size), root, flush_events)
    found: dict[int, Any] = {}
    for step in (1, 2, 3, 4):
        this.step(step)
        if rank == 1 and step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, unlimited))
        this.begin(step)
        assert this.saver._writing is not None and this.saver._writing.thread is not None
        this.saver._writing.thread.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
        votes = this.step(step + 10)  # training is not disturbed
        this.saver.publish_if_written(votes)
        this.saver.wait()
        found[step] = (votes, this.done(), this.saver.failed)
    assert flushed == [1, 2, 3, 4]
    return found


def both(rank: int, size: int, root: Path) -> tuple[Any, Any]:
    return protocol(rank, size, root / "protocol"), failing(rank, size, root / "failing")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[Path, list[tuple[Any, Any]]]:
    """The folders that `protocol` and `failing` have left, and what each rank says."""
    root = tmp_path_factory.mktemp("saving")
    return root, run_ranks(both, 2, root, root)


@pytest.mark.ranks
def test_two_ranks_publish_when_both_have_written_and_never_a_later_state(two_ranks):
    root, ((first, _), (second, _)) = two_ranks
    root = root / "protocol"
    assert first["number"] == second["number"]
    assert first["done"] == [(1, ""), (20, ""), (21, "")] and second["done"] == []
    assert first["failed"] == second["failed"] == ""
    assert published(root) == {
        step: {"model/w": step, "buffers/0/b": step, "buffers/1/b": step + 0.1} for step in (1, 20, 21)
    }
    assert not [p.name for p in root.iterdir() if p.name.startswith((".tmp", ".trash"))]
    manifest = Checkpoints(root).check(root / "step-00000021")
    assert (manifest.samples_seen, manifest.metrics, manifest.definition) == (5, {"loss": 0.5}, {"seed": 0})
    assert (manifest.attempt, manifest.generation, manifest.world_size, manifest.virtual_ranks) == (1, 0, 2, 2)


@pytest.mark.ranks
def test_a_rank_that_cannot_write_is_named_and_the_next_checkpoint_succeeds(two_ranks):
    root, ((_, told), (_, silent)) = two_ranks
    root = root / "failing"
    for step, reason in ((1, "the disk is broken"), (3, "File too large")):
        votes, [(failed_step, failure)], failed = told[step]
        assert votes == ControlFlags(shard_written=1.0, shard_failed=1.0)
        assert failed_step == step and failure == failed
        assert failure.startswith("rank 1: OSError: ") and reason in failure
    for step in (2, 4):
        assert told[step] == (ControlFlags(shard_written=2.0), [(step, "")], "")
    assert [found[1:] for found in silent.values()] == [([], "")] * 4  # rank 0 tells
    assert list(published(root)) == [4, 2]
    Checkpoints(root).claim_publishing(2, 0)  # the next start removes what was never published
    assert sorted(p.name for p in root.iterdir()) == [".fence", "step-00000002", "step-00000004"]


# ---- the command -------------------------------------------------------------------------------------------------

# 100 kB of weights, so 300 kB of state; the disk has 250 kB.
TASK = """
import torch
from torch import nn
from paceline import ArrayDataset, Task

def data(split):
    return ArrayDataset(torch.arange(32.0).reshape(32, 1) / 32, torch.zeros(32))

task = Task(lambda: nn.Sequential(nn.Linear(1, 8000), nn.Linear(8000, 1)), data, lambda o, t: (o[:, 0] - t).square())
"""


def test_a_shard_from_before_a_rollback_is_replaced(tmp_path, monkeypatch):
    def has_separate_folder(_) -> bool:
        tmp_path.joinpath(".tmp-1-1-0", "shard-0-of-1.safetensors").write_bytes(b"earlier")
        return True

    monkeypatch.setattr(checkpointing, "has_separate_folder", has_separate_folder)
    this = rank_of(world_of(0, 1), tmp_path)
    this.begin(1)
    this.saver.wait()
    assert this.done() == [(1, "")] and list(published(tmp_path)) == [1]


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=250k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def failed(paceline, folder, disk, *words):
    (folder / "mine.py").write_text(TASK)
    run = paceline("train", "mine.py:task", "--batch-size", 8, "--run-dir", disk / "run", *words)
    assert run.returncode == 1, run.stdout
    return run


@pytest.mark.root
def test_a_run_without_room_for_checkpoints_trains_to_its_end_and_says_so(paceline, small_disk, tmp_path):
    run = failed(paceline, tmp_path, small_disk, "--steps", 5, "--checkpoint-every", 2)
    room = r"a checkpoint needs [\d,]+ bytes, and the file system of \S+/checkpoints has [\d,]+ free"
    for step in (2, 4, 5):
        assert re.search(f"WARNING: .*step {step} .*{room}", run.stdout)
    assert "[last-checkpoint-unsaved]" in run.stderr and re.search(room, run.stderr)
    assert (small_disk / "run/model.safetensors").is_file()
    events = list(read_events(small_disk / "run/events-0.jsonl"))
    assert [e.step for e in events if isinstance(e, Step)] == [1, 2, 3, 4, 5]
    saved = [(e.step, bool(e.failure)) for e in events if isinstance(e, Checkpointed)]
    assert saved == [(2, True), (4, True), (5, True)]


@pytest.mark.root
def test_a_stop_that_cannot_save_keeps_the_weights_and_is_no_success(paceline, small_disk, tmp_path):
    run = failed(paceline, tmp_path, small_disk, "--steps", 50, "--rehearse-preemption", 2)
    assert "[stopped-unsaved]" in run.stderr and "step 3, " in run.stderr
    assert "rescued to" in run.stderr
    assert list(tmp_path.rglob("*rescued.safetensors"))
    assert "rehearsal" not in run.stderr
