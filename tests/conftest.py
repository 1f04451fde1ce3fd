"""What holds for every test: it leaves nothing behind, it ends, and in CI it is not skipped.

1. A leak fixture fails a test that leaves a process, a thread, a listening port, a file in /dev/shm or a changed
   environment variable behind, and removes what it can, so that the next test is not the one to suffer.
2. A backstop ends the whole run when a test is stuck where pytest-timeout's signal cannot reach it.
3. `make test` runs one of n tests that are marked `sample(n)`, `make check` all of them. CI runs half of those with
   n >= 3. The commit decides which half.
4. In CI a skipped test is a failed one, unless it waits for a GPU.

Markers of what a test needs (`root`, `needs`, `gpu`) stand in pyproject.toml.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("paceline", deadline=None)  # CI's machine may be busy
hypothesis.settings.load_profile("paceline")
pytest_plugins = ["pytester"]
sys.dont_write_bytecode = False  # else each of three workers rewrites 430 modules each time: half a minute of a core
os.environ.pop("PYTHONUNBUFFERED", None)  # a user's shell has none: with it, tests passed that failed on their machines

RUN_MARKER = "PACELINE_TEST_RUN"  # in the environment of every process that a test starts, however far down
SETTLE_SECONDS = 20.0  # what is just ending is no leak
BACKSTOP_SECONDS = 30.0
LEAKS_EXIT_CODE = 6  # not pytest's 1: tests/rerun.py repeats failed tests, and this is no failure of one test

PROC = Path("/proc")
SHM = Path("/dev/shm")
THREADS_OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


# ---- 1. leaks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """What there is at one moment. Cheap: two directory listings and a few links."""

    pids: frozenset[str]
    threads: frozenset[threading.Thread]
    sockets: frozenset[str]
    shm: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            pids=frozenset(name for name in os.listdir(PROC) if name.isdigit()),  # noqa: PTH208 - names only: fast
            threads=frozenset(threading.enumerate()),
            sockets=frozenset(_open_sockets().values()),
            shm=_in_shm(),
        )


def _in_shm() -> frozenset[str]:
    return frozenset(os.listdir(SHM)) if SHM.is_dir() else frozenset()  # noqa: PTH208


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaks something. Set up before all other fixtures of the test, so torn down after them."""
    alone = not _one_of_several(request.config)
    environment = dict(os.environ)
    before, open_files = Snapshot.take(), resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, open_files)  # an agent in the process of a test raises it
    found = [*_changed_environment(environment), *_settled(lambda: _leaks(before, shm=alone))]
    if found:
        _kill(_leaked_processes(before))
        pytest.fail("this test leaks:\n  " + "\n  ".join(found), pytrace=False)


def _settled(look: Callable[[], list[str]]) -> list[str]:
    """What `look` still finds when everything that is just ending has ended."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while found := look():
        gc.collect()  # a port or a file may only wait for its object
        if time.monotonic() > deadline:
            return found
        time.sleep(0.02)
    return []


def _leaks(before: Snapshot, *, shm: bool) -> list[str]:
    found = [f"process {pid}: {_command(pid)}" for pid in _leaked_processes(before)]
    for thread in set(threading.enumerate()) - before.threads:
        if thread.is_alive() and not thread.daemon:
            found.append(f"thread {thread.name!r}, not a daemon: Python waits for it at exit")
    found += [f"listening port {port}" for port in _listening_ports(before)]
    return [*found, *_new_in_shm(before.shm)] if shm else found


def _one_of_several(config: pytest.Config) -> bool:
    """Whether other tests run at the same time (xdist), whose files in /dev/shm nobody can tell from ours."""
    return hasattr(config, "workerinput")


def _new_in_shm(before: frozenset[str]) -> list[str]:
    return [f"file /dev/shm/{name}" for name in sorted(_in_shm() - before) if not _held_by_a_stranger(name)]


def _changed_environment(before: dict[str, str]) -> list[str]:
    """The variables that changed, now put back."""
    after = dict(os.environ)
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    # The second is torch's: it sets it when its compiler is first imported, in whichever test that is.
    names = [name for name in names if name not in ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")]
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}: {before.get(name)!r} -> {after.get(name)!r}" for name in names]


def _leaked_processes(before: Snapshot) -> list[int]:
    """Processes younger than the test that descend from it, also those whose parent is gone.

    An orphan is known by the run's marker in its environment (inherited through every exec) or, forked without an
    exec, by this process's group that its new parent is not in.
    """
    pids = [int(name) for name in os.listdir(PROC) if name.isdigit() and name not in before.pids]  # noqa: PTH208
    warm = sys.modules.get("tests.warm")  # what it forks from serves later tests, too
    kept = warm.pids() if warm else ()
    return [p for p in pids if p not in kept and _is_ours(p) and not _command(p).endswith(THREADS_OF_PYTHON)]


def _is_ours(pid: int) -> bool:
    try:
        state, parent, group = _state_parent_group(pid)
        if parent == os.getpid():
            return True  # even a zombie: nobody has waited for it
        if state == "Z":
            return False
        marker = f"{RUN_MARKER}={os.environ.get(RUN_MARKER)}".encode()
        if marker in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            return True
        # In this group, with a parent outside it: adopted. A CI runner's other children may be in the group as well.
        return group == os.getpgrp() and _state_parent_group(parent)[2] != group
    except OSError:  # gone meanwhile, or another user's
        return False


def _state_parent_group(pid: int) -> tuple[str, int, int]:
    state, parent, group = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
    return state, int(parent), int(group)


def _command(pid: int) -> str:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        # `python -c "from multiprocessing.resource_tracker import main;main(5)"`: kept by Python until it exits
        for module in THREADS_OF_PYTHON:
            if module in words:
                return module
        return words[:200] or "(ended, but nobody waited for it)"
    except OSError:
        return "(gone)"


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _open_sockets() -> dict[int, str]:
    sockets: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed again
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                sockets[int(name)] = target
    return sockets


def _listening_ports(before: Snapshot) -> list[int]:
    ports: list[int] = []
    for fd, inode in _open_sockets().items():
        if inode in before.sockets:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
            internet = one.family in (socket.AF_INET, socket.AF_INET6)
            if internet and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.append(one.getsockname()[1])
    return ports


def _held_by_a_stranger(name: str) -> bool:
    """Whether a process that is not the test's has the file mapped: /dev/shm is everybody's."""
    for maps in PROC.glob("[0-9]*/maps"):
        pid = int(maps.parent.name)
        with contextlib.suppress(OSError):
            if pid != os.getpid() and f"/dev/shm/{name}" in maps.read_text() and not _is_ours(pid):
                return True
    return False


# ---- 2. hard time limit ------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    os.environ[RUN_MARKER] = str(os.getpid())
    if _one_of_several(config):  # its orphans are known by its group
        os.setpgrp()
    config.stash[_stderr] = os.dup(2)  # before pytest captures it


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_shm] = _in_shm()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where several tests run at once, files left in /dev/shm fail them all; one by one, the guilty test is named."""
    if _one_of_several(session.config) or session.config.getoption("numprocesses", None) is None:
        return
    if found := _settled(lambda: _new_in_shm(session.config.stash[_shm])):
        print("\nthe tests leak (run them without --numprocesses to see which):\n  " + "\n  ".join(found))
        session.exitstatus = LEAKS_EXIT_CODE


