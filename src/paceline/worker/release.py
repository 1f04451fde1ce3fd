"""Gets a rank out of a collective in which it would wait for ever: its connections are cut, not its life.

Gloo has no way to give up (torch's `abort` unblocks nothing), but its sockets are this process's own: shut down, they
make the blocked call raise a usual RuntimeError within milliseconds. NCCL's groups can be aborted; what waited for
them then goes on *without an error*, with whatever lies in its buffers (`Guard.check_freed` is for that).

Gloo's sockets are those that came up while torch made the process group: gloo connects all pairs there, and the
store has connected before. So neither the store's connection nor the user's own are ever touched, except one that
another thread of the user has opened at that very moment. With TORCH_GLOO_LAZY_INIT the connections come up later,
and are not known here: such a rank stays blocked until it is stopped.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from functools import wraps
from types import ModuleType
from typing import Any

from paceline.errors import UsageError
from paceline.worker import doors

MAKES_GROUP = "_new_process_group_helper"  # what init_process_group, new_group and split_group all call


class Connections:
    """The sockets that process groups have opened, known by their inodes: a number may be another socket's by now."""

    def __init__(self) -> None:
        self.inodes: set[str] = set()
        self._tolerated: list[str] | None = None

    def install(self, distributed: ModuleType) -> None:
        """Note from now on what a new process group opens, and shut its door behind it."""
        make: Callable[..., Any] | None = getattr(distributed, MAKES_GROUP, None)
        if make is None:  # a torch that has another name for it: nothing is known, nobody is freed
            return

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            before = open_sockets()
            try:
                group = make(*args, **kwargs)
            finally:
                new = {inode: number for inode, number in open_sockets().items() if inode not in before}
            if _is_nccl(distributed, group[0]):  # it needs its doors: ranks connect when they first exchange something
                return group
            self.inodes |= new.keys()
            if os.environ.get("TORCH_GLOO_LAZY_INIT", "").upper() in ("", "0", "OFF", "FALSE", "N", "NO"):
                if not doors.shut(new.values()) and os.environ.get("RANK", "0") == "0":
                    print(
                        "paceline: this system cannot shut the ports by which ranks have met: other users of this "
                        "machine can connect to them, which wastes memory and time, but not be taken for a rank",
                        file=sys.stderr,
                    )
                self._judge(doors.strangers(new.values()))
            return group

        setattr(distributed, MAKES_GROUP, made)

    def _judge(self, strangers: str) -> None:
        if strangers and self._tolerated is None:
            raise UsageError(strangers)
        if strangers and self._tolerated is not None:
            self._tolerated.append(strangers)

    @contextmanager
    def tolerating(self) -> Generator[list[str]]:
        """Inside, a group with a stranger in it is no error, but noted in the list: all ranks must make it again."""
        self._tolerated = []
        try:
            yield self._tolerated
        finally:
            self._tolerated = None

    def note(self, inodes: Collection[str]) -> None:
        """Add what has been found otherwise."""
        self.inodes |= set(inodes)

    def shut(self) -> int:
        """Cut those that are still there; how many."""
        count = 0
        for inode, descriptor in open_sockets().items():
            if inode in self.inodes:
                with suppress(OSError):  # closed meanwhile, or one that only listens
                    count += _shut(descriptor)
        return count


def open_sockets() -> dict[str, int]:
    """All sockets of this process: inode -> a descriptor of it."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        with suppress(OSError):  # the listing's own is closed again
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def _shut(descriptor: int) -> bool:
    # a duplicate: closing this one does not close gloo's
    with socket.socket(fileno=os.dup(descriptor)) as one:
        internet = one.family in (socket.AF_INET, socket.AF_INET6)
        if not internet or one.type != socket.SOCK_STREAM or one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        one.shutdown(socket.SHUT_RDWR)
        return True


def abort_nccl(distributed: ModuleType) -> None:
    """Give up all collectives of all NCCL groups at once: one alone would wait for the others (pytorch 119797)."""
    names: dict[Any, str] = {**distributed._world.pg_names}
    groups = sorted((group for group in names if _is_nccl(distributed, group)), key=lambda group: names[group])
    if not groups:
        return
    backend = groups[0]._get_backend(sys.modules["torch"].device("cuda"))
    backend._group_start()
    try:
        for group in reversed(groups):
            group.abort()
    finally:
        backend._group_end()


def _is_nccl(distributed: ModuleType, group: Any) -> bool:
    return "nccl" in str(distributed._world.pg_backend_config.get(group))
