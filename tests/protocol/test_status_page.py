"""The box alone: what a worker writes, its agent reads, and nobody writes into a file that is no box."""

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from operator import ge
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import warm

from paceline.protocol import marks, status_page
from paceline.protocol.evidence import Op, Phase
from paceline.protocol.status_page import PAGE_BYTES, RECORDS, StatusPage, make_status_page

# A worker that writes all the time. Each number is larger than the one before.
WRITER = """
import itertools, sys
from paceline.protocol.status_page import StatusPage
box = StatusPage(int(sys.argv[1]))
for n in itertools.count(1):
    box.set_step(n)
    box.put("beat_ns", n)
    box._spend(0, 1)
    box.set_loader(0, epoch=n, item=n, busy=True)
"""


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = make_status_page(3)
    yield made
    os.close(made)


@pytest.fixture
def page(descriptor: int) -> Iterator[StatusPage]:
    with closing(StatusPage(descriptor)) as made:
        yield made


def test_the_agent_reads_what_the_worker_has_written_last(descriptor: int) -> None:
    assert status_page.read_counters(descriptor).step == 0
    page = StatusPage.from_descriptor(descriptor)
    assert page is not None
    for step in (1, 2**40 + 3, 7):
        page.set_step(step)
        assert status_page.read_counters(descriptor).step == step
    page.close()
    assert status_page.read_counters(descriptor).step == 7
    assert os.fstat(descriptor).st_size == PAGE_BYTES


def test_a_second_look_finds_the_same_box(descriptor: int) -> None:
    one, other = StatusPage.from_descriptor(descriptor), StatusPage.from_descriptor(descriptor)
    assert one is not None and other is not None
    one.set_step(5)
    one.close()
    one.close()
    other.set_step(6)
    other.close()
    assert status_page.read_counters(descriptor).step == 6


def test_a_number_of_no_open_file_or_of_another_file_is_no_status_page(tmp_path: Path) -> None:
    """A program that a worker starts may know the number, but not the descriptor."""
    assert StatusPage.from_descriptor(-1) is None and StatusPage.from_descriptor(99999) is None
    path = tmp_path / "precious"
    path.write_bytes(b"x" * PAGE_BYTES)
    with path.open("r+b") as file:
        assert StatusPage.from_descriptor(file.fileno()) is None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=400), at=st.integers(0, status_page.ANSWER_AT + 64), length=st.integers(0, 2 * PAGE_BYTES)
)
def test_whatever_stands_in_a_box_its_readers_do_not_fail(descriptor: int, data: bytes, at: int, length: int) -> None:
    os.ftruncate(descriptor, length)  # a worker may do that, too
    os.pwrite(descriptor, data, at)
    seen = status_page.read_counters(descriptor)
    assert isinstance(seen.phase, Phase) and len(seen.phase_seconds) == len(Phase)
    assert len(status_page.read_recent_ops(descriptor)) <= RECORDS
    assert len(status_page.read_answer(descriptor)) <= status_page.ANSWER_MAX
    assert len(status_page.read_loader_workers(descriptor)) <= status_page.SLOTS
    assert len(status_page.read_faulthandler_text(descriptor)) <= status_page.NATIVE_MAX


def test_the_ring_keeps_the_last_collectives_in_order(descriptor: int, page: StatusPage) -> None:
    made = [Op("0", n, "all_reduce", f"bucket {n}", "[3]", "float32", "a.py:1 in f", done=True) for n in range(1, 400)]
    for op in made:
        page.end_op(page.begin_op(op))
    assert status_page.read_recent_ops(descriptor) == made[-RECORDS:]
    first = page.begin_op(Op("1", 1, "recv", peer=3))
    assert status_page.read_recent_ops(descriptor)[-1] == Op("1", 1, "recv", peer=3)
    for op in made[:RECORDS]:
        page.begin_op(op)
    page.end_op(first)  # its record is another's by now
    assert not any(op.done for op in status_page.read_recent_ops(descriptor))


def test_a_record_half_written_is_not_read(descriptor: int, page: StatusPage) -> None:
    for seq in (1, 2, 3):
        page.begin_op(Op("0", seq, "barrier"))
    os.pwrite(descriptor, (RECORDS + 2).to_bytes(8, "little"), status_page.RING_AT + status_page.RECORD.size)
    assert [op.seq for op in status_page.read_recent_ops(descriptor)] == [1, 3]


def test_long_words_cost_their_own_ends_only(descriptor: int, page: StatusPage) -> None:
    page.begin_op(Op("g" * 99, 7, "reduce_scatter", "n\x1f" * 99, "[1, 2] " * 99, "float32", "\udcffé" * 99))
    (op,) = status_page.read_recent_ops(descriptor)
    assert (op.group, op.seq, op.kind, op.dtype) == ("g" * 24, 7, "reduce_scatter", "float32")
    assert op.name.startswith("n n ") and op.shape.startswith("[1, 2] ") and op.site.startswith("?")


def test_a_question_an_answer_a_word(descriptor: int, page: StatusPage) -> None:
    status_page.set_counter(descriptor, "asked", 3)
    assert page.get("asked") == 3 and status_page.read_counters(descriptor).answered == 0
    page.answer(3, b"{}")
    assert status_page.read_counters(descriptor).answered == 3 and status_page.read_answer(descriptor) == b"{}"
    page.answer(4, b"x" * (status_page.ANSWER_MAX + 1))  # half a JSON text would be none
    assert status_page.read_counters(descriptor).answered == 4 and status_page.read_answer(descriptor) == b""
    status_page.release_from_collective(descriptor, b"why")
    assert page.get("released") == 1 and page.agent_message() == b"why"


