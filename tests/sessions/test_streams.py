"""A loop over a stream: the same bits on every number of ranks, killed or not; what cannot be that is refused."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.run_script import run_script

from paceline.cli import ledger

pytestmark = pytest.mark.sample(2)

SCRIPT = Path(__file__).with_name("streamed.py")


def start(ranks: int, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return run_script(ranks, SCRIPT, folder, *words, cwd=folder.parent)


def digest(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["weights_sha256"]


def reads(done: subprocess.CompletedProcess[str]) -> int:
    found = re.search(r"reads (\d+)", done.stdout)
    assert found and done.returncode == 0, done.stdout + done.stderr
    return int(found[1])


@pytest.mark.parametrize(("kind", "again"), [("stateful", 38), ("late", 8 + 70)])
def test_it_goes_on_by_its_state_or_where_that_is_wrong_by_counting(tmp_path: Path, kind: str, again: int) -> None:
    assert reads(start(1, tmp_path / "whole", kind)) == 140
    assert start(1, tmp_path / "run", kind, 13, "raise").returncode == 1
    assert reads(start(1, tmp_path / "run", kind)) == again
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")


def test_a_stream_that_gives_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    assert start(1, tmp_path / "run", "by-chance", 5, "raise").returncode == 1
    done = start(1, tmp_path / "run", "by-chance")
    assert done.returncode and "other samples after batch 5 than before" in done.stderr


# CI takes one of each way to keep the position; `pytest -m soak` all
SAMPLED = ("split-stateful",)
LIBRARIES = {"hf": "datasets", "wds": "webdataset"}
KINDS = [
    pytest.param(
        kind,
        marks=[pytest.mark.needs(name) for start, name in LIBRARIES.items() if kind.startswith(start)]
        + [pytest.mark.soak] * (kind not in SAMPLED),
    )
    for kind in ("late", "accumulated", "drop", "split", "split-stateful", "hf", "hf-shuffled", "hf-split", "wds")
]


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_failed_on_other_numbers_of_ranks_it_comes_to_the_same_bits(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert start(2, whole, kind).returncode == 0
    assert start(3, run, kind, 5, "kill").returncode == 137
    failed = start(1, run, kind, 13, "raise")
    assert failed.returncode == 1 and "goes on after step" in failed.stdout
    done = start(2, run, kind)
    assert done.returncode == 0 and "goes on after step 13" in done.stdout, done.stdout + done.stderr
    assert digest(run) == digest(whole)
    used = "64, 64" if kind == "drop" else "70, 70"
    assert f"used exactly once, {used} in each of 2 epochs" in ledgers(run, capsys)
    assert ("its last 6 samples are no whole batch" in done.stdout) is (kind == "drop")
    assert ("have different lengths" in done.stdout) is ("split" in kind)


def ledgers(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert ledger.main([str(run)]) == 0
    return capsys.readouterr().out.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("by-rank", 2, "other samples on rank 1 than on rank 0"),
        ("by-chance", 2, "other samples on rank 1 than on rank 0"),
        ("uneven", 1, "the ranks' numbers of samples in the stream differ"),
    ],
)
def test_ranks_with_streams_of_their_own_are_refused(tmp_path: Path, kind: str, code: int, words: str) -> None:
    done = start(2, tmp_path / "run", kind)
    assert done.returncode == code and words in done.stdout + done.stderr


@pytest.mark.slow
def test_a_stream_that_fails_ends_the_run_in_words_and_what_was_trained_is_saved(tmp_path: Path) -> None:
    assert start(1, tmp_path / "whole", "counted").returncode == 0
    failed = start(2, tmp_path / "run", "fails")
    assert failed.returncode == 1
    assert "this one is damaged" in failed.stderr and "for sample 35 of epoch 1" in failed.stderr
    done = start(3, tmp_path / "run", "counted")  # mended
    assert done.returncode == 0 and "goes on after step 4" in done.stdout, done.stdout + done.stderr
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("words", [pytest.param((), marks=pytest.mark.soak), ("--split",)], ids=["whole", "split"])
def test_the_example_learns_and_stops_where_it_is_told(tmp_path: Path, words: tuple[str, ...]) -> None:
    example, losses = SCRIPT.parents[2] / "examples" / "streaming_text.py", list[float]()
    for steps, ranks in ((5, 1), (60, 2)):
        run = tmp_path / f"run-{steps}"
        done = run_script(ranks, example, "--steps", steps, "--run", run, *words, cwd=tmp_path)
        found = re.search(rf"after step {steps}: loss ([0-9.]+)", done.stdout)
        assert done.returncode == 0 and found, done.stdout + done.stderr
        losses.append(float(found[1]))
    assert losses[1] < losses[0] - 1
