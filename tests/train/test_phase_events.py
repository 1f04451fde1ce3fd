"""The times of phases where the host only launches: on a stand-in for a device, a queue that runs behind the host."""

import os
from collections.abc import Callable
from contextlib import closing

from paceline.guard.detectors import find_slow_rank
from paceline.protocol.evidence import Phase
from paceline.protocol.status_page import StatusPage, make_status_page, read_counters
from paceline.train.step_record import PhaseClock, PhaseEvents

STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.SYNC, Phase.OPTIMIZER)


class Device:
    """One stream: what is launched runs as soon as the device is free, after the host has launched it."""

    def __init__(self) -> None:
        self.host = self.free = 0.0  # seconds

    def launch(self, seconds: float) -> None:
        self.host += 1e-5
        self.free = max(self.free, self.host) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.free)

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.at = device, float("inf")

    def record(self) -> None:
        self.at = max(self._device.free, self._device.host)

    def query(self) -> bool:
        return self.at <= self._device.host

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.query() and end_event.query(), "torch raises"
        return (end_event.at - self.at) * 1e3


def steps(device: Device, enter: Callable[[Phase], object], take: Callable[[], object], backward: float) -> None:
    for _ in range(20):
        enter(Phase.DATA)
        device.host += 0.002  # in the host, while the device may still be at the step before
        enter(Phase.FORWARD)
        device.launch(0.010)
        enter(Phase.BACKWARD)
        device.launch(backward)
        enter(Phase.SYNC)
        device.wait()  # the totals are read
        enter(Phase.OPTIMIZER)
        device.launch(0.005)
        take()


def test_phases_are_as_long_as_the_device_is_in_them() -> None:
    device = Device()
    events = PhaseEvents(device.event, lambda: False)
    taken: list[dict[str, float]] = []
    descriptor = make_status_page(0)
    with closing(StatusPage(descriptor)) as page:
        page.on_device = events
        clock = PhaseClock(page, events)
        steps(device, page.enter, lambda: taken.append(clock.take()), backward=0.020)
    os.close(descriptor)
    for spent in taken[2:]:
        assert {name: round(seconds, 3) for name, seconds in spent.items() if round(seconds, 3)} == {
            "forward": 0.010,
            "backward": 0.020,
            "optimizer": 0.005,
        }  # fmt: skip - no data: it came while the device was at work; by the host's clock 30 ms are sync


def test_a_slow_gpu_is_named_by_what_the_boxes_show() -> None:
    spent = {}
    for rank, backward in enumerate((0.050, 0.120, 0.050)):
        device = Device()
        descriptor = make_status_page(rank)
        with closing(StatusPage(descriptor)) as page:
            page.on_device = PhaseEvents(device.event, lambda: False)
            steps(device, page.enter, lambda: None, backward)
            spent[rank] = tuple(seconds / 20 for seconds in read_counters(descriptor).phase_seconds)
        os.close(descriptor)
    found = find_slow_rank(spent, {1: "n2"})
    assert found is not None
    assert (found.rank, found.host, found.phase) == (1, "n2", Phase.BACKWARD)


def test_a_phase_counts_as_begun_before_its_time_is_known() -> None:
    """Whether a rank's optimizer has stepped decides if its failure may have been applied."""
    device, descriptor = Device(), make_status_page(0)
    with closing(StatusPage(descriptor)) as page:
        page.on_device = PhaseEvents(device.event, lambda: False)
        for phase in STEP:
            page.enter(phase)
            device.free = device.host + 100  # nothing passes
        page.enter(Phase.DATA)
        assert read_counters(descriptor).phase_seconds[Phase.OPTIMIZER] > 0
    os.close(descriptor)


def test_nothing_is_marked_while_a_graph_is_recorded() -> None:
    device, recording = Device(), [True]
    events = PhaseEvents(device.event, lambda: recording[0])
    assert [*events(Phase.FORWARD), *events(Phase.BACKWARD)] == []
    recording[0] = False
    assert events(Phase.SYNC) == []
    device.launch(1.0)
    device.wait()
    events(Phase.OPTIMIZER)
    assert list(events.take()) == ["sync"]
