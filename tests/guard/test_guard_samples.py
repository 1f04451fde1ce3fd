"""How long has a worker not moved, by the agent's own clock? Real boxes, made-up clocks."""

import os
from collections.abc import Iterator

import pytest

from paceline.guard.collect import IdleTimer
from paceline.guard.detectors import sample_interval_seconds
from paceline.protocol.evidence import Phase, RankSample
from paceline.protocol.job import HangTimeout
from paceline.protocol.status_page import StatusPage, make_status_page


@pytest.fixture
def page() -> Iterator[int]:
    descriptor = make_status_page(0)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def worker(page: int) -> Iterator[StatusPage]:
    mine = StatusPage(page)
    yield mine
    mine.close()


def read(stillness: IdleTimer, page: int, now_seconds: float, rank: int = 0) -> RankSample:
    return stillness.read_status_page(RankSample(rank, "here", 1), page, now_seconds)


def test_an_age_grows_until_anything_moves(page: int, worker: StatusPage) -> None:
    stillness = IdleTimer()
    ages = [read(stillness, page, now).still_seconds for now in (100.0, 101.0, 102.5)]
    assert ages == [0.0, 1.0, 2.5]
    for move in (worker.tick, lambda: worker.set_step(7), lambda: worker.enter(Phase.DATA)):
        move()
        assert read(stillness, page, 103.0).still_seconds == 0.0
    assert read(stillness, page, 104.0).still_seconds == 1.0


def test_a_heartbeat_alone_is_no_progress(page: int, worker: StatusPage) -> None:
    stillness = IdleTimer()
    read(stillness, page, 100.0)
    worker.put("beat_ns", 12345)
    assert read(stillness, page, 103.0).still_seconds == 3.0


def test_a_suspended_agent_counts_anew(page: int) -> None:
    """It was stopped with its workers: what it did not see is no standstill."""
    stillness = IdleTimer()
    read(stillness, page, 100.0)
    assert read(stillness, page, 101.0).still_seconds == 1.0
    assert read(stillness, page, 500.0).still_seconds == 0.0
    assert read(stillness, page, 501.0).still_seconds == 1.0


def test_a_sample_says_what_the_worker_says(page: int, worker: StatusPage) -> None:
    worker.set_step(12)
    worker.enter(Phase.EVALUATE)
    one = read(IdleTimer(), page, 100.0, rank=5)
    assert (one.rank, one.step, one.phase, one.met) == (5, 12, Phase.EVALUATE, False)
    assert one.stepped is False
    worker.put("enqueued", 1)
    assert read(IdleTimer(), page, 100.0).met


def test_a_short_window_is_looked_at_more_often() -> None:
    assert sample_interval_seconds(HangTimeout.parse("5")) == 0.25
    assert sample_interval_seconds(HangTimeout.parse("30")) == sample_interval_seconds(HangTimeout.parse("auto")) == 1.0
