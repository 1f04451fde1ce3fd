"""The logs of all ranks as one: merged by time, folded, and what is asked for of them."""

import re
import time
from pathlib import Path

import pytest
from tests.errors import raises

from paceline.cli import logs
from paceline.report.logs import MAX_MERGED_LINES, SAME_LINE_SECONDS, LineFilter, RankLine, RankLogs, merge_line_stream
from paceline.runs.attempt import TIME_RECORD, LogTimeIndex, LogTimesWriter, log_times_path
from paceline.runs.folder import create_attempt_dir

NOW = 1_780_000_000.0


def said(*lines: tuple[float, int, str]) -> list[tuple[list[int], str]]:
    return [(line.ranks, line.text) for line in merge_line_stream(RankLine(*line) for line in lines)]


def write(log: Path, *lines: tuple[float, str]) -> None:
    """A log, and its times as an agent would note them."""
    text = b""
    for seconds, line in lines:
        text += f"{line}\n".encode()
        with log_times_path(log).open("ab") as file:
            file.write(TIME_RECORD.pack(len(text), NOW + seconds))
    log.write_bytes(text)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three ranks. Rank 1 is a bit later, and says something else in between."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", lambda: NOW + 100)
    attempt = create_attempt_dir(tmp_path / "runs" / "mine")[1]
    write(attempt / "rank-0.log", (0, "begin"), (10, "step 1"), (20, "end"))
    write(attempt / "rank-1.log", (0.5, "begin"), (10.5, "loss nan"), (10.6, "step 1"), (20, "end"))
    write(attempt / "rank-2.log", (0.5, "begin"), (10, "step 1"), (90, "late"))
    return tmp_path / "runs" / "mine"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert logs.main(["mine", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_same_line_of_several_ranks_is_one_and_each_rank_keeps_its_order() -> None:
    assert said((0, 0, "a"), (0, 0, "b"), (0, 1, "a"), (0.5, 1, "b")) == [([0, 1], "a"), ([0, 1], "b")]
    assert said((0, 0, "a"), (0, 0, "b"), (0, 1, "b"), (0, 1, "a")) == [([0], "a"), ([0, 1], "b"), ([1], "a")]
    assert said((0, 0, "a"), (0, 0, "a"), (0, 1, "a")) == [([0, 1], "a"), ([0], "a")]
    assert said((0, 0, "a"), (SAME_LINE_SECONDS, 1, "a")) == [([0], "a"), ([1], "a")]
    own = said(*((0, rank, text) for rank in (0, 1, 2) for text in (f"loss {rank}", "step 5", f"time {rank}")))
    assert own == [
        ([0], "loss 0"), ([1], "loss 1"), ([2], "loss 2"), ([0, 1, 2], "step 5"),
        ([0], "time 0"), ([1], "time 1"), ([2], "time 2"),
    ]  # fmt: skip
    many = [(0.0, rank, str(number)) for rank in (0, 1) for number in range(2 * MAX_MERGED_LINES)]
    assert len(said(*many)) == 4 * MAX_MERGED_LINES  # in bounded memory: what is far apart is not put together


def test_all_ranks_are_merged_by_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys) == ["[0-2] begin", "[1] loss nan", "[0-2] step 1", "[0,1] end", "[2] late"]
    assert shown(capsys, "--lines", "2") == ["[0,1] end", "[2] late"]
    assert shown(capsys, "--rank", "1", "--lines", "0") == ["begin", "loss nan", "step 1", "end"]
    assert shown(capsys, "--rank", "0,1-2", "--grep", "^(loss|late)") == ["[1] loss nan", "[2] late"]
    assert shown(capsys, "--since", "1m") == ["[2] late"]
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW + 90))
    assert shown(capsys, "--since", clock, "--times") == [f"{clock} [2] late"]
    assert shown(capsys, "--since", time.strftime("%H:%M:%S", time.localtime(NOW + 15))) == ["[0,1] end", "[2] late"]


def test_without_times_the_order_is_that_of_the_ranks_and_that_is_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_times_path(run / "attempt-1" / "rank-1.log").unlink()
    assert logs.main(["mine"]) == 0
    out, err = capsys.readouterr()
    ahead = ["[0-2] begin", "[1] loss nan", "[0-2] step 1", "[2] late", "[0,1] end"]
    assert out.splitlines() == ahead
    assert "rank 1 " in err
    with raises("since-unknown-times", ranks="rank 1"):
        logs.main(["mine", "--since", "1m"])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--grep", "("], "grep-invalid"),
        (["--since", "yesterday"], "since-not-a-time"),
        (["--since", "25:00"], "since-not-a-time"),
        (["--since", "9999999999d"], "since-not-a-time"),
        (["--rank", "5-2"], "logs-rank"),
        (["--rank", "7"], "no-output"),
        (["--lines", "-1"], "lines-negative"),
        (["--follow", "--attempt", "1"], "follow-with-attempt"),
    ],
)
def test_bad_input_is_an_error(run: Path, words: list[str], code: str) -> None:
    with raises(code):
        logs.main(["mine", *words])


def test_only_the_end_of_a_large_log_is_read_and_a_search_reads_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank-0.log").write_text("".join(f"line {number}\n" for number in range(200_000)))
    found = RankLogs({0: tmp_path / "rank-0.log"})
    assert [line.text for line in found.lines(LineFilter(last=2))] == ["line 199998", "line 199999"]
    assert [line.text for line in found.lines(LineFilter(pattern=re.compile("^line 7$")))] == ["line 7"]
    monkeypatch.setattr("paceline.report.logs.MAX_SHOWN_BYTES", 24)
    assert [line.text for line in found.lines(LineFilter())] == ["line 199998", "line 199999"]
    assert found.truncated_ranks(LineFilter()) == [0]


def test_the_agents_notes_say_when_a_byte_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runs.attempt.RECORDS_PER_PAGE", 8)
    log = tmp_path / "rank-0.log"
    log.touch()
    writer = LogTimesWriter(log)
    for number in range(100):
        with log.open("a") as file:
            file.write("ten bytes\n")
        monkeypatch.setattr(time, "time", lambda number=number: NOW + number)
        writer.record_growth(last=True)
        writer.record_growth(last=True)  # nothing has come: nothing is noted
        if number == 50:  # a full disk may tear a record: the next one is written over it
            with log_times_path(log).open("ab") as file:
                file.write(b"torn")
    writer.record_growth()
    writer.close()
    assert log_times_path(log).stat().st_size == 100 * TIME_RECORD.size
    times = LogTimeIndex(log)
    assert [times.time_at(10 * number + 9) for number in (3, 99, 50, 0)] == [NOW + number for number in (3, 99, 50, 0)]
    assert [times.offset(NOW + number - 0.5) for number in (0, 50)] == [0, 500]
    log_times_path(log).write_bytes(TIME_RECORD.pack(5, float("nan")) * 3)  # written by others
    assert LogTimeIndex(log).time_at(0) == 0.0
