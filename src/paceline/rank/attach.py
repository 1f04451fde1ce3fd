"""The rank's side of the protocol with its agent: a rank ends when its agent ends, and reports why it fails.

`attach` is for a rank that our agent started. `attach_to_agent` is for a rank that another launcher started, under
`paceline watchover`: local rank 0 starts the agent, not as its child, because the script must not find a child that it
has not made, and because the agent outlives a rank that dies. A failure there is reported once, and the script
continues. In all other processes (torchrun, srun, a world of one) nothing happens.
"""

from __future__ import annotations

import atexit
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from multiprocessing import current_process
from pathlib import Path
from traceback import format_exception, print_exception
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from msgspec.structs import replace

from paceline.disk import writing
from paceline.errors import ExitCode, PacelineError, ToldElsewhere
from paceline.host.procfs import die_with_parent, read_process
from paceline.observe.terminal import clean, say
from paceline.protocol.control import (
    Goodbye,
    Hello,
    Meeting,
    WorkerBirth,
    agent_address,
    peer_pid,
    receive,
    restarts,
    send,
)
from paceline.protocol.evidence import Failure, is_victim
from paceline.protocol.status_page import make_status_page
from paceline.rank import recorder
from paceline.rank.environment import job_token
from paceline.rank.guard import Guard
from paceline.rank.hooks import unseen, when_imported

if TYPE_CHECKING:
    from paceline.protocol.job import NodePlan

MAX_CHARS = 60_000  # a record is read by people
INTERRUPTED = 130  # 128 + SIGINT
DDP = "torch.nn.parallel.distributed"
SHARING = "paceline.collectives.ddp"  # by name: it imports torch, and this package is below it
FREE_SECONDS = 3.0  # for the agent of an earlier start to leave the name
SEEK_SECONDS, LOOK_SECONDS = 60.0, 0.1
LEAVE_SECONDS = 1.5
PROBE_SECONDS, STORE_SECONDS = 2.0, 10.0


def attach() -> None:
    """End with the agent from now on, and begin to write the status page; the first call of a worker."""
    birth = WorkerBirth.here()
    if birth is None:
        return
    if birth.temporary:
        # for the sockets of multiprocessing, which a killed process leaves behind: the agent removes them
        vars(current_process())["_config"]["tempdir"] = birth.temporary
    Guard.of_process().start().watch_torch()
    if birth.shares_gradients:
        when_imported(DDP, _share_gradients)
    if os.getppid() != birth.agent_pid:
        agent = read_process(birth.agent_pid)
        if agent is not None and agent.runs:
            return  # a wrapper (a shell, numactl) stands between us: left are the agent's and the janitor's sweeps
    die_with_parent(birth.agent_pid)


def _share_gradients(*, late: bool) -> None:
    """Offer shared memory to each DDP (`paceline launch --collectives shared`), after the script has made it."""
    del late  # a class is changed in place: who has imported it already has the changed one
    kind: Any = sys.modules[DDP].DistributedDataParallel
    make = kind.__init__

    @unseen
    @wraps(make)
    def made(ddp: Any, *args: Any, **kwargs: Any) -> None:
        make(ddp, *args, **kwargs)
        importlib.import_module(SHARING).share_memory(ddp, in_step=kwargs.get("init_sync", True))

    kind.__init__ = made


