"""What lines add up to: curves, throughput, and what is out of order, with the line where it stands."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.cli import analyze
from paceline.errors import UsageError
from paceline.observe.events import Ended, Evaluated, Skipped, Started, Step
from paceline.observe.folder import create_attempt_dir
from paceline.observe.log_times import TimesWriter
from paceline.observe.writers import EventWriter
from paceline.view.analysis import Analysis, Analyzer
from paceline.view.analyzed import add_log
from paceline.view.curves import MOST_POINTS, Point, Series, sparkline

LOSSES = [2.3 * 0.97**number for number in range(100)]


def classic(epoch: int, number: int, loss: float) -> str:
    return f"Train Epoch: {epoch} [{number * 64}/6400 ({number}%)]\tLoss: {loss:.6f}"


def analyzed(folder: Path, lines: Iterable[str]) -> Analysis:
    (folder / "train.log").write_text("".join(f"{line}\n" for line in lines))
    analyzer = Analyzer("train.log")
    add_log(analyzer, folder / "train.log")
    return analyzer.result()


def kinds(found: Analysis) -> list[tuple[str, str, str]]:
    return [(one.kind, one.where, one.rank) for one in found.anomalies]


def test_a_good_training_has_its_curve_and_nothing_out_of_order(tmp_path: Path) -> None:
    found = analyzed(tmp_path, [classic(1, number, loss) for number, loss in enumerate(LOSSES)])
    assert kinds(found) == [] and found.loss is not None
    assert (found.loss.count, found.loss.first.value, found.loss.last.where) == (100, 2.3, "100")
    assert found.loss.best == found.loss.last
    assert sparkline(found.loss)[0] == "█" and sparkline(found.loss)[-1] == "▁"


def test_what_is_out_of_order_is_told_with_its_line(tmp_path: Path) -> None:
    lines = [classic(1, number, loss) for number, loss in enumerate(LOSSES)]
    lines[40] = classic(1, 40, 30.0)
    lines[70] = classic(1, 70, math.nan)
    lines += ["Traceback (most recent call last):", '  File "train.py", line 3', "ValueError: no"]
    lines += ["[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"]
    found = analyzed(tmp_path, lines)
    assert kinds(found) == [
        ("spike", "41", ""), ("not finite", "71", ""), ("traceback", "101", ""), ("out of memory", "104", "0"),
    ]  # fmt: skip
    assert found.anomalies[2].words == "ValueError: no"


def test_a_loss_that_falls_no_more_is_a_plateau(tmp_path: Path) -> None:
    found = analyzed(
        tmp_path, [classic(1, number, max(1.0, loss)) for number, loss in enumerate([*LOSSES, *LOSSES[50:]])]
    )
    ((kind, where, _),) = kinds(found)
    assert kind == "plateau" and 25 < int(where) < 90


def test_a_restart_is_told_and_ranks_without_names_are_none(tmp_path: Path) -> None:
    once = [classic(1, number, LOSSES[number]) for number in range(10)]
    assert kinds(analyzed(tmp_path, [*once, *once[4:]])) == [("restart", "11", "")]
    mixed = [classic(1, n, LOSSES[n]) for number in range(5) for n in (number + 1, number, number, number)]  # 4 ranks
    assert kinds(analyzed(tmp_path, mixed)) == []


def test_times_give_the_throughput_where_it_drops_and_where_nothing_was_said(tmp_path: Path) -> None:
    lines, now = list[str](), 0.0
    for number in range(100):
        now += 3.0 if 50 <= number < 60 else 400.0 if number == 80 else 1.0
        lines.append(f"2026-01-31 12:{int(now // 60):02}:{now % 60:06.3f} {classic(1, number, LOSSES[number])}")
    found = analyzed(tmp_path, lines)
    (rate,) = found.throughput
    assert (rate.unit, rate.source, rate.median) == ("samples/s", "from counts and times", pytest.approx(64))
    assert rate.highest.value == pytest.approx(64)
    assert [kind for kind, *_ in kinds(found)] == ["slow", "gap", "slow"] or {"slow", "gap"} == {*found.counts}
    assert ("gap", "81", "") in kinds(found)


def test_ranks_that_differ_are_named(tmp_path: Path) -> None:
    lines = [
        f"{rank}: {classic(1, number, loss * (3 if rank == 2 else 1))}"
        for number, loss in enumerate(LOSSES)
        for rank in range(5)
        if rank != 3 or number < 50
    ]
    found = analyzed(tmp_path, [*lines, "0: Test set: Accuracy: 9/10", "1: Test set: Accuracy: 8/10"])
    differ = [one for one in found.anomalies if one.kind == "ranks differ"]
    assert [one.rank for one in differ][:2] == ["2", "3"] and "ends at epoch 1, 3,136" in differ[1].words
    assert differ[-1].words.startswith("the test's accuracy")
    assert found.ranks == ["0", "1", "2", "3", "4"]


def test_memory_is_bounded_and_long_lines_are_cut(tmp_path: Path) -> None:
    series = Series()
    for number in range(100_000):
        series.add(Point(str(number), float(number)))
    assert len(series.points) <= MOST_POINTS and series.count == 100_000
    tracemalloc.start()
    found = analyzed(tmp_path, ["x" * 10_000_000, classic(1, 1, 0.5), "loss: 1 " + "y" * 3_000_000, "\r".join("abc")])
    tracemalloc.reset_peak()
    add_log(Analyzer("again"), tmp_path / "train.log")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4_000_000
    assert found.lines == 6 and found.formats == {"classic": 1, "key and value": 1}
    assert found.loss is not None and found.loss.last.where == "3"


def test_an_unknown_format_is_refused_with_its_first_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "x.log"
    log.write_text("\n\x1b[2Jhello\nworld\n")
    with pytest.raises(
        UsageError, match=r"none of the 3 lines .* The first is line 2:\n  hello\nExpected(.|\n)*Train Ep"
    ):
        analyze.main([str(log)])
    log.write_text("")
    with pytest.raises(UsageError, match="says nothing yet"):
        analyze.main([str(log)])
    with pytest.raises(UsageError, match=r"there is no log file .*nix.*unknown run"):
        analyze.main([str(tmp_path / "nix")])
    with pytest.raises(UsageError, match="is not a run folder"):
        analyze.main([str(tmp_path)])


def test_a_run_gives_the_same_answers_by_its_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (create_attempt_dir(run)[1] / "rank-1.log").write_text("Traceback (most recent call last):\nValueError: no\n")
    for rank in (0, 1):
        with EventWriter(run / f"events-{rank}.jsonl") as writer:
            writer.write(Started(1, rank, 2, "n1", 1, "cpu", 0.0))
            for number, loss in enumerate(LOSSES, 1):
                skipped = number == 50
                if skipped:
                    writer.write(Skipped(number, "the loss is nan", [3]))
                writer.write(Step(number, 0, loss, 64, 1e-3, 0.1, 0.0, float(number), skipped=skipped))
            writer.write(Evaluated(100, {"loss": 0.2, "accuracy": 0.9}, 0.1))
            writer.write(Started(2, rank, 2, "n1", 1, "cpu", 0.0, start_step=100))
            writer.write(Ended(100, 100.0))
    assert analyze.main([str(run), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["loss"]["count"] == 99 and found["throughput"][0]["median"] == pytest.approx(640)
    assert [(one["kind"], one["where"], one["rank"]) for one in found["anomalies"]] == [
        ("not finite", "step 50", "0"), ("restart", "step 100", "0"), ("traceback", "attempt-1/rank-1.log:1", "1"),
    ]  # fmt: skip
    assert analyze.main([str(run)]) == 0
    assert "test accuracy first 90.00%" in capsys.readouterr().out


def test_a_script_under_launch_has_the_times_that_its_agent_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    log = create_attempt_dir(run)[1] / "rank-0.log"
    now = 1_000_000.0
    monkeypatch.setattr("paceline.observe.log_times.time.time", lambda: now)
    writer = TimesWriter(log)
    with log.open("a") as file:
        for number, loss in enumerate(LOSSES):
            file.write(classic(1, number, loss) + "\n")
            file.flush()
            writer.look(last=True)
            now += 2.0
    writer.close()
    (rate,) = analyze._analyzed(str(run)).throughput
    assert rate.median == pytest.approx(32) and rate.source == "from counts and times"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("tee", [False, True], ids=["plain", "tee"])
def test_the_log_of_a_classic_script_under_torchrun(tmp_path: Path, small_mnist: Path, tee: bool) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["--tee", "3", "--log-dir", str(tmp_path / "logs")] if tee else []
    log = tmp_path / "torchrun.log"
    with log.open("w") as file:
        script = (str(Path(__file__).parent / "classic_mnist.py"), str(small_mnist))
        done = subprocess.run([*words, *script], stdout=file, stderr=file, timeout=50)
    assert done.returncode == 0, log.read_text()
    analyzer = Analyzer("torchrun.log")
    add_log(analyzer, log)
    found = analyzer.result()
    assert found.ranks == (["0", "1"] if tee else [])
    assert {"classic", "test set", "key and value"} == {*found.formats}
    # without --tee two ranks may write into one line, which then tells less
    assert found.throughput[0].unit == "samples/s" and found.throughput[0].count >= (4 if tee else 2)
    assert found.loss is not None and found.loss.last.value < found.loss.first.value < 2.5
    assert found.held_out["accuracy"].last.value > 0.3 and (not found.counts or not tee)
