"""The tests that need programs, root or a cluster, as on a fresh machine: they skip and say why, and none fails.

    python tests/fresh.py

What .ci/install and the extras install is hidden; once with root, where we are root, and once without. .ci/run runs
this: elsewhere in CI nothing skips, so only here is it seen that skipping works.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = {  # packages of pyproject's extras, by the names that tests import
    "datasets", "ipykernel", "jupyter_client", "material", "mkdocs", "mlflow", "nbclient", "playwright", "sklearn",
    "tensorboard", "torchmetrics", "tqdm", "transformers", "wandb",
}  # fmt: skip
MARKED = re.compile(r"mark\.(root|needs|cluster)\b")
ASKED = {"root": "(needs or cluster) and not soak", "nobody": "(root or cluster) and not soak"}


class Outcomes:
    """How many tests passed, failed and were skipped, and which of those did not say what they need."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unsaid: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if report.skipped and not (isinstance(report.longrepr, tuple) and "needs " in report.longrepr[2]):
            self.unsaid.append(f"{report.nodeid} is skipped without a reason: {report.longrepr}")


def hide(shown: Path) -> int:
    """Fill a folder with links to all programs of PATH but those that .ci/install installs; how many are hidden."""
    listed = subprocess.run(
        [ROOT / ".ci" / "install", "--programs"], capture_output=True, text=True, check=False
    ).stdout
    theirs = {os.path.realpath(line) for line in listed.splitlines()}
    hidden = 0
    for folder in filter(os.path.isdir, os.environ["PATH"].split(os.pathsep)):
        for program in Path(folder).iterdir():
            if os.path.realpath(program) in theirs:  # also through /etc/alternatives
                hidden += 1
            elif not os.path.lexists(shown / program.name):
                (shown / program.name).symlink_to(program)
    return hidden


def both(env: dict[str, str]) -> list[int]:
    """Exit codes, of both at once: they mostly import. Each in a group of its own, by which it knows its orphans."""
    runs = [
        subprocess.Popen(
            [sys.executable, __file__, who], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        )
        for who in ASKED
    ]
    try:
        for run in runs:
            sys.stdout.buffer.write(run.communicate()[0])
            sys.stdout.flush()
    finally:
        for run in runs:
            run.kill()  # nothing happens to one that has ended
    return [run.wait() for run in runs]


def main() -> int:
    if len(sys.argv) < 2:
        with tempfile.TemporaryDirectory() as shown:
            print(f"{hide(Path(shown))} programs are hidden", flush=True)
            env = {**os.environ, "PATH": shown}
            return max(both(env))
    (who,) = sys.argv[1:]
    if who == "nobody":
        os.geteuid = lambda: 65534
    there = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name in EXTRAS else there(name, package)
    marked = [path for path in (ROOT / "tests").glob("*/**/*.py") if MARKED.search(path.read_text())]
    marked += [path for path in (ROOT / "tests").glob("test_*.py") if MARKED.search(path.read_text())]
    # a conftest.py marks all in its folder
    asked = sorted({str(path.parent if path.name == "conftest.py" else path) for path in marked})
    seen = Outcomes()
    words = ["-q", "-p", "no:cacheprovider", "-r", "fE", "-m", ASKED[who], "--rootdir", str(ROOT), *asked]
    code = pytest.main(words, plugins=[seen])
    print(f"as {who}: {dict(seen.counts)}", *seen.unsaid, sep="\n", flush=True)
    return int(bool(seen.unsaid) or not seen.counts["skipped"] or code != pytest.ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
