"""Progress for people: plain lines, a bar within 80 columns, and the line of `paceline.run`."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.rendered import rendered

from paceline.runs import progress
from paceline.runs.progress import ProgressDisplay, ProgressRecord, ProgressViewer, ProgressWriter

SAID = "global batch 64 = 2 ranks x 1 micro-batch x 32 [not markup]"


def shown(*, terminal: bool, visible: bool = True, interval: int = 2) -> str:
    display = ProgressDisplay(total_steps=5, interval=interval, shown=visible)
    text = io.StringIO()
    display._console = Console(file=text, force_terminal=terminal, width=80, quiet=not visible, soft_wrap=True)
    with display:
        display.say(SAID)
        for step in range(1, 6):
            rate = None if step < 3 else 123_456.0
            display.show_step(step, epoch=0, loss=2.5, lr=1e-3, rate=rate, samples_left=9 * 10**8)
    return text.getvalue()


def test_plain_lines_come_every_interval_and_at_the_end():
    lines = shown(terminal=False).splitlines()
    assert lines[0] == SAID
    assert [line.split()[1] for line in lines[1:]] == ["2/5", "4/5", "5/5"]
    rendered(lines[1:])


def test_only_rank_0_shows_anything():
    assert shown(terminal=False, visible=False) == ""


@pytest.mark.parametrize("word", ["step 5/5", "loss 2.5000", "samples/s", "2:01:30 left"])
def test_the_bar_shows_everything_within_80_columns(word):
    assert word in shown(terminal=True)


EARLY = ProgressRecord(epoch=1, epochs=3, step=40, steps=80, loss=0.5, rate=None, samples_left=320)
LATE = ProgressRecord(epoch=1, epochs=3, step=80, steps=80, loss=None, rate=1234.5, samples_left=0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    r"""The visible lines: \r returns to the start of a line, and later text overwrites it."""
    lines = []
    for line in written.split("\n"):
        seen = ""
        for drawn in line.split("\r"):
            seen = drawn + seen[len(drawn) :]
        lines.append(seen.rstrip())
    return lines


def test_the_words_of_a_report() -> None:
    endless = ProgressRecord(epoch=0, epochs=0, step=7, steps=0, loss=1.0, rate=10.0, samples_left=0)
    rendered(map(str, (EARLY, LATE, endless)))


def test_what_ranks_print_stays_above_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    reporter, shown = ProgressWriter(tmp_path / "progress"), ProgressViewer(tmp_path / "progress", stream)
    shown.refresh()  # nothing is there yet
    reporter.write_step(40, 80, lambda: EARLY)
    shown.refresh()
    assert screen(stream.getvalue()) == [str(EARLY)]
    shown.print_above("after step 40: acc")
    assert screen(stream.getvalue()) == ["after step 40: acc"]  # an incomplete line is not overwritten
    shown.print_above("uracy 0.9\n")
    assert screen(stream.getvalue()) == ["after step 40: accuracy 0.9", str(EARLY)]
    reporter.write_step(80, 80, lambda: LATE)
    monkeypatch.setenv("COLUMNS", "31")
    shown.refresh()
    assert screen(stream.getvalue())[-1] == str(LATE)[:30]  # a wrapped line cannot be overwritten
    monkeypatch.setenv("COLUMNS", "100")
    shown.print_above("done\n")
    shown.end()
    assert screen(stream.getvalue()) == ["after step 40: accuracy 0.9", "done", str(LATE), ""]


def test_where_no_line_can_be_drawn_anew_there_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    reporter, shown = ProgressWriter(tmp_path / "progress"), ProgressViewer(tmp_path / "progress", stream)
    written = []
    for second in range(25):
        clock[0] = float(second)
        reporter.write_step(second, 80, lambda step=second + 1: ProgressRecord(0, 1, step, 80, 0.5, None, 320))
        shown.refresh()
        written.append(stream.getvalue().count("\n"))
    assert (written[0], written[9], written[10], written[24]) == (1, 1, 2, 3) and "\r" not in stream.getvalue()
    shown.end()
    assert stream.getvalue().splitlines()[-1].startswith("epoch 1/1  step 25/80")


def test_a_training_writes_a_few_times_a_second_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    reporter, reports = ProgressWriter(tmp_path / "progress"), []

    def report() -> ProgressRecord:
        reports.append(clock[0])
        return EARLY

    for step, now in (
        (1, 0.0),
        (2, progress.REPORT_SECONDS / 2),
        (3, progress.REPORT_SECONDS),
        (80, progress.REPORT_SECONDS),
    ):
        clock[0] = now
        reporter.write_step(step, 80, report)
    assert reports == [0.0, progress.REPORT_SECONDS, progress.REPORT_SECONDS]
    ProgressWriter(tmp_path / "gone" / "progress").write_step(1, 80, report)  # nobody looks any more: no error
