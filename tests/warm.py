"""Processes that need not import anything: forked from one that has, in a hundredth of a second instead of two.

    process = warm.start("tests.run_ranks:rank_of", folder, rank, stdout=file)    # a function
    process = warm.python(["-m", "paceline", "train", "--help"], stdout=file)     # as `python -m paceline ...`
    done = warm.run(["-c", code], torch=False, cwd=folder)                        # as subprocess.run

Each is as fresh as a new interpreter with the modules of TORCH, or of LIGHT, imported: that is how the product forks
its workers, too (worker/preload.py). Its state is the state of that moment, whatever other processes did since.
It gets its own environment, working folder, streams and session, and is a child of whoever asked for it: it is waited
for and killed as any other. The processes that they are forked from start when they are first needed, do nothing but
fork, and end with the test run. There are two with torch, so that not all ranks have the same seed of hashes.

Not for what looks at how Python itself starts (`sys.flags`, `sys.orig_argv`), at when a module is imported, or at what
is read from the environment at that time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

PR_SET_CHILD_SUBREAPER = 36
MAX_ORDER_BYTES = 1 << 17  # less than what a socket takes by default
START_SECONDS = 60.0
POLL_SECONDS = 0.01
ROOT = Path(__file__).parents[1]
ENVIRONMENT = dict(os.environ)  # before a test changes it

LIGHT = ("paceline.cli.train", "paceline.cli.launch", "paceline.cli.elsewhere", "rich.console", "rich.panel", "pytest")
TORCH = (*LIGHT, "torch.distributed", "torch._dynamo", "safetensors.torch", "paceline.train.run", "hypothesis")
SOURCES = (LIGHT, TORCH, TORCH)  # torch's optimizers import torch._dynamo, which takes as long as torch itself


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
    """A process that is forked from, and the socket to it."""

    def __init__(self, number: int) -> None:
        self.channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(START_SECONDS)
        with its:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(number), str(its.fileno())],
                env=ENVIRONMENT,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )

    def fork(self, order: bytes, files: Sequence[int]) -> Warm:
        libc = ctypes.CDLL(None, use_errno=True)
        # Only now is the child of a descendant that ends ours: what tests leave behind goes to init, as ever.
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self.channel, [order], files)
            answer = self.channel.recv(MAX_ORDER_BYTES).decode()
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer.isdecimal():
            raise RuntimeError(f"no process is forked: {answer or 'what forks has ended'}")
        return Warm(int(answer))

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


_sources: dict[int, _Source] = {}  # one set for the whole test run: that is its point


def pids() -> set[int]:
    """The processes that are forked from: no leak of the test that happened to need them first."""
    return {source.process.pid for source in _sources.values()}


def close() -> None:
    """End them, at the end of the test run."""
    while _sources:
        _sources.popitem()[1].close()


def start(
    function: str | None,
    *args: Any,
    stdout: int | IO[Any],
    stderr: int | IO[Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Mapping[int, int] | None = None,
    torch: bool = True,
    rank: int = 0,
) -> Warm:
    """Call `function(*args)` in a process of its own; its end is the process's, as if it had been a script.

    Args:
        function: "module:name"; None is what `python` calls.
        args: whatever can be pickled, without a type of a test module.
        stdout: an open file; standard input is empty.
        stderr: the same file without one.
        env: its whole environment; ours without one.
        cwd: its working folder.
        pass_fds: further open files, our number -> the number there.
        torch: whether it has torch imported.
        rank: ranks with an even and an odd one have different seeds of hashes.
    """
    env = dict(os.environ if env is None else env)
    read = {name for name in env.keys() | ENVIRONMENT.keys() if name.startswith("PYTHON")}
    if strange := sorted(name for name in read if env.get(name) != ENVIRONMENT.get(name)):
        raise ValueError(f"only a new interpreter reads {', '.join(strange)}")
    number = 1 + rank % 2 if torch else 0
    pass_fds = pass_fds or {}
    order = pickle.dumps((function, args, env, str(cwd or Path.cwd()), sys.path, (1, 2, *pass_fds.values())))
    files = [
        file if isinstance(file, int) else file.fileno() for file in (stdout, stdout if stderr is None else stderr)
    ]
    if number not in _sources:
        _sources[number] = _Source(number)
    return _sources[number].fork(order, [*files, *pass_fds])


def python(arguments: Sequence[object], **settings: Any) -> Warm:
    """`python ARGUMENTS`: -m MODULE, -c CODE or a script with arguments. `settings` as those of `start`."""
    return start(None, [str(argument) for argument in arguments], **settings)


def run(arguments: Sequence[object], *, timeout: float = 55.0, **settings: Any) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`, and what it has printed until it and all that has its streams has ended.

    Raises:
        subprocess.TimeoutExpired: after that many seconds; it is then killed.
    """
    pipes = os.pipe(), os.pipe()
    try:
        try:
            process = python(arguments, stdout=pipes[0][1], stderr=pipes[1][1], **settings)
        finally:
            for _, end in pipes:
                os.close(end)
        said = _read([begin for begin, _ in pipes], process, time.monotonic() + timeout)
    finally:
        for begin, _ in pipes:
            os.close(begin)
    code = process.wait(timeout)
    return subprocess.CompletedProcess([*map(str, arguments)], code, *(words.decode() for words in said))


