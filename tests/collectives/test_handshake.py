"""All ranks share memory, or none: a failure at any stage on any rank reaches all ranks."""

import contextlib
import gc
import io
import json
import os
import platform
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests import warm
from tests.errors import ended_with
from tests.run_ranks import run_ranks

from paceline.collectives import shared_memory as handshake
from paceline.collectives.communicator import get_communicator, make_communicator
from paceline.collectives.control import all_gather_object
from paceline.collectives.shared_memory import MemoryLayout, SharedMemoryUnavailable, connect_shared_memory
from paceline.protocol.control import SHARED_MEMORY
from paceline.rank.world import World

pytestmark = pytest.mark.ranks


really_open = os.open


def no_memory(*_: object) -> int:
    raise PermissionError(1, "Operation not permitted")


def somebody_elses(path: str, flags: int) -> int:
    original = really_open(path, flags)
    copy = os.memfd_create("copy")
    os.write(copy, os.pread(original, os.fstat(original).st_size, 0))
    os.close(original)
    return copy


@contextlib.contextmanager
def stage(name: str):
    with pytest.MonkeyPatch.context() as patch:
        match name:
            case "switched off":
                patch.setenv(SHARED_MEMORY, "off")
            case "memfd refused":
                patch.setattr(os, "memfd_create", no_memory)
            case "no room":
                patch.setattr(os, "posix_fallocate", no_memory)
            case "another host":
                patch.setattr(handshake, "node_key", lambda: "elsewhere")
            case "proc closed":
                patch.setattr(handshake, "_open", no_memory)
            case "other memory":
                patch.setattr(os, "open", lambda p, f: (somebody_elses if "/fd/" in p else really_open)(p, f))
            case "another order of stores":
                patch.setattr(platform, "machine", lambda: "aarch64")
        yield


STAGES = {
    "switched off": "switched off",
    "memfd refused": "Operation not permitted",
    "no room": "Operation not permitted",
    "another host": "2 nodes",
    "proc closed": "Operation not permitted",
    "other memory": "has opened different memory",
    "another order of stores": "on aarch64 does not keep stores to memory in order",
}


def open_memories() -> list[str]:
    """The descriptors of memory files. Other descriptors may be opened and closed by other threads meanwhile."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(descriptor))  # noqa: PTH115
    return [link for link in links if link.startswith("/memfd:")]


def refused(rank: int, world_size: int) -> list[str]:
    found, before = [], open_memories()
    for name in STAGES:
        with stage(name) if rank == 1 else contextlib.nullcontext():
            try:
                connect_shared_memory(rank, MemoryLayout(world_size))
                found.append("")
            except SharedMemoryUnavailable as refusal:
                found.append(str(refusal))
    assert open_memories() == before
    assert len(connect_shared_memory(rank, MemoryLayout(world_size)).peers) == world_size
    assert open_memories() == before
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "paceline-shared" in line]
    return found


def test_a_refusal_at_any_stage_is_one_of_all_ranks(tmp_path):
    everybody = run_ranks(refused, 3, tmp_path)
    assert everybody[0] == everybody[1] == everybody[2]
    for (name, words), found in zip(STAGES.items(), everybody[0], strict=True):
        assert words in found, name


def falls_back(rank: int, world_size: int) -> tuple[str, list[float], list[int]]:
    with contextlib.redirect_stderr(io.StringIO()) as said, stage("memfd refused" if rank == 1 else ""):
        assert make_communicator().memory is None
        assert make_communicator().memory is None
    world = World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    return said.getvalue(), get_communicator().start_float_sum([rank, 1.0], "test")(), all_gather_object(rank, world)


def test_ranks_without_shared_memory_talk_over_gloo_and_rank_0_says_why_once(tmp_path):
    everybody = run_ranks(falls_back, 2, tmp_path)
    words = "paceline: ranks talk over gloo, not through shared memory: rank 1: PermissionError: [Errno 1] Operation"
    assert everybody[0][0].startswith(words) and everybody[0][0].count("\n") == 1
    assert everybody[1][0] == ""
    assert all(one[1:] == ([1.0, 2.0], [0, 1]) for one in everybody)


def leaves_nothing(rank: int, world_size: int) -> list[bool]:
    def mapped() -> bool:
        return "memfd:paceline-shared" in Path("/proc/self/maps").read_text()

    found = [mapped()]
    memory = make_communicator().memory
    assert memory is not None and memory is make_communicator().memory is get_communicator().memory
    gather_words_everywhere = all_gather_object(
        rank, World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    )
    assert gather_words_everywhere == [*range(world_size)]
    found.append(mapped())
    del memory
    dist.destroy_process_group()
    gc.collect()
    found.append(mapped())
    return found


@pytest.mark.slow
def test_the_memory_ends_with_the_process_group(tmp_path):
    assert run_ranks(leaves_nothing, 2, tmp_path) == [[False, True, False]] * 2


TASK = """
import torch
from torch import nn
from paceline import ArrayDataset, Task
data = ArrayDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), torch.ones(24))
task = Task(lambda: nn.Linear(4, 1), lambda split: data, lambda out, wanted: (out[:, 0] - wanted).square())
"""


@pytest.mark.slow
def test_the_command_takes_what_is_asked_for_and_gives_the_same_weights(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    found = {}
    for asked, switch in (("shared", "auto"), ("auto", "off"), ("shared", "off")):
        folder = tmp_path / f"{asked}-{switch}"
        command = ("-m", "paceline", "train", f"{tmp_path / 'mine.py'}:task", "--nproc", "2", "--steps", "2",
                   "--strategy", "exact", "--collectives", asked, "--run-dir", folder)  # fmt: skip
        ended = warm.run(command, env={**os.environ, SHARED_MEMORY: switch})
        if (asked, switch) == ("shared", "off"):
            ended_with(ended, "memory-not-shared")
            assert f"{SHARED_MEMORY}=off" in ended.stderr
            continue
        assert ended.returncode == 0, ended.stderr
        assert "gloo" not in ended.stderr
        way = json.loads((folder / "environment.json").read_text())["collectives"]
        found[asked, switch] = way, json.loads((folder / "summary.json").read_text())["weights_sha256"]
    assert [way for way, _ in found.values()] == ["shared", "torch"]
    assert len({digest for _, digest in found.values()}) == 1
