"""`paceline.run(function, nproc=2)`: runs a function of a script or a notebook as ranks, and returns their results."""

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
from paceline.runs.attempt import read_ended
from paceline.runs.progress import REPORT_SECONDS, ProgressLine
from paceline.runs.reading import read

CALLED = Path(__file__).parents[1] / "rank" / "function_worker.py"
CALL, PROGRESS, RESULT, ERROR = "call", "progress", "result-{}", "error-{}"
_MOST_BYTES = 1 << 40  # of what a rank returns
SHARED = Path("runs")  # where run folders are made: all hosts of a run see it
# In a process group of its own, so that a notebook's interrupt reaches the launcher once, through us; and it ends with
# us, however we do.
LAUNCHER = """
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
    """Call `function(*args, **kwargs)` as `nproc` ranks of each machine, show how far they are, and wait for them.

    Args:
        function: what each rank calls; inside, `paceline.session()` finds the others. It may be defined in a notebook.
        nproc: how many ranks, on each machine.
        args: and `kwargs`: whatever can be pickled.
        on: "local", this machine; or "ssh", `hosts`, which all see the working folder at the same path.
        hosts: over ssh: their names, as a list, or as --hosts has them.
        nodes: over ssh: how many hosts, all by default; "MIN:MAX": without a lost one `function` is called anew.
        show: whose output appears here: "rank 0" or "all".
        options: more words of `paceline launch`, ["--stall-after", "30"] say.

    Returns:
        What the ranks have returned, by rank.

    Raises:
        UsageError: for arguments that cannot be; inside a rank; for hosts that cannot be used.
        TrainingError: a rank was killed, or the guard has ended the run; with the verdict.
        KeyboardInterrupt: after an interrupt, once all ranks have ended.
        Exception: whatever the first rank that failed has raised, with its traceback as a note.
    """
    if WorkerSpec.here() is not None:
        raise UsageError(code="run-inside-rank")
    if nproc < 1:
        raise UsageError(code="run-nproc", value=nproc)
    words = ["launch", "--nproc", str(nproc), "--show", show, *_where(on, hosts, nodes), *options]
    # a folder of mode 0700: what is unpickled out of it, here and by the ranks, is what we and they have put there
    with tempfile.TemporaryDirectory(prefix="paceline-run-", dir=None if on == "local" else SHARED.absolute()) as name:
        folder = Path(name)
        try:
            call = cloudpickle.dumps((function, tuple(args), dict(kwargs or {})))
            (folder / CALL).write_bytes(cloudpickle.dumps((_surroundings(), call)))
        except Exception as error:
            raise UsageError(code="run-not-sent", function=function, reason=str(error)) from error
        words += ["--run-dir", str(folder / "run"), "--", str(CALLED), name]
        shown = _Shown([sys.executable, "-P", "-c", LAUNCHER, str(os.getpid()), *words], folder)
        code = shown.to_the_end()
        if code != ExitCode.DONE:
            raise _failure(folder, code, shown)
        found = sorted(folder.glob(RESULT.format("*")), key=lambda path: int(path.name.rpartition("-")[2]))
        return [cloudpickle.loads(read(path, limit_bytes=_MOST_BYTES, ours=True)) for path in found]


def _where(on: str, hosts: str | Sequence[str], nodes: int | str | None) -> list[str]:
    if on not in ("local", "ssh"):
        raise UsageError(code="run-on", value=on)
    listed = hosts if isinstance(hosts, str) else ",".join(hosts)
    if (on == "ssh") != bool(listed):
        raise UsageError(code="run-ssh-hosts")
    if nodes is not None and not listed:
        raise UsageError(code="run-nodes", value=nodes)
    if listed:
        SHARED.mkdir(exist_ok=True)
    return [
        "--on",
        on,
        *(["--hosts", listed] if listed else []),
        *(["--nodes", str(nodes)] if nodes is not None else []),
    ]


def _surroundings() -> dict[str, Any]:
    """The state of this process that the ranks take over, with the source of a notebook, which is in no file."""
    sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    main = getattr(sys.modules["__main__"], "__file__", None)
    return {"path": sys.path, "argv": sys.argv, "main": main, "sources": sources}


class _Shown:
    """A launcher whose output appears here, also in the cell of a notebook."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command, self._folder = command, str(folder)
        self._bar = ProgressLine(folder / PROGRESS, sys.stdout)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.tail = ""
        self.interrupt: KeyboardInterrupt | None = None

    def to_the_end(self) -> int:
        """Show its output until it ends; its exit code."""
        with subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        ) as process:
            try:
                while True:
                    try:
                        self._follow(process)
                        return process.wait()
                    except KeyboardInterrupt as interrupt:  # once more ends it at once
                        self.interrupt = interrupt
                        process.send_signal(signal.SIGINT)
            except BaseException:  # nobody reads any more
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
            self._bar.look()
            if ready:
                if not (data := os.read(process.stdout.fileno(), 65536)):
                    return
                lines = self._decoder.decode(data).splitlines(keepends=True)
                text = "".join(line for line in lines if self._folder not in line)  # it is gone when one looks
                self.tail = (self.tail + text)[-MAX_TAIL_CHARS:]
                self._bar.show(text)


def _failure(folder: Path, code: int, shown: _Shown) -> BaseException:
    ended = read_ended(folder / "run" / "attempt-1")
    words = ended.words if ended else ""
    if shown.interrupt is not None:
        saved = "; they have saved their state" if code == ExitCode.SAVED else ""
        return KeyboardInterrupt(words or f"the ranks have ended{saved}")
    first = re.match(r"rank ([0-9]+) ", words)
    path = folder / ERROR.format(first[1] if first else "")
    if path.is_file():
        error, traceback = cloudpickle.loads(read(path, limit_bytes=_MOST_BYTES, ours=True))
        error.add_note(f"on {words.partition(': ')[0]}\n{traceback}")
        return error
    if code == ExitCode.USAGE and ended is None:  # refused before anything was started
        text, _, what = shown.tail.strip().removeprefix("paceline: ").rpartition(" [")
        return UsageError(text, code=what.removesuffix("]")) if text else UsageError(what)
    exit_code = ExitCode(code) if code in {*ExitCode} else ExitCode.FAILED
    return TrainingError(words or f"the ranks have ended with exit code {code}", exit_code)
