"""Batches that travel on a stream of their own: waited for before use, and their memory not taken back too early."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
import torch
from tests.doubles.streams import Event, Recorder, Stream
from torch import Tensor

from paceline.data.loader import Prefetch, prefetch_to_device

CUDA = torch.device("cuda")
BATCHES = 5


def batches() -> Iterator[dict[str, Tensor]]:
    for number in range(BATCHES):
        yield {"inputs": torch.full((3,), float(number)), "targets": torch.full((2, 2), number)}


def consumed(recorder: Recorder, ahead: Prefetch | None) -> list[float]:
    """Each batch is read, and let go, before the next one is asked for."""
    found: list[float] = []
    on_device: Generator[dict[str, Tensor]] = prefetch_to_device(batches(), CUDA, ahead)
    for batch in on_device:
        total = batch["inputs"].sum() + batch["targets"].sum()
        found.append(float(total))
        if ahead is not None:
            ahead.begin()
        del batch
    return found


@pytest.mark.parametrize("ahead", [None, Prefetch()], ids=["by itself", "when a step says so"])
def test_every_batch_has_arrived_before_it_is_read_and_is_kept_until_then(ahead: Prefetch | None) -> None:
    with Recorder() as recorder:
        assert consumed(recorder, ahead) == [7.0 * number for number in range(BATCHES)]
    assert recorder.copies == 2 * BATCHES
    assert recorder.races == []


def test_without_the_wait_a_batch_is_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    with Recorder() as recorder:
        consumed(recorder, None)
    assert {*recorder.races} == {"stream 0 reads what stream 1 may still copy"}


def test_without_record_stream_memory_is_taken_back_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.loader.tensors", lambda batch: ())
    with Recorder() as recorder:
        consumed(recorder, None)
    assert {*recorder.races} == {"stream 1 takes memory back that stream 0 may read"}


def test_without_page_locked_memory_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    with Recorder() as recorder:
        consumed(recorder, None)
    assert "the host waits for a copy" in recorder.races


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
