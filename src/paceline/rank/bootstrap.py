"""`python -m paceline.rank.bootstrap SCRIPT ARGS` (or `-m MODULE ARGS`): runs any script as a worker of our agent.

The script runs as if Python had started it, in a new `__main__`. Code that imports or pickles by that name (loader
workers under spawn, multiprocessing) therefore finds the script and not this file. In addition, the process ends with
its agent, and an uncaught exception is recorded for the agent before teardown.
"""

from __future__ import annotations

import builtins
import difflib
import fcntl
import io
import os
import re
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial, wraps
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from msgspec.structs import replace

from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.protocol import control
from paceline.protocol.evidence import is_lost_peer_error
from paceline.protocol.marks import NamesWriter
from paceline.protocol.status_page import make_status_page
from paceline.rank import flight_recorder
from paceline.rank.attach import bind_to_agent, exit_worker, print_lost_peer_error, record_failure, report_error
from paceline.rank.collective_recorder import CollectiveOrderRecorder
from paceline.rank.environment import launcher_job_id
from paceline.rank.guard import HangGuard
from paceline.rank.imports import when_imported
from paceline.rank.probes import ScriptHooks, ScriptListener, faults
from paceline.rank.probes.replicas import FingerprintWriter
from paceline.rank.probes.steps import JoinContextDetector, PhaseTracker, StepCounter, SyncedOptimizerDetector
from paceline.rank.stops import StepStopHandler, UnresumableScriptWarner
from paceline.runs.console import print_to_stderr

if TYPE_CHECKING:
    from paceline.protocol.job import NodePlan

SOCKET_RELEASE_SECONDS = 3.0  # for the agent of an earlier start to release the socket's name
SEEK_SECONDS, LOOK_SECONDS = 60.0, 0.1
DETACH_TIMEOUT_SECONDS = 1.5
PROBE_SECONDS, STORE_SECONDS = 2.0, 10.0


def worker_command(script_and_args: Sequence[str], python: str = sys.executable) -> tuple[str, ...]:
    """The command of one worker that runs `SCRIPT.py ARGS`, `-m MODULE ARGS`, or any other program.

    A .py file or a module runs through this bootstrap. Any other program runs directly. Reports of its failures contain
    only the exit code and the last lines. If the agent is killed, its cleanup process ends the program, not the kernel.
    """
    if not script_and_args:
        raise UsageError(code="nothing-to-run")
    script, arguments = script_and_args[0], tuple(script_and_args[1:])
    if arguments and _is_this_python(script, python) and (arguments[0].endswith(".py") or arguments[0] == "-m"):
        script, arguments = arguments[0], arguments[1:]  # a common form: `-- python train.py`
    bootstrap = (python, "-P", "-m", control.BOOTSTRAP)  # -P: do not import modules of the working folder
    if script == "-m":
        if not arguments or arguments[0].startswith("-"):
            raise UsageError(code="module-missing")
        return (*bootstrap, "-m", *arguments)
    if script.endswith(".py"):
        _check_file(script)
        return (*bootstrap, script, *arguments)
    if "/" in script:
        _check_file(script)
        if not os.access(script, os.X_OK):
            raise UsageError(code="script-not-executable", value=script)
    elif shutil.which(script) is None:
        raise UsageError(code="program-not-found", value=script, hint=_suggest_scripts(Path(script)))
    return (script, *arguments)


def _is_this_python(script: str, python: str) -> bool:
    if re.fullmatch(r"python[0-9.]*", Path(script).name) is None:
        return False
    program, ours = shutil.which(script), Path(python)
    return program is not None and (Path(program).parent, Path(program).resolve()) == (ours.parent, ours.resolve())


def _check_file(script: str) -> None:
    path = Path(script)
    if path.is_dir():
        raise UsageError(code="script-is-folder", value=script, name=path.name)
    if not path.exists():
        raise UsageError(code="script-not-found", value=script, folder=str(Path.cwd()), hint=_suggest_scripts(path))


def _suggest_scripts(path: Path) -> str:
    scripts = [str(path.with_name(p.name)) for p in path.absolute().parent.glob("*.py") if p.is_file()]
    similar = difflib.get_close_matches(str(path), scripts, n=3)
    return f" Did you mean {' or '.join(similar)}?" if similar else ""


