"""A loop over a stream: the same bits on every number of ranks, killed or not; what cannot be that is refused."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.ended import digest, start_steps
from tests.errors import codes
from tests.run_script import run_script

from paceline.cli import ledger

pytestmark = pytest.mark.sample(2)

SCRIPT = Path(__file__).with_name("streamed.py")


def start(ranks: int, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return run_script(ranks, SCRIPT, folder, *words, cwd=folder.parent)


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
    assert done.returncode == 2 and codes(done.stderr) == ["stream-differs-from-saved"]


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
@pytest.mark.timeout(450)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_failed_on_other_numbers_of_ranks_it_comes_to_the_same_bits(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert start(2, whole, kind).returncode == 0
    assert start(3, run, kind, 5, "kill").returncode == 137
    failed = start(1, run, kind, 13, "raise")
    assert failed.returncode == 1 and start_steps(run)[-1] > 0
    done = start(2, run, kind)
    assert done.returncode == 0 and start_steps(run)[-1] == 13, done.stdout + done.stderr
    assert digest(run) == digest(whole)
    assert used(run) == [64 if kind == "drop" else 70] * 2
    assert ("its last 6 samples" in done.stdout) is (kind == "drop")
    assert ("have different lengths" in done.stdout) is ("split" in kind)


def used(run: Path) -> list[int]:
    """How many samples each epoch has used, each of them once."""
    found = run.with_suffix(".json")
    assert ledger.main([str(run), "--json", str(found)]) == 0
    epochs = json.loads(found.read_text())["epochs"]
    assert all(epoch["repeatedly"] in (0, None) for epoch in epochs)
    return [epoch["once"] for epoch in epochs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "exit_code", "code"),
    [("by-rank", 2, "streams-differ"), ("by-chance", 2, "streams-differ"), ("uneven", 1, "ranks-differ")],
)
def test_ranks_with_streams_of_their_own_are_refused(tmp_path: Path, kind: str, exit_code: int, code: str) -> None:
    done = start(2, tmp_path / "run", kind)
    assert (done.returncode, codes(done.stdout + done.stderr)) == (exit_code, [code])


@pytest.mark.slow
def test_a_stream_that_fails_ends_the_run_in_words_and_what_was_trained_is_saved(tmp_path: Path) -> None:
    assert start(1, tmp_path / "whole", "counted").returncode == 0
    failed = start(2, tmp_path / "run", "fails")
    assert failed.returncode == 1
    assert "damaged" in failed.stderr and re.search("sample 35 of epoch 1", failed.stderr)
    done = start(3, tmp_path / "run", "counted")  # mended
    assert done.returncode == 0 and start_steps(tmp_path / "run")[-1] == 4, done.stdout + done.stderr
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
