"""The workers of a node are forked from one process that has imported torch, so that torch is imported once.

That process, the preloader, runs the command of a worker, and stops before it becomes a rank. So its forks have the
worker's interpreter, arguments, flags and working folder. The kernel makes each worker a child of the agent. An error
of the preloader is reported once; after it the agent starts the workers without the preloader.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from paceline.host.procfs import read_process
from paceline.host.sweep import mark_of
from paceline.protocol.control import (
    AGENT_MARK,
    MAX_ORDER_BYTES,
    READY,
    ForkOrder,
    Orders,
    WorkerSpec,
    as_bytes,
    at_import,
)
from paceline.runs.console import say

PR_SET_CHILD_SUBREAPER = 36
READY_SECONDS = 60.0  # importing torch from a slow disk; then every worker has to as well
ANSWER_SECONDS = 5.0  # for a fork, which takes milliseconds
WAIT_STEP_SECONDS = 0.01


class Forked:
    """A worker that the preloader has forked, with the methods of `subprocess.Popen` that an agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, -n if signal n killed it; None while it runs."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code; subprocess.TimeoutExpired if it still runs after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(WAIT_STEP_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Preloader:
    """The process from which workers are forked. After its first error it is not used any more."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, env: Mapping[str, str]) -> None:
        """`env` is the environment with which it was started, as far as imports may depend on it."""
        self._process, self._channel, self._env = process, channel, env
        self._ready = self._gone = False
        channel.settimeout(ANSWER_SECONDS)

    def wait_ready(self, orders: Orders) -> None:
        """Return if it has imported everything, has failed, or an order has come; give up after a minute."""
        deadline = time.monotonic() + READY_SECONDS
        while not (self._ready or self._gone or orders.given):
            left = deadline - time.monotonic()
            if left <= 0:
                return self.give_up(f"has not imported everything within {READY_SECONDS:g} s")
            orders.wait(left, [self._channel])
            if select.select([self._channel], [], [], 0)[0]:
                self._hear_ready()
        return None

    def _hear_ready(self) -> None:
        try:
            words = self._channel.recv(MAX_ORDER_BYTES)
        except OSError as error:
            return self.give_up(f"does not answer: {error}")
        self._ready = words == READY
        return None if self._ready else self.give_up(words.decode(errors="replace") or "has died while importing")

    def fork(self, env: Mapping[str, str], descriptors: Mapping[int, int]) -> Forked | None:
        """Fork a worker, which becomes our child; None if the agent has to start it instead. Main thread only.

        Args:
            env: its whole environment.
            descriptors: its open files, number there -> descriptor here; 1 and 2 among them, 0 is /dev/null.
        """
        if not self._ready or self._gone:
            return None
        if at_import(env) != self._env:
            self.give_up("was started with another environment")
            return None
        waits, begins = os.pipe()
        try:
            _take_orphans(True)  # only now: what workers leave behind is not ours to wait for
            blocked = tuple(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, []))
            order = msgspec.msgpack.encode(ForkOrder(as_bytes(env), tuple(descriptors), blocked))
            socket.send_fds(self._channel, [order], [waits, *descriptors.values()])
            answer = self._channel.recv(MAX_ORDER_BYTES).decode(errors="replace")
            if not answer.isdecimal():
                raise OSError(answer or "it has died")
            seen = read_process(int(answer))
            if seen is None or seen.parent != os.getpid():
                raise OSError("the kernel does not give us its children")
            os.write(begins, b"\0")
            return Forked(int(answer))
        except OSError as error:
            self.give_up(f"cannot fork a worker: {error}")
            return None
        finally:
            os.close(waits)
            os.close(begins)  # a worker that was not allowed to begin ends now
            with suppress(OSError):
                _take_orphans(False)

    def give_up(self, why: str) -> None:
        """Report why workers are not forked from now on, and end the preloader."""
        if not self._gone:
            slower = "each worker imports torch itself, so startup is slower"
            say(f"Preloading disabled (the preloader {why}); {slower}")
        self.close()

    def close(self) -> None:
        """End it; the workers forked from it run on."""
        if not self._gone:
            self._gone = True
            self._channel.close()
            self._process.kill()
            self._process.wait()


def start_preloader(argv: Sequence[str], env: Mapping[str, str]) -> Preloader | None:
    """Start a preloader for workers with this command and environment; None if that is not possible.

    Main thread only, as for workers: the kernel takes a thread's end for the parent's.
    """
    agent = read_process(os.getpid())
    if sys.platform != "linux" or agent is None:
        return None
    kept = at_import(env)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # What the imports print goes into memory: each worker prints it again, as one that has imported for itself would.
    said = os.memfd_create("paceline-preload-stdout"), os.memfd_create("paceline-preload-stderr")
    own = {
        **WorkerSpec(agent_pid=os.getpid(), preload=its.fileno()).variable(),
        # as long as a worker's, which takes its place
        AGENT_MARK: mark_of(agent.pid, agent.start) + "preloader-",
    }
    try:
        process = subprocess.Popen(
            argv,
            env={**kept, **own},
            stdin=subprocess.DEVNULL,
            stdout=said[0],
            stderr=said[1],
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
    except OSError:  # the workers' own start says why
        ours.close()
        return None
    finally:
        its.close()
        for descriptor in said:
            os.close(descriptor)
    return Preloader(process, ours, kept)


def _take_orphans(wanted: bool) -> None:
    """Set whether the kernel makes us the parent of processes whose parent, a descendant of ours, has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no PR_SET_CHILD_SUBREAPER")
