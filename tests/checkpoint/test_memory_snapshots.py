"""Snapshots in memory: at every moment of a write an older one is complete, and no partial one is used."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.memory_snapshots import DescriptorPair, SnapshotWriter, inherited_memory_files, newest_snapshot
from paceline.checkpoint.shards import ShardFileSource
from paceline.checkpoint.state import TensorShard
from paceline.protocol.control import WorkerSpec

pytestmark = pytest.mark.sample(2)

MakeFiles = Callable[[int], list[DescriptorPair]]


@pytest.fixture
def make_files(monkeypatch: pytest.MonkeyPatch) -> Generator[MakeFiles]:
    """Creates the memory files of local ranks, and sets the environment, like the agent."""
    made: list[int] = []

    def make(ranks: int) -> list[DescriptorPair]:
        pairs = [(os.memfd_create("first"), os.memfd_create("second")) for _ in range(ranks)]
        made.extend(fd for pair in pairs for fd in pair)
        monkeypatch.setattr(WorkerSpec, "_here", WorkerSpec(os.getpid(), snapshots=tuple(pairs)))
        assert inherited_memory_files() == pairs
        return pairs

    yield make
    for descriptor in made:
        os.close(descriptor)


def state(step: int, rank: int, *, size: int = 50) -> list[TensorShard]:
    """The state of a rank after `step`: two replicated tensors, and a separate buffer."""
    return [
        TensorShard("model/weight", torch.full((size,), float(step))),
        TensorShard("model/bias", torch.full((3,), step)),
        TensorShard(f"buffers/{rank}/mean", torch.full((2,), step + 0.5 * rank), replicated=False),
    ]


def writers(pairs: list[DescriptorPair], generation: int = 0, origin: set[int] | None = None) -> list[SnapshotWriter]:
    """The writers of one start of the workers, which resume from the state in the files `origin`."""
    spared = [next((fd for fd in pair if fd in (origin or set())), None) for pair in pairs]
    return [
        SnapshotWriter(p, r, len(pairs), generation, spared=s)
        for r, (p, s) in enumerate(zip(pairs, spared, strict=True))
    ]


def keep(all_writers: list[SnapshotWriter], step: int, *, size: int = 50, ranks: int | None = None) -> None:
    for rank, writer in enumerate(all_writers[:ranks]):
        writer.write(state(step, rank, size=size), step, {"seen": 10 * step})


def found(step: int, world_size: int, *, size: int = 50) -> set[int]:
    """Check that the newest snapshot is the complete one of `step`. Returns its files."""
    snapshot = newest_snapshot(inherited_memory_files())
    assert snapshot is not None
    assert (snapshot.meta.step, snapshot.meta.content) == (step, {"seen": 10 * step})
    assert len(snapshot.memory_file_descriptors) == world_size
    wanted = {held.name: held.tensor for rank in range(world_size) for held in state(step, rank, size=size)}
    assert snapshot.source.names("") == sorted(wanted)
    for name, tensor in wanted.items():
        value = snapshot.source.tensor(name)
        assert value is not None and value.dtype == tensor.dtype and torch.equal(value, tensor), name
    return {*snapshot.memory_file_descriptors}


def test_the_header_has_room_for_long_values(make_files: MakeFiles) -> None:
    """Such as the names of all tensors of an adapter."""
    (writer,) = writers(make_files(1))
    content = {"names": [f'"{number}"' for number in range(20_000)], "text": "\u00e9" * 200_000}
    writer.write(state(1, 0), 1, content)
    snapshot = newest_snapshot(inherited_memory_files())
    assert snapshot is not None and snapshot.meta.content == content


def test_without_an_agent_there_are_no_files_and_no_snapshot() -> None:
    assert inherited_memory_files() == [] and newest_snapshot(inherited_memory_files()) is None


def test_the_two_files_of_a_rank_are_written_in_turn_and_the_newest_is_taken(make_files: MakeFiles) -> None:
    pairs = make_files(2)
    assert newest_snapshot(pairs) is None  # nothing written
    group, seen = writers(pairs), []
    for step in (3, 6, 9, 12):
        keep(group, step)
        seen.append(found(step, 2))
    assert seen[0] == seen[2] and seen[1] == seen[3] and not seen[0] & seen[1]


def test_only_a_set_of_all_ranks_is_taken(make_files: MakeFiles) -> None:
    group = writers(make_files(3))
    keep(group, 4, ranks=2)
    assert newest_snapshot(inherited_memory_files()) is None
    group[2].write(state(4, 2), 4, {"seen": 40})
    first = found(4, 3)
    for ranks in (1, 2):  # one after the other arrives at step 8
        group[ranks - 1].write(state(8, ranks - 1), 8, {"seen": 80})
        assert found(4, 3) == first
    group[2].write(state(8, 2), 8, {"seen": 80})
    found(8, 3)


class Stop(Exception):  # noqa: N818 - it stands for a kill, no error
    pass


class StopsCopying(Tensor):
    """Raises an error when it is copied, as if the rank were killed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            raise Stop
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("again", [False, True], ids=["a new file", "a file written before"])
def test_a_rank_that_ends_while_it_writes_leaves_the_snapshot_before(make_files: MakeFiles, again: bool) -> None:
    group = writers(make_files(2))
    if again:
        keep(group, 2)
    keep(group, 4)
    before = found(4, 2)
    group[0].write(state(6, 0), 6, {"seen": 60})
    dying = state(6, 1)
    dying[-1] = TensorShard(dying[-1].name, dying[-1].tensor.as_subclass(StopsCopying), replicated=False)
    with pytest.raises(Stop):
        group[1].write(dying, 6, {"seen": 60})
    assert found(4, 2) == before


