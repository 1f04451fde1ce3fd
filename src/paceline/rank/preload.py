"""The preloader: a process that has imported all modules and forks a worker for each order of the agent.

It runs the command of a worker up to this point (see protocol/control.py and launch/agent/preload.py). A fork is safe
while this is the only thread, and while no file and no CUDA device is open. The preloader checks this first. A worker
gets its environment, descriptors, session and signals after the fork.
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

from paceline.host.procfs import die_with_parent, open_descriptors
from paceline.protocol import control
from paceline.rank.collective_recorder import ARGUMENT_RULES, C10D_MODULE
from paceline.rank.guard import HangGuard

PROCESS_NAME = "preloader"  # in `ps -o comm` and `top`; its command line is that of a worker
COMM_PATH = Path("/proc/self/comm")
MAX_OUTPUT_BYTES = 1 << 20
THREAD_END_SECONDS = 0.5  # /proc lists a thread for a short time after its end


def serve_fork_orders(spec: control.WorkerSpec, load: Callable[[], None]) -> None:
    """Call `load`, which imports modules, and fork a worker for each order. Returns only in the workers.

    Ends with its agent, or when the agent closes the channel.
    """
    channel = socket.socket(fileno=spec.preload)
    channel.set_inheritable(False)
    die_with_parent(spec.agent_pid)
    comm = COMM_PATH.read_text().strip()
    COMM_PATH.write_text(PROCESS_NAME)
    try:
        load()
        gc.freeze()  # the collectors of workers do not write to these objects, so that their memory stays common
        reason = why_fork_is_unsafe({0, 1, 2, channel.fileno()})
    except BaseException as error:  # a worker will have the same error, and reports it completely
        reason = f"cannot import its modules: {type(error).__name__}: {error}"[:1000]
    _answer(channel, reason.encode(errors="replace") or control.READY)
    if reason:
        os._exit(1)
    while True:
        order, descriptors = _next_order(channel)
        try:
            pid = fork_detached()
        except OSError as error:
            _answer(channel, str(error).encode())
        else:
            if pid == 0:
                channel.close()
                COMM_PATH.write_text(comm)
                return become_worker(order, descriptors)
            _answer(channel, str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _answer(channel: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # the agent has ended, so no further order will arrive
        channel.send(data)


def _next_order(channel: socket.socket) -> tuple[control.ForkRequest, list[int]]:
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, control.MAX_FORK_REQUEST_BYTES, control.MAX_DESCRIPTORS)
    except OSError:
        data, descriptors = b"", []
    if not data:  # the agent has ended or closed the channel
        os._exit(0)
    return msgspec.msgpack.decode(data, type=control.ForkRequest), descriptors


def why_fork_is_unsafe(known: set[int]) -> str:
    """Why this process cannot fork workers safely; empty if it can. `known` are descriptors that may be open."""
    if (pid := os.fork()) == 0:  # some libraries (OpenBLAS) end their idle threads at a fork
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + THREAD_END_SECONDS
    while (threads := len(os.listdir("/proc/self/task"))) != 1:  # noqa: PTH208 - names only
        if time.monotonic() > deadline:
            return f"has {threads} threads after its imports"
        time.sleep(0.005)
    if opened := [link for descriptor, link in sorted(open_descriptors().items()) if descriptor not in known]:
        return f"has opened files while importing: {', '.join(opened)}"
    cuda: Any = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "has initialised CUDA while importing"
    return ""


def fork_detached() -> int:
    """Fork a process whose parent is not this process; return 0 in it, and its pid here.

    Its parent, an intermediate fork, ends. The kernel then makes it a child of the agent, which is the nearest ancestor
    that adopts orphans.
    """
    reader, writer = os.pipe()
    middle_pid = os.fork()
    if middle_pid == 0:
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
    os.waitpid(middle_pid, 0)  # after this, its child is a child of the agent
    if not text:
        raise OSError("no more processes")
    return int(text)


def become_worker(order: control.ForkRequest, received: Sequence[int]) -> None:
    """Become the worker that `order` describes, as if started with these descriptors and this environment."""
    start_fd, *descriptors = received
    os.setsid()
    if not os.read(start_fd, 1):  # the agent has ended or has cancelled the order
        os._exit(0)
    os.close(start_fd)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    output = [os.pread(number, MAX_OUTPUT_BYTES, 0) for number in (1, 2)]
    _move_descriptors(descriptors, order.numbers)
    for number, text in zip((1, 2), output, strict=True):
        with suppress(OSError):  # a full disk, or a closed terminal
            os.write(number, text)
    if os.isatty(1) and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    env = dict(order.env)
    _write_agent_mark(env.get(control.AGENT_MARK.encode(), b""))
    os.environb.clear()
    os.environb.update(env)
    signal.pthread_sigmask(signal.SIG_SETMASK, order.blocked_signals)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:  # Python's random module seeds itself after a fork
        numpy_random.seed()
    _wrap_torch_collectives()


def _move_descriptors(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    min_fd = max(numbers) + 1  # move all away first, because a target number may be in use
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, min_fd) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _write_agent_mark(mark: bytes) -> None:
    """Write this mark into the environment that /proc shows, which is the environment at the start of the program.

    By the mark the agent finds processes that its workers have forked into other sessions. The preloader's mark is at
    least as long.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # of the environment, see proc_pid_stat(5)
    name = b"\0" + control.AGENT_MARK.encode() + b"="
    environment = b"\0" + ctypes.string_at(start, end - start) if 0 < start < end else b""
    at = environment.find(name)
    length = len(environment[at + len(name) :].partition(b"\0")[0]) if at >= 0 else 0
    if mark and len(mark) <= length:
        ctypes.memmove(start + at + len(name) - 1, mark.ljust(length, b"-"), length)


def _wrap_torch_collectives() -> None:
    guard, module = HangGuard.of_process(), sys.modules.get(C10D_MODULE)
    if not guard.on or module is None:
        return
    functions = {name: function for name in ARGUMENT_RULES if (function := getattr(module, name, None)) is not None}
    others = [
        other
        for other in [*sys.modules.values()]
        if other is not module
        and any(getattr(other, "__dict__", {}).get(name) is function for name, function in functions.items())
    ]
    guard.ledger.install(module, *others)
