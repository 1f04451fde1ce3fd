"""`paceline.run(function, nproc=2)`: runs a function of a script or a notebook on ranks, and returns their results."""

import codecs
import linecache
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from paceline.errors import ExitCode, TrainingError, UsageError
from paceline.protocol.control import WorkerSpec
from paceline.runs.attempt import read_attempt_end
from paceline.runs.progress import REPORT_SECONDS, ProgressViewer
from paceline.runs.reading import read_file

WORKER_SCRIPT = Path(__file__).parents[1] / "rank" / "function_worker.py"
CALL, PROGRESS, RESULT, ERROR = "call", "progress", "result-{}", "error-{}"
_MAX_RESULT_BYTES = 1 << 40  # of the result of a rank
RUNS_FOLDER = Path("runs")  # folder of the run folders, which all hosts of a run see
# The launcher has a separate process group, so that an interrupt of a notebook reaches it once, through this process.
# It ends with this process, even if this process is killed.
LAUNCHER_SCRIPT = """
import sys
from paceline.host.procfs import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from paceline.cli import entry
entry()
"""
MAX_TAIL_CHARS = 2000


def run(
    function: Callable[..., Any],
    nproc: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    on: str = "local",
    hosts: str | Sequence[str] = (),
    nodes: int | str | None = None,
    show: str = "rank 0",
    options: Sequence[str] = (),
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `nproc` ranks of each node, show their progress, and wait for them.

    Args:
        function: the function that each rank calls. It may be defined in a notebook. In it, `paceline.session()`
            connects the ranks.
        nproc: number of ranks on each node.
        args: positional arguments of `function`, pickled.
        kwargs: keyword arguments of `function`, pickled.
        on: "local" for this machine, or "ssh" for `hosts`. All nodes must see the working folder at the same path.
        hosts: names of the nodes for "ssh", as a list or in the format of --hosts.
        nodes: number of nodes for "ssh" (default: all). With "MIN:MAX" paceline calls `function` again without a lost
            node.
        show: the ranks whose output is displayed: "rank 0" or "all".
        options: further options of `paceline launch`, e.g. ["--hang-timeout", "30"].

    Returns:
        The return values of the ranks, by rank.

    Raises:
        UsageError: an argument is invalid, a host cannot be used, or this process is itself a rank.
        TrainingError: a rank was killed, or the guard ended the run. The message is the diagnosis.
        KeyboardInterrupt: after an interrupt, once all ranks have ended.
        Exception: the exception of the rank that failed first, with its traceback as a note.
    """
    if WorkerSpec.from_environment() is not None:
        raise UsageError(code="run-inside-rank")
    if nproc < 1:
        raise UsageError(code="run-nproc", value=nproc)
    arguments = ["launch", "--nproc", str(nproc), "--show", show, *_host_options(on, hosts, nodes), *options]
    # The folder has mode 0700: this process and the ranks unpickle only files that they have written themselves
    parent = None if on == "local" else RUNS_FOLDER.absolute()
    with tempfile.TemporaryDirectory(prefix="paceline-run-", dir=parent) as name:
        folder = Path(name)
        try:
            call = cloudpickle.dumps((function, tuple(args), dict(kwargs or {})))
            (folder / CALL).write_bytes(cloudpickle.dumps((_caller_state(), call)))
        except Exception as error:
            raise UsageError(code="run-not-sent", function=function, reason=str(error)) from error
        arguments += ["--run-dir", str(folder / "run"), "--", str(WORKER_SCRIPT), name]
        launcher = _Launcher([sys.executable, "-P", "-c", LAUNCHER_SCRIPT, str(os.getpid()), *arguments], folder)
        code = launcher.run()
        if code != ExitCode.DONE:
            raise _failure(folder, code, launcher)
        results = sorted(folder.glob(RESULT.format("*")), key=lambda path: int(path.name.rpartition("-")[2]))
        return [cloudpickle.loads(read_file(path, limit_bytes=_MAX_RESULT_BYTES, ours=True)) for path in results]


def _host_options(on: str, hosts: str | Sequence[str], nodes: int | str | None) -> list[str]:
    if on not in ("local", "ssh"):
        raise UsageError(code="run-on", value=on)
    host_list = hosts if isinstance(hosts, str) else ",".join(hosts)
    if (on == "ssh") != bool(host_list):
        raise UsageError(code="run-ssh-hosts")
    if nodes is not None and not host_list:
        raise UsageError(code="run-nodes", value=nodes)
    if host_list:
        RUNS_FOLDER.mkdir(exist_ok=True)
    options = {"--on": on, "--hosts": host_list, "--nodes": "" if nodes is None else str(nodes)}
    return [word for name, value in options.items() if value for word in (name, value)]


def _caller_state() -> dict[str, Any]:
    """The state of this process that the ranks take over. It includes the source of a notebook, which is in no file."""
    sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    main = getattr(sys.modules["__main__"], "__file__", None)
    return {"path": sys.path, "argv": sys.argv, "main": main, "sources": sources}


class _Launcher:
    """A launcher process whose output is printed here, for example in the cell of a notebook."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command, self._folder = command, str(folder)
        self._bar = ProgressViewer(folder / PROGRESS, sys.stdout)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.tail = ""
        self.interrupt: KeyboardInterrupt | None = None

    def run(self) -> int:
        with subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        ) as process:
            try:
                while True:
                    try:
                        self._follow(process)
                        return process.wait()
                    except KeyboardInterrupt as interrupt:  # a second one ends the launcher immediately
                        self.interrupt = interrupt
                        process.send_signal(signal.SIGINT)
            except BaseException:  # no code reads the output any more
                process.terminate()
                raise
            finally:
                self._bar.end()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout)
        while True:
            ready = poll.poll(REPORT_SECONDS * 1000)
            self._bar.refresh()
            if ready:
                if not (data := os.read(process.stdout.fileno(), 65536)):
                    return
                lines = self._decoder.decode(data).splitlines(keepends=True)
                text = "".join(line for line in lines if self._folder not in line)  # the folder is deleted at the end
                self.tail = (self.tail + text)[-MAX_TAIL_CHARS:]
                self._bar.print_above(text)


def _failure(folder: Path, code: int, launcher: _Launcher) -> BaseException:
    ended = read_attempt_end(folder / "run" / "attempt-1")
    report = ended.words if ended else ""
    if launcher.interrupt is not None:
        suffix = "; they have saved their state" if code == ExitCode.SAVED else ""
        return KeyboardInterrupt(report or f"the ranks have ended{suffix}")
    rank_match = re.match(r"rank ([0-9]+) ", report)
    path = folder / ERROR.format(rank_match[1] if rank_match else "")
    if path.is_file():
        error, traceback = cloudpickle.loads(read_file(path, limit_bytes=_MAX_RESULT_BYTES, ours=True))
        error.add_note(f"on {report.partition(': ')[0]}\n{traceback}")
        return error
    if code == ExitCode.USAGE and ended is None:  # an error before any process was started
        text, _, last = launcher.tail.strip().removeprefix("paceline: ").rpartition(" [")
        return UsageError(text, code=last.removesuffix("]")) if text else UsageError(last)
    exit_code = ExitCode(code) if code in {*ExitCode} else ExitCode.FAILED
    return TrainingError(report or f"the ranks have ended with exit code {code}", exit_code)