WRITER = """
import sys, torch
from paceline.checkpoint.memory_snapshots import SnapshotWriter
from paceline.checkpoint.state import TensorShard
from paceline.protocol.control import WorkerSpec
first, second, step = map(int, sys.argv[1:])
writer = SnapshotWriter((first, second), 0, 1, 0, spared=None)
while True:
    step += 1
    tensors = [TensorShard(f"t{i}", torch.full((500_000,), float(step))) for i in range(4)]
    writer.write(tensors, step, {"seen": step})
    print(step, flush=True)
"""


def test_a_writer_killed_at_any_time_leaves_a_whole_snapshot_not_older_than_it_said(make_files: MakeFiles) -> None:
    (pair,) = make_files(1)
    command = [sys.executable, "-c", WRITER, *map(str, pair), "0"]
    with subprocess.Popen(command, pass_fds=pair, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        try:
            for _ in range(3):
                assert writer.stdout.readline()  # started, both files written
            for pause_seconds in (0.0, 0.003, 0.007, 0.013, 0.031):
                time.sleep(pause_seconds)
                writer.send_signal(signal.SIGSTOP)  # as good as dead, and can be looked at many times
                os.waitpid(writer.pid, os.WUNTRACED)
                there = newest_snapshot([pair])
                assert there is not None
                step = there.meta.step
                for i in range(4):
                    value = there.source.tensor(f"t{i}")
                    assert value is not None and torch.equal(value, torch.full((500_000,), float(step)))
                writer.send_signal(signal.SIGCONT)
        finally:
            writer.kill()
        said = [int(line) for line in writer.stdout.read().split("\n")[:-1]]
    last = newest_snapshot([pair])
    assert last is not None and last.meta.step >= max(said, default=0)


def test_another_world_size_keeps_its_origin_until_it_has_a_whole_snapshot_of_its_own(make_files: MakeFiles) -> None:
    pairs = make_files(3)
    group = writers(pairs)
    for step in (2, 4, 6):
        keep(group, step)
    origin = found(6, 3)
    smaller = writers(pairs[:2], generation=1, origin=origin)  # a rank is gone for good
    keep(smaller, 8, ranks=1)
    assert found(6, 3) == origin
    smaller[1].write(state(8, 1), 8, {"seen": 80})
    origin = found(8, 2)
    larger = writers(pairs, generation=2, origin=origin)  # and is back
    for ranks in (1, 2):
        larger[ranks - 1].write(state(10, ranks - 1), 10, {"seen": 100})
        assert found(8, 2) == origin
    larger[2].write(state(10, 2), 10, {"seen": 100})
    found(10, 3)


def test_a_later_generation_wins_even_if_it_is_at_an_earlier_step(make_files: MakeFiles) -> None:
    pairs = make_files(2)
    keep(writers(pairs), 20)
    later = writers(pairs, generation=1, origin=found(20, 2))  # it had to begin before, from a disk
    keep(later, 12, ranks=1)
    found(20, 2)  # not whole yet
    later[1].write(state(12, 1), 12, {"seen": 120})
    found(12, 2)
    keep(later, 14)
    found(14, 2)


def test_sets_of_two_generations_or_world_sizes_are_never_mixed(make_files: MakeFiles) -> None:
    pairs = make_files(2)
    SnapshotWriter(pairs[0], 0, 2, 0, spared=None).write(state(5, 0), 5, {"seen": 50})
    SnapshotWriter(pairs[1], 1, 2, 1, spared=None).write(state(5, 1), 5, {"seen": 50})
    assert newest_snapshot(pairs) is None
    SnapshotWriter(pairs[1], 1, 3, 0, spared=None).write(state(5, 1), 5, {"seen": 50})
    assert newest_snapshot(pairs) is None
    SnapshotWriter(pairs[1], 1, 2, 0, spared=pairs[1][0]).write(state(5, 1), 5, {"seen": 50})
    found(5, 2)


def test_a_state_that_grows_or_shrinks_is_kept(make_files: MakeFiles) -> None:
    group = writers(make_files(2))
    for step, size in enumerate((50, 5000, 5000, 30, 30, 70_000, 10), start=1):
        keep(group, step, size=size)
        found(step, 2, size=size)


def test_foreign_bytes_in_a_memory_file_are_no_snapshot(make_files: MakeFiles) -> None:
    pairs = make_files(1)
    for foreign in (b"x" * 8, b"x" * 500, bytes(500), (8).to_bytes(8, "little") + b"{}      "):
        os.ftruncate(pairs[0][0], 0)
        os.pwrite(pairs[0][0], foreign, 0)
        assert newest_snapshot(pairs) is None
    keep(writers(pairs), 3)
    found(3, 1)


def test_what_was_taken_over_stays_readable_when_its_file_is_written_again(make_files: MakeFiles) -> None:
    group = writers(make_files(1))
    keep(group, 1)
    there = newest_snapshot(inherited_memory_files())
    assert there is not None and isinstance(there.source, ShardFileSource)
    value = there.source.tensor("model/weight")
    keep(group, 2)
    keep(group, 3)
    assert value is not None and torch.equal(value, torch.full((50,), 1.0))


def test_without_memory_for_it_the_snapshot_before_stays(make_files: MakeFiles) -> None:
    (pair,) = make_files(1)
    assert (
        SnapshotWriter(pair, 0, 1, 0, spared=None).write(state(1, 0), 1, {"seen": 10})
        == os.fstat(pair[0]).st_size
        > 200
    )
    origin = found(1, 1)
    script = """
import sys, torch, resource
from paceline.checkpoint.memory_snapshots import SnapshotWriter
from paceline.checkpoint.state import TensorShard
from paceline.protocol.control import WorkerSpec
first, second = map(int, sys.argv[1:])
writer = SnapshotWriter((first, second), 0, 1, 1, spared=first)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for _ in range(2):
    try:
        writer.write([TensorShard("model/weight", torch.ones(1_000_000))], 2, {})
    except OSError as error:
        print(error.strerror)
"""
    command = [sys.executable, "-W", "error", "-c", script, *map(str, pair)]
    done = subprocess.run(command, pass_fds=pair, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "File too large\n" * 2  # and SIGXFSZ has killed nobody
    assert found(1, 1) == origin
