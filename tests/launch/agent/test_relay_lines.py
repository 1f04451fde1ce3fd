"""What a progress bar leaves in a log, and what is seen of it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch import output as relay_module
from paceline.launch.output import LinePart, Thinned, relay_rank

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
    monkeypatch.setattr(relay_module.time, "monotonic", lambda: now[0])
    return now


def test_of_a_bar_one_state_in_ten_seconds_is_kept_and_its_end(clock: list[float]) -> None:
    lines, found = Thinned(), list[LinePart]()
    for percent in range(100):
        clock[0] += 1.0
        found += lines.feed(f"\r {percent}%|".encode())
    found += lines.feed(b"\r 100%|done\n")
    assert [piece.text for piece in found[-2:]] == [b" 90%|\n", b" 100%|done\n"]
    assert len(found) == 10 and lines.end() == []


def test_a_bar_that_stands_still_is_told_and_not_again_at_its_end(clock: list[float]) -> None:
    lines = Thinned()
    assert lines.feed(b"\r 40%|") == [] and lines.wait_seconds == 10
    clock[0] += 11
    assert lines.due() == [LinePart(b" 40%|\n", drawn=True)]
    assert lines.wait_seconds is None
    clock[0] += 11
    assert lines.due() == [] and lines.end() == []


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
    lines = Thinned()
    found = [piece for at in range(0, len(data), size) for piece in lines.feed(data[at : at + size])]
    assert b"".join(piece.text for piece in [*found, *lines.end()]).replace(b"\r", b"") == kept.replace(b"\r", b"")


def relayed(data: bytes, screen: int, log: Path) -> None:
    reader, writer = os.pipe()
    with log.open("ab") as file:
        thread = relay_rank(os.fdopen(reader, "rb"), os.dup(file.fileno()), screen=screen, prefix=b"[rank 1] ")
    os.write(writer, data)
    os.close(writer)
    thread.join(10)
    assert not thread.is_alive()


def test_a_terminal_sees_a_bar_drawn_over_and_wiped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_BAR", relay_module._Bar())
    terminal, screen = pty.openpty()
    try:
        relayed(b"hello\n\n\r 1%|\xe2\x96\x88\r 2%|", screen, tmp_path / "log")
        seen = os.read(terminal, 4096)
    finally:
        os.close(terminal)
        os.close(screen)
    assert seen.startswith(b"[rank 1] hello\r\n[rank 1]  2%|\x1b[K\r") and seen.endswith(b"\x1b[K[rank 1]  2%|\r\n")
    assert (tmp_path / "log").read_bytes() == b"hello\n\n 2%|\n"


@pytest.mark.ranks
@pytest.mark.needs("tqdm")
def test_real_bars_of_two_ranks_are_four_lines(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = str(tmp_path / "run")
    words = (sys.executable, "-m", "paceline", "launch", "--nproc", "2", "--run-dir", run, "--", "script.py")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    ends = sorted(re.findall(r"^\[rank (\d)\] epoch (\d): 100%", done.stderr, re.MULTILINE))
    assert ends == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")] and done.stderr.count("it/s") == 4
    assert sorted(done.stdout.splitlines()) == ["[rank 0] done", "[rank 1] done"]  # the empty line has gone
    logs = (sys.executable, "-m", "paceline", "logs", str(tmp_path / "run"))
    shown = subprocess.run(logs, capture_output=True, text=True, timeout=50)
    assert shown.stderr == "" and "[0,1] done" in shown.stdout and shown.stdout.count("100%") == 4
