"""tests/conftest.py keeps its promises: a leak of each kind fails its test, nothing hangs, and CI skips nothing.

The conftest itself runs in a pytest of its own (a subprocess), on tests that break each promise.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = Path(__file__).with_name("conftest.py").read_text()

LEAKY = """
import os, signal, socket, subprocess, threading, time
from multiprocessing import shared_memory
from pathlib import Path

def orphan(work):
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            work()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.3)  # until it has become what it will be: in the middle of exec a process shows nothing

def test_child():
    global kept
    kept = subprocess.Popen(["sleep", "45.125"])

def test_child_nobody_waited_for():
    child = os.fork()
    if child == 0:
        os._exit(0)

def test_grandchild():
    global kept_too
    kept_too = subprocess.Popen(["sh", "-c", "sleep 45.125; true"])

def test_orphan_in_a_session_of_its_own():
    orphan(lambda: (os.setsid(), os.execlp("sleep", "sleep", "45.125")))

def test_orphan_forked_without_exec():
    orphan(lambda: time.sleep(45))

def test_thread():
    threading.Thread(target=time.sleep, args=(4,), name="stays").start()

def test_port():
    global server
    server = socket.create_server(("127.0.0.1", 0))

def test_shm():
    Path("/dev/shm", f"paceline-leak-{os.getpid()}").write_text("x")

def test_environment_added():
    os.environ["PACELINE_LEAK"] = "1"

def test_environment_removed():
    del os.environ["PACELINE_KEPT"]
"""

CLEAN = """
import os, socket, subprocess, threading, time

def test_environment_is_put_back():
    assert "PACELINE_LEAK" not in os.environ and os.environ["PACELINE_KEPT"] == "1"

def test_ended_in_good_order(monkeypatch):
    monkeypatch.setenv("PACELINE_LEAK", "1")
    subprocess.run(["true"], check=True)
    with socket.create_server(("127.0.0.1", 0)):
        pass

def test_daemon_thread():
    threading.Thread(target=time.sleep, args=(1,), daemon=True).start()

def test_just_ending():
    threading.Thread(target=time.sleep, args=(0.05,)).start()
