"""Are the surroundings of a fault as they must be, and gone afterwards?"""

import socket
import subprocess
from pathlib import Path

import pytest
from benchmarks.faults.setups import CGROUPS, surroundings

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