def _read(pipes: Sequence[int], process: Warm, deadline: float) -> list[bytes]:
    found = dict.fromkeys(pipes, b"")
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        try:
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(str(process.pid), 0.0, *found.values())
                for key, _ in ready:
                    words = os.read(key.fd, 1 << 16)
                    found[key.fd] += words
                    if not words:
                        selector.unregister(key.fd)
        except BaseException:  # pytest's own time limit, too
            process.kill()
            process.wait()
            raise
    return [found[pipe] for pipe in pipes]


# ---- in the forked process ---------------------------------------------------------------------------------------


def interpret(arguments: Sequence[str]) -> None:
    """What `python ARGUMENTS` does once the interpreter is there."""
    if arguments[0] == "-P":
        first, arguments = [], arguments[1:]
    elif arguments[0] == "-m":
        first = [str(Path.cwd())]
    else:
        first = [""] if arguments[0] == "-c" else [str(Path(arguments[0]).resolve().parent)]
    sys.path[:0] = first
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy._run_module_as_main(arguments[1])
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), main.__dict__)
        return
    sys.argv[:] = arguments
    main.__file__ = arguments[0]
    with io.open_code(arguments[0]) as file:
        exec(compile(file.read(), arguments[0], "exec", dont_inherit=True), main.__dict__)


def _become(order: bytes, files: Sequence[int], go: int) -> NoReturn:
    """Be what `order` says; never returns."""
    code = 1
    try:
        os.read(go, 1)  # until the process between us and our parent has ended
        os.close(go)
        os.setsid()
        code = _call(order, files)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    # Without C++'s static destructors: a gloo thread that still runs there aborts a process that has done its work.
    os._exit(code)


def _call(order: bytes, files: Sequence[int]) -> int:
    function, args, env, cwd, path, numbers = pickle.loads(order)
    above = max(*files, *numbers) + 1
    for file, number in [(_moved(file, above), number) for file, number in zip(files, numbers, strict=True)]:
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if "numpy" in sys.modules:  # Python's own random does it by itself
        sys.modules["numpy"].random.seed()
    try:
        if function is None:
            interpret(*args)
        else:
            sys.path[:] = path
            module, _, name = function.partition(":")
            getattr(importlib.import_module(module), name)(*args)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _moved(file: int, above: int) -> int:
    """The same open file under a number out of the way."""
    import fcntl

    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(file)
    return moved


# ---- in the process that is forked from --------------------------------------------------------------------------


def _serve(number: int, channel: socket.socket) -> None:
    channel.set_inheritable(False)
    sys.path.pop(0)  # this folder
    gc.disable()  # a third less: it would look at each of a million new objects again and again
    for name in SOURCES[number]:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    while True:
        order, files, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, 32)
        if not order:  # the test run has ended
            return
        go, gone = os.pipe()
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child == 0:
                for end in (reader, writer, gone):
                    os.close(end)
                channel.close()
                _become(order, files, go)
            os.write(writer, str(child).encode())
            os._exit(0)
        os.close(writer)
        pid = os.read(reader, 32)
        os.waitpid(middle, 0)  # now its child is the test run's
        for end in (reader, gone, go, *files):
            os.close(end)
        channel.send(pid or b"fork failed")


if __name__ == "__main__":
    _serve(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
