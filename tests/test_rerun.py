"""tests/rerun.py repeats the failed tests of a small project, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CONFTEST = (ROOT / "tests" / "conftest.py").read_text()

FLAKY = """
import os, pathlib
def first(name):  # whether this is the first call
    mark = pathlib.Path(name)
    there = mark.exists()
    mark.touch()
    return not there
def test_passes(): pass
"""


@pytest.fixture
def rerun(tmp_path, monkeypatch):
    """Runs a file of tests in a worker of xdist; gives the exit code, the lists at the end and the whole output."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("CI", raising=False)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p pytest_timeout -m 'not soak'\nmarkers =\n  soak\n")

    def run(tests, *words):
        (tmp_path / "test_a.py").write_text(FLAKY + tests)
        command = [sys.executable, "-m", "tests.rerun", "-p", "xdist.plugin", "--numprocesses", "1", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
        lists: dict[str, list[str]] = {}
        title = ""
        for line in done.stdout.splitlines():
            if line.startswith("  test_a.py::"):
                lists.setdefault(title, []).append(line.strip().removeprefix("test_a.py::"))
            else:
                title = line.split(" ")[0].rstrip(":")
        return done.returncode, lists, done.stdout + done.stderr

    return run


def flaky(*names):
    return "".join(f"def test_{name}(): assert not first('{name}')\n" for name in names)


def test_a_test_that_passes_alone_is_flaky(rerun):
    code, lists, output = rerun(
        """
import pytest
@pytest.mark.parametrize("word", ["a b", "c[d]::e"])
def test_word(word): assert word == "a b" or not first("word")
@pytest.fixture
def leaves():
    yield
    assert not first("teardown")
def test_teardown(leaves): pass
"""
        + flaky("once")
    )
    assert (code, lists) == (0, {"flaky": ["test_once", "test_teardown", "test_word[c[d]::e]"]}), output
    assert output.index("2 failed, 3 passed, 1 error") < output.index("1 passed in") < output.index("flaky:")


def test_a_test_that_fails_again_or_is_skipped_then_or_has_an_error_in_set_up_fails_the_run(rerun):
    skips = "import pytest\ndef test_skips():\n    assert not first('skips')\n    pytest.skip('now')\n"
    code, lists, output = rerun(flaky("once") + "def test_always(): assert False\n" + skips)
    assert (code, lists) == (1, {"failed": ["test_always", "test_skips"], "flaky": ["test_once"]}), output
    fixture = "import pytest\n@pytest.fixture\ndef made(): assert not first('made')\ndef test_made(made): pass\n"
    assert rerun(fixture)[:2] == (1, {"an": ["test_made"], "flaky": ["test_made"]})


def test_four_flaky_tests_or_many_failures_fail_the_run(rerun):
    assert rerun(flaky(*"bcde"))[:2] == (1, {"flaky": ["test_b", "test_c", "test_d", "test_e"]})
    many = "import pytest\n@pytest.mark.parametrize('n', range(21))\ndef test_n(n): assert n < 0\n"
    assert rerun(many)[:2] == (1, {})  # none is repeated


def test_a_selected_test_is_repeated_although_the_settings_leave_it_out(rerun):
    marked = "import pytest\n@pytest.mark.soak\ndef test_soak(): assert not first('soak')\n"
    assert rerun(marked, "-m", "soak")[:2] == (0, {"flaky": ["test_soak"]})


@pytest.mark.parametrize(
    ("tests", "words", "code"),
    [
        ("def test_crashes(): first('crash') and os._exit(3)\n", [], 1),
        ("", ["test_a.py", "test_b.py"], 1),  # an error in collection
        ("", ["-k", "nothing"], 5),
        ("", ["--no-such-option"], 4),
        ("", ["--maxfail=1"], 2),
        ("def test_stops(): raise KeyboardInterrupt\n", [], 2),
    ],
    ids=["crash", "collection", "no-tests", "usage", "maxfail", "interrupt"],
)
def test_what_is_no_failure_of_one_test_fails_the_run_without_a_repeat(rerun, tmp_path, tests, words, code):
    if "test_b.py" in words:
        (tmp_path / "test_b.py").write_text("import no_such_module\n")
    got, lists, output = rerun(flaky("once") + tests, *words)
    assert (got, lists) == (code, {}), output
    assert "repeating" not in output


@pytest.fixture
def conftest(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("SETTLE_SECONDS = 20.0", "SETTLE_SECONDS = 0.1"))
    with (tmp_path / "pytest.ini").open("a") as ini:
        ini.write("  root\n  needs(*names)\n  gpu(count)\ntimeout = 40\n")


def test_a_leak_of_the_whole_run_fails_it_although_a_flaky_test_failed_as_well(rerun, conftest, tmp_path):
    left = Path("/dev/shm") / f"paceline-{tmp_path.parent.name}-{tmp_path.name}"
    try:
        code, lists, output = rerun(flaky("once") + f"def test_leaks(): pathlib.Path({str(left)!r}).touch()\n")
    finally:
        left.unlink()
    assert code not in (0, 1) and not lists and left.name in output
