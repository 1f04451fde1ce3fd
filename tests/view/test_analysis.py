"""What lines add up to: loss and throughput."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.errors import raises
from tests.rendered import rendered

from paceline.cli import logs
from paceline.observe.events import Ended, Evaluated, Skipped, Started, Step
from paceline.observe.folder import create_attempt_dir
from paceline.observe.log_times import TimesWriter
from paceline.observe.writers import EventWriter
from paceline.view.analysis import Analysis, logged
from paceline.view.run import whole_run

LOSSES = [2.3 * 0.97**number for number in range(100)]


def classic(epoch: int, number: int, loss: float) -> str:
    return f"Train Epoch: {epoch} [{number * 64}/6400 ({number}%)]\tLoss: {loss:.6f}"


def analyzed(folder: Path, lines: Iterable[str]) -> Analysis:
    (folder / "train.log").write_text("".join(f"{line}\n" for line in lines))
    return logs.analyzed(str(folder / "train.log"))


def test_the_loss_of_a_log_is_read_line_by_line(tmp_path: Path) -> None:
    found = analyzed(tmp_path, [classic(1, number, loss) for number, loss in enumerate(LOSSES)])
    assert found.values == {"loss": pytest.approx(LOSSES, abs=1e-6)}
    assert found.formats == {"classic": 100}


def test_the_loss_is_that_of_one_rank_and_the_throughput_of_all(tmp_path: Path) -> None:
    lines = [f"{rank}: loss: {loss * rank}, {rank} samples/s" for loss in LOSSES for rank in (1, 2)]
    lines.insert(0, "10: 7 samples/s")
    found = analyzed(tmp_path, lines)
    assert found.ranks == ["1", "2", "10"]
    assert found.values == {"loss": pytest.approx(LOSSES), "samples/s": [7.0, *[1.0, 2.0] * 100]}


def test_losses_that_are_not_finite_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text("0: loss: 2\n1: loss: nan\n0: loss: inf\n1: loss: inf\n0: loss: 1\n")
    assert logs.analyze([str(tmp_path / "train.log")]) == 0
    rendered(capsys.readouterr().out.replace(str(tmp_path), ""))


def test_memory_is_bounded_by_the_length_of_lines(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("x" * 10_000_000 + "\nloss: 1 " + "y" * 3_000_000 + "\n10%|#| 1/9 [0:1<0:1]\r20%|#| 2/9 [0:1<0:1]\n")
    tracemalloc.start()
    found = logs.analyzed(str(log))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4_000_000
    assert found.formats == {"key and value": 1, "progress bar": 2}


def test_an_unknown_format_is_refused_with_its_first_line(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("\n\x1b[2Jhello\nworld\n")
    with raises("no-known-line", asked=str(log)) as caught:
        logs.analyze([str(log)])
    assert all(part in caught.value.fields["seen"] for part in ("3 lines", "'hello'"))
    log.write_text("")
    with raises("no-known-line", seen=""):
        logs.analyze([str(log)])
    with raises("unknown-name", kind="run"):
        logs.analyze([str(tmp_path / "nix")])
    with raises("not-a-run-folder"):
        logs.analyze([str(tmp_path)])


def test_a_run_gives_the_same_answers_by_its_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (create_attempt_dir(run)[1] / "rank-1.log").write_text("loss: 1\n")
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
    assert logs.analyze([str(run), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    losses = found["values"]["loss"]
    assert losses.pop(49) is None  # skipped: not finite
    assert losses == pytest.approx(LOSSES[:49] + LOSSES[50:])
    assert found["values"]["samples/s"] == pytest.approx([640] * 200)
    assert found["values"]["test loss"] == [0.2]
    assert logs.analyze([str(run)]) == 0
    assert "test loss     first 0.2" in capsys.readouterr().out


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
        now += 60.0
        for number in range(9):  # another epoch: no samples are counted in between
            file.write(classic(2, 100 + number, 1.0) + "\n")
            file.flush()
            writer.look(last=True)
            now += 2.0
    writer.close()
    rates = logs.analyzed(str(run)).values["samples/s (counted)"]
    assert len(rates) == 33 + 2
    assert rates == pytest.approx([32] * len(rates))
    figures, sentence = logged(whole_run(run))
    assert [figure.y for figure in figures] == ["loss"] and "32 samples/s (counted)" in sentence


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
    found = logs.analyzed(str(log))
    assert found.ranks == (["0", "1"] if tee else [])
    assert {"classic", "key and value"} == {*found.formats}
    # without --tee two ranks may write into one line, which then tells less
    assert len(found.values["samples/s"]) >= (4 if tee else 2)
    losses = found.values["loss"]
    assert losses[-1] < losses[0] < 2.5
    assert found.values["test loss"]
