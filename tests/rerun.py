"""Run pytest, then repeat each failed test once, alone: `python -m tests.rerun [OPTION OF PYTEST ...]`.

A test that passes alone is flaky: it is listed at the end, and more than three of them fail the run. A test that fails
again fails the run. So does everything that is not the failure of one test, without a repeat: an error in collection, a
crashed worker, an exit code of pytest other than 0 and 1. An error in the set-up of a test fails the run even if the
test passes alone.
"""

import subprocess
import sys
from collections import defaultdict

import pytest

MOST_FLAKY = 3
MOST_REPEATED = 20  # the run fails with so many, whatever a repeat shows
ALONE = "--alone"


class Outcomes:
    """The failed tests of one pytest run, and its failures that belong to no test."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: defaultdict[str, set[str]] = defaultdict(set)  # the phases (setup, call, teardown) of each test
        self.fatal: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid].add(report.when)
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.fatal.append(f"an error while collecting {report.nodeid}")

    def pytest_internalerror(self, excrepr: object) -> None:
        self.fatal.append(f"an internal error of pytest: {str(excrepr).splitlines()[-1]}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        if error:
            self.fatal.append(f"a crashed worker of xdist: {error}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if reason := session.shouldfail or session.shouldstop:
            self.fatal.append(f"pytest stopped before the last test: {reason}")


def passes_alone(nodeid: str) -> bool:
    """Whether the test passes in a process of its own."""
    return subprocess.run([sys.executable, "-m", "tests.rerun", ALONE, nodeid], check=False).returncode == 0


def alone(nodeid: str) -> int:
    """Exit code of a run of one test. A test that is skipped or expected to fail has not passed."""
    seen = Outcomes()
    code = pytest.main(["-p", "no:xdist", "-m", "", nodeid], plugins=[seen])  # -m: the first run has selected it
    return int(code) or int(seen.passed != {nodeid})


def listed(title: str, lines: list[str]) -> None:
    if lines:
        print(f"\n{title}:", *lines, sep="\n  ", flush=True)


def main(words: list[str]) -> int:
    """0 if each test passed, in the first run or alone, and at most three of them only alone."""
    seen = Outcomes()
    code = int(pytest.main(words, plugins=[seen]))
    failed = sorted(seen.failed)
    if code == 0 and not seen.fatal:
        return 0
    if code == pytest.ExitCode.TESTS_FAILED and not failed and not seen.fatal:
        seen.fatal.append("pytest failed, but no test did")
    if seen.fatal or code != pytest.ExitCode.TESTS_FAILED:
        listed("no test is repeated after", [*seen.fatal, f"exit code {code} of pytest"])
        return code or 1
    if len(failed) > MOST_REPEATED:
        print(f"\n{len(failed)} tests failed: none is repeated, because there are more than {MOST_REPEATED}")
        return 1
    print(f"\nrepeating {len(failed)} failed tests, each alone", flush=True)
    flaky = [nodeid for nodeid in failed if passes_alone(nodeid)]
    again = [nodeid for nodeid in failed if nodeid not in flaky]
    in_setup = [nodeid for nodeid in flaky if "setup" in seen.failed[nodeid]]
    listed("failed again when run alone", again)
    listed("an error in set-up fails the run, even if the test passes alone", in_setup)
    listed(f"flaky: failed at first, passed alone (more than {MOST_FLAKY} fail the run)", flaky)
    return int(bool(again or in_setup) or len(flaky) > MOST_FLAKY)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(alone(*arguments[1:]) if arguments[:1] == [ALONE] else main(arguments))
