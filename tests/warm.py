"""Processes that need not import torch: forked from one that has, a tenth of a second instead of two.

    process = warm.start("tests.run_ranks:child", folder, rank, env=..., output=...)

Each is as fresh as a new interpreter that has imported torch, numpy and safetensors: its state is the state at that
moment, whatever other processes did since. It gets its own environment, working folder, streams and session, and it is
a child of whoever asked for it, so it is waited for and killed as any other. The process that they are forked from
starts at the first use, does nothing but fork, and ends with the test run.

Not for what must see how Python itself starts (`sys.flags`, `sys.orig_argv`), when torch is imported, or what libraries
read from the environment while they are imported: OMP_NUM_THREADS is 1 there.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

PR_SET_CHILD_SUBREAPER = 36
MAX_ORDER_BYTES = 1 << 18  # twice that is what a socket takes by default
START_SECONDS = 60.0
POLL_SECONDS = 0.01
# Third-party only: the tested code is imported by each process for itself. torch's optimizers import torch._dynamo.
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "numpy", "safetensors.torch", "msgspec", "hypothesis", "pytest")


class Warm:
    """A process forked for us: what `subprocess.Popen` has for one that we have started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Source:
    """The process that is forked from, and the socket to it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None

    def ready(self) -> socket.socket:
        if self.channel is None or self.process is None or self.process.poll() is not None:
            self.close()
            self.channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.channel.settimeout(START_SECONDS)
            with its:
                self.process = subprocess.Popen(
                    [sys.executable, __file__, str(its.fileno())],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[its.fileno()],
                    start_new_session=True,
                )
        return self.channel

    def close(self) -> None:
        if self.channel is not None and self.process is not None:
            self.channel.close()
            self.process.kill()
            self.process.wait()
        self.channel = self.process = None


_source = _Source()  # one for the whole test run: that is its point


def pid() -> int | None:
    """The process that is forked from, no leak of the test that happened to need it first."""
    return _source.process.pid if _source.process else None


def close() -> None:
    """End it, at the end of the test run."""
    _source.close()


def start(
    function: str,
    *args: Any,
    stdout: int | IO[Any],
    stderr: int | IO[Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Warm:
    """Call `function(*args)` in a process of its own; its end is the process's, as if it had been a script.

    Args:
        function: "module:name".
        args: whatever can be pickled, without a type of a test module.
        stdout: an open file; standard input is empty.
        stderr: the same file without one.
        env: its whole environment; ours without one.
        cwd: its working folder.
    """
    order = pickle.dumps((function, args, dict(os.environ if env is None else env), str(cwd or Path.cwd()), sys.path))
    files = [file if isinstance(file, int) else file.fileno() for file in (stdout, stdout if stderr is None else stderr)]
    channel = _source.ready()
    libc = ctypes.CDLL(None, use_errno=True)
    # Only now is the child of a descendant that ends ours: what tests leave behind goes to init, as ever.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(channel, [order], files)
        answer = channel.recv(MAX_ORDER_BYTES).decode()
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
    if not answer.isdecimal():
        raise RuntimeError(f"no process is forked: {answer or 'what forks has ended'}")
    return Warm(int(answer))


def run_script(argv: Sequence[str]) -> None:
    """`python ARGV` in a process that `start` forked: start("tests.warm:run_script", ["worker.py", "7"])."""
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).parent)
    runpy.run_path(argv[0], run_name="__main__")


# ---- in the process that is forked from --------------------------------------------------------------------------


def _serve(channel: socket.socket) -> None:
    gc.disable()  # a third less: it would look at each of a million new objects again and again
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    while True:
        order, files, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, 2)
        if not order:  # the test run has ended
            return
        go, gone = os.pipe()  # closed when the process between us and the new one has ended
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child == 0:
                for number in (reader, writer, gone):
                    os.close(number)
                channel.close()
                _become(order, files, go)
            os.write(writer, str(child).encode())
            os._exit(0)
        os.close(writer)
        pid = os.read(reader, 32)
        os.waitpid(middle, 0)
        for number in (reader, gone, go, *files):
            os.close(number)
        channel.send(pid or b"fork failed")


def _become(order: bytes, files: list[int], go: int) -> NoReturn:
    """Be what `order` says; never returns."""
    code = 1
    try:
        os.read(go, 1)
        os.close(go)
        for number, file in enumerate(files, start=1):
            os.dup2(file, number)
        for file in files:
            os.close(file)
        code = _call(order)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    # Without C++'s static destructors: a gloo thread that still runs there aborts a process that has done its work.
    os._exit(code)


def _call(order: bytes) -> int:
    function, args, env, cwd, path = pickle.loads(order)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:] = path
    sys.modules["numpy"].random.seed()  # Python's own random does it by itself
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(*args)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