def pytest_unconfigure(config: pytest.Config) -> None:
    if (warm := sys.modules.get("tests.warm")) is not None:
        warm.close()
    os.close(config.stash[_stderr])


_stderr = pytest.StashKey[int]()
_shm = pytest.StashKey[frozenset[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the whole run if the test outlives its time limit by 30 s.

    pytest-timeout's signal is handled between two bytecodes of the main thread: a test stuck in C (a collective
    that waits for a dead rank) never gets there. faulthandler's timer needs neither that nor the GIL.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker and marker.args else item.config.getini("timeout") or 0)
    if limit:
        faulthandler.dump_traceback_later(limit + BACKSTOP_SECONDS, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---- 3. what `make test` runs ------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all but each n-th of the tests with `sample(n)` as slow. In CI, deselect half of those with n >= 3."""
    counts: Counter[str] = Counter()
    left_out: set[pytest.Item] = set()
    for item in items:
        node, marker = next(item.iter_markers_with_node("sample"), (item, None))
        if marker is not None:
            of = node.nodeid.partition("[")[0]  # a module, or all cases of one function
            counts[of] += 1
            if counts[of] % marker.args[0] != 1:
                item.add_marker(pytest.mark.slow)
            if in_ci() and marker.args[0] >= 3 and not in_half(item.nodeid, commit()):
                left_out.add(item)
    items[:] = [item for item in items if item not in left_out]
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])


def pytest_collection_finish() -> None:
    """Exclude the tests and imported modules from garbage collection, which reads 2 million objects each time."""
    gc.collect()
    gc.freeze()


def in_half(nodeid: str, seed: str) -> bool:
    """Whether a test belongs to the half that CI runs: the same for a test that is repeated alone."""
    return zlib.crc32(f"{seed} {nodeid}".encode()) % 2 == 0


@functools.cache
def commit() -> str:
    """The commit that is tested; empty outside a clone."""
    asked = ("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


# ---- 4. what a test needs ----------------------------------------------------------------------------------------


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            if shutil.which(name) is None and importlib.util.find_spec(name) is None:
                pytest.skip(f"needs {name}, neither a program nor a Python package here")
    if marker := item.get_closest_marker("gpu"):
        import torch

        wanted = marker.args[0] if marker.args else 1
        if torch.cuda.device_count() < wanted:
            pytest.skip(f"needs {wanted} CUDA devices, there are {torch.cuda.device_count()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI a skip is a failure: CI is the machine that has everything but a GPU."""
    report = yield
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("gpu")
    if report.skipped and in_ci() and not expected:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    """A module that skips itself (pytest.importorskip at its top) counts as well."""
    report = yield
    if report.skipped and in_ci():
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped in CI, where nothing may be missing but a GPU: {reason}"
