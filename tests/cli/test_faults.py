"""`paceline faults`: what it refuses, what it lists, what it writes."""

from __future__ import annotations

import json

import pytest


def test_every_fault_is_listed_with_what_it_does(paceline):
    done = paceline("faults", "--list")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith(" faults")
    line = next(line for line in done.stdout.splitlines() if line.startswith("sleeps "))
    assert "behind" in line and " 1 " in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--run", "slepps"), "Did you mean 'sleeps'"),
        (("--repeat", "0"), "--repeat must be at least 1"),
        (("--out", "scores.txt"), "--out must end in .md or .json"),
        (("--out", "nowhere/scores.md"), "does not exist"),
        (("--stall-after", "soon"), "--stall-after must be"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_started(paceline, arguments, words):
    done = paceline("faults", *arguments)
    assert done.returncode == 2 and words in done.stderr


def test_what_needs_hosts_is_left_out_with_the_reason(paceline):
    done = paceline("faults", "--run", "network-cut")
    assert done.returncode == 0 and "network-cut: left out, it needs several hosts: `make soak-faults`" in done.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_the_scores_are_written_and_the_folders_of_good_runs_removed(paceline, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = paceline("faults", "--run", "killed", "--out", "scores.json", env={"TMPDIR": str(temporary)})
    assert done.returncode == 0, done.stderr
    (score,) = json.loads((tmp_path / "scores.json").read_text())
    assert score["fault"] == "killed" and score["right_rank"] and score["code"] == 137
    assert "| killed | 1 | yes |" in (tmp_path / "scores.md").read_text()
    assert not list(temporary.iterdir())
