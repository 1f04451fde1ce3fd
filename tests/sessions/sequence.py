"""Three sessions one after the other. Rank 0 keeps the group of each, and leaves it after the others."""

import time
from typing import Any

import torch.distributed as dist

import paceline

kept = list[Any]()
destroy = dist.destroy_process_group


def late(*arguments: Any) -> None:
    time.sleep(0.5)
    destroy(*arguments)


for number in range(3):
    with paceline.session() as s:
        if s.rank == 0:
            kept.append(dist.distributed_c10d._get_default_group())  # as a mesh does
            dist.destroy_process_group = late
        assert s.sum(1) == 2
        s.print("session", number)
