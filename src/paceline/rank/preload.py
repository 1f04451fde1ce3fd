"""Makes N workers of a process that has imported everything: it forks, and each fork takes a worker's place.

It runs a worker's command, up to here (see protocol/control.py and launch/agent/preload.py). A fork is safe while this
is the only thread, and no file and no CUDA device is open, which is checked before. A worker gets its environment,
descriptors, session and signals after the fork.
"""

import ctypes
import fcntl
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from paceline.host.procfs import die_with_parent, open_files
from paceline.protocol.control import AGENT_MARK, MAX_DESCRIPTORS, MAX_ORDER_BYTES, READY, ForkOrder, WorkerSpec
from paceline.rank.guard import Guard
from paceline.rank.ledger import KINDS, MODULE

NAME = "preloader"  # in `ps -o comm` and `top`; its command line is a worker's
COMM = Path("/proc/self/comm")
MAX_SAID_BYTES = 1 << 20
SETTLE_SECONDS = 0.5  # a thread that has ended is listed a moment longer


def serve(spec: WorkerSpec, load: Callable[[], None]) -> None:
    """Import all that `load` does, and fork a worker at each order. Returns in the workers only, each as just started.

    Ends with its agent, or when the agent no longer listens.
    """
    channel = socket.socket(fileno=spec.preload)
    channel.set_inheritable(False)
    die_with_parent(spec.agent_pid)
    comm = COMM.read_text().strip()
    COMM.write_text(NAME)
    try:
        load()
        gc.freeze()  # no worker's collector looks at these objects, which means writes to them: their memory stays one
        reason = why_not({0, 1, 2, channel.fileno()})
    except BaseException as error:  # a worker meets it again, and tells it in full
        reason = f"cannot import what it should: {type(error).__name__}: {error}"[:1000]
    _answer(channel, reason.encode(errors="replace") or READY)
    if reason:
        os._exit(1)
    while True:
        order, received = _next_order(channel)
        try:
            pid = fork_away()
        except OSError as error:
            _answer(channel, str(error).encode())
        else:
            if pid == 0:
                channel.close()
                COMM.write_text(comm)
                return become(order, received)
            _answer(channel, str(pid).encode())
        for descriptor in received:
            os.close(descriptor)


def _answer(channel: socket.socket, words: bytes) -> None:
    with suppress(OSError):  # nobody listens: the next order will not come, either
        channel.send(words)


def _next_order(channel: socket.socket) -> tuple[ForkOrder, list[int]]:
    try:
        data, received, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, MAX_DESCRIPTORS)
    except OSError:
        data, received = b"", []
    if not data:  # the agent is gone, or has no use for us any more
        os._exit(0)
    return msgspec.msgpack.decode(data, type=ForkOrder), received


def why_not(known: set[int]) -> str:
    """Why this process is not fit to be forked from; empty if it is. `known` are its descriptors that may be open."""
    if (pid := os.fork()) == 0:  # libraries that know how to (OpenBLAS) end their idle threads before a fork: have them
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + SETTLE_SECONDS
    while (threads := len(os.listdir("/proc/self/task"))) != 1:  # noqa: PTH208 - names only
        if time.monotonic() > deadline:
            return f"has {threads} threads after its imports"
        time.sleep(0.005)
    if opened := [link for descriptor, link in sorted(open_files().items()) if descriptor not in known]:
        return f"has opened files while importing: {', '.join(opened)}"
    cuda: Any = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "has initialised CUDA while importing"
    return ""


def fork_away() -> int:
    """Fork a process whose parent is at once no longer this one: 0 in it, its pid here.

    Its parent, a fork too, ends; the kernel looks for the next ancestor that takes orphans, which is the agent.
    """
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid == 0:
            os.close(reader)
            os.close(writer)
            return 0
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read()
    os.waitpid(middle, 0)  # only when it has ended is its child the agent's
    if not text:
        raise OSError("no more processes")
    return int(text)


def become(order: ForkOrder, received: Sequence[int]) -> None:
    """Be the worker that `order` describes, as if it had been started with these descriptors and this environment."""
    begins, *descriptors = received
    os.setsid()
    if not os.read(begins, 1):  # the agent has given up on us, or is gone: it knows no such worker
        os._exit(0)
    os.close(begins)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    said = [os.pread(number, MAX_SAID_BYTES, 0) for number in (1, 2)]
    _place(descriptors, order.numbers)
    for number, words in zip((1, 2), said, strict=True):
        with suppress(OSError):  # a full disk, a terminal that is gone
            os.write(number, words)
    if os.isatty(1) and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    env = dict(order.env)
    _show_mark(env.get(AGENT_MARK.encode(), b""))
    os.environb.clear()
    os.environb.update(env)
    signal.pthread_sigmask(signal.SIG_SETMASK, order.blocked_signals)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:  # Python's own random does it by itself
        numpy_random.seed()
    _watch_torch()


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give `descriptors` these numbers."""
    above = max(numbers) + 1  # first out of the way: one may stand where another is to go
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _show_mark(mark: bytes) -> None:
    """Have /proc show this mark in the environment of this process: it shows the state when its program began.

    By the mark the agent finds what its workers have forked into other sessions. The preloader's is as long, at least.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # of the environment, see proc_pid_stat(5)
    name = b"\0" + AGENT_MARK.encode() + b"="
    shown = b"\0" + ctypes.string_at(start, end - start) if 0 < start < end else b""
    at = shown.find(name)
    length = len(shown[at + len(name) :].partition(b"\0")[0]) if at >= 0 else 0
    if mark and len(mark) <= length:
        ctypes.memmove(start + at + len(name) - 1, mark.ljust(length, b"-"), length)


def _watch_torch() -> None:
    """Wrap torch.distributed's functions wherever imports have put them, as if the guard had come before them."""
    guard, module = Guard.of_process(), sys.modules.get(MODULE)
    if not guard.on or module is None:
        return
    functions = {name: found for name in KINDS if (found := getattr(module, name, None)) is not None}
    others = [
        other
        for other in [*sys.modules.values()]
        if other is not module
        and any(getattr(other, "__dict__", {}).get(name) is found for name, found in functions.items())
    ]
    guard.ledger.install(module, *others)