"""


@pytest.fixture
def project(pytester, monkeypatch):
    pytester.makeconftest(CONFTEST.replace("SETTLE_SECONDS = 20.0", "SETTLE_SECONDS = 0.3"))
    pytester.makeini(
        "[pytest]\nmarkers =\n  root\n  needs(*names)\n  gpu(count)\n"
        "addopts = -p no:cacheprovider -p pytest_timeout\ntimeout = 40\n"
    )
    pytester.makepyfile(torch="class cuda: device_count = staticmethod(lambda: 0)")  # the real one takes seconds
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other plugins' imports take a second
    return pytester


def processes_with(word: str) -> list[str]:
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in cmdline.read_bytes().decode(errors="replace").split("\0"):
                found.append(cmdline.parent.name)
        except OSError:
            pass
    return found


def test_each_kind_of_leak_fails_its_test_and_is_cleaned_up(project, monkeypatch):
    monkeypatch.setenv("PACELINE_KEPT", "1")
    project.makepyfile(test_leaky=LEAKY, test_zz_clean=CLEAN)
    result = project.runpytest_subprocess("-v", timeout=55)
    leaks = {
        "test_child": "process * sleep 45.125",
        "test_child_nobody_waited_for": "process *nobody waited for it*",
        "test_grandchild": "process * sh -c sleep*",
        "test_orphan_in_a_session_of_its_own": "process * sleep 45.125",
        "test_orphan_forked_without_exec": "process *",
        "test_thread": "thread 'stays'*",
        "test_port": "listening port *",
        "test_shm": "file /dev/shm/paceline-leak-*",
        "test_environment_added": "environment variable PACELINE_LEAK: None -> '1'",
        "test_environment_removed": "environment variable PACELINE_KEPT: '1' -> None",
    }
    clean = CLEAN.count("def test_")
    result.assert_outcomes(passed=len(leaks) + clean, errors=len(leaks))  # the tests themselves pass, their ends do not
    for name, what in leaks.items():
        result.stdout.fnmatch_lines([f"*ERROR at teardown of {name} *", "this test leaks:", f"  {what}"])
    assert not processes_with("45.125")
    for left in Path("/dev/shm").glob("paceline-leak-*"):
        left.unlink()


def test_a_neighbours_process_is_no_leak(project):
    """Even one in pytest's own process group, as under a CI runner: it must be neither reported nor killed."""
    project.makepyfile("""
        import pathlib, time

        def test_while_the_neighbour_starts_something():
            pathlib.Path("go").touch()
            time.sleep(0.5)
    """)
    neighbour = "for i in $(seq 400); do [ -e go ] && break; sleep 0.05; done; sleep 3 && echo neighbour lives"
    run = subprocess.run(
        ["bash", "-c", f"({neighbour}) & {sys.executable} -m pytest; code=$?; wait; exit $code"],
        cwd=project.path, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "neighbour lives" in run.stdout


def test_a_test_that_no_signal_reaches_ends_the_run(project):
    project.makeconftest(CONFTEST.replace("BACKSTOP_SECONDS = 30.0", "BACKSTOP_SECONDS = 1.0"))
    # a lock taken twice, with the GIL held: no bytecode runs any more, so Python never sees a signal
    project.makepyfile("""
        import ctypes
        import pytest

        @pytest.mark.timeout(1)
        def test_stuck_in_c():
            mutex = ctypes.create_string_buffer(64)
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    """)
    result = project.runpytest_subprocess(timeout=40)
    assert result.ret == 1
    result.stderr.fnmatch_lines(["Timeout (0:00:02)!", "*in test_stuck_in_c"])


MAIN = "pytest.main(['-rsf', '--continue-on-collection-errors'])"
NOT_ROOT = f"import os, sys, pytest; os.geteuid = lambda: 1000; sys.exit({MAIN})"
SKIPPING = """
    import pytest

    @pytest.mark.root
    def test_mounts():
        pass

    @pytest.mark.needs("no-such-program")
    def test_needs():
        pass

    def test_skips_itself():
        pytest.skip("no network")

    def test_imports():
        pytest.importorskip("no_such_package")

    @pytest.mark.gpu(99)
    def test_gpu():
        pass

    @pytest.mark.xfail(reason="known")
    def test_xfail():
        assert False

    @pytest.mark.needs("sh", "pytest")
    def test_has_all():
        pass
"""


def test_ci_runs_half_of_many_cases_and_everything_else(project, monkeypatch):
    project.makepyfile("""
        import pytest

        @pytest.mark.sample(3)
        @pytest.mark.parametrize("case", range(64))
        def test_many(case):
            pass

        @pytest.mark.sample(2)
        @pytest.mark.parametrize("case", range(8))
        def test_few(case):
            pass
    """)
    project.runpytest_subprocess().assert_outcomes(passed=72)
    monkeypatch.setenv("CI", "true")
    found = project.runpytest_subprocess().parseoutcomes()
    assert found["passed"] + found["deselected"] == 72 and 20 <= found["deselected"] <= 44
    assert project.runpytest_subprocess().parseoutcomes() == found  # of one commit it is the same half


def test_in_ci_only_a_missing_gpu_is_skipped_and_a_module_that_skips_itself_fails(project, monkeypatch):
    monkeypatch.setenv("CI", "true")
    project.makepyfile(test_skipping=SKIPPING, test_module='import pytest\npytest.importorskip("no_such_package")\n')
    result = project.run(sys.executable, "-c", NOT_ROOT)
    result.assert_outcomes(passed=1, skipped=1, xfailed=1, failed=2, errors=3)  # of a module and two markers
    result.stdout.fnmatch_lines(["*skipped in CI*needs root*"])
    result.stdout.fnmatch_lines(["*skipped in CI, where nothing may be missing but a GPU:*no network*"])
