"""Loops over loader processes, length groups and packed sequences: the plain loop's samples, after kills too."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.errors import codes
from tests.run_script import run_script
from tests.sessions import soak_loaders
from tests.sessions.soak_loaders import KINDS, SCRIPT

DIFFERS, ANOTHER_RUN, WEIGHTS = "stream-differs-from-saved", "another-run-for-good", "weights-not-of-targets"
LIBRARIES = {"hf": "datasets", "length": "transformers", "flattened": "transformers"}


def start(size: int, folder: Path, words: Sequence[object]) -> tuple[int, str]:
    done = run_script(size, SCRIPT, *words, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def needs(kind: str) -> list[pytest.MarkDecorator]:
    names = {name for begin, name in LIBRARIES.items() if kind.startswith(begin)}
    return [pytest.mark.needs(name) for name in [*names, *(["transformers"] if kind == "hf-map" else [])]]


EACH = [pytest.param(kind, marks=needs(kind)) for kinds in KINDS.values() for kind in kinds]


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.timeout(450)
@pytest.mark.parametrize("kind", EACH)
def test_killed_on_any_number_of_ranks_it_uses_the_samples_of_the_plain_loop(tmp_path: Path, kind: str) -> None:
    whole = soak_loaders.expected(kind, tmp_path, start)
    found = soak_loaders.killed_run(kind, whole, 2, random.Random(kind), tmp_path, start)
    assert found["faults"] == [] and found["kills"] == 2


def test_processes_take_turns_and_none_of_their_samples_is_lost_or_repeated(tmp_path: Path) -> None:
    whole = soak_loaders.expected("split", tmp_path, start)
    found = soak_loaders.killed_run("split", whole, 1, random.Random(4), tmp_path, start)
    assert found["faults"] == [] and found["kills"] == 1 and len({*found["ranks"]}) == 2


@pytest.mark.parametrize(("kind", "size", "step"), [
    ("split", 2, 3), ("packed", 2, 3),
    pytest.param("length", 3, 10, marks=needs("length")),  # the last batch has one sample: the killed rank has none
])  # fmt: skip
def test_a_step_that_a_killed_rank_has_not_recorded_is_proven(tmp_path: Path, kind: str, size: int, step: int) -> None:
    run = tmp_path / "run"
    assert start(size, tmp_path, [run, kind, step, 1, -1])[0] == soak_loaders.KILLED
    assert start(size, tmp_path, [run, kind])[0] == 0
    assert '"vouched"' in (run / "events-0.jsonl").read_text()  # rank 0 has saved the step
    said, counts = soak_loaders.epochs(run)
    assert (said, [(epoch["never"], epoch["repeatedly"]) for epoch in counts]) == ("", [(0, 0)] * 3)


@pytest.mark.slow
def test_a_stream_that_shuffles_before_it_splits_itself_gives_each_sample_once(tmp_path: Path) -> None:
    assert start(2, tmp_path, [tmp_path / "run", "shuffled-split"])[0] == 0
    for epoch in soak_loaders.epochs(tmp_path / "run")[1]:
        assert (epoch["never"], epoch["repeatedly"]) == (0, 0)
    used = soak_loaders.used_samples(tmp_path / "run", [{*(tmp_path / "run").glob("seen-*")}])
    assert sorted(sample for step, samples in used.items() if step < 11 for sample in samples) == [*range(61)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["counting", "counting-kept"])
@pytest.mark.parametrize("killed", [15, 22], ids=["in an epoch", "after an epoch"])
def test_a_stream_that_counts_its_epochs_is_not_continued_in_another_order(
    tmp_path: Path, kind: str, killed: int
) -> None:
    run = tmp_path / "run"
    assert start(2, tmp_path, [run, kind, killed, 0, 0])[0] == soak_loaders.KILLED
    code, output = start(1, tmp_path, [run, kind])
    assert code == 2 and codes(output) == [DIFFERS]


@pytest.mark.slow
def test_another_number_of_processes_is_another_order(tmp_path: Path) -> None:
    assert start(1, tmp_path, [tmp_path / "run", "split-1", 5, 0, 0])[0] == soak_loaders.KILLED
    code, output = start(1, tmp_path, [tmp_path / "run", "split"])
    assert code == 2 and codes(output) == [ANOTHER_RUN]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unweighted-packed", "unweighted-length"])
def test_packed_and_padded_rows_need_the_number_of_tokens(tmp_path: Path, kind: str) -> None:
    code, output = start(2, tmp_path, [tmp_path / "run", kind])
    assert code == 2 and codes(output)[:1] == [WEIGHTS]
