"""A training resumes from the newest intact state, on disk or in memory, the same on all ranks."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run_ranks import run_ranks
from tests.worlds import world_of

from paceline.checkpoint.manager import Checkpoints
from paceline.checkpoint.memory_snapshots import SnapshotWriter, inherited_memory_files
from paceline.checkpoint.resume import LockedRun, ResumePoint, find_newest_checkpoint, find_newest_state
from paceline.checkpoint.shards import make_shard_layout, select_shards_to_save, serialize_shard_file
from paceline.checkpoint.state import TensorShard
from paceline.config.settings import CheckpointConfig, TrainConfig
from paceline.errors import PacelineError
from paceline.protocol.control import WorkerSpec
from paceline.rank.world import World
from paceline.runs.checkpoint_format import FORMAT_VERSION, Manifest, ShardFile
from paceline.runs.writing import write_new_file
from paceline.train.run import _find_resume_point

CONTENT: dict[str, Any] = {"samples_seen": 7, "metrics": {"loss": 0.25}, "definition": {"seed": 0}}


def state(step: int) -> list[TensorShard]:
    return [
        TensorShard("model/w", torch.full((40,), float(step))),
        TensorShard("model/b", torch.full((3,), -float(step))),
    ]


def save(checkpoints: Checkpoints, step: int, world_size: int = 2) -> Path:
    tmp, files = checkpoints.begin(step), []
    for rank in range(world_size):
        places = make_shard_layout(select_shards_to_save(state(step), rank, world_size))
        buffer = torch.empty(places.total_bytes, dtype=torch.uint8)
        serialize_shard_file(buffer, places, {})
        name = f"shard-{rank}-of-{world_size}.safetensors"
        files.append(ShardFile(name, *write_new_file(tmp / name, [buffer.numpy().data]), places.pieces))
    manifest = Manifest(
        format=FORMAT_VERSION, step=step, attempt=1, generation=0, world_size=world_size, virtual_ranks=2, scalars={},
        files=tuple(files), **CONTENT,
    )  # fmt: skip
    return checkpoints.commit(tmp, manifest, keep=9)


def folder(root: Path, *steps: int, damaged: tuple[int, ...] = (), truncated: tuple[int, ...] = ()) -> Path:
    """Checkpoints of `steps`; some have a wrong byte in the second file, or half a manifest."""
    checkpoints = Checkpoints(root)
    checkpoints.claim_publishing(1, 0)
    for step in steps:
        path = save(checkpoints, step)
        if step in damaged:
            file = path / "shard-1-of-2.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        if step in truncated:
            os.truncate(path / "manifest.json", 100)
    return root


def told_by(origin: ResumePoint | None) -> tuple[int, float] | None:
    """The step, and a value of the state, which must belong together."""
    if origin is None:
        return None
    tensor = origin.source.tensor("model/w")
    assert tensor is not None and bool((tensor == tensor[0]).all())
    assert (origin.trainer_state.samples_seen, origin.trainer_state.metrics) == (7, {"loss": 0.25})
    return origin.step, float(tensor[0])


def snapshot_only(world: World) -> ResumePoint | None:
    return find_newest_state(Checkpoints(Path("/nowhere")), world, print, memory=True)


def looked(rank: int, size: int, root: Path) -> dict[str, Any]:
    world = world_of(rank, size)
    found: dict[str, Any] = {}
    for name, after in (("healthy", None), ("damaged", None), ("hopeless", None), ("empty", None), ("missing", None),
                        ("healthy", 6), ("healthy", 9), ("healthy", 12), ("hopeless", 2)):  # fmt: skip
        reports: list[str] = []
        try:
            known = -1 if after is None else after
            outcome: Any = told_by(find_newest_checkpoint(Checkpoints(root / name), world, reports.append, after=known))
        except PacelineError as error:
            outcome = f"{type(error).__name__} {int(error.exit_code)}: {error}"
        found[name if after is None else f"{name} after {after}"] = (outcome, reports)
    return found


def test_the_search_can_stop_before_a_step(tmp_path: Path) -> None:
    checkpoints, reports = Checkpoints(folder(tmp_path, 3, 6, 9, damaged=(6,))), list[str]()

    def found(before: int, after: int = -1) -> tuple[int, float] | None:
        return told_by(find_newest_checkpoint(checkpoints, world_of(0, 1), reports.append, after=after, before=before))

    assert (found(10), found(9), found(6)) == ((9, 9.0), (3, 3.0), (3, 3.0))
    assert len(reports) == 1 and reports[0].startswith("step-00000006 ")
    assert (found(3), found(9, after=3)) == (None, None)


# ---- memory ------------------------------------------------------------------------------------------------------


def remembered(rank: int, size: int, root: Path) -> dict[str, Any]:
    """The next generation searches for the snapshots of steps 5 and 6; files replace the memory of the agent."""
    world = world_of(rank, size)
    pairs: list[tuple[int, int]] = []
    for local_rank in range(size):
        names = [root / f"memory-{local_rank}-{turn}" for turn in range(2)]
        first, second = (os.open(name, os.O_RDWR | os.O_CREAT, 0o600) for name in names)
        pairs.append((first, second))
    WorkerSpec._here = WorkerSpec(os.getpid(), snapshots=tuple(pairs))
    found: dict[str, Any] = {"nothing": told_by(snapshot_only(world))}
    writer = SnapshotWriter(inherited_memory_files()[rank], rank, size, 0, spared=None)
    for step in (5, 6):
        writer.write(state(step), step, CONTENT)
    torch.distributed.barrier()
    found["memory"] = told_by(snapshot_only(world))
    config = TrainConfig(checkpoint=CheckpointConfig(resume="no"))
    for name in ("older", "newer", "newer but damaged", "none"):
        place = LockedRun(root / name, attempt=1, generation=1, attempt_dir=None, definition={"seed": 0})
        found[name] = told_by(_find_resume_point(config, place, world)), place.notices
    first_start = LockedRun(root / "older", attempt=1, generation=0, attempt_dir=None, definition={"seed": 0})
    found["no restart"] = told_by(_find_resume_point(config, first_start, world))
    if rank == size - 1:  # is another process's file after all
        WorkerSpec._here = None
    found["unequal"] = told_by(snapshot_only(world)) if size > 1 else None
    return found


def hosts_memory(rank: int, size: int) -> tuple[Any, ...]:
    """Each rank is a host. Only the last one has step 6, and the first one nothing. Returns the state of each."""
    world = World(rank, size, 0, 1, torch.device("cpu"), "gloo")
    files = os.memfd_create("first"), os.memfd_create("second")
    WorkerSpec._here = WorkerSpec(os.getpid(), snapshots=(files,))
    nothing = told_by(snapshot_only(world))
    writer = SnapshotWriter(files, 0, 1, 0, spared=None)
    for step in (5, 6)[: size if rank == size - 1 else rank]:
        writer.write(state(step), step, CONTENT)
    one, two = (snapshot_only(world) for _ in range(2))
    own = bool(one and one.memory_file_descriptors <= {*files})
    told, again = told_by(one), told_by(two)
    before = len([*Path("/proc/self/fd").iterdir()])
    del one, two
    gc.collect()
    return nothing, told, again, own, before - len([*Path("/proc/self/fd").iterdir()])


# ---- what was found ----------------------------------------------------------------------------------------------


def both(rank: int, size: int, root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return looked(rank, size, root), remembered(rank, size, root)


@pytest.fixture(scope="module", params=[1, 2, 3], ids=["1 rank", "2 ranks", "3 ranks"])
def found(request, tmp_path_factory) -> tuple[Path, list[tuple[dict[str, Any], dict[str, Any]]]]:
    root = tmp_path_factory.mktemp("checkpoints")
    folder(root / "healthy", 3, 6, 9)
    folder(root / "damaged", 3, 6, 9, 12, damaged=(9,), truncated=(12,))
    folder(root / "hopeless", 3, 6, damaged=(3,), truncated=(6,))
    folder(root / "empty")
    folder(root / "older/checkpoints", 3)
    folder(root / "newer/checkpoints", 3, 9)
    folder(root / "newer but damaged/checkpoints", 3, 9, damaged=(9,))
    return root, run_ranks(both, request.param, root, root)


@pytest.mark.ranks
def test_all_ranks_take_the_newest_checkpoint_that_is_whole(found):
    root, ranks = found
    told, *others = (dict(disk) for disk, _ in ranks)
    assert told.pop("healthy") == ((9, 9.0), [])
    outcome, reports = told.pop("damaged")
    assert outcome == (6, 6.0)
    assert [report.split()[0] for report in reports] == ["step-00000012", "step-00000009"]
    assert "manifest.json" in reports[0] and "shard-1-of-2.safetensors" in reports[1] and "sha256" in reports[1]
    outcome, reports = told.pop("hopeless")
    assert outcome.startswith("UsageError 2: ") and f" 2 checkpoints in {root / 'hopeless'} " in outcome
    assert "--restart" in outcome and len(reports) == 2
    assert told.pop("empty") == told.pop("missing") == (None, [])
    assert told.pop("healthy after 6") == ((9, 9.0), [])
    assert told.pop("healthy after 9") == told.pop("healthy after 12") == (None, [])
    outcome, reports = told.pop("hopeless after 2")  # there is a state at hand: no reason to give up
    assert outcome is None and len(reports) == 2
    assert told == {}
    for other in others:
        assert [reports for _, reports in other.values()] == [[]] * 9
        assert other["healthy"][0] == (9, 9.0) and other["damaged"][0] == (6, 6.0)
        assert other["hopeless"][0].startswith("ReportedByPeer 2")


@pytest.mark.ranks
def test_a_restarted_worker_takes_memory_or_disk_whichever_is_newer(found):
    _, ranks = found
    for rank, (_, memory) in enumerate(ranks):
        assert memory["nothing"] is None
        assert memory["memory"] == (6, 6.0)
        assert memory["older"] == memory["none"] == ((6, 6.0), [])
        assert memory["newer"] == ((9, 9.0), [])
        origin, notices = memory["newer but damaged"]
        assert origin == (6, 6.0)
        assert [n.split()[0] for n in notices] == ["step-00000009"] * (rank == 0)
        assert memory["no restart"] is None
        assert memory["unequal"] is None


@pytest.mark.ranks
def test_hosts_that_have_no_snapshot_or_an_older_one_are_sent_the_newest(tmp_path: Path) -> None:
    nothing, told, again, own, closed = zip(*run_ranks(hosts_memory, 3, tmp_path), strict=True)
    assert {*nothing} == {None}
    assert {*told} == {*again} == {(6, 6.0)}
    assert own == (False, False, True)  # the rank that has it reads its own
    assert closed[-1] == 0 and min(closed[:-1]) >= 2  # received files are closed when the state is loaded