def test_time_goes_to_the_phase_that_was(descriptor: int, page: StatusPage) -> None:
    assert page.enter(Phase.DATA) == Phase.USER
    time.sleep(0.05)
    assert page.enter(Phase.FORWARD) == Phase.DATA
    seen = status_page.read_counters(descriptor)
    assert seen.phase == Phase.FORWARD and 0.05 <= seen.phase_seconds[Phase.DATA] < 30
    page.tick()
    assert status_page.read_counters(descriptor).progress_values != seen.progress_values


def test_only_a_process_that_catches_the_signal_takes_it() -> None:
    assert not status_page.handles_signal(os.getpid()) and not status_page.handles_signal(2**22 + 1)
    signal.signal(status_page.STACK_SIGNAL, lambda *_: None)
    try:
        assert status_page.handles_signal(os.getpid())
    finally:
        signal.signal(status_page.STACK_SIGNAL, signal.SIG_DFL)


def test_a_muted_box_keeps_what_it_may_say(descriptor: int) -> None:
    steps, loads = StatusPage(descriptor), StatusPage(descriptor)
    steps.share_only_steps()
    loads.share_only_loader_items()
    for page in (steps, loads):
        page.set_step(1 if page is loads else 5)
        page.enter(Phase.CLOSE)
        page.begin_op(Op("0", 1, "barrier"))
    steps.set_loader(0, epoch=0, item=1, busy=True)
    loads.set_loader(1, epoch=0, item=2, busy=True)
    seen = status_page.read_counters(descriptor)
    assert (seen.step, seen.phase, seen.has_called_collective, seen.progress_values) == (
        5,
        Phase.USER,
        False,
        (5, 0, 0, 0, 0),
    )
    assert [loader.item for loader in status_page.read_loader_workers(descriptor)] == [1, 2]


@contextmanager
def writing(descriptor: int) -> Generator[None]:
    """Until the end of the block, another process writes into the box. It has begun to write."""
    with warm.Popen(["-c", WRITER, str(descriptor)], torch=False, pass_fds=[descriptor]) as writer:
        try:
            until = time.monotonic() + 30
            while not any(status_page.read_counters(descriptor).progress_values):
                assert writer.poll() is None and time.monotonic() < until
                time.sleep(0.01)
            yield
        finally:
            writer.kill()


def test_a_reader_never_sees_a_smaller_number_than_before(descriptor: int) -> None:
    names = [status_page.COUNTERS_AT[name] for name in ("step", "beat_ns", "changes")]
    words = [at // 8 for at in (*names, status_page.PHASES_AT, status_page.SLOTS_AT, status_page.SLOTS_AT + 16)]
    last = [0] * len(words)
    with writing(descriptor):
        until = time.monotonic() + 1
        while time.monotonic() < until:
            for _ in range(100):
                data = memoryview(os.pread(descriptor, status_page.RING_AT, 0)).cast("Q")
                now = [data[word] for word in words]
                assert all(map(ge, now, last)), (last, now)
                last = now
    assert last[0] > 100


def reads(descriptor: int, at: int, size: int, write: Callable[[], object]) -> Iterator[bytes]:
    """What a reader may get that copies upwards while `write` runs: up to any word as it was before any line, and the
    rest as it was later.
    """
    seen: list[bytes] = []

    def look(*_: object) -> Any:
        seen.append(os.pread(descriptor, size, at))
        return look

    tracing = sys.gettrace()
    sys.settrace(look)
    try:
        write()
    finally:
        sys.settrace(tracing)
    look()
    for number, early in enumerate(seen):
        for late in seen[number:]:
            yield from (early[:split] + late[split:] for split in range(0, size + 1, 8))


def test_a_reader_never_takes_a_part_of_a_record_for_a_record(descriptor: int, page: StatusPage) -> None:
    for seq in range(1, RECORDS + 1):
        page.begin_op(Op("0", seq, "send", peer=seq))
    new = Op("1", 1 + RECORDS, "recv", peer=1 + RECORDS)
    mixed = reads(descriptor, status_page.RING_AT, status_page.RECORD.size, lambda: page.begin_op(new))
    found = [op for data in mixed for _, op in status_page.decode_recent_ops(data)]
    assert all(op in (Op("0", 1, "send", peer=1), new) for op in found) and new in found
    old, mark = (marks.ReplicaFingerprint(n, n, 0, (n,) * 4, (n,) * 4, (float(n),) * 4) for n in (1, 17))
    marks.put_replica_fingerprint(page, old)
    mixed = reads(descriptor, status_page.MARKS_AT, marks.MARK.size, lambda: marks.put_replica_fingerprint(page, mark))
    kept = [one for data in mixed for one in marks.parse_fingerprints(data)]
    assert {*kept} == {old, mark}


def test_calls_are_found_while_another_thread_writes_a_record(descriptor: int, page: StatusPage) -> None:
    page.end_op(page.begin_op(Op("0", 1, "barrier")))
    page.put("ops", 2)  # the record of the second one is not there yet
    assert [op.seq for _, _, op in page.calls_since(1)] == [1]
