"""What `--check` puts into a worker: cut epochs, and callbacks of several who wait for one module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.contract.facts import Pass
from paceline.worker.imports import when_imported
from paceline.worker.probes.loading import Cut


def test_a_cut_epoch_has_its_first_batches_and_its_last_and_knows_all_indices() -> None:
    seen = Pass()
    drawn = [*Cut(iter([[0, 1], [2, 3], [4, 5], [6]]), 4, 2, seen)]
    assert drawn == [[0, 1], [6]]
    assert seen.indices == [*range(7)]
    assert seen.drawn == 7


def test_a_sampler_that_ends_early_ends_the_epoch() -> None:
    assert [*Cut(iter([[0], [1]]), 5, 3, Pass())] == [[0], [1]]
    assert [*Cut(iter([[0], [1], [2]]), 5, 3, Pass())] == [[0], [1], [2]]


def test_all_who_wait_for_a_module_are_called_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waited_for.py").write_text("ready = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    heard: list[tuple[str, bool, bool]] = []

    def first(*, late: bool) -> None:
        heard.append(("first", late, sys.modules["waited_for"].ready))

    def second(*, late: bool) -> None:
        heard.append(("second", late, sys.modules["waited_for"].ready))

    for then in (first, second, first):
        when_imported("waited_for", then)
    __import__("waited_for")
    assert heard == [("first", False, True), ("second", False, True)]
    when_imported("waited_for", second)
    assert heard[2:] == [("second", True, True)]
    del sys.modules["waited_for"]
