"""Standard input of scripts: as under torchrun; a terminal is one rank's at a time, and waiting for it is no hang."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests import warm
from tests.errors import codes, ended_with
from tests.launch.terminals import on_terminal, read_until

from paceline.host.procfs import waits_for_terminal_input

pytestmark = pytest.mark.sample(4)

LAUNCH = ("-P", "-m", "paceline", "launch", "--nproc=2")
TWO = "import os\nrank = os.environ['RANK']\n"


def launched(folder: Path, code: str, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(TWO + code)
    command = [sys.executable, *LAUNCH, *words, "script.py"]
    return subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, timeout=180, check=False)


def test_piped_data_reach_the_rank_that_reads(tmp_path: Path) -> None:
    run = launched(tmp_path, "if rank == '1': import sys; print('read', sys.stdin.read().split())", given="a b\nc\n")
    assert (run.returncode, run.stdout) == (0, "[rank 1] read ['a', 'b', 'c']\n"), run.stderr


def test_one_rank_alone_has_it_where_that_is_asked(tmp_path: Path) -> None:
    code = "import sys; print(sys.stdin.readline() or 'nothing')"
    run = launched(tmp_path, code, "--stdin=1", given="line\n")
    assert sorted(run.stdout.splitlines()) == ["[rank 0] nothing", "[rank 1] line"], run.stderr


def test_pdb_reads_what_is_piped(tmp_path: Path) -> None:
    run = launched(
        tmp_path, "value = 3\nif rank == '1':\n    breakpoint()\n    print('on')", given="p 100 + value\nc\n"
    )
    assert run.returncode == 0 and "103" in run.stdout and "on" in run.stdout, run.stderr


def test_the_debugger_ends_the_run(tmp_path: Path) -> None:
    """With `q`. A breakpoint in other ranks than that of --stdin has no effect: it would end the run at once."""
    code = "import time\nbreakpoint()\nif rank == '0':\n    open('passed', 'w')\n    time.sleep(60)"
    run = launched(tmp_path, code, "--stdin=1", "--run-dir=run", given="q\n")
    assert run.returncode == 1 and (tmp_path / "passed").exists(), run.stderr
    failure = json.loads((tmp_path / "run" / "attempt-1" / "error-1.json").read_text())
    assert failure["type"] == "SystemExit" and "Traceback" not in run.stdout + run.stderr


def test_who_writes_into_the_pipe_learns_that_nobody_reads_any_more(tmp_path: Path) -> None:
    """The launcher, the agent and its cleanup process hold it no longer than the run."""
    (tmp_path / "script.py").write_text("")
    words = f"yes | {sys.executable} {' '.join(LAUNCH)} script.py; echo ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert run.stdout == "141\n", run.stderr


@pytest.mark.parametrize("value", ["2", "-1", "rank0", ""])
def test_a_rank_that_there_is_not(tmp_path: Path, value: str) -> None:
    run = launched(tmp_path, "", f"--stdin={value}")
    assert (run.returncode, codes(run.stderr)) == (2, ["stdin-not-a-rank"]) and repr(value) in run.stderr


def test_other_machines_have_no_input(tmp_path: Path) -> None:
    run = launched(tmp_path, "", "--stdin=0", "--on=ssh", "--hosts=n1,n2")
    ended_with(run, "stdin-elsewhere")


def test_closed_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(repr(sys.stdin and sys.stdin.read()))")
    words = f"{sys.executable} {' '.join(LAUNCH)} script.py <&-"
    run = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0 and run.stdout.count("''") == 2, run.stderr


def test_at_a_terminal_ranks_ask_one_after_the_other(tmp_path: Path) -> None:
    """A breakpoint keeps it until it goes on; prompts of all ranks are seen, and say whose they are."""
    (tmp_path / "script.py").write_text(
        f"{TWO}if rank == '1':\n    breakpoint()\n    open('asked', 'w')\nelse:\n"
        "    import time\n    time.sleep(3)\n    print('answer', input('sure? '))"
    )
    with on_terminal([sys.executable, *LAUNCH, "script.py"], cwd=tmp_path) as (process, keyboard):
        read_until(keyboard, b"[rank 1] (Pdb)")
        time.sleep(4)  # rank 0 would ask now
        os.write(keyboard, b"p 5000 + 1\n")
        shown = read_until(keyboard, b"[rank 1] (Pdb)")
        assert b"sure?" not in shown
        os.write(keyboard, b"c\n")
        read_until(keyboard, b"sure?")
        os.write(keyboard, b"yes\n")
        read_until(keyboard, b"answer yes")
        assert process.wait(30) == 0 and (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("input()", True),
        ("import sys; sys.stdin.read()", True),
        ("import os; os.read(0, 1)", True),
        ("import select, sys; select.select([sys.stdin], [], [])", True),
        ("import threading; one = threading.Thread(target=input); one.start(); one.join()", True),
        ("import time; time.sleep(60)", False),
        ("import os; os.read(os.pipe()[0], 1)", False),
        ("import threading, time; threading.Thread(target=input, daemon=True).start(); time.sleep(60)", False),
    ],
)
def test_waiting_for_input_is_seen(code: str, reads: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", f"print(flush=True); {code}"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until = time.monotonic() + (30.0 if reads else 0.5)
        while waits_for_terminal_input(process.pid) is not True and time.monotonic() < until:
            time.sleep(0.02)
        assert waits_for_terminal_input(process.pid) is reads
        process.kill()


@pytest.mark.parametrize("reads", [True, False])
def test_waiting_for_input_is_no_hang(tmp_path: Path, reads: bool) -> None:
    """Rank 1 waits in a barrier while rank 0 asks; for longer than the window."""
    (tmp_path / "script.py").write_text(
        f"{TWO}import sys, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "print('MET', flush=True)\nif rank == '0':\n"
        f"    {'sys.stdin.readline()' if reads else 'import time; time.sleep(600)'}\n"
        "dist.barrier()\ndist.destroy_process_group()"
    )
    words = [*LAUNCH, "--hang-timeout=3", "script.py"]
    with warm.Popen(words, cwd=tmp_path, stdin=-1, stdout=-1, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(2):
            while "MET" not in process.stdout.readline():
                pass
        time.sleep(8)  # longer than the window: a notice that it is too short would be wrong
        with suppress(BrokenPipeError):
            process.stdin.write("on\n")
            process.stdin.close()
        said = process.stdout.read()
        assert process.wait(60) == (0 if reads else 3) and not (reads and "--hang-timeout" in said), said