def leave(code: int) -> NoReturn:
    """End this process after its work is done and its process group is down, with exit code `code`; -n: by signal n.

    Threads are waited for, exit handlers run and output is flushed, as always; only C++'s static destructors are not:
    torch's may meet a gloo thread that still runs, and abort a process that had trained to the end (measured: 2 of 12
    finished runs on 3 ranks of a busy machine ended with SIGABRT, after their weights were written).
    """
    # as the interpreter's own end does: waits for threads that are no daemons, after telling idle pools to finish
    threading._shutdown()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or a reader that is gone
            stream.flush()
    if code >= 0:
        Guard.of_process().leave(code)
    if code < 0:  # a shell stops its loop only if Ctrl-C has *killed* what it ran
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def record_failure(error: BaseException, exit_code: int, *, traceback: bool, victim: bool | None = None) -> bool:
    """Record the failure of this rank when `error` is caught, before any teardown; only the first record is kept.

    The record goes into memory that the agent reads, and, if the disk allows, into error-<rank>.json for people
    (after a restart error-<rank>-generation-<generation>.json).

    Args:
        error: the error that ends this worker.
        exit_code: the exit code of this worker, 1..255.
        traceback: whether to record the traceback; not for errors whose message is sufficient.
        victim: whether a different rank is the cause; by default decided by `error`.

    Returns:
        Whether the agent will report this failure, so that the worker need not print it. False without an agent.
    """
    birth, rank = WorkerBirth.here(), os.environ.get("RANK", "")
    if not rank.isdecimal():
        return False
    record = Guard.of_process().record if birth is None else birth.record
    if record < 0:
        return False
    failure = Failure(
        rank=int(rank), host=os.uname().nodename, pid=os.getpid(), exit_code=int(exit_code), type=type(error).__name__,
        message=_clipped(error.shown if isinstance(error, PacelineError) else str(error)),
        traceback=_clipped("".join(format_exception(error))) if traceback else "",
        victim=is_victim(error) if victim is None else victim, monotonic_seconds=time.monotonic(),
        code=error.code if isinstance(error, PacelineError) else "",
        fields=_plain(error.fields) if isinstance(error, PacelineError) and error.code else {},
    )  # fmt: skip
    encoded = msgspec.json.encode(failure)
    try:
        if os.fstat(record).st_size:  # what fails after the first failure is teardown
            return birth is not None
        os.pwrite(record, encoded, 0)
    except OSError:  # no such descriptor: this is no worker, but a process that a worker has started
        return False
    if birth is None:  # its agent may be gone by now: nobody is sure to tell it
        return False
    with suppress(OSError):
        # why the first start failed must outlast the restarts
        later = f"-generation-{birth.generation}" if birth.generation else ""
        writing.replace(Path(birth.attempt_dir) / f"error-{rank}{later}.json", encoded)
    return True


def tell_victim(error: BaseException, what: str) -> None:
    """Print one line, `what`, for a rank that lost a peer. The traceback goes only into its log."""
    birth = WorkerBirth.here()
    assert birth is not None
    log = Path(birth.attempt_dir) / f"rank-{os.environ['RANK']}.log"
    with suppress(OSError), os.fdopen(writing.keep(log, append=True), "a", errors="replace") as file:
        print_exception(error, file=file)
    print(f"paceline: {what}: {type(error).__name__}, see {log}", file=sys.stderr)


def _plain(value: Any) -> Any:
    """A value for JSON: numbers, lists and tables as they are, all else as text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return [_plain(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return value if value is None or isinstance(value, (bool, int, float)) else _clipped(str(value))


def _clipped(text: str) -> str:
    # a lone surrogate (out of a file name that is no UTF-8) has no JSON; the end of a text says most
    return text.encode(errors="backslashreplace").decode()[-MAX_CHARS:]


def run_worker(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Be a worker whose whole life is `main`: under its agent from the start, and ended with its exit code.

    Args:
        main: takes the command line's arguments.
    """
    attach()
    try:
        code = main(sys.argv[1:])
    except Exception as error:
        code = tell(error)
    leave(code)


