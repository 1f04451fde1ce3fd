"""Are the surroundings of a fault as they must be, and gone afterwards? Is all seen that a run prints and leaves?"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.faults.setups import CGROUPS, run_command, surroundings

MAKES = (
    "sh",
    "-c",
    "head -c 1000 /dev/zero > checkpoints/step-00010.pt; head -c 500 /dev/zero > checkpoints/step-00005.pt",
)


@pytest.mark.parametrize(("name", "size", "wrong"), [("truncated", 500, 0), ("flipped", 1000, 4)])
def test_the_newest_checkpoint_alone_is_damaged(tmp_path: Path, name: str, size: int, wrong: int) -> None:
    with surroundings(f"{name} checkpoint", tmp_path, MAKES, {}) as setup:
        newest, older = (tmp_path / "checkpoints" / f"step-{n:05}.pt" for n in (10, 5))
        assert (len(newest.read_bytes()), sum(map(bool, newest.read_bytes()))) == (size, wrong)
        assert older.read_bytes() == bytes(500)
        assert setup.env["FAULT_CHECKPOINTS"] == str(tmp_path / "checkpoints")


def test_a_run_that_fails_before_its_fault_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="did not end well"),
        surroundings("flipped checkpoint", tmp_path, ("false",), {}),
    ):
        pass


def test_a_taken_port_is_free_again_afterwards(tmp_path: Path) -> None:
    with (
        surroundings("taken port", tmp_path, (), {}) as setup,
        pytest.raises(OSError),
        socket.create_server(("", setup.port)),
    ):
        pass
    with socket.create_server(("", setup.port)):
        pass


@pytest.mark.root
@pytest.mark.needs("unshare", "mount")
@pytest.mark.parametrize("name", ["small shm", "small disk"])
def test_a_small_file_system_is_full_for_the_command_alone(tmp_path: Path, name: str) -> None:
    where = Path("/dev/shm") if name == "small shm" else tmp_path / "disk"
    with surroundings(name, tmp_path, (), {}) as setup:
        argv = [*setup.before, "sh", "-c", f"head -c 1000000 /dev/zero > {where}/paceline-test"]
        done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode != 0 and "No space left" in done.stderr
    assert not (where / "paceline-test").exists()


@pytest.mark.root
@pytest.mark.parametrize("name", ["small shm", "small disk"])
def test_nothing_is_ever_mounted_for_the_whole_machine(tmp_path: Path, name: str) -> None:
    mounted = Path("/proc/self/mountinfo").read_text()
    with surroundings(name, tmp_path, (), {}) as setup:
        without = [word for word in setup.before if word not in ("unshare", "--mount")]
        done = subprocess.run([*without, "true"], capture_output=True, text=True)
        now = Path("/proc/self/mountinfo").read_text()
        if now != mounted:
            subprocess.run(["umount", "/dev/shm" if name == "small shm" else tmp_path / "disk"], check=True)
    assert done.returncode == 70 and now == mounted


@pytest.mark.root
def test_a_cgroup_holds_the_command_and_is_removed(tmp_path: Path) -> None:
    if not (CGROUPS / "memory").is_dir() and not (CGROUPS / "memory.max").exists():
        pytest.skip("no memory cgroups that can be made here")
    folders = lambda: {*CGROUPS.glob("paceline-faults-*"), *CGROUPS.glob("memory/paceline-faults-*")}  # noqa: E731
    before = folders()
    with surroundings("cgroup", tmp_path, (), {}) as setup:
        (made,) = folders() - before
        argv = [*setup.before, "cat", "/proc/self/cgroup"]
        assert made.name in subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert folders() == before


# ---- the command ----------------------------------------------------------------------------------------------------


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
