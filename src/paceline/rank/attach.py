"""The rank's side of the protocol with its agent: a rank ends when its agent ends, and reports why it fails.

In a process that no agent of ours started (torchrun, srun, a world of one) `attach` does nothing. A rank under
`paceline watchover` attaches itself, see `bootstrap.attach_to_agent`.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from multiprocessing import current_process
from pathlib import Path
from traceback import format_exception, print_exception
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from paceline.errors import ExitCode, PacelineError, ReportedByPeer
from paceline.host.procfs import die_with_parent, read_process
from paceline.protocol.control import (
    WorkerBirth,
)
from paceline.protocol.evidence import Failure, is_victim
from paceline.rank.guard import Guard
from paceline.rank.imports import unseen, when_imported
from paceline.runs import writing
from paceline.runs.console import clean

if TYPE_CHECKING:
    pass

MAX_CHARS = 60_000  # a record is read by people
INTERRUPTED = 130  # 128 + SIGINT
DDP = "torch.nn.parallel.distributed"
SHARING = "paceline.collectives.ddp"  # by name: it imports torch, and this package is below it


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
    told_elsewhere = isinstance(error, ReportedByPeer)
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
