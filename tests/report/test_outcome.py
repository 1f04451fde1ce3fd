"""Whether a run went well: what it learned, restarts, what broke it, and the bottleneck that was injected."""

import html
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.rendered import rendered
from tests.report.folders import make_run

from paceline.protocol.evidence import Failure
from paceline.report.outcome import (
    COMPUTING,
    DATA,
    EXCHANGE,
    WAITING,
    failure_remedies,
    find_bottleneck,
    learning_summary,
    restart_summary,
    root_failures,
)
from paceline.report.page import render_html
from paceline.report.run import read_run
from paceline.runs.events import Started, Step
from paceline.runs.writers import EventWriter


def test_a_loss_that_falls_and_one_that_does_not(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    fell = learning_summary(read_run(folder))
    text = (folder / "events-0.jsonl").read_text()
    (folder / "events-0.jsonl").write_text(text.replace('"loss":', '"loss":1.0,"was":'))
    rendered([fell, learning_summary(read_run(folder))])


def test_restarts_are_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert restart_summary(read_run(folder)) == ""
    with EventWriter(folder / "events-0.jsonl") as writer:
        writer.write(Started(1, 0, 2, "n1", 2, "cpu", 2000.0, generation=1, start_step=30))
        writer.write(Step(31, 0, 1.0, 64, 1e-3, 0.1, 0.0, 2001.0))
    run = read_run(folder)
    rendered(restart_summary(run))
    assert run.first_rank_log is not None and (run.first_rank_log.discarded, len(run.first_rank_log.valid_rows)) == (
        10,
        31,
    )
    assert restart_summary(run) in render_html([run], "x")


@pytest.mark.parametrize("code", [5, 1, 3])
def test_a_failure_is_told_in_its_own_words_with_what_to_try(code: int, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for rank, victim, words in ((0, True, "connection reset"), (1, False, "the loss <b>broke</b>" + " and more" * 60)):
        failure = Failure(rank, "n1", 7, code, "TrainingError", words, "", victim, 1.0)
        (folder / "attempt-1" / f"error-{rank}.json").write_bytes(msgspec.json.encode(failure))
    run = read_run(folder)
    run.state = "failed"
    assert [who for who, _ in root_failures(run)] == ["rank 1 (n1)"]  # not the one that only lost its peer
    text = render_html([run], "x")
    assert html.escape("<b>broke</b>") + " and more" * 60 in text  # all that it said
    assert re.search("failed</td>.{0,30}>rank 1", text)
    assert html.escape(failure_remedies(run)[0]) in text
    rendered(failure_remedies(run))


CAUSES: dict[str, tuple[dict[str, Any], str, int | None, str]] = {
    "data of one rank": ({"slow": {1: {"data": 0.03}}, "ranks": 3}, WAITING, 1, "data"),
    "a slow rank": ({"slow": {2: {"forward": 0.04}}, "ranks": 4}, WAITING, 2, "forward"),
    "a rank without a core": (
        {"slow": {0: {"backward": 0.06}}, "rank_cores": {0: 0.5, 1: 1.0}}, WAITING, 0, "backward",
    ),
    "a slow link": ({"exchange": 0.03, "hosts": ("n1", "n2")}, EXCHANGE, None, ""),
    "the exchange on one host": ({"exchange": 0.03}, EXCHANGE, None, ""),
    "data everywhere": ({"slow": {0: {"data": 0.05}, 1: {"data": 0.05}}}, DATA, None, ""),
    "data of a rank on another host": ({"slow": {1: {"data": 0.03}}, "hosts": ("n1", "n2")}, WAITING, 1, "data"),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_cause_is_the_one_that_was_injected(cause: str, tmp_path: Path) -> None:
    asked, wanted, rank, phase = CAUSES[cause]
    found = find_bottleneck(read_run(make_run(tmp_path / "run", **asked)))
    lost = {one: share for one, share in found.cause_fractions.items() if one != COMPUTING}
    assert max(lost, key=lambda one: lost[one]) == wanted
    assert wanted != WAITING or (found.parts and (found.parts.slowest, found.parts.slow_phase) == (rank, phase))
    rendered(found.summary)
    assert sum(share for cause, share in found.cause_fractions.items() if cause != "not explained") == pytest.approx(
        1, abs=0.05
    )
    assert found.advice


def test_more_threads_than_cores_come_first(tmp_path: Path) -> None:
    found = find_bottleneck(read_run(make_run(tmp_path / "run", threads=4, cores=2)))
    assert "--threads-per-rank" in found.advice[0]
    assert "compete" not in find_bottleneck(read_run(make_run(tmp_path / "fine", threads=1, cores=2))).summary
    more_ranks = find_bottleneck(read_run(make_run(tmp_path / "more", ranks=3, threads=1, cores=2))).summary
    rendered([found.summary, more_ranks])  # that there are more ranks is not what a rank can change, so not the first


def test_a_run_that_nothing_held_up_says_so(tmp_path: Path) -> None:
    found = find_bottleneck(
        read_run(make_run(tmp_path / "run", slow={0: {"data": 0.0}, 1: {"data": 0.0}}, exchange=0.0))
    )
    assert found.cause_fractions[COMPUTING] == pytest.approx(1) and not found.advice
    rendered(found.summary)


def test_who_waited_for_whom(tmp_path: Path) -> None:
    parts = find_bottleneck(read_run(make_run(tmp_path / "run", ranks=3, slow={1: {"data": 0.03}}))).parts
    assert parts
    waits = parts.wait_seconds
    assert {rank: [*of] for rank, of in waits.items()} == {0: [1], 2: [1]}
    assert waits[0][1] == pytest.approx(waits[2][1])


def test_too_little_is_said_to_be_too_little(tmp_path: Path) -> None:
    found = [find_bottleneck(read_run(make_run(tmp_path / "short", steps=4)))]
    make_run(tmp_path / "run")
    for rank in (1, 0):
        (tmp_path / "run" / f"events-{rank}.jsonl").unlink()
        found.append(find_bottleneck(read_run(tmp_path / "run")))
    assert not any(one.cause_fractions for one in found)
    rendered(one.summary for one in found)
