"""`python -m benchmarks.faults`: what it refuses, what it lists, what it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def faults(tmp_path):
    """Run `python -m benchmarks.faults ARGUMENTS`, as in a clone."""

    def run(*arguments: str, env: dict[str, str] | None = None):
        words = (sys.executable, "-m", "benchmarks.faults", *arguments)
        env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("slepps",), "Did you mean 'sleeps'"),
        (("--repeat", "0"), "--repeat must be at least 1"),
        (("--out", "scores.txt"), "--out must end in .md or .json"),
        (("--out", "nowhere/scores.md"), "does not exist"),
        (("--hang-timeout", "soon"), "--hang-timeout must be"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_started(faults, arguments, words):
    done = faults(*arguments)
    assert done.returncode == 2 and words in done.stderr


def test_what_needs_hosts_is_left_out_with_the_reason(faults):
    done = faults("network-cut")
    assert done.returncode == 0 and "network-cut: " in done.stderr and "make soak-faults" in done.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_the_scores_are_written_and_the_folders_of_good_runs_removed(faults, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = faults("killed", "--out", "scores.json", env={"TMPDIR": str(temporary)})
    assert done.returncode == 0, done.stderr
    (score,) = json.loads((tmp_path / "scores.json").read_text())
    assert score["fault"] == "killed" and score["right_rank"] and score["code"] == 137
    assert "| killed | 1 | yes |" in (tmp_path / "scores.md").read_text()
    assert not list(temporary.iterdir())
