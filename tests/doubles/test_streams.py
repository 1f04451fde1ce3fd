"""Batches on a separate stream: steps wait for them, and their memory is not freed too early."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
import torch
from tests.doubles.streams import Event, Recorder, Stream
from torch import Tensor

from paceline.data.loader import PrefetchTrigger, prefetch_to_device

CUDA = torch.device("cuda")
BATCHES = 5


def batches() -> Iterator[dict[str, Tensor]]:
    for number in range(BATCHES):
        yield {"inputs": torch.full((3,), float(number)), "targets": torch.full((2, 2), number)}


def consumed(recorder: Recorder, ahead: PrefetchTrigger | None) -> list[float]:
    """Each batch is read and freed before the next one is requested."""
    found: list[float] = []
    on_device: Generator[dict[str, Tensor]] = prefetch_to_device(batches(), CUDA, ahead)
    for batch in on_device:
        total = batch["inputs"].sum() + batch["targets"].sum()
        found.append(float(total))
        if ahead is not None:
            ahead.start_batches()
        del batch
    return found


@pytest.mark.parametrize("ahead", [None, PrefetchTrigger()], ids=["by itself", "when a step says so"])
def test_every_batch_has_arrived_before_it_is_read_and_is_kept_until_then(ahead: PrefetchTrigger | None) -> None:
    with Recorder() as recorder:
        assert consumed(recorder, ahead) == [7.0 * number for number in range(BATCHES)]
    assert recorder.copies == 2 * BATCHES
    assert recorder.races == []


@pytest.mark.parametrize("ahead", [None, PrefetchTrigger()], ids=["by itself", "when a step says so"])
def test_events_are_reused(ahead: PrefetchTrigger | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Event]()
    with Recorder() as recorder:
        monkeypatch.setattr(torch.cuda, "Event", lambda: made.append(Event()) or made[-1])
        consumed(recorder, ahead)
    assert len(made) <= 2 and recorder.races == []


def test_without_the_wait_a_batch_is_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    with Recorder() as recorder:
        consumed(recorder, None)
    assert {*recorder.races} == {("read too early", 0, 1)}


def test_without_record_stream_memory_is_taken_back_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.loader.tensors", lambda batch: ())
    with Recorder() as recorder:
        consumed(recorder, None)
    assert {*recorder.races} == {("freed too early", 1, 0)}


def test_without_page_locked_memory_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    with Recorder() as recorder:
        consumed(recorder, None)
    assert ("host waits",) in recorder.races


def test_an_event_orders_what_came_before_it_only() -> None:
    with Recorder():
        one, other, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
        assert isinstance(one, Stream) and isinstance(other, Stream) and isinstance(event, Event)
        first = one.work()
        event.record(one)
        later = one.work()
        other.wait_event(event)
        assert other.comes_after(one.number, first)
        assert not other.comes_after(one.number, later)
