"""Does the injector see what a run prints, when, and all that it leaves?"""

import os
import sys
import time
from pathlib import Path

import pytest
from benchmarks.faults.setups import run_command


def run(folder: Path, program: str, *, limit_seconds: float = 20.0):
    return run_command([sys.executable, "-c", program], folder, {}, limit_seconds=limit_seconds)


def test_lines_come_with_the_moment_at_which_they_were_written(tmp_path: Path) -> None:
    ran = run(
        tmp_path, "import time; print('one', flush=True); time.sleep(0.5); print('two', end=''); raise SystemExit(7)"
    )
    assert [line for _, line in ran.lines] == ["one", "two"] and ran.code == 7
    assert 0.4 < ran.lines[1][0] - ran.lines[0][0] < 5
    assert ran.began_seconds < ran.lines[0][0] and ran.lines[1][0] <= ran.ended_seconds
    assert not ran.processes_left and not ran.files_left


def test_a_process_that_is_left_in_a_session_of_its_own_is_counted_and_killed(tmp_path: Path) -> None:
    ran = run(tmp_path, "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)")
    pid = int(ran.lines[0][1])
    assert ran.processes_left == (f"{pid} sleep 600",)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline


def test_a_file_in_shared_memory_that_nobody_uses_is_left(tmp_path: Path) -> None:
    name = f"paceline-test-{os.getpid()}"
    ran = run(tmp_path, f"open('/dev/shm/{name}', 'w')")
    Path("/dev/shm", name).unlink()
    assert ran.files_left == (f"/dev/shm/{name}",)


@pytest.mark.parametrize("closes", ["", "import os; os.close(1); os.close(2);"], ids=["open", "closed"])
def test_what_hangs_is_ended_at_the_limit_and_has_no_code(tmp_path: Path, closes: str) -> None:
    ran = run(tmp_path, f"print('here', flush=True); {closes} import time; time.sleep(600)", limit_seconds=1.0)
    assert ran.code is None and ran.text == "here" and not ran.processes_left
    assert ran.ended_seconds - ran.began_seconds < 10
