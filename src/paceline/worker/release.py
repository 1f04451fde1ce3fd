"""Gets a rank out of a collective in which it would wait for ever: its connections are cut, not its life.

Gloo has no way to give up (torch's `abort` unblocks nothing), but its sockets are this process's own: shut down, they
make the blocked call raise a usual RuntimeError within milliseconds. NCCL's groups can be aborted; what waited for
them then goes on *without an error*, with whatever lies in its buffers (`Guard.check_freed` is for that).

Gloo's sockets are those that came up while torch made the process group: gloo connects all pairs there, and the
store has connected before. So neither the store's connection nor the user's own are ever touched, except one that
another thread of the user has opened at that very moment. With TORCH_GLOO_LAZY_INIT the connections come up later,
and are not known here: such a rank stays blocked until it is stopped.

Gloo listens for its peers where every user of the machine can reach it. Once a group is made all its pairs are
connected: the port is shut to all who come. Until then, for less than a second, a stranger may have been faster than a
peer: gloo takes anybody who sends a small number. On one machine the kernel says whose the other end is; a group with a
stranger in it is not used.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

from paceline.disk.owners import user_name
from paceline.errors import UsageError
from paceline.host.procfs import open_files, tcp_connections, written
from paceline.host.reach import is_loopback, sign
from paceline.worker.unseen import unseen

MAKES_GROUP = "_new_process_group_helper"  # what init_process_group, new_group and split_group all call
SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06  # asm-generic/socket.h, linux/bpf_common.h
LOOPBACK = "127.0.0.1"


class Connections:
    """The sockets that process groups have opened, known by their inodes: a number may be another socket's by now."""

    def __init__(self) -> None:
        self.inodes: set[str] = set()
        self.ends: list[End] = []
        """of the connections to other hosts that the last group has opened"""
        self._tolerated: list[str] | None = None

    def install(self, distributed: ModuleType) -> None:
        """Note from now on what a new process group opens, and shut its door behind it."""
        make: Callable[..., Any] | None = getattr(distributed, MAKES_GROUP, None)
        if make is None:  # a torch that has another name for it: nothing is known, nobody is freed
            return

        @unseen
        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            before = open_sockets()
            try:
                group = make(*args, **kwargs)
            finally:
                new = {inode: number for inode, number in open_sockets().items() if inode not in before}
            # NCCL alone needs its doors: ranks connect when they first exchange something
            if _is_nccl(distributed, group[0]) and "gloo" not in str(distributed._world.pg_backend_config[group[0]]):
                return group
            self.inodes |= new.keys()
            self.ends = far_ends(new.values())
            if os.environ.get("TORCH_GLOO_LAZY_INIT", "").upper() in ("", "0", "OFF", "FALSE", "N", "NO"):
                if not shut(new.values()) and os.environ.get("RANK", "0") == "0":
                    print(
                        "paceline: this system cannot shut the ports by which ranks have met: other users of this "
                        "machine can connect to them, which wastes memory and time, but not be taken for a rank",
                        file=sys.stderr,
                    )
                if words := strangers(new.values()):
                    if self._tolerated is None:
                        raise UsageError(words)
                    self._tolerated.append(words)
            return group

        setattr(distributed, MAKES_GROUP, made)

    @contextmanager
    def tolerating(self) -> Generator[list[str]]:
        """Inside, a group with a stranger in it is no error, but noted in the list: all ranks must make it again."""
        self._tolerated = []
        try:
            yield self._tolerated
        finally:
            self._tolerated = None

    def shut(self) -> None:
        """Cut those that are still there."""
        for one in _internet([descriptor for inode, descriptor in open_sockets().items() if inode in self.inodes]):
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                with suppress(OSError):  # closed meanwhile
                    one.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class End:
    """One end of a connection to another host: its name, the other end's, and whether that one has made it."""

    name: str
    other: str
    accepted: bool


def far_ends(descriptors: Collection[int]) -> list[End]:
    """Our ends of connections to other hosts."""
    doors: set[int] = set()
    pairs: list[tuple[tuple[str, int], tuple[str, int]]] = []
    for one in _internet(descriptors):
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            doors.add(one.getsockname()[1])
            continue
        with suppress(OSError):  # closed by the other side
            pairs.append((one.getsockname()[:2], one.getpeername()[:2]))
    return [
        End(f"{own[0]} {own[1]} {its[0]} {its[1]}", f"{its[0]} {its[1]} {own[0]} {own[1]}", own[1] in doors)
        for own, its in pairs
        if not is_loopback(own[0])
    ]


def open_sockets() -> dict[str, int]:
    """All sockets of this process: inode -> a descriptor of it."""
    return {target: descriptor for descriptor, target in open_files().items() if target.startswith("socket:")}


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


def shut(descriptors: Collection[int]) -> bool:
    """Have the kernel drop whatever comes to ports at which we listen; what is connected already goes on.

    Returns:
        Whether all of them are shut: a kernel may know neither way.
    """
    return all(
        sign(one, os.urandom(16)) or _filter(one)  # with a key that nobody knows
        for one in _internet(descriptors)
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _filter(one: socket.socket) -> bool:
    """A program for the packet filter: one instruction, "return 0 bytes of it". Newer kernels let only root do this."""
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    with suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(instruction)))
        return True
    return False


def strangers(descriptors: Collection[int]) -> str:
    """Who is connected over the loopback and is another user, in words; empty: nobody."""
    ends: dict[tuple[str, str], None] = {}
    for one in _internet(descriptors):
        with suppress(OSError):  # it only listens
            (address, port), (its_address, its_port) = one.getsockname()[:2], one.getpeername()[:2]
            if address == its_address == LOOPBACK:
                ends[written(its_address, its_port), written(address, port)] = None
    # (own end, other end) -> user, of all connections over IPv4 in this network
    users = {(row[1], row[2]): int(row[7]) for row in tcp_connections("tcp")} if ends else {}
    if strange := {users[end] for end in ends if end in users} - {os.geteuid()}:
        return (
            f"a process of user {', '.join(map(user_name, sorted(strange)))} has connected to a port of this training "
            f"on {os.uname().nodename} while its ranks met, in place of one of them. Nothing was sent there. Start it "
            "again, and tell your administrator"
        )
    return ""


def _internet(descriptors: Collection[int]) -> Iterator[socket.socket]:
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # closing this does not close gloo's
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield one
