"""A script under the bootstrap does what it does under Python itself: the same words, the same end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.errors import raises

from paceline.launch.agent.workers import read_failure_record
from paceline.protocol.control import BOOTSTRAP, WorkerSpec
from paceline.rank.bootstrap import worker_command

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def run(*arguments: str, cwd: Path, seconds: float = 30) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=BUFFERED, capture_output=True, text=True, timeout=seconds
    )
    return done.returncode, re.sub("0x[0-9a-f]+", "0x...", done.stdout), done.stderr


def same_as_python(cwd: Path, *arguments: str) -> tuple[int, str, str]:
    """Run it both ways, and return what both did."""
    plain = run(*arguments, cwd=cwd)
    ours = run("-P", "-m", BOOTSTRAP, *arguments, cwd=cwd)
    assert ours == plain
    return ours


LOOKS = '''
"""A script's words about itself."""
from __future__ import division
import os, sys
import beside
print(sorted(globals()), __name__, __file__, __spec__, __doc__, __package__, type(__builtins__), type(__loader__))
print(sys.argv, sys.path, os.getcwd(), sys.modules["__main__"].__dict__ is globals())
def f(x: print("annotations are evaluated, as the script's own __future__ says")): ...
'''


def test_a_script_sees_what_python_shows_it(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    (folder / "looks.py").write_text(LOOKS)
    (folder / "beside.py").write_text("")
    (tmp_path / "types.py").write_text("raise SystemExit('imported out of the working folder')")
    code, out, _ = same_as_python(tmp_path, "deep/er/looks.py", "-m", "x y", "--", "")
    assert code == 0 and str(folder) in out and "annotations are evaluated" in out
    (tmp_path / "link.py").symlink_to(folder / "looks.py")  # Python looks beside the file, not beside the link
    assert same_as_python(tmp_path, "link.py")[0] == 0


@pytest.mark.parametrize("name", ["pack.looks", "pack", "pack.missing", "missing"])
def test_a_module_sees_what_python_shows_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    for file in ("looks", "__main__"):
        (tmp_path / "pack" / f"{file}.py").write_text(LOOKS.replace("import beside", "from pack import looks as _"))
    assert same_as_python(tmp_path, "-m", name, "--epochs", "2")[0] == ("missing" in name)


ENDS = {
    "raise ValueError('bad sample')": 1,
    "def f(): 1 / 0\ntry:\n    f()\nfinally:\n    print('teardown')": 1,
    "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError from e": 1,
    "this is no python": 1,
    "import sys; sys.exit()": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit(-1)": 255,
    "import sys; sys.exit(256)": 0,
    "import sys; sys.exit('words')": 1,
    "import sys; sys.exit(('a', 1))": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import atexit; atexit.register(print, 'handler'); raise KeyboardInterrupt": -signal.SIGINT,
    "import sys; sys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\nraise ValueError": 1,
    "import atexit, threading, time; atexit.register(print, 'handler')\n"
    "threading.Thread(target=lambda: (time.sleep(.2), print('thread'))).start(); print('main', end=' ')": 0,
    "from concurrent.futures import ThreadPoolExecutor\n"
    "print(ThreadPoolExecutor(2).submit(int, '7').result())  # never shut down: its threads wait for more": 0,
    "import os, sys\nif os.fork() == 0: sys.exit(5)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))": 0,
}


@pytest.mark.parametrize("text", ENDS)
def test_a_script_ends_as_under_python(tmp_path: Path, text: str) -> None:
    (tmp_path / "script.py").write_text(text)
    assert same_as_python(tmp_path, "script.py")[0] == ENDS[text]


def test_a_script_that_cannot_be_read_ends_as_under_python(tmp_path: Path) -> None:
    assert same_as_python(tmp_path, "missing.py")[0] == 2


CHILDREN = """
import multiprocessing, pickle, sys
class Point:
    def __init__(self, x): self.x = x
def work(point): return Point(point.x + 1), __name__
if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            point, name = pool.apply(work, (Point(1),))
        print(method, point.x, type(point) is Point, name)
    print(type(pickle.loads(pickle.dumps(Point(3)))).__module__)
"""


@pytest.mark.parametrize("arguments", [["script.py"], ["-m", "script"]])
def test_children_import_the_users_main_and_not_ours(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "script.py").write_text(CHILDREN)
    code, out, _ = same_as_python(tmp_path, *arguments)
    by_method = {method: rest for method, *rest in map(str.split, out.splitlines())}
    assert code == 0 and by_method["spawn"] == by_method["forkserver"] == ["2", "True", "__mp_main__"]


LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return torch.tensor(i * i)
if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=3, num_workers=1, multiprocessing_context="spawn")
    print([b.tolist() for b in loader])
"""


@pytest.mark.slow
def test_spawned_loader_workers_find_the_scripts_dataset(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOADER)
    code, out, _ = run("-P", "-m", BOOTSTRAP, "script.py", cwd=tmp_path, seconds=50)
    assert (code, out) == (0, "[[0, 1, 4], [9, 16, 25]]\n")  # now and then Python's tracker speaks of a semaphore


def as_worker(script: Path, attempt: Path, record: int) -> tuple[int, str]:
    told = {**WorkerSpec(os.getpid(), str(attempt), record=record).to_environment(), "RANK": "0"}
    done = subprocess.run(
        worker_command([str(script)]), env={**BUFFERED, **told}, pass_fds=[record], capture_output=True, text=True,
        timeout=90,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def record():
    descriptor = os.memfd_create("record")
    yield descriptor
    os.close(descriptor)


LATE = """
import atexit, os
from paceline.protocol.control import WorkerSpec
atexit.register(lambda: print("recorded before:", os.fstat(WorkerSpec.from_environment().record).st_size > 0))
"""


def test_an_uncaught_exception_is_written_down_before_any_teardown_and_printed(tmp_path: Path, record: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(LATE + "def train(): raise ValueError('bad sample 4711')\ntrain()")
    code, said = as_worker(script, tmp_path, record)
    assert code == 1 and "recorded before: True" in said and "ValueError: bad sample 4711" in said
    failure = read_failure_record(record)
    assert failure is not None and (failure.type, failure.message) == ("ValueError", "bad sample 4711")
    assert "in train" in failure.traceback and "bootstrap.py" not in failure.traceback + said


def test_words_of_sys_exit_are_written_down_and_numbers_are_not(tmp_path: Path, record: int) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit(3)")
    assert as_worker(script, tmp_path, record)[0] == 3 and read_failure_record(record) is None
    script.write_text("import sys; sys.exit('no data')")
    assert as_worker(script, tmp_path, record) == (1, "no data\n")
    failure = read_failure_record(record)
    assert failure is not None and failure.message == "no data"


def test_a_forked_childs_failure_is_not_the_ranks(tmp_path: Path, record: int) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nif os.fork() == 0: raise ValueError\nos.wait(); print('goes on')")
    code, said = as_worker(script, tmp_path, record)
    assert code == 0 and "goes on" in said and read_failure_record(record) is None


AGENT = """
import os, subprocess, sys, time
from paceline.protocol.control import WorkerSpec
worker = subprocess.Popen(sys.argv[1:], env={**os.environ, **WorkerSpec(os.getpid()).to_environment()})
print(worker.pid, flush=True)
time.sleep(60)
"""


def test_a_script_dies_with_its_agent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time; assert 'PACELINE_WORKER' not in os.environ\nprint('runs', flush=True)\n"
                      "time.sleep(60)")  # fmt: skip
    command: Sequence[str] = [sys.executable, "-c", AGENT, *worker_command([str(script)])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        words = {agent.stdout.readline().strip(), agent.stdout.readline().strip()}
        agent.kill()
    assert "runs" in words
    pid = int((words - {"runs"}).pop())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    through = ("py", "-P", "-m", BOOTSTRAP)
    assert worker_command(["train.py", "--epochs", "5"], "py") == (*through, "train.py", "--epochs", "5")
    assert worker_command(["-m", "pack.train", "-x"], "py") == (*through, "-m", "pack.train", "-x")
    assert worker_command(["bash", "x.sh"], "py") == ("bash", "x.sh")
    mine, here = tmp_path / "env/bin/python", "train.py"
    mine.parent.mkdir(parents=True)
    mine.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(mine.parent), prepend=os.pathsep)
    assert worker_command(["python", here, "-x"], str(mine)) == (str(mine), *through[1:], here, "-x"), "out of habit"
    assert worker_command(["python", "-u", here], str(mine)) == ("python", "-u", here)  # with options for Python
    assert worker_command(["python", here], "/elsewhere/python") == ("python", here), "another environment"
    program.chmod(0o755)
    assert worker_command(["./program"], "py") == ("./program",)


@pytest.mark.parametrize(
    ("words", "code", "fields"),
    [
        ([], "nothing-to-run", {}),
        (["-m"], "module-missing", {}),
        (["-m", "--epochs"], "module-missing", {}),
        (["trian.py"], "script-not-found", {"value": "trian.py", "hint": " Did you mean train.py?"}),
        (["zzz.py"], "script-not-found", {"value": "zzz.py", "hint": ""}),
        (["folder.py"], "script-is-folder", {"name": "folder.py"}),
        (["./plain"], "script-not-executable", {}),
        (["train"], "program-not-found", {"value": "train", "hint": " Did you mean train.py?"}),
        (["-x.py"], "script-not-found", {"value": "-x.py"}),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: list[str], code: str, fields: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "plain").write_text("")
    (tmp_path / "folder.py").mkdir()
    with raises(code, **fields):
        worker_command(words)
