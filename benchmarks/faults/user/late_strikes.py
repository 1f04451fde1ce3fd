"""Further faults for program.py, like those of strikes.py, thought out after the judge was finished.

A plain user's file, too. Nobody who wrote these had read how the judge thinks.
"""

import fcntl
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from strikes import FOR_EVER_SECONDS, State
from torch import Tensor


def recursion(state: State) -> None:
    """Calls itself for ever."""
    recursion(state)  # FAULT: recursion


def fork_outlives(state: State) -> None:
    """A process of its own goes on in another session, and holds this rank's connections and output open."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(FOR_EVER_SECONDS)
        os._exit(0)
    raise ValueError("bad sample 4711")  # FAULT: fork-outlives


def leaves_the_group(state: State) -> None:
    """Believes that all is done, and goes on with work of its own."""
    dist.destroy_process_group()  # FAULT: leaves-the-group
    time.sleep(FOR_EVER_SECONDS)  # FAULT: leaves-the-group


def lock_file(state: State) -> None:
    """A lock on a file of the data's cache, which somebody holds for ever."""
    path = state.plan.folder / "cache.lock"
    with path.open("w") as held, path.open("w") as mine:
        fcntl.flock(held, fcntl.LOCK_EX)
        fcntl.flock(mine, fcntl.LOCK_EX)  # FAULT: lock-file


def thread_deadlock(state: State) -> None:
    """Two threads take two locks in different orders."""
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            first.acquire()

    threading.Thread(target=other, daemon=True).start()
    with first:
        both.wait()
        second.acquire()  # FAULT: thread-deadlock


def prefetcher_dies(state: State) -> None:
    """A thread that was to fetch batches ends without a word: SystemExit in a thread is not printed."""
    batches: queue.Queue[Tensor] = queue.Queue()
    threading.Thread(target=sys.exit, daemon=True).start()
    batches.get()  # FAULT: prefetcher-dies


def connects(state: State) -> None:
    """A server that listens and accepts nobody."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        while True:
            held.append(socket.create_connection(server.getsockname()))  # FAULT: connects


def waits_for_a_key(state: State) -> None:
    """A key that nobody sets in the store in which the ranks have met."""
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage] # users do
    store.wait(["ready"])  # FAULT: waits-for-a-key


def hook_sleeps(state: State) -> None:
    """Stands still in the midst of the backward."""
    next(state.model.parameters()).register_hook(_sleep)


def _sleep(gradient: Tensor) -> None:
    # not in the line that registers the hook: who names that line has not found where the rank stands
    time.sleep(FOR_EVER_SECONDS)  # FAULT: hook-sleeps


def no_sync(state: State) -> None:
    """Accumulates the gradients of this one step, which the others reduce: `no_sync` after a count that is off."""
    state.model.require_backward_grad_sync = False  # type: ignore[assignment] # as DDP's `no_sync` does

    def sync_again(_: Tensor) -> None:
        state.model.require_backward_grad_sync = True  # type: ignore[assignment]

    next(state.model.parameters()).register_post_accumulate_grad_hook(sync_again)


def other_root(state: State) -> None:
    """On all ranks: 4 numbers from rank 0; the guilty one takes itself for the source."""
    if state.now():
        dist.broadcast(torch.ones(4), src=state.rank)  # FAULT: other-root
    else:
        dist.broadcast(torch.ones(4), src=0)


def group_not_made(state: State) -> None:
    """On all ranks: a new group, which all should make; one does not, for it takes no part in it."""
    if not state.now():
        dist.new_group([0, 2])


LATE: dict[str, Callable[[State], object]] = {
    "recursion": recursion,
    # a list with room for too few ranks: torch refuses it on this rank alone
    "short-list": lambda state: dist.all_gather([torch.zeros(2)], torch.zeros(2)),  # FAULT: short-list
    "left-breakpoint": lambda state: breakpoint(),  # FAULT: left-breakpoint
    "fork-outlives": fork_outlives,
    "leaves-the-group": leaves_the_group,
    "lock-file": lock_file,
    # a tool that unpacks, downloads, converts, and does not come back
    "child-hangs": lambda state: subprocess.run(["sleep", "3600"], check=True),  # FAULT: child-hangs
    "thread-deadlock": thread_deadlock,
    "prefetcher-dies": prefetcher_dies,
    "connects": connects,
    "waits-for-a-key": waits_for_a_key,
    # minutes of work in native code without the interpreter's lock, only here
    "metric-on-one": lambda state: torch.linalg.eigvals(torch.randn(5000, 5000)),  # FAULT: metric-on-one
    "hook-sleeps": hook_sleeps,
    "no-sync": no_sync,
}
TOGETHER: dict[str, Callable[[State], object]] = {  # all ranks call these in that step
    "other-root": other_root,
    "group-not-made": group_not_made,
    "all-rest": lambda state: time.sleep(8.0),  # longer than the window, but nobody waits for anybody
}
