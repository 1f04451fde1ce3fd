"""Processes that need not import anything: forked from one that has, in a hundredth of a second instead of two.

    warm.Popen(["-m", "paceline", "train", "--help"])         # subprocess.Popen([sys.executable, "-m", ...])
    warm.run(["-c", code], torch=False, cwd=folder)           # subprocess.run(..., capture_output=True, text=True)
    warm.call("tests.run_ranks:rank_of", folder, rank)        # a Popen that calls a function

Each is as fresh as a new interpreter with the modules of TORCH, or of LIGHT, imported: that is how the product forks
its workers, too (rank/preload.py). Its state is the state of that moment, whatever other processes did since. It gets
its own environment, working folder and streams, and is a child of whoever asked for it. The processes that they are
forked from start when they are first needed, do nothing but fork, and end with the test run. There are two with torch,
so that not all ranks have the same seed of hashes.

A command that starts agents gets what they and their workers are forked from, too (`Nursery`): each agent would import
torch once for its workers, which is most of what a test of two ranks takes. Parents, sessions, descriptors and the
environment in /proc are those of processes that were started. With `ranks` so are the ranks of a script or of
`paceline verify`, each of which would import torch; that is for what they do, not for how they start.

Not for what looks at how Python itself starts (`sys.flags`), at when a module is imported, at what is read from the
environment at that time, or at the command line in /proc.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_ORDER_BYTES = 1 << 17  # less than what a socket takes by default
START_SECONDS = 180.0
ROOT = Path(__file__).parents[1]
ENVIRONMENT = dict(os.environ)  # before a test changes it
ROOM = {"WARM_ROOM": "-" * 40_000}  # in which a fork shows its own environment in /proc
AGENT = "paceline.launch.agent"
RANKS = ("paceline.rank.bootstrap", "paceline.lab.ranks.")  # the modules of ranks that no preloader forks
OUT_OF_THE_WAY = 500  # the number of a file that no order asks for
STARTING = {"train", "launch", "verify", "compare", "scale"}  # commands that may start one
AFTER_START = {"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"}  # of a new interpreter; a fork can do it, too

LIGHT = (
    *("paceline.cli.train", "paceline.cli.launch", "paceline.cli.jobs", "pytest"),
    *("paceline.launch.supervise", "paceline.launch.agent.coordinator", "paceline.launch.agent.follower"),
)
TORCH = (
    *(*LIGHT, "torch.distributed", "torch.distributed.run", "torch._dynamo", "safetensors.torch", "hypothesis"),
    *("paceline.train.run", "paceline.sessions.session", "paceline.lab.ranks.verify"),
)
SOURCES = (LIGHT, TORCH, TORCH)  # torch's optimizers import torch._dynamo, which takes as long as torch itself


class _Source:
    """A process that is forked from, and the socket to it."""

    def __init__(self, start: Callable[[socket.socket], Any]) -> None:
        """`start` starts it with the other end of the socket."""
        self.channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(START_SECONDS)
        with its:
            self.process = start(its)

    def fork(self, order: bytes, files: Sequence[int]) -> int:
        """The pid of a new process, our child."""
        libc = ctypes.CDLL(None, use_errno=True)
        # Only now is the child of a descendant that ends ours: what tests leave behind goes to init, as ever.
        before = _children()
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self.channel, [order], files)
            answer = self.channel.recv(MAX_ORDER_BYTES).decode()
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer.isdecimal():
            raise RuntimeError(f"no process is forked: {answer or 'what forks has ended'}")
        _adopted.update(_children() - before - {int(answer)})  # whose parent has ended just then
        return int(answer)

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


def _started(number: int) -> Callable[[socket.socket], Any]:
    return lambda its: subprocess.Popen(
        [sys.executable, __file__, str(number), str(its.fileno())],
        env=ENVIRONMENT | ROOM,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
    )


_sources: dict[int, _Source] = {}  # one set for the whole test run: that is its point


_adopted: set[int] = set()
_forking = threading.Lock()  # an answer belongs to the order before it


def _children() -> set[int]:
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found.update(map(int, path.read_text().split()))
    return found


def pids() -> set[int]:
    """The processes that are forked from: no leak of the test that happened to need them first; and who was adopted."""
    for pid in _adopted:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return {source.process.pid for source in _sources.values()} | {pid for pid in _adopted if not _runs(pid)}


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def close() -> None:
    """End them, at the end of the test run."""
    while _sources:
        _sources.popitem()[1].close()


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` for arguments of Python: -m MODULE, -c CODE or a script, and what follows.

    Args:
        arguments: without the interpreter.
        torch: whether it has torch imported.
        rank: ranks with an even and an odd one have different seeds of hashes.
        function: "module:name", called with `arguments` instead; whatever can be pickled, without a test module's type.
        agents: whether what agents it starts are forked, too, and what they fork workers from; by default where
            `arguments` are a command that starts some.
        ranks: whether the workers are forked, too, that agents start by a command, such as those of a script.
        settings: of `subprocess.Popen`. Without `stdin` it is empty.
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        *,
        torch: bool = True,
        rank: int = 0,
        function: str = "",
        agents: bool | None = None,
        ranks: bool = False,
        **settings: Any,
    ) -> None:
        words = [str(argument) for argument in arguments]
        if agents is None:
            starts = AGENT in words[:3] or (words[:2] == ["-m", "paceline"] and bool({*words[2:3]} & STARTING))
            agents = ranks or starts
        self._source = 1 + rank % 2 if torch or agents else 0
        self._call = function, [*arguments] if function else words, agents, ranks
        super().__init__(words, **{"stdin": subprocess.DEVNULL, **settings})

    def _execute_child(  # instead of fork and exec
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, *_more,
    ) -> None:  # fmt: skip
        assert preexec_fn is None and executable is None and not shell
        env = dict(os.environ if env is None else env)
        if strange := _only_new(env):
            raise ValueError(f"only a new interpreter reads {', '.join(strange)}")
        streams = [end if end >= 0 else number for number, end in enumerate((p2cread, c2pwrite, errwrite))]
        numbers = (0, 1, 2, *pass_fds)
        blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        order = pickle.dumps((*self._call, env, str(cwd or Path.cwd()), sys.path, numbers, start_new_session, blocked))
        with _forking:
            if self._source not in _sources:
                _sources[self._source] = _Source(_started(self._source))
            try:
                self.pid = _sources[self._source].fork(order, [*streams, *pass_fds])
            except BaseException:  # also the time limit of a test: the next answer would belong to this order
                _sources.pop(self._source).close()
                raise
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _only_new(env: Mapping[str, str]) -> list[str]:
    """The variables of an environment that only a new interpreter would heed."""
    read = {name for name in env.keys() | ENVIRONMENT.keys() if name.startswith("PYTHON")} - AFTER_START
    return sorted(name for name in read if env.get(name) != ENVIRONMENT.get(name))


def with_ranks(command: Sequence[str], **settings: Any) -> Popen:
    """`command`, of this interpreter, with forked agents and ranks: what `subprocess.Popen` would start."""
    return Popen(command[1:], ranks=True, **settings)


def call(function: str, *arguments: Any, **settings: Any) -> Popen:
    """Call a function in a process of its own; its end is the process's, as if it had been a script."""
    return Popen(arguments, function=function, **settings)


