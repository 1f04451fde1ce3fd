"""`paceline.run(function, nproc=2)`: ranks from a script or a notebook, and what they return."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from paceline.contract.birth import WorkerBirth
from paceline.errors import ExitCode, TrainingError, UsageError
from paceline.observe.summary import read_ended

CALLED = Path(__file__).parents[1] / "worker" / "called.py"
CALL, RESULT, ERROR = "call", "result-{}", "error-{}"


def run(
    function: Callable[..., Any],
    nproc: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    show: str = "rank 0",
    options: Sequence[str] = (),
) -> list[Any]:
    """Call `function(*args, **kwargs)` as `nproc` ranks of this machine, and wait for them.

    Args:
        function: what each rank calls; inside, `paceline.session()` finds the others. It may be defined in a notebook.
        nproc: how many ranks.
        args: and `kwargs`: whatever can be pickled.
        show: whose output appears here: "rank 0" or "all".
        options: more words of `paceline launch`, ["--stall-after", "30"] say; or those that start it elsewhere,
            ["--on", "ssh", "--hosts", "n1,n2"], where all machines share this one's temporary folder (TMPDIR).

    Returns:
        What the ranks have returned, by rank.

    Raises:
        UsageError: for arguments that cannot be; inside a rank.
        TrainingError: a rank was killed, or the guard has ended the run; with the verdict.
        Exception: whatever the first rank that failed has raised, with its traceback as a note.
    """
    if WorkerBirth.here() is not None:
        raise UsageError("paceline.run inside a rank would start a run from each: call it outside")
    if nproc < 1:
        raise UsageError(f"paceline.run(nproc={nproc}): there must be one rank at least")
    # a folder of mode 0700: what is unpickled out of it, here and by the ranks, is what we and they have put there
    with tempfile.TemporaryDirectory(prefix="paceline-run-") as name:
        folder = Path(name)
        try:
            call = cloudpickle.dumps((function, tuple(args), dict(kwargs or {})))
            (folder / CALL).write_bytes(cloudpickle.dumps((sys.path, call)))
        except Exception as error:
            raise UsageError(f"paceline.run: {function!r} or its arguments cannot be sent to ranks: {error}") from error
        words = ["launch", "--nproc", str(nproc), "--show", show, "--run-dir", str(folder / "run"), *options]
        code = _shown([sys.executable, "-m", "paceline", *words, "--", str(CALLED), name])
        if code != ExitCode.DONE:
            raise _failure(folder, code)
        found = sorted(folder.glob(RESULT.format("*")), key=lambda path: int(path.name.rpartition("-")[2]))
        return [cloudpickle.loads(path.read_bytes()) for path in found]


def _shown(command: Sequence[str]) -> int:
    """Run a command, and print what it prints, also where that is a notebook's cell; its exit code."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        while True:
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                return process.wait()
            except KeyboardInterrupt:  # once more ends it at once
                process.send_signal(signal.SIGINT)


def _failure(folder: Path, code: int) -> BaseException:
    """The exception of the rank that failed first, as its agent says."""
    ended = read_ended(folder / "run" / "attempt-1")
    words = ended.words if ended else ""
    first = re.match(r"rank ([0-9]+) ", words)
    path = folder / ERROR.format(first[1] if first else "")
    if path.is_file():
        error, traceback = cloudpickle.loads(path.read_bytes())
        error.add_note(f"{words}\n{traceback}")
        return error
    exit_code = ExitCode(code) if code in {*ExitCode} else ExitCode.FAILED
    return TrainingError(words or f"the ranks have ended with exit code {code}", exit_code)
