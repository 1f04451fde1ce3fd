"""Three sessions in one process. Rank 0 leaves each group late, and keeps those after the first, as a mesh does."""

import time
from typing import Any

import torch.distributed as dist

import paceline

kept, destroy = list[Any](), dist.destroy_process_group


def late(*arguments: Any) -> None:
    time.sleep(0.5)
    destroy(*arguments)


for number in range(3):
    with paceline.session() as s:
        if s.rank == 0:
            kept += [dist.distributed_c10d._get_default_group()] if number else []
            dist.destroy_process_group = late
        assert s.sum(1) == 2
        s.print("session", number)