def main(arguments: Sequence[str]) -> NoReturn:
    """Run `arguments`, a script or -m and a module, and end this process as Python would.

    `--check` before them also records facts of the run for `paceline launch --check`.
    """
    listeners: tuple[ScriptListener, ...] = ()
    if arguments[:1] == [control.CHECK_OPTION]:
        arguments, spec = arguments[1:], control.WorkerSpec.from_environment()
        if spec is not None and spec.attempt_dir:
            from paceline.rank.check import create_fact_recorders  # costs all other scripts nothing

            listeners = create_fact_recorders(Path(spec.attempt_dir))
    bind_to_agent()
    run_script(arguments, *listeners)


def run_script(arguments: Sequence[str], *also: ScriptListener) -> NoReturn:
    """As `main`, in a process that is attached already, or that another launcher started."""
    pid, on_success = os.getpid(), list[Callable[[], None]]()
    if not arguments or arguments == ["-m"]:
        print(f"usage: python -m {control.BOOTSTRAP} SCRIPT ARGS | -m MODULE ARGS", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    if (spec := control.WorkerSpec.from_environment()) is not None:
        if os.isatty(0):
            serialize_terminal_input(spec.temporary)
        stops = StepStopHandler(HangGuard.of_process().page, arguments)
        if not also:  # --check neither resumes a stopped training nor removes its record
            stops.watch_frameworks()
        on_success = [
            install_script_probes(HangGuard.of_process(), UnresumableScriptWarner(stops), *also),
            stops.remove_resume_records,
        ]
    try:
        _run(arguments)
    except SystemExit as end:
        code = _exit_code(end, is_worker=os.getpid() == pid)
    except BaseException as error:
        code = _report_failure(error, is_worker=os.getpid() == pid)
    else:
        code = 0
    for act in on_success if code == 0 else ():
        act()
    if code >= 0 and "torch" not in sys.modules:  # with torch, `exit_worker` skips its static destructors
        HangGuard.of_process().leave(code)
        sys.exit(code)
    exit_worker(code)


def _run(arguments: Sequence[str]) -> None:
    script = ModuleType("__main__")
    script.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = sys.modules["__mp_main__"] = script  # the second as multiprocessing sets it when imported
    is_module = arguments[0] == "-m"
    if not os.environ.get("PYTHONSAFEPATH"):  # set by the user; our -P must not affect the script
        sys.path.insert(0, str(Path.cwd()) if is_module else str(Path(arguments[0]).resolve().parent))
    if is_module:
        sys.argv = ["-m", *arguments[2:]]
        # the function of `python -m`: it finds the package's __main__, and sets __spec__, __file__ and sys.argv[0]
        runpy._run_module_as_main(arguments[1])  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        return
    sys.argv = list(arguments)
    path = str(Path(arguments[0]).absolute())
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    script.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    # dont_inherit, so that this file's __future__ imports do not apply to the script
    exec(compile(source, path, "exec", dont_inherit=True), script.__dict__)


def _exit_code(end: SystemExit, *, is_worker: bool) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    if is_worker:
        record_failure(end, ExitCode.FAILED, traceback=False)
    print(end.code, file=sys.stderr)
    return ExitCode.FAILED


def _report_failure(error: BaseException, *, is_worker: bool) -> int:
    """Record an uncaught error, print it as Python does, and return the exit code; -2 for Ctrl-C.

    The error of a child that the script has forked is not recorded.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    if is_worker and isinstance(error, PacelineError):  # its message is sufficient
        if getattr(sys.excepthook, "of_paceline", False):  # the hook of a session, which ends first
            sys.excepthook(type(error), error, trace)
        return report_error(error)
    if isinstance(error, getattr(sys.modules.get("bdb"), "BdbQuit", ())):  # a user has entered `q`
        return _exit_code(SystemExit("ended in the debugger"), is_worker=is_worker)
    interrupted = isinstance(error, KeyboardInterrupt)
    if is_worker and not interrupted:
        unblocked = bool(HangGuard.of_process().release_reason())  # the agent has unblocked this rank in a collective
        victim = unblocked or is_lost_peer_error(error)
        recorded = record_failure(error, ExitCode.FAILED, traceback=True, victim=victim)
        if victim and recorded and sys.excepthook.__module__ in ("sys", "torch.distributed.distributed_c10d"):
            if (sessions := sys.modules.get("paceline.sessions.lifecycle")) is not None:  # by name: it imports torch
                with suppress(Exception):
                    sessions.close_all_sessions(error)
            cause = "unblocked by the hang guard" if unblocked else "lost another rank"
            print_lost_peer_error(error, f"{cause}, ended")
            return ExitCode.FAILED
    sys.excepthook(type(error), error, trace)
    return -signal.SIGINT if interrupted else ExitCode.FAILED


def serialize_terminal_input(folder: str) -> None:
    """Serialize `input` and pdb of ranks with a common terminal: `input()` for a line, pdb until it continues.

    Direct reads of `sys.stdin` are not serialized, as under torchrun. `folder` is equal for all ranks of the node.
    """
    builtin_input, asking = builtins.input, False

    @contextmanager
    def turn() -> Generator[None]:
        """Hold a lock on the folder. The lock ends with its process."""
        nonlocal asking
        if asking or not folder:
            yield
            return
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            asking = True
            yield
        finally:
            asking = False
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # even if a fork holds the file open
            os.close(lock)

    @wraps(builtin_input)
    def asked(prompt: object = "", /) -> str:
        with turn():
            to_pipe = not sys.stdout.isatty() or "readline" not in sys.modules  # without readline it goes to stderr
            if prompt and to_pipe:  # the agent relays a pipe line by line
                sys.stdout.flush()
                with suppress(OSError):
                    os.write(0, f"[rank {os.environ.get('RANK', '')}] {prompt}".encode(errors="replace"))
                return builtin_input()
            return builtin_input(prompt)

    def wrap_pdb() -> None:
        pdb_class: Any = sys.modules["pdb"].Pdb
        interact = pdb_class.interaction

        @wraps(interact)
        def interaction(debugger: Any, *args: Any, **kwargs: Any) -> Any:
            with turn():
                return interact(debugger, *args, **kwargs)

        pdb_class.interaction = interaction

    builtins.input = asked
    when_imported("pdb", wrap_pdb)


def install_script_probes(guard: HangGuard, *also: ScriptListener) -> Callable[[], None]:
    """Install the probes for the script of this process; `also` are more listeners. Never raises.

    The caller must call the result when the script has ended with exit code 0.
    """
    page, names, marker, on_failure = guard.page, NamesWriter(guard.page), None, None
    joint = SyncedOptimizerDetector(lambda: page.get("ops"))
    listeners: list[ScriptListener] = [joint, StepCounter(page, joint)]
    if guard.on:
        steps, batches, marker = PhaseTracker(page, joint), faults.BatchTracker(), CollectiveOrderRecorder(page, names)
        swallowed, stale = faults.SwallowedExceptionDetector(page, steps), faults.StepAnomalyDetector(page, steps)
        on_failure = partial(swallowed.on_exception, "collective")
        listeners = [joint, batches, faults.NonFiniteGradientDetector(page, steps, batches), swallowed, stale, steps]
        listeners += [JoinContextDetector(page), FingerprintWriter(page, names, joint)]
    hooks = ScriptHooks(guard.warn_once).add_listeners(*listeners, *also).install()
    guard.attach_probes(lambda: hooks.remove_listeners(*listeners), marker, on_failure)
    return hooks.report_success


def attach_to_agent(plan: NodePlan, env: Mapping[str, str]) -> None:
    """Attach this process, which another launcher started, to its node's agent (`paceline watchover`). Never raises.

    Local rank 0 starts the agent first, with `plan`. The agent is not its child: the script must not see a child that
    it has not started, and the agent outlives a rank that ends. Rank 0 reports a failure, and the script continues.
    """
    # torch reads this at its import; the default of 2000 operations would take 20 ms per read
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    rank, is_first = int(env["RANK"]), env["LOCAL_RANK"] == "0"
    address = control.agent_address(env, launcher_job_id(env))
    try:
        page_fd, record_fd = make_status_page(rank), os.memfd_create(f"paceline-record-{rank}")
        if is_first:
            start_agent(address, plan)
        attachment = AgentConnection(rank, address, (page_fd, record_fd), first=is_first, several_nodes=plan.nodes > 1)
        guard = HangGuard.create_attached(page_fd, record_fd).start().watch_torch()
        guard.leave = attachment.report_exit
    except Exception as error:
        if is_first:
            print_to_stderr(f"warning: paceline does not observe the ranks of this node: {error}")


def start_agent(address: bytes, plan: NodePlan) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener, os.fdopen(os.memfd_create("paceline-plan"), "w+b") as plan_file:
        deadline = time.monotonic() + SOCKET_RELEASE_SECONDS
        while listener.getsockname() != address:
            try:
                listener.bind(address)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        listener.listen(128)
        plan_file.write(msgspec.json.encode(replace(plan, attach=listener.fileno())) + b"\n")
        plan_file.seek(0)
        if child := os.fork():  # safe: the script has not started, so there are no threads
            os.waitpid(child, 0)
            return
        try:
            os.setsid()  # so that signals to this rank's group or terminal do not reach the agent
            if os.fork() == 0:
                os.dup2(plan_file.fileno(), 0)
                os.dup2(2, 1)  # messages of the agent go to stderr: they are not output of the job
                os.set_inheritable(listener.fileno(), True)
                os.execv(sys.executable, [sys.executable, "-P", "-m", "paceline.launch.agent"])
        finally:
            os._exit(1)


class AgentConnection:
    def __init__(
        self, rank: int, address: bytes, descriptors: tuple[int, int], *, first: bool, several_nodes: bool
    ) -> None:
        """`descriptors` are those of the status page and the record; the `first` rank of a node prints warnings."""
        self._rank, self._address, self._descriptors = rank, address, descriptors
        self._first, self._several_nodes = first, several_nodes
        self._over = False
        self._connection = self._connect()
        threading.Thread(target=self._listen, name="paceline-attach", daemon=True).start()

    def report_exit(self, code: int) -> None:
        self._over = True
        with suppress(OSError):
            if self._connection is not None:
                control.send(self._connection, control.RankExit(code))
                select.select([self._connection], [], [], DETACH_TIMEOUT_SECONDS)

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(self._address)
            if not control.peer_pid(connection):
                raise PermissionError
            control.send(connection, control.Hello(self._rank), self._descriptors)
        except OSError:
            connection.close()
            return None
        return connection

    def _listen(self) -> None:
        deadline = time.monotonic() + SEEK_SECONDS
        while self._connection is None:
            if time.monotonic() > deadline:
                return  # the agent reports the missing ranks
            time.sleep(LOOK_SECONDS)
            self._connection = self._connect()
        if self._first and self._several_nodes and self._rank:
            self._start_exchange(None)
        while isinstance(message := control.receive(self._connection)[0], control.AgentAddress):
            self._start_exchange(message)
        if self._first and not self._over:
            print_to_stderr("warning: the agent of this node has ended; paceline no longer detects hangs here")

    def _start_exchange(self, meeting: control.AgentAddress | None) -> None:
        exchange = partial(self._exchange_agent_address, meeting)
        threading.Thread(target=exchange, name="paceline-meet", daemon=True).start()

    def _exchange_agent_address(self, meeting: control.AgentAddress | None) -> None:
        """Send the address of node 0's agent to the first ranks of the other nodes, or receive it, through a store.

        It runs in a separate thread with separate connections, because the main thread may wait in a store forever.
        """
        key = f"paceline/agent/{control.restart_count()}"
        stores: list[Any] = [None, None]
        try:
            while stores[1] is None or meeting is None:  # some ranks may reach only the default store, not the port
                if flight_recorder.loaded_c10d_module() is not None:
                    makers = _connect_store_at_port, _default_store
                    stores = [s or make() for s, make in zip(stores, makers, strict=True)]
                for store in filter(None, stores):
                    if meeting is not None:
                        store.set(key, msgspec.json.encode(meeting))
                    elif store.check([key]) and self._connection is not None:
                        meeting = msgspec.json.decode(store.get(key), type=control.AgentAddress)
                        return control.send(self._connection, meeting)
                time.sleep(LOOK_SECONDS)
        except Exception as error:
            print_to_stderr(f"warning: rank {self._rank} cannot connect the agents of the nodes: {error}")


def _connect_store_at_port() -> Any:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        socket.create_connection((address, int(port)), PROBE_SECONDS).close()  # torch would print an error
        store_class = sys.modules["torch.distributed"].TCPStore
        return store_class(address, int(port), None, False, timedelta(seconds=STORE_SECONDS), wait_for_workers=False)
    except (OSError, ValueError, RuntimeError):
        return None


def _default_store() -> Any:
    module: Any = flight_recorder.loaded_c10d_module()
    return module._get_default_store().clone() if module.is_initialized() else None


if __name__ == "__main__":
    main(sys.argv[1:])
