"""Start a launcher as a process of its own, and find what it leaves behind. Shared by the tests and soak_kills.py."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm

MARK = "LAUNCH_TEST_MARK"  # every process that a launcher starts inherits it: this is how survivors are found
HARD_LIMIT_SECONDS = 90.0

LAUNCHER = """
import fcntl, json, os, sys
from paceline.protocol.job import JobSpec
from paceline.protocol.job import HangTimeout
from paceline.launch.plan import plan_local
from paceline.launch.supervise import run
settings = json.loads(sys.argv[1])
lock = settings.pop("lock", None)
settings["hang_timeout"] = HangTimeout.parse(settings.get("hang_timeout", "auto"))
job = JobSpec(tuple(settings.pop("argv")), run_id="test", threads=1, **settings)
keep_open = []
if lock:
    keep_open.append(os.open(lock, os.O_RDWR | os.O_CREAT))
    fcntl.flock(keep_open[0], fcntl.LOCK_EX)
sys.exit(run(plan_local(job), keep_open=keep_open))
"""

PRELUDE = """
import ctypes, os, re, signal, subprocess, sys, time
from pathlib import Path
from paceline.protocol.control import WorkerSpec
from paceline.rank.attach import bind_to_agent, record_failure
bind_to_agent()
spec = WorkerSpec.from_environment()
rank, generation, folder = int(os.environ["RANK"]), spec.generation, Path(spec.attempt_dir)

class DistNetworkError(RuntimeError): ...

def fail(error, code=1, *, traceback=True, cleanup=0.0):
    try:
        raise error
    except Exception as caught:
        record_failure(caught, code, traceback=traceback)
        time.sleep(cleanup)
        sys.exit(code)

def ready():
    (folder / f"ready-{rank}").touch()

def forever():
    ready()
    while True:
        time.sleep(60)

def grandchild():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""


@dataclass
class Launch:
    """One launcher process, its folder, and the mark that everything it starts carries."""

    folder: Path
    process: subprocess.Popen[str]
    mark: str
    stdout: str = ""
    stderr: str = ""

    def finish(self) -> int:
        """Wait for the launcher's end; its exit code as a shell would see it."""
        self.stdout, self.stderr = self.process.communicate(timeout=HARD_LIMIT_SECONDS)
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def wait_ready(self, ranks: int) -> None:
        """Return when that many workers have said they are ready."""
        wait_until(lambda: len(list(self.folder.glob("ready-*"))) >= ranks, "workers are ready")

    @property
    def agent_pid(self) -> int:
        return json.loads((self.folder / "agent-0.json").read_text())["agent_pid"]

    @property
    def diagnosis(self) -> list[str]:
        """The error output's lines from the headline on."""
        lines = self.stderr.splitlines()
        first = max(i for i, line in enumerate(lines) if " failed: " in line)
        return lines[first:]


def start(
    folder: Path, worker: str, *, nproc: int = 3, env: Mapping[str, str] | None = None, **settings: object
) -> Launch:
    """Start a launcher whose workers run the Python text `worker`.

    `settings` are further fields of its JobSpec, or `lock`: a file that it locks and keeps open for its workers.
    """
    script = folder / "worker.py"
    script.write_text(PRELUDE + worker)
    argv = settings.pop("argv", [sys.executable, str(script)])
    cwd = settings.pop("cwd", None)
    ignored = settings.pop("ignored", ())
    assert isinstance(ignored, tuple)
    mark = uuid.uuid4().hex
    told = {"attempt_dir": str(folder), "argv": argv, "nproc": nproc, **settings}

    def usual_signals() -> None:  # whoever runs the tests in the background may have SIGINT ignored
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    more: dict[str, Any] = {
        "env": {**os.environ, MARK: mark, **(env or {})},
        "cwd": str(cwd) if cwd else None,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    words = ["-P", "-c", LAUNCHER, json.dumps(told)]
    if ignored:
        command = [sys.executable, *words]
        process = subprocess.Popen(command, **more, preexec_fn=usual_signals)
    else:
        process = warm.Popen(words, agents="preload" in settings, **more)
    return Launch(folder, process, mark)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = HARD_LIMIT_SECONDS) -> None:
    """Return when `condition()` holds; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def carriers(mark: str, variable: str = MARK) -> dict[int, str]:
    """The living processes with this mark in their environment: pid -> command line (a zombie's is empty)."""
    found: dict[int, str] = {}
    wanted = f"{variable}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
        except OSError:
            continue
    return found


def survivors(mark: str, seconds: float = 5.0) -> dict[int, str]:
    """Who is left after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := carriers(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def kill_all(mark: str) -> None:
    """End whatever carries the mark: no test leaves anything behind, failed or not."""
    for _ in range(20):
        for pid in (left := carriers(mark)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not left:
            return
        time.sleep(0.05)


def end_all(launches: list[Launch]) -> None:
    """End the launchers and all that they have started; AssertionError if any of that was left."""
    left = {pid: words for one in launches for pid, words in survivors(one.mark).items()}
    for one in launches:
        kill_all(one.mark)
        one.process.kill()
        one.process.wait()
        for pipe in (one.process.stdout, one.process.stderr):
            if pipe is not None:
                pipe.close()
    assert not left, f"left behind: {left}"
