"""Output of ranks and hosts: what a progress bar leaves in a log, and how lines of several hosts are shown."""

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.launch import output
from paceline.launch.output import (
    LineOrBar,
    LineSplitter,
    MultiNodeRelay,
    TerminalWriter,
    sanitize_line,
    start_output_relay,
)
from paceline.runs.console import join_ranges

SCRIPT = """
import os, time
from tqdm import tqdm
for epoch in range(2):
    for _ in tqdm(range(30), desc=f"epoch {epoch}", mininterval=0):
        time.sleep(0.005)
print()
print("done")
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def test_of_a_bar_one_state_in_ten_seconds_is_kept_and_its_end(clock: list[float]) -> None:
    lines, found = LineSplitter(), list[LineOrBar]()
    for percent in range(100):
        clock[0] += 1.0
        found += lines.feed(f"\r {percent}%|".encode())
    found += lines.feed(b"\r 100%|done\n")
    assert [piece.text for piece in found[-2:]] == [b" 90%|\n", b" 100%|done\n"]
    assert len(found) == 10 and lines.end() == []


def test_a_bar_that_stands_still_is_told_and_not_again_at_its_end(clock: list[float]) -> None:
    lines = LineSplitter()
    assert lines.feed(b"\r 40%|") == [] and lines.wait_seconds == 10
    clock[0] += 11
    assert lines.take_due_bar() == [LineOrBar(b" 40%|\n", is_bar=True)]
    assert lines.wait_seconds is None
    clock[0] += 11
    assert lines.take_due_bar() == [] and lines.end() == []


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (b"a\r\nb\n", b"a\r\nb\n"),
        (b"one\rtwo\r\n", b"two\r\n"),
        (b"one\rtwo", b"two\n"),
        (b"one\r        \r", b""),  # a bar that wipes itself out
        (b"\r 1%\n\r inner 1%\x1b[A\n\r inner 2%\x1b[A\n\r inner 3%\x1b[A\r 2%\n", b" 1%\n 2%\n"),  # one below another
        (b"no end", b"no end"),
        (b"\n\n", b"\n\n"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_log_keeps_lines_and_what_a_line_shows_in_the_end(data: bytes, kept: bytes, size: int) -> None:
    lines = LineSplitter()
    found = [piece for at in range(0, len(data), size) for piece in lines.feed(data[at : at + size])]
    assert b"".join(piece.text for piece in [*found, *lines.end()]).replace(b"\r", b"") == kept.replace(b"\r", b"")


def relayed(data: bytes, screen: int, log: Path) -> None:
    reader, writer = os.pipe()
    with log.open("ab") as file:
        thread = start_output_relay(os.fdopen(reader, "rb"), os.dup(file.fileno()), screen=screen, prefix=b"[rank 1] ")
    os.write(writer, data)
    os.close(writer)
    thread.join(10)
    assert not thread.is_alive()


def test_a_terminal_sees_a_bar_drawn_over_and_wiped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_BAR", output._Bar())
    terminal, screen = pty.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as shown:
        with os.fdopen(screen, "wb"):
            relayed(b"hello\n\n\r 1%|\xe2\x96\x88\r 2%|", screen, tmp_path / "log")
        seen = b""
        with suppress(OSError):  # EIO: all is read. One read may give only the first part
            while piece := shown.read(4096):
                seen += piece
    assert seen.startswith(b"[rank 1] hello\r\n[rank 1]  2%|\x1b[K\r") and seen.endswith(b"\x1b[K[rank 1]  2%|\r\n")
    assert (tmp_path / "log").read_bytes() == b"hello\n\n 2%|\n"


@pytest.mark.ranks
@pytest.mark.needs("tqdm")
def test_real_bars_of_two_ranks_are_four_lines(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = str(tmp_path / "run")
    words = (sys.executable, "-m", "paceline", "launch", "--nproc", "2", "--run-dir", run, "--", "script.py")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    ends = sorted(re.findall(r"^\[rank (\d)\] epoch (\d): 100%", done.stderr, re.MULTILINE))
    assert ends == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")] and done.stderr.count("it/s") == 4
    assert sorted(done.stdout.splitlines()) == ["[rank 0] done", "[rank 1] done"]  # the empty line has gone
    logs = (sys.executable, "-m", "paceline", "logs", str(tmp_path / "run"))
    shown = subprocess.run(logs, capture_output=True, text=True, timeout=150)
    assert shown.stderr == "" and "[0,1] done" in shown.stdout and shown.stdout.count("100%") == 4


# ---- several hosts ----

NAMES = ("n1", "n2", "n3", "n4", "n5")


class Shown:
    """A pipe in the place of both stdout and stderr."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.screen = TerminalWriter()
        put = self.screen.put
        self.screen.put = lambda descriptor, data: put(self.writer, data)  # type: ignore[method-assign]
        self.relay = MultiNodeRelay(NAMES, self.screen)

    def text(self) -> str:
        """All that was shown, once no more comes."""
        self.relay.flush_all()
        self.screen.close()
        assert self.screen.wait_closed(10)
        os.close(self.writer)
        with os.fdopen(self.reader, "rb") as file:
            return file.read().decode()


