import signal

import pytest
from tests.rendered import rendered

from paceline.guard.judge import diagnose
from paceline.guard.report import MAX_TRACEBACK_LINES, format_failure
from paceline.protocol.evidence import Evidence, Failure
from paceline.runs.console import ControlSequenceFilter, remove_control_characters


def seen(rank: int, code: int | None, *, words: str = "", traceback: str = "", log: str = "", victim: bool = False):
    record = Failure(rank, "node7", 40 + rank, 1, "ValueError", words, traceback, victim, 1.0) if words else None
    said = f"ValueError: {words}" if words else log
    return Evidence(rank, "node7", 40 + rank, code=code, ended_seconds=1.0, failure=record, error_text=said)


def told(*ranks: Evidence, oom_kills: int = 0) -> str:
    """What is told of ranks that have failed; the judge says which of them is the first."""
    return format_failure(diagnose(ranks), ranks, oom_kills=oom_kills, attempt_dir="/runs/a/attempt-0")


def test_traceback() -> None:
    rendered(told(seen(1, 1, words="bad", traceback="Traceback ...\nValueError: bad\n"), seen(0, None)))


def test_the_same_words_of_some_ranks_or_all_are_told_once() -> None:
    some, every = ([seen(rank, 1, words="bad") for rank in ranks] for ranks in ((1, 2), range(4)))
    rendered([told(seen(0, None), *some), told(*every)])


def test_sigkill_with_and_without_a_counted_kill() -> None:
    killed = seen(1, -signal.SIGKILL)
    rendered([told(killed, oom_kills=1), told(killed)])
    assert "OOM" not in told(seen(1, -signal.SIGSEGV), oom_kills=1)


def test_a_lost_node_is_told_with_all_its_ranks() -> None:
    lost = [Evidence(rank, "n1", 40 + rank, lost_reason="node 1 (n1) is lost: cut off") for rank in (2, 3)]
    rendered(told(seen(0, None), *lost, seen(1, 1, words="Connection closed by peer", victim=True)))


def test_last_lines_of_the_log() -> None:
    text = told(seen(1, 3, log="".join(f"line {n}\n" for n in range(40))))
    assert [line.strip() for line in text.splitlines()[2:]] == [f"line {n}" for n in range(25, 40)]


def test_victim_and_early_end() -> None:
    rendered(told(seen(0, 1, words="Connection closed by peer", victim=True), seen(1, 0), seen(2, None)))


def test_bounded_and_harmless() -> None:
    lines = told(seen(0, 1, words="x", traceback="\n".join(["frame"] * 5000))).splitlines()
    assert len(lines) <= MAX_TRACEBACK_LINES + 5
    assert remove_control_characters("a\x1b[31mred\x1b[0m\x07\x9b2J\x1b]0;title\x07\tb\r\nc") == "ared2J]0;title\tb\nc"


# ---- what is shown while it runs --------------------------------------------------------------------------------

SHOWN = [
    (b"plain\ttext\n", b"plain\ttext\n"),
    (b"\x1b[1;31mred\x1b[0m 10%\r20%\r\n", b"\x1b[1;31mred\x1b[0m 10%\r20%\r\n"),
    (b"\x1b[2Jgone\x1b[10;10Hmoved\x1b[?25lhidden", b"gonemovedhidden"),
    (b"\x1b]0;title\x07a\x1b]52;c;AAAA\x1b\\b", b"ab"),
    (b"\x1bcreset\x1b7\x1bMup\x07\x08\x0e\x7f", b"resetup"),
    ("é \u2192 \u4e2d\u6587".encode(), "é \u2192 \u4e2d\u6587".encode()),
    (b"\xc2\x9b2Jc1 \xc3\xa9", b"2Jc1 \xc3\xa9"),
    (b"cut \x1b[3", b"cut "),
    (b"\xc2\x00\x9b2J \xc2\x07\x9d0;t \xc2\x1b[2J\x9b5n", b"2J 0;t 5n"),  # what is taken out brings together
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("said", "shown"), SHOWN, ids=str)
def test_live_output_keeps_text_and_colours_however_it_is_cut(said: bytes, shown: bytes, size: int) -> None:
    live = ControlSequenceFilter()
    passed = b"".join(live.filter_bytes(said[start : start + size]) for start in range(0, len(said), size))
    assert passed == shown


def test_a_sequence_without_an_end_holds_nothing_back_for_ever() -> None:
    live = ControlSequenceFilter()
    assert live.filter_bytes(b"\x1b]" + b"x" * 3000) == b""
    assert b"still here" in live.filter_bytes(b"x" * 3000 + b"still here\n")
