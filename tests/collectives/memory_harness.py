"""Ranks that share memory as threads of one process: real memory and real waits, without starting processes."""

import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

from paceline.collectives.shared_memory import MemoryLayout, MemoryPeer, SharedMemoryGroup
from paceline.host.procfs import read_process


def in_threads(size: int, act: Callable[[SharedMemoryGroup], Any], *, bulk_bytes: int = 16 << 10) -> list[Any]:
    """Call `act` for each of `size` ranks in threads. Returns the results by rank, or raises the first error."""
    layout = MemoryLayout(size, bulk_bytes)
    mine = read_process(os.getpid())
    assert mine is not None
    peers = [
        MemoryPeer(rank, mine.pid, mine.start_ticks, memoryview(mmap.mmap(-1, layout.total_bytes)))
        for rank in range(size)
    ]
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        memory = SharedMemoryGroup(peers, rank, layout, 20.0)
        try:
            results[rank] = act(memory)
        except BaseException as error:
            errors.append(error)
            memory.mark_as_left()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results
