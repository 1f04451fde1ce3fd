"""The hang guard of a rank whose collectives are only enqueued when a call returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - what is aborted is of the torch that is imported
from tests.rank.guard_ranks import ranks, wait

from paceline.protocol import status_page
from paceline.rank import guard

SCRIPT = """
import torch, torch.distributed as dist
from paceline.rank.guard import HangGuard
from tests.doubles import nccl
torch.set_num_threads(1)
nccl.register()
dist.init_process_group(nccl.BACKEND)
tensor = torch.ones(2)
dist.all_reduce(tensor)
tensor.tolist()
other = dist.new_group([0, 1])
ready()
if rank == 0:
    dist.all_reduce(tensor)  # ENQUEUED
    dist.all_reduce(torch.ones(1), group=other)
    (folder / "returned").touch()
    tensor.tolist()
    (folder / "freed").touch()
    try:
        HangGuard.of_process().check_not_released()
    except Exception as error:
        (folder / "error").write_text(type(error).__name__)
time.sleep(60)
"""


@pytest.mark.ranks
def test_what_is_only_enqueued_is_pending_and_an_abort_frees_the_host_once(tmp_path: Path) -> None:
    with ranks(SCRIPT, 2, tmp_path, TORCH_NCCL_ASYNC_ERROR_HANDLING="0") as (blocked, late):
        late.wait_ready()
        wait((tmp_path / "returned").exists, "the call has not returned")
        wait(lambda: status_page.read_counters(blocked.page).waiting, "not seen to wait")
        answer = blocked.ask()
        assert answer is not None
        op = next(op for op in answer.ops if op.group == "0" and op.seq == 2)
        assert not op.done and f"script.py:{blocked.line('# ENQUEUED')}" in op.site, answer.ops
        assert next(op for op in answer.ops if op.group == "0" and op.seq == 1).done
        status_page.release_from_collective(blocked.page, b"{}")
        wait((tmp_path / "freed").exists, "not freed", seconds=10)
        wait((tmp_path / "error").exists, "what came of it was taken for a sum")
        assert (tmp_path / "error").read_text() == "StallError"
        assert blocked.process.poll() is None and blocked.failure() is None


def test_groups_are_aborted_together_and_only_those_of_nccl() -> None:
    order: list[str] = []

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def _get_backend(self, device: object) -> Group:
            return self

        def _group_start(self) -> None:
            order.append("start")

        def _group_end(self) -> None:
            order.append("end")

        def abort(self) -> None:
            order.append(self.name)

    groups = [Group("0"), Group("1"), Group("2")]
    module: Any = type("torch", (), {})()
    module._world = type("World", (), {})()
    module._world.pg_names = {group: group.name for group in groups}
    module._world.pg_backend_config = dict(zip(groups, ("cuda:nccl", "cpu:gloo", "cuda:nccl"), strict=True))
    guard.abort_nccl(module)
    assert order == ["start", "2", "0", "end"]