@pytest.fixture
def shown() -> Generator[Shown]:
    made = Shown()
    yield made
    made.screen.close()


def test_the_same_line_of_several_hosts_is_shown_once(shown: Shown) -> None:
    for node in (3, 1, 2):
        shown.relay.put(node, 2, b"error\n")
    shown.relay.put(4, 2, b"fine\n")
    assert shown.text() == "[n2-n4] error\n[n5] fine\n"


def test_a_line_that_a_host_says_twice_is_shown_twice_and_in_its_order(shown: Shown) -> None:
    shown.relay.put(1, 1, b"a\nb\n")
    shown.relay.put(2, 1, b"b\na\na\n")
    assert shown.text() == "[n2] a\n[n2,n3] b\n[n3] a\n[n3] a\n"


def test_lines_wait_for_their_like_and_no_longer(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    shown.relay.put(1, 1, b"a\n")
    assert shown.relay.show_due_lines() == pytest.approx(output.MERGE_WAIT_SECONDS)
    now[0] = 0.31
    assert shown.relay.show_due_lines() == float("inf")
    shown.relay.put(2, 1, b"a\n")
    assert shown.text() == "[n2] a\n[n3] a\n"


def test_no_line_is_put_into_a_half_line_of_node_0(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    shown.relay.put(0, 1, b"0")
    shown.relay.put(1, 1, b"a\n")
    now[0] = 0.5
    shown.relay.show_due_lines()
    shown.relay.put(0, 1, b".25\n")
    shown.relay.show_due_lines()
    shown.relay.put(0, 1, b"10%")
    shown.relay.put(1, 1, b"b\n")
    now[0] = 1.6
    shown.relay.show_due_lines()
    assert shown.text() == "0.25\n[n2] a\n10%\n[n2] b\n"


def test_half_lines_of_hosts_are_put_together(shown: Shown) -> None:
    shown.relay.put(1, 1, b"a ")
    shown.relay.put(2, 1, b"b ")
    shown.relay.put(1, 1, b"1\nc")
    shown.relay.put(2, 1, b"2\n")
    shown.relay.end_node(1)
    assert shown.text() == "[n2] a 1\n[n3] b 2\n[n2] c\n"


def test_a_host_cannot_make_us_remember_without_end(shown: Shown) -> None:
    for _ in range(40):
        shown.relay.put(1, 1, b"x" * 1000)
    for number in range(1000):
        shown.relay.put(2, 1, b"%d\n" % number)
    assert sum(map(len, shown.relay._unfinished.values())) <= output.MAX_HOST_LINE_BYTES
    assert len(shown.relay._waiting) <= output.MAX_WAITING_LINES
    text = shown.text()
    assert all(f"[n3] {number}\n" in text for number in range(1000))


def test_what_could_move_the_cursor_or_hide_words_is_gone() -> None:
    assert sanitize_line(b"\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b \xff\ttab \xe2\x80\xaereversed") == (
        "red ]0;title \ufffd \ufffd\ttab reversed"
    )
    assert sanitize_line(b"10%\r20%\r") == "20%" and sanitize_line(b"windows\r") == "windows"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("n2",), "n2"),
        (("n1", "n2"), "n1,n2"),
        (("n1", "n3", "n4", "n5"), "n1,n3-n5"),
        (("gpu08", "gpu09", "gpu10"), "gpu08-gpu10"),
        (("a1", "b2", "b3"), "a1,b2,b3"),
        (("10.0.0.1", "10.0.0.2", "10.0.0.3"), "10.0.0.1-10.0.0.3"),
        (("n9", "n10", "n11"), "n9-n11"),
    ],
)
def test_names_together(names: tuple[str, ...], text: str) -> None:
    assert join_ranges(names, ",") == text


def test_a_screen_that_nobody_reads_says_that_it_is_full() -> None:
    reader, writer = os.pipe()
    screen = TerminalWriter()
    try:
        for _ in range(40):
            screen.put(writer, b"x" * 65536)
        screen.close()
        assert screen.full and not screen.wait_closed(0.1)
        os.set_blocking(reader, False)
        deadline = time.monotonic() + 10
        while not screen.wait_closed(0.0) and time.monotonic() < deadline:
            try:
                os.read(reader, 1 << 20)
            except BlockingIOError:
                time.sleep(0.001)
        assert screen.wait_closed(0.0) and not screen.full
    finally:
        os.close(writer)
        os.close(reader)