def run(arguments: Sequence[object], *, timeout: float = 165.0, **settings: Any) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` has printed until it and all that has its streams has ended.

    Raises:
        subprocess.TimeoutExpired: after that many seconds; it is then killed.
    """
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
    with Popen(arguments, **settings) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:  # pytest's own time limit, too
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


# ---- in the forked process ---------------------------------------------------------------------------------------


def interpret(arguments: Sequence[str]) -> None:
    """What `python ARGUMENTS` does once the interpreter is there."""
    sys.orig_argv[:] = [sys.executable, *arguments]
    if arguments[0] == "-P":
        first, arguments = [], arguments[1:]
    elif arguments[0] == "-m":
        first = [str(Path.cwd())]
    else:
        first = [""] if arguments[0] == "-c" else [str(Path(arguments[0]).resolve().parent)]
    sys.path[:0] = first
    main = sys.modules["__main__"] = ModuleType("__main__")
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy._run_module_as_main(arguments[1])
        return
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), main.__dict__)
        return
    sys.argv[:] = arguments
    main.__file__ = arguments[0]
    with io.open_code(arguments[0]) as file:
        source = file.read()
    exec(compile(source, arguments[0], "exec", dont_inherit=True), main.__dict__)


def _become(order: bytes, files: Sequence[int], go: int) -> NoReturn:
    """Be what `order` says; never returns."""
    code = 1
    try:
        os.read(go, 1)  # until the process between us and our parent has ended
        os.close(go)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background ignores them
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        code = _call(order, files)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    # Without C++'s static destructors: a gloo thread that still runs there aborts a process that has done its work.
    os._exit(code)


def _call(order: bytes, files: Sequence[int]) -> int:
    function, args, agents, ranks, env, cwd, path, numbers, new_session, blocked = pickle.loads(order)
    nursery = _Source(_forked) if agents else None  # first: what comes of it is as this is now
    if nursery is not None:
        nursery.channel = socket.socket(fileno=_moved(nursery.channel.detach(), OUT_OF_THE_WAY))
        nursery.channel.settimeout(START_SECONDS)
    if new_session:
        os.setsid()
    above = max(*files, *numbers) + 1
    for file, number in [(_moved(file, above), number) for file, number in zip(files, numbers, strict=True)]:
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    _show(env)
    os.chdir(cwd)
    tempfile.tempdir = None  # TMPDIR may be another one
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if "torch" in sys.modules:  # as at their import; Python's own random does it by itself
        sys.modules["numpy"].random.seed()
        sys.modules["torch"].default_generator.seed()
        if threads := env.get("OMP_NUM_THREADS"):
            sys.modules["torch"].set_num_threads(int(threads))
    if env.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if nursery is not None:
        _raise_agents(nursery, ranks)
    try:
        if not function:
            interpret(args)
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
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(file)
    return moved


def _show(env: Mapping[str, str]) -> None:
    """Have /proc show this environment: it shows what was in this place when the program began."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # see proc_pid_stat(5)
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    assert len(shown) <= end - start, "make ROOM larger"
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _raise_agents(nursery: _Source, ranks: bool) -> None:
    """From now on this process starts agents, and an agent what its workers are forked from, as forks of `nursery`."""
    _sources.clear()
    _sources[1] = nursery
    start = subprocess.Popen._execute_child

    def begin(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more) -> None:
        words = [*map(str, args)] if isinstance(args, (list, tuple)) else []
        agent = AGENT in words[:4]
        rank = ranks and words[1:3] == ["-P", "-m"] and words[3].startswith(RANKS)
        ours = agent or rank or '"preload"' in (env or {}).get("PACELINE_WORKER", "")
        if not ours or words[0] != sys.executable or preexec_fn is not None or _only_new(env or {}):
            return start(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
        self._source, self._call = 1, ("", words[1:], agent, agent and ranks)
        return Popen._execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)

    subprocess.Popen._execute_child = begin


# ---- in the process that is forked from --------------------------------------------------------------------------


def _serve(number: int, channel: socket.socket) -> None:
    channel.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test run's
    sys.path.pop(0)  # this folder
    gc.disable()  # a third less: it would look at each of a million new objects again and again
    for name in SOURCES[number]:
        importlib.import_module(name)
    gc.freeze()
    gc.get_freeze_count = lambda: 0  # sessions search all objects: none of these two million is a user's
    gc.enable()
    _fork_on(channel)


def _forked(channel: socket.socket) -> None:
    """Leave a process as this one is now, that is forked from; it ends with this one."""
    parent = os.getpid()
    if os.fork():
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    kept = channel.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 4096)
    _fork_on(channel)
    os._exit(0)


def _fork_on(channel: socket.socket) -> None:
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
