"""Slow cables between hosts: so many bits a second into each and out of each, and every packet so many seconds late.

    with Wire(lab, ("n1", "n2"), rate=100e6, delay=0.01) as wire:      # ping says 20 ms
        ...                                                           # wire.address("n1") over interface wire.NIC

Each host gets a tunnel, of which this process holds the other end: it passes packets on when cables would have. For
kernels that cannot delay packets themselves (without sch_netem). What waits longer than QUEUE_SECONDS is dropped.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

NIC, SUBNET, MTU = "wire", "10.78.0", 9000
QUEUE_SECONDS = 0.3
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000


class Wire:
    """See the module's words."""

    NIC = NIC

    def __init__(self, lab: Any, hosts: Sequence[str], *, rate: float, delay: float) -> None:
        self._hosts = hosts
        inits = [str(lab._init(host)) for host in hosts]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(rate), str(delay), *inits], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("no tunnel between the hosts")
        for host in hosts:
            for words in (
                ("addr", "add", f"{self.address(host)}/24", "dev", NIC),
                ("link", "set", NIC, "mtu", str(MTU), "up"),
            ):
                done = lab.run(host, "ip", *words)
                if done.returncode:
                    raise RuntimeError(done.stderr)

    def address(self, host: str) -> str:
        """Of a host, over this cable."""
        return f"{SUBNET}.{self._hosts.index(host) + 1}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def tunnel(pid: int) -> int:
    """A new tunnel in the network of this process; the descriptor of its other end."""
    libc, home = ctypes.CDLL(None, use_errno=True), os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(made, TUNSETIFF, struct.pack("16sH22x", NIC.encode(), IFF_TUN | IFF_NO_PI))
        libc.setns(home, CLONE_NEWNET)
    finally:
        os.close(there)
        os.close(home)
    return made


def carry(ends: Sequence[int], rate: float, delay: float) -> None:
    """Until nobody holds our standard input any more."""
    queues: list[deque[tuple[float, bytes]]] = [deque() for _ in ends]  # to each host
    sent, taken = [0.0] * len(ends), [0.0] * len(ends)  # when its cable has sent, and taken, all that was given to it
    poll = select.poll()
    for end in (0, *ends):
        poll.register(end, select.POLLIN | select.POLLHUP)
    while True:
        due = min((queue[0][0] for queue in queues if queue), default=None)
        ready = poll.poll(None if due is None else max(0.0, due - time.monotonic()) * 1000)
        if any(end == 0 for end, _ in ready):
            return
        now = time.monotonic()
        for number, end in enumerate(ends):
            try:
                while True:
                    packet = os.read(end, 65536)
                    to, seconds = host_of(packet), 8 * len(packet) / rate
                    start = max(sent[number], now)
                    if not 0 <= to < len(ends) or start - now >= QUEUE_SECONDS:
                        continue
                    sent[number] = start + seconds
                    there = sent[number] + delay
                    if taken[to] - there < QUEUE_SECONDS:
                        taken[to] = max(taken[to] + seconds, there)
                        queues[to].append((taken[to], packet))
            except BlockingIOError:
                pass
        now = time.monotonic()
        for number, queue in enumerate(queues):
            while queue and queue[0][0] <= now + 1e-4:
                try:
                    os.write(ends[number], queue.popleft()[1])
                except OSError:  # the other end is not up yet
                    continue


def host_of(packet: bytes) -> int:
    """Whom an IPv4 packet is for, counted from 0; below 0 for all others."""
    return packet[19] - 1 if len(packet) >= 20 and packet[0] >> 4 == 4 else -1


if __name__ == "__main__":
    os.nice(-5)
    tunnels = [tunnel(int(pid)) for pid in sys.argv[3:]]
    print("ready", flush=True)
    carry(tunnels, float(sys.argv[1]), float(sys.argv[2]))