def tell(error: BaseException) -> int:
    """Report an error once, and return the exit code for it.

    A worker leaves the report to its agent, which knows which rank failed first. Without an agent (torchrun), rank 0
    reports the errors that all ranks find before they meet; each rank reports its other errors itself.
    """
    if isinstance(error, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    in_words = isinstance(error, PacelineError)
    code = error.exit_code if in_words else ExitCode.FAILED
    told_elsewhere = isinstance(error, ToldElsewhere)
    if record_failure(error, code, traceback=not in_words, victim=told_elsewhere or None) or told_elsewhere:
        return code
    found_alike = in_words and "torch.distributed" not in sys.modules
    if found_alike and os.environ.get("RANK", "0") != "0":
        return code
    if in_words:
        print(f"paceline: {clean(error.shown)}", file=sys.stderr)
    else:
        print_exception(error)
    return code


def attach_to_agent(plan: NodePlan, env: Mapping[str, str]) -> None:
    """Attach this process to its node's agent; local rank 0 starts the agent first, with `plan`. Never raises.

    `env` has torchrun's variables.
    """
    # torch reads it when it is imported: looking at its 2000 operations would take 20 ms each time
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    rank, is_first = int(env["RANK"]), env["LOCAL_RANK"] == "0"
    address = agent_address(env, job_token(env))
    try:
        box, record = make_status_page(rank), os.memfd_create(f"paceline-record-{rank}")
        if is_first:
            start_agent(address, plan)
        attachment = Attachment(rank, address, (box, record), first=is_first, several_nodes=plan.nodes > 1)
        guard = Guard.observed(box, record).start().watch_torch()
        guard.leave = attachment.leave
    except Exception as error:
        if is_first:
            say(f"warning: the ranks of this node are not watched over: {error}")


def start_agent(address: bytes, plan: NodePlan) -> None:
    """Start the agent of this node, with a socket at `address` that listens already; raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener, os.fdopen(os.memfd_create("paceline-plan"), "w+b") as plan_file:
        deadline = time.monotonic() + FREE_SECONDS
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
        if child := os.fork():  # there are no threads yet: nothing of the script has run
            os.waitpid(child, 0)
            return
        try:
            os.setsid()  # no signal to this rank's group or terminal is one to the agent
            if os.fork() == 0:
                os.dup2(plan_file.fileno(), 0)
                os.dup2(2, 1)  # what the agent prints is about the job, no output of it
                os.set_inheritable(listener.fileno(), True)
                os.execv(sys.executable, [sys.executable, "-P", "-m", "paceline.agent"])
        finally:
            os._exit(1)


class Attachment:
    """This rank's connection to its node's agent, and a thread that listens to it."""

    def __init__(
        self, rank: int, address: bytes, descriptors: tuple[int, int], *, first: bool, several_nodes: bool
    ) -> None:
        """`descriptors` are of this rank's box and record; the `first` of its node speaks for all of them."""
        self._rank, self._address, self._descriptors = rank, address, descriptors
        self._first, self._several_nodes = first, several_nodes
        self._over = False
        self._connection = self._connect()
        threading.Thread(target=self._listen, name="paceline-attach", daemon=True).start()

    def leave(self, code: int) -> None:
        """Report to the agent that this rank ends now, and wait for the answer."""
        self._over = True
        with suppress(OSError):
            if self._connection is not None:
                send(self._connection, Goodbye(code))
                select.select([self._connection], [], [], LEAVE_SECONDS)

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(self._address)
            if not peer_pid(connection):
                raise PermissionError
            send(connection, Hello(self._rank), self._descriptors)
        except OSError:
            connection.close()
            return None
        return connection

    def _listen(self) -> None:
        deadline = time.monotonic() + SEEK_SECONDS
        while self._connection is None:
            if time.monotonic() > deadline:
                return  # the agent reports who has not come
            time.sleep(LOOK_SECONDS)
            self._connection = self._connect()
        if self._first and self._several_nodes and self._rank:
            threading.Thread(target=self._meet, args=(None,), name="paceline-meet", daemon=True).start()
        while isinstance(message := receive(self._connection)[0], Meeting):
            threading.Thread(target=self._meet, args=(message,), name="paceline-meet", daemon=True).start()
        if self._first and not self._over:
            say("warning: the agent that watches over this node is gone; its hangs are no longer judged")

    def _meet(self, meeting: Meeting | None) -> None:
        """Send the address of node 0's agent to the first ranks of the other nodes, or receive it, through a store.

        It runs in a separate thread with separate connections: the main thread may wait in a store forever.
        """
        key = f"paceline/agent/{restarts()}"
        stores: list[Any] = [None, None]
        try:
            while stores[1] is None or meeting is None:  # not all can be reached at the port: they have met elsewhere
                if recorder.distributed() is not None:
                    stores = [one or make() for one, make in zip(stores, (_store_at_port, _default_store), strict=True)]
                for store in filter(None, stores):
                    if meeting is not None:
                        store.set(key, msgspec.json.encode(meeting))
                    elif store.check([key]) and self._connection is not None:
                        return send(self._connection, msgspec.json.decode(store.get(key), type=Meeting))
                time.sleep(LOOK_SECONDS)
        except Exception as error:
            say(f"warning: rank {self._rank} cannot connect the agents of the nodes: {error}")


def _store_at_port() -> Any:
    """A client of the store at the launcher's address, as soon as there is one: before the script comes to it."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        socket.create_connection((address, int(port)), PROBE_SECONDS).close()  # torch would print its complaint
        make = sys.modules["torch.distributed"].TCPStore
        return make(address, int(port), None, False, timedelta(seconds=STORE_SECONDS), wait_for_workers=False)
    except (OSError, ValueError, RuntimeError):
        return None


def _default_store() -> Any:
    """The store of the default group, if the script has made one; a clone, for this thread alone."""
    module: Any = recorder.distributed()
    return module._get_default_store().clone() if module.is_initialized() else None
