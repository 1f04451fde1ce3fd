"""Fork the workers of a node from one process that has imported torch, so that torch is imported once per node.

This process, the preloader, runs the command of a worker and stops before it becomes a rank. Its forks therefore have
the interpreter, arguments, flags and working folder of a worker. The kernel makes each worker a child of the agent.
After an error of the preloader, the agent prints it once and starts the workers without the preloader.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

import msgspec

from paceline.host.cleanup import agent_mark
from paceline.host.procfs import read_process
from paceline.protocol import control
from paceline.runs.console import print_to_stderr

PR_SET_CHILD_SUBREAPER = 36
READY_SECONDS = 60.0  # for importing torch from a slow disk; after this, each worker imports torch itself
ANSWER_SECONDS = 5.0  # for a fork, which takes milliseconds
WAIT_STEP_SECONDS = 0.01


class ForkedProcess:
    """A worker that the preloader has forked. It has the methods of `subprocess.Popen` that an agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(WAIT_STEP_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Preloader:
    """The process from which workers are forked. It is not used after its first error.

    `env` has the variables, of those with which it was started, on which imports may depend.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, env: Mapping[str, str]) -> None:
        self._process, self._channel, self._env = process, channel, env
        self._ready = self._gone = False
        channel.settimeout(ANSWER_SECONDS)

    def wait_ready(self, orders: control.StopSignals) -> None:
        """Wait until the imports are done, have failed, or an order has come; give up after a minute."""
        deadline = time.monotonic() + READY_SECONDS
        while not (self._ready or self._gone or orders.has_order):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return self.disable(f"has not imported everything within {READY_SECONDS:g} s")
            orders.wait(remaining, [self._channel])
            if select.select([self._channel], [], [], 0)[0]:
                self._receive_ready()
        return None

    def _receive_ready(self) -> None:
        try:
            message = self._channel.recv(control.MAX_FORK_REQUEST_BYTES)
        except OSError as error:
            return self.disable(f"does not answer: {error}")
        self._ready = message == control.READY
        return None if self._ready else self.disable(message.decode(errors="replace") or "died while importing")

    def fork(self, env: Mapping[str, str], descriptors: Mapping[int, int]) -> ForkedProcess | None:
        """Fork a worker, which becomes a child of the agent; None: the agent has to start it. Main thread only.

        `descriptors` maps numbers in the worker, which include 1 and 2, to descriptors of the agent; 0 is /dev/null.
        """
        if not self._ready or self._gone:
            return None
        if control.select_import_env(env) != self._env:
            self.disable("was started with a different environment")
            return None
        libc, (start_reader, start_writer) = ctypes.CDLL(None), os.pipe()
        try:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # only now: the agent must not inherit orphans of workers
            blocked = tuple(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, []))
            request = control.ForkRequest(control.encode_environment(env), tuple(descriptors), blocked)
            order = msgspec.msgpack.encode(request)
            socket.send_fds(self._channel, [order], [start_reader, *descriptors.values()])
            answer = self._channel.recv(control.MAX_FORK_REQUEST_BYTES).decode(errors="replace")
            if not answer.isdecimal():
                raise OSError(answer or "it has died")
            worker = read_process(int(answer))
            if worker is None or worker.parent != os.getpid():
                raise OSError("the kernel did not make the agent the parent of its children")
            os.write(start_writer, b"\0")
            return ForkedProcess(int(answer))
        except OSError as error:
            self.disable(f"cannot fork a worker: {error}")
            return None
        finally:
            os.close(start_reader)
            os.close(start_writer)  # a worker that has not received its start byte ends now
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def disable(self, why: str) -> None:
        if not self._gone:
            slower = "each worker imports torch itself, so startup is slower"
            print_to_stderr(f"Preloading disabled (the preloader {why}); {slower}")
        self.close()

    def close(self) -> None:
        if not self._gone:
            self._gone = True
            self._channel.close()
            self._process.kill()
            self._process.wait()


def start_preloader(argv: Sequence[str], env: Mapping[str, str]) -> Preloader | None:
    """Start a preloader for workers with this command and environment. Main thread only, as for workers."""
    import_env = control.select_import_env(env)
    agent_socket, preloader_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The output of the imports is kept in memory: each worker prints it, as if it had imported torch itself
    output = os.memfd_create("paceline-preload-stdout"), os.memfd_create("paceline-preload-stderr")
    preload_env = {
        **control.WorkerSpec(agent_pid=os.getpid(), preload=preloader_socket.fileno()).to_environment(),
        control.AGENT_MARK: agent_mark("preloader"),  # a worker overwrites it, so it must be long enough
    }
    try:
        process = subprocess.Popen(
            argv, env={**import_env, **preload_env}, stdin=subprocess.DEVNULL, stdout=output[0], stderr=output[1],
            pass_fds=[preloader_socket.fileno()], start_new_session=True,
        )  # fmt: skip
    except OSError:  # starting the workers will report the reason
        agent_socket.close()
        return None
    finally:
        preloader_socket.close()
        for descriptor in output:
            os.close(descriptor)
    return Preloader(process, agent_socket, import_env)
