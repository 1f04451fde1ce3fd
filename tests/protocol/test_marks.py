"""Marks in a box: written by a worker at any pace, found again by agents that look seldom, and never trusted."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protocol import marks
from paceline.protocol.evidence import Op, ScriptFault
from paceline.protocol.marks import (
    FINDINGS,
    LAST_CALLS,
    MARK,
    CallHistory,
    ReplicaFingerprint,
    append_call,
    parse_call_tables,
    parse_fingerprints,
    put_replica_fingerprint,
    read_call_table_bytes,
    read_fingerprint_bytes,
    write_script_finding,
)
from paceline.protocol.status_page import MARKS_AT, PAGE_BYTES, StatusPage, make_status_page


def mark(number: int, table: int = 0) -> ReplicaFingerprint:
    return ReplicaFingerprint(number, 7, table | 3 << 16, (0, 1, 2, 3), (number, 2, 3, 4), (0.5,) * 4, (0.25,) * 4)


@pytest.fixture
def page() -> Iterator[StatusPage]:
    with closing(StatusPage(make_status_page(0))) as made:
        yield made
    os.close(made.descriptor)


def test_the_regions_do_not_overlap() -> None:
    assert MARKS_AT + marks.TABLES * marks.TABLE_BYTES <= marks.ORDERS_AT
    assert marks.ORDERS_AT + marks.GROUPS * marks.ORDER_BYTES <= marks.NAMES_AT
    assert marks.NAMES_AT + marks.NAMES_MAX <= marks.FINDINGS_AT
    assert marks.FINDINGS_AT + marks.FINDINGS * marks.FINDING_MAX <= PAGE_BYTES


@settings(max_examples=30, deadline=None)
@given(first=st.integers(1, 3000), ahead=st.integers(0, 1000))
def test_agents_that_look_at_different_moments_find_numbers_in_common(first: int, ahead: int) -> None:
    found: list[set[int]] = []
    for last in (first, first + ahead):
        with closing(StatusPage(make_status_page(0))) as page:
            for number in range(max(1, last - 5000), last + 1):
                put_replica_fingerprint(page, mark(number))
            found.append({one.optimizer_step for one in parse_fingerprints(read_fingerprint_bytes(page.descriptor))})
        os.close(page.descriptor)
        assert all(one <= last for one in found[-1])
    assert found[0] & found[1] or ahead > first


def test_a_short_run_that_is_looked_at_once_leaves_numbers_from_before_its_middle(page: StatusPage) -> None:
    for number in range(1, 77):
        put_replica_fingerprint(page, mark(number))
    found = {one.optimizer_step for one in parse_fingerprints(read_fingerprint_bytes(page.descriptor))}
    assert {8, 16, 20, 24, 28, 32, 36, 76} <= found  # sufficient to find the first difference


def test_what_was_written_is_read_again_and_what_is_torn_is_left_out(page: StatusPage) -> None:
    put_replica_fingerprint(page, mark(12, table=3))
    (one,) = parse_fingerprints(read_fingerprint_bytes(page.descriptor))
    assert one == mark(12, table=3) and (one.table_index, one.num_ranks) == (3, 3)
    torn = bytearray(MARK.pack(9, 7, 0, *[0] * 8, *[0.0] * 8, 9))
    torn[-8] = 8
    assert parse_fingerprints(bytes(torn)) == [] and parse_fingerprints(b"short") == []


def test_the_last_calls_of_each_group_are_read_again_in_their_order(page: StatusPage) -> None:
    for table, count in ((0, 5), (2, LAST_CALLS + 10)):
        for number in range(count):
            append_call(page, table, CallHistory(70 + table, 3, number, ()), number)
    short, long = parse_call_tables(read_call_table_bytes(page.descriptor))
    assert short == CallHistory(70, 3, 5, (0, 1, 2, 3, 4)) and short.first_call_number == 0
    assert (long.group, long.num_ranks, long.num_calls, long.calls[-1]) == (72, 3, LAST_CALLS + 10, LAST_CALLS + 9)
    assert long.calls == (*range(long.first_call_number, long.num_calls),) and long.first_call_number > 10
    assert parse_call_tables(b"short") == []


def test_names_calls_and_the_last_findings_are_read_again(page: StatusPage) -> None:
    names = marks.NamesWriter(page)
    names.set_tensor_names(7, ["fc.weight"])
    names.set_call(5, b"0\x1fall_reduce\x1f[8]\x1ffloat32\x1f\x1ftrain.py:3 in main")
    assert marks.read_tensor_and_call_names(page.descriptor).tensors == {"7": ["fc.weight"]}
    called = Op("0", 0, "all_reduce", shape="[8]", dtype="float32", site="train.py:3 in main")
    assert marks.read_calls(page.descriptor) == {"5": called}
    for step in range(FINDINGS + 2):
        write_script_finding(page, ScriptFault("swallowed", step, "words"))
    assert {one.step for one in marks.read_findings(page.descriptor)} == {*range(2, FINDINGS + 2)}
    page.store(marks.NAMES_AT, b"{broken\0")
    page.store(marks.FINDINGS_AT, b"\xff\xff\0")
    assert marks.read_calls(page.descriptor) == {} and len(marks.read_findings(page.descriptor)) == FINDINGS - 1
    names.set_tensor_names(8, ["a name of a tensor"] * 10_000)
    assert marks.read_tensor_and_call_names(page.descriptor).tensors == {}


def test_calls_that_were_written_over_while_they_were_read_are_left_out(
    page: StatusPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(LAST_CALLS):
        append_call(page, 0, CallHistory(70, 3, number, ()), number)
        append_call(page, 1, CallHistory(71, 3, number, ()), number)
    pread, more = os.pread, [(0, marks.NUM_UNSTABLE_CALLS), (1, marks.NUM_UNSTABLE_CALLS - 1)]

    def slow_pread(*place: int) -> bytes:
        data = pread(*place)
        for table, count in more:
            for number in range(LAST_CALLS, LAST_CALLS + count):
                append_call(page, table, CallHistory(70 + table, 3, number, ()), number)
        more.clear()
        return data

    monkeypatch.setattr(os, "pread", slow_pread)
    assert [one.group for one in parse_call_tables(read_call_table_bytes(page.descriptor))] == [71]
    assert [one.num_calls for one in parse_call_tables(read_call_table_bytes(page.descriptor))] == [
        LAST_CALLS + marks.NUM_UNSTABLE_CALLS,
        LAST_CALLS + marks.NUM_UNSTABLE_CALLS - 1,
    ]
