"""Keeps strangers from gloo's ports: it listens for its peers where every user of the machine can reach it.

Once a group is made all its pairs are connected and nobody else has any business there: the port is shut to all who
come. Until then, for less than a second, a stranger may have been faster than a peer: gloo takes anybody who sends a
small number. On one machine the kernel says whose the other end is; a group with a stranger in it is not used.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress

from paceline.disk.owners import user_name
from paceline.host.procfs import PROC

TCP_MD5SIG_EXT, WITH_PREFIX, KEY_BYTES = 32, 1, 80  # Linux: linux/tcp.h
SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06  # asm-generic/socket.h, linux/bpf_common.h
LOOPBACK = "127.0.0.1"


def shut(descriptors: Collection[int]) -> bool:
    """Have the kernel drop whatever comes to ports at which we listen; what is connected already goes on.

    Returns:
        Whether all of them are shut: a kernel may know neither way.
    """
    return all(
        _sign(one) or _filter(one)
        for one in _internet(descriptors)
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _sign(one: socket.socket) -> bool:
    """Have every packet from anywhere signed (RFC 2385), with a key that nobody knows."""
    address = struct.pack("=H", one.family).ljust(128, b"\0")  # with a prefix of 0 bits: all of them
    key = os.urandom(16)
    option = address + struct.pack("=BBHi", WITH_PREFIX, 0, len(key), 0) + key.ljust(KEY_BYTES, b"\0")
    with suppress(OSError):
        one.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG_EXT, option)
        return True
    return False


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
                ends[_written(its_address, its_port), _written(address, port)] = None
    users = _users() if ends else {}
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


def _users() -> dict[tuple[str, str], int]:
    """(own end, other end) -> user, of all connections over IPv4 in this network, as /proc/net/tcp writes them."""
    with suppress(OSError):
        rows = map(str.split, (PROC / "net" / "tcp").read_text().splitlines()[1:])
        return {(fields[1], fields[2]): int(fields[7]) for fields in rows}
    return {}


def _written(address: str, port: int) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address))
    return f"{number:08X}:{port:04X}"
