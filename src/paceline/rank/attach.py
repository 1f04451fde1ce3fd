"""The rank's side of the protocol with its agent: a rank ends when its agent ends, and reports why it fails.

If no agent of paceline started the process (torchrun, srun, a single process), `attach` does nothing. A rank under
`paceline watchover` attaches itself: see `bootstrap.attach_to_agent`.
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
from typing import Any, NoReturn

import msgspec

from paceline.errors import ExitCode, PacelineError, ReportedByPeer
from paceline.host.procfs import die_with_parent, read_process
from paceline.protocol.control import WorkerSpec
from paceline.protocol.evidence import Failure, is_lost_peer_error
from paceline.rank.guard import HangGuard
from paceline.rank.imports import hide_from_warnings, when_imported
from paceline.runs import writing
from paceline.runs.console import remove_control_characters

MAX_CHARS = 60_000  # of each text in a record
EXIT_CODE_INTERRUPTED = 130  # 128 + SIGINT
DDP_MODULE = "torch.nn.parallel.distributed"
GRADIENT_SHARING_MODULE = "paceline.collectives.ddp"  # by name, because it imports torch and is in a higher layer


def bind_to_agent() -> None:
    """Bind this process to its agent: it ends with the agent and writes the status page. The first call of a worker."""
    spec = WorkerSpec.from_environment()
    if spec is None:
        return
    if spec.temporary:
        # a killed process does not remove the sockets of multiprocessing: the agent removes this folder
        vars(current_process())["_config"]["tempdir"] = spec.temporary
    HangGuard.of_process().start().watch_torch()
    if spec.shares_gradients:
        when_imported(DDP_MODULE, _share_gradients)
    if os.getppid() != spec.agent_pid:
        agent = read_process(spec.agent_pid)
        if agent is not None and agent.runs:
            return  # a shell or numactl is the parent: only the agent and its cleanup process end this one
    die_with_parent(spec.agent_pid)


def _share_gradients() -> None:
    ddp_class: Any = sys.modules[DDP_MODULE].DistributedDataParallel
    original = ddp_class.__init__

    @hide_from_warnings
    @wraps(original)
    def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        sharing: Any = importlib.import_module(GRADIENT_SHARING_MODULE)
        sharing.register_shared_memory_hook(ddp, in_step=kwargs.get("init_sync", True))

    ddp_class.__init__ = init


def exit_worker(code: int) -> NoReturn:
    """End this process with exit code `code` (-n: by signal n), after its process group is destroyed.

    As at a normal end, it waits for threads, runs exit handlers and flushes output. But it does not run the static
    destructors of C++. Those of torch may conflict with a running gloo thread and abort a process that has finished
    (measured: 2 of 12 finished runs on 3 ranks of a busy machine ended with SIGABRT, after their weights were written).
    """
    # as at the end of the interpreter: shuts down idle pools, then waits for non-daemon threads
    threading._shutdown()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the stream or its reader is closed
            stream.flush()
    if code >= 0:
        HangGuard.of_process().leave(code)
    if code < 0:  # a shell ends its loop only if Ctrl-C has *killed* the command
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def record_failure(error: BaseException, exit_code: int, *, traceback: bool, victim: bool | None = None) -> bool:
    """Record the failure of this rank when `error` is caught, before any teardown. Only the first record is kept.

    The record is written to memory that the agent reads, and, if the disk allows, to error-<rank>.json for people
    (after a restart error-<rank>-generation-<generation>.json). `traceback` is False for errors whose message is
    sufficient. `victim`: whether a different rank is the cause; by default derived from `error`.

    Returns whether the agent will report this failure, so that the worker need not print it. False without an agent.
    """
    spec, rank = WorkerSpec.from_environment(), os.environ.get("RANK", "")
    if not rank.isdecimal():
        return False
    record = HangGuard.of_process().record if spec is None else spec.record
    if record < 0:
        return False
    failure = Failure(
        rank=int(rank), host=os.uname().nodename, pid=os.getpid(), exit_code=int(exit_code), type=type(error).__name__,
        message=_clip_text(error.message_with_code if isinstance(error, PacelineError) else str(error)),
        traceback=_clip_text("".join(format_exception(error))) if traceback else "",
        victim=is_lost_peer_error(error) if victim is None else victim, monotonic_seconds=time.monotonic(),
        code=error.code if isinstance(error, PacelineError) else "",
        fields=_to_json_value(error.fields) if isinstance(error, PacelineError) and error.code else {},
    )  # fmt: skip
    encoded = msgspec.json.encode(failure)
    try:
        if os.fstat(record).st_size:  # later failures belong to the teardown
            return spec is not None
        os.pwrite(record, encoded, 0)
    except OSError:  # no such descriptor: this process is not a worker, but a child of one
        return False
    if spec is None:  # the agent may have ended, so this rank must report the failure itself
        return False
    with suppress(OSError):
        # a separate file per generation, so that the first failure remains after restarts
        suffix = f"-generation-{spec.generation}" if spec.generation else ""
        writing.replace_file(Path(spec.attempt_dir) / f"error-{rank}{suffix}.json", encoded)
    return True


def print_lost_peer_error(error: BaseException, what: str) -> None:
    """Print one line, `what`, for a rank that lost a peer. The traceback goes only to its log."""
    spec = WorkerSpec.from_environment()
    assert spec is not None
    log = Path(spec.attempt_dir) / f"rank-{os.environ['RANK']}.log"
    with suppress(OSError), os.fdopen(writing.open_or_create(log, append=True), "a", errors="replace") as file:
        print_exception(error, file=file)
    print(f"paceline: {what}: {type(error).__name__}, see {log}", file=sys.stderr)


def _to_json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_json_value(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return [_to_json_value(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value if value is None or isinstance(value, (bool, int, float)) else _clip_text(str(value))


def _clip_text(text: str) -> str:
    # JSON cannot represent a lone surrogate (from a file name that is not UTF-8); the end of a text is most useful
    return text.encode(errors="backslashreplace").decode()[-MAX_CHARS:]


def run_worker(main: Callable[[Sequence[str]], int]) -> NoReturn:
    bind_to_agent()
    try:
        code = main(sys.argv[1:])
    except Exception as error:
        code = report_error(error)
    exit_worker(code)


def report_error(error: BaseException) -> int:
    """Report an error once, and return the exit code for it.

    The agent of a worker prints the report, because it knows which rank failed first. Without an agent (torchrun), rank
    0 reports errors that all ranks find before the rendezvous. Each rank reports its other errors itself.
    """
    if isinstance(error, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
        return EXIT_CODE_INTERRUPTED
    has_message = isinstance(error, PacelineError)
    code = error.exit_code if has_message else ExitCode.FAILED
    reported_by_peer = isinstance(error, ReportedByPeer)
    if record_failure(error, code, traceback=not has_message, victim=reported_by_peer or None) or reported_by_peer:
        return code
    on_all_ranks = has_message and "torch.distributed" not in sys.modules
    if on_all_ranks and os.environ.get("RANK", "0") != "0":
        return code
    if has_message:
        print(f"paceline: {remove_control_characters(error.message_with_code)}", file=sys.stderr)
    else:
        print_exception(error)
    return code
