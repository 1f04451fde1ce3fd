"""The page says first whether a run went well: what it learned, that it was restarted, and what broke it."""

from __future__ import annotations

import html
import re
from pathlib import Path

import msgspec
import pytest
from tests.rendered import rendered
from tests.view.folders import make_run

from paceline.observe.events import Started, Step
from paceline.observe.writers import EventWriter
from paceline.protocol.evidence import Failure
from paceline.view.happened import breakdowns, learned, remedy, started_again
from paceline.view.page import report_page
from paceline.view.run import whole_run


def test_a_loss_that_falls_and_one_that_does_not(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    fell = learned(whole_run(folder))
    text = (folder / "events-0.jsonl").read_text()
    (folder / "events-0.jsonl").write_text(text.replace('"loss":', '"loss":1.0,"was":'))
    rendered([fell, learned(whole_run(folder))])


def test_restarts_are_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert started_again(whole_run(folder)) == ""
    with EventWriter(folder / "events-0.jsonl") as writer:
        writer.write(Started(1, 0, 2, "n1", 2, "cpu", 2000.0, generation=1, start_step=30))
        writer.write(Step(31, 0, 1.0, 64, 1e-3, 0.1, 0.0, 2001.0))
    run = whole_run(folder)
    rendered(started_again(run))
    assert run.first is not None and (run.first.thrown_away, len(run.first.rows)) == (10, 31)
    assert started_again(run) in report_page([run], "x")


@pytest.mark.parametrize("code", [5, 1, 3])
def test_a_failure_is_told_in_its_own_words_with_what_to_try(code: int, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for rank, victim, words in ((0, True, "connection reset"), (1, False, "the loss <b>broke</b>" + " and more" * 60)):
        failure = Failure(rank, "n1", 7, code, "TrainingError", words, "", victim, 1.0)
        (folder / "attempt-1" / f"error-{rank}.json").write_bytes(msgspec.json.encode(failure))
    run = whole_run(folder)
    run.state = "failed"
    assert [who for who, _ in breakdowns(run)] == ["rank 1 (n1)"]  # not the one that only lost its peer
    text = report_page([run], "x")
    assert html.escape("<b>broke</b>") + " and more" * 60 in text  # all that it said
    assert re.search("failed</td>.{0,30}>rank 1", text)
    assert html.escape(remedy(run)[0]) in text
    rendered(remedy(run))
