"""Loss and throughput, from single lines and from logs and runs."""

import json
import math
import re
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests import warm
from tests.errors import raises
from tests.rendered import rendered

from paceline.cli import logs
from paceline.report.log_analysis import EXAMPLES, LogAnalysis, ParsedLine, figures_from_logs, parse_log_line
from paceline.report.run import read_run
from paceline.runs.attempt import LogTimesWriter
from paceline.runs.events import Ended, Evaluated, Skipped, Started, Step
from paceline.runs.folder import create_attempt_dir
from paceline.runs.writers import EventWriter

LOSSES = [2.3 * 0.97**number for number in range(100)]


def classic(epoch: int, number: int, loss: float) -> str:
    return f"Train Epoch: {epoch} [{number * 64}/6400 ({number}%)]\tLoss: {loss:.6f}"


def analyzed(folder: Path, lines: Iterable[str]) -> LogAnalysis:
    (folder / "train.log").write_text("".join(f"{line}\n" for line in lines))
    return logs.analyze_log_or_run(str(folder / "train.log"))


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
    found = logs.analyze_log_or_run(str(log))
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
    monkeypatch.setattr("paceline.runs.attempt.time.time", lambda: now)
    writer = LogTimesWriter(log)
    with log.open("a") as file:
        for number, loss in enumerate(LOSSES):
            file.write(classic(1, number, loss) + "\n")
            file.flush()
            writer.record_growth(last=True)
            now += 2.0
        now += 60.0
        for number in range(9):  # another epoch: no samples are counted in between
            file.write(classic(2, 100 + number, 1.0) + "\n")
            file.flush()
            writer.record_growth(last=True)
            now += 2.0
    writer.close()
    rates = logs.analyze_log_or_run(str(run)).values["samples/s (counted)"]
    assert len(rates) == 33 + 2
    assert rates == pytest.approx([32] * len(rates))
    figures, sentence = figures_from_logs(read_run(run))
    assert [figure.y for figure in figures] == ["loss"] and "32 samples/s (counted)" in sentence


SCRIPT = r"""
for epoch in (1, 2):
    for batch in (0, 5, 10):
        loss = 2 / (epoch + batch)
        print(f"Train Epoch: {epoch} [{batch * 20}/300 ({100 * batch / 15:.0f}%)]\tLoss: {loss:.6f}", flush=True)
    print("Throughput: 1234.5 samples/s", flush=True)
    print("\nTest set: Average loss: 0.5000, Accuracy: 150/200 (75%)\n", flush=True)
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_the_log_of_a_classic_script_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--tee", "3"]
    log, plain = tmp_path / "torchrun.log", tmp_path / "plain.log"
    with log.open("w") as file:
        done = warm.run([*words, "--log-dir", tmp_path / "logs", tmp_path / "script.py"], stdout=file, stderr=file)
    assert done.returncode == 0, log.read_text()
    plain.write_text(re.sub(r"^\[default\d\]:", "", log.read_text(), flags=re.MULTILINE))  # as without --tee
    for path, ranks in ((log, ["0", "1"]), (plain, [])):
        found = logs.analyze_log_or_run(str(path))
        assert found.ranks == ranks
        assert {"classic", "key and value"} == {*found.formats}
        assert len(found.values["samples/s"]) >= 4
        assert {*found.values["loss"]} == {round(2 / n, 6) for n in (1, 2, 6, 7, 11, 12)}
        assert {*found.values["test loss"]} == {0.5}


BAR = "40/100 [00:04<00:06,"
CLASSIC = {"samples": (3, 2560), "loss": 0.12}
LINES: list[tuple[str, str, dict[str, Any]]] = [
    ("Train Epoch: 3 [2560/60000 (4%)]\tLoss: 0.12", "classic", CLASSIC),
    ("Train Epoch: 3 [2560/60000] Loss: 0.120000", "classic", CLASSIC),  # seed 003
    ("1: Train Epoch: 3 [2560/60000] Loss: 0.12", "classic", {"rank": "1", **CLASSIC}),
    ("[default2]:[rank2]: Train Epoch: 3 [2560/60000] Loss: .12", "classic", {"rank": "2", **CLASSIC}),
    ("4: [default2]:Train Epoch: 3 [2560/60000] Loss: .12", "classic", {"rank": "4.2", **CLASSIC}),
    ("[rank 3] Train Epoch: 3 [2560/60000] Loss: 1.2e-1", "classic", {"rank": "3", **CLASSIC}),
    ("Test set: Average loss: 0.0300, Accuracy: 9876/10000 (99%)", "key and value", {"test loss": 0.03}),
    ("{'loss': 0.5, 'learning_rate': 5e-05, 'epoch': 1.2}", "Hugging Face Trainer", {"loss": 0.5}),
    (
        "{'eval_loss': 0.4, 'eval_accuracy': 0.9, 'eval_samples_per_second': 100.0, 'epoch': 1.0}",
        "Hugging Face Trainer", {"test loss": 0.4},
    ),
    (
        "{'train_runtime': 10.1, 'train_samples_per_second': 99.0, 'train_loss': 0.3, 'epoch': 3.0}",
        "Hugging Face Trainer", {"samples/s": 99},
    ),
    (
        f"Epoch 3:  40%|####      | {BAR}  9.52it/s, v_num=0, train_loss=0.12]", "progress bar",
        {"steps/s": 9.52, "loss": 0.12},
    ),
    (f" 40%|####  | {BAR} 2.00s/it]", "progress bar", {"steps/s": 0.5}),
    ("epoch=3 step=40 loss=nan", "key and value", {"loss": math.nan}),
    (
        "2026-01-31 13:05:01,500 INFO: step 10/100 loss 0.5 Throughput: 1,234.5 samples/s", "key and value",
        {"loss": 0.5, "samples/s": 1234.5},
    ),
    ("step 7: 1,234 images/s", "key and value", {"samples/s": 1234}),
    ('{"step": 7, "loss": 0.25}', "key and value", {"loss": 0.25}),
    ("Epoch [1/5], Step [100/600], Loss: 0.25", "key and value", {"loss": 0.25}),
    ("[0-7] val_loss: 0.3 val_acc: 93%", "key and value", {"rank": "0-7", "test loss": 0.3}),
    ("loss tensor(0.5, device='cuda:0', grad_fn=<NllLossBackward0>)", "key and value", {"loss": 0.5}),
    ("MASTER_PORT: 29900", "", {}),
    ("lossy compression of 3 epochs", "", {}),
    ("[rank1]: torch.OutOfMemoryError: CUDA out of memory.", "", {"rank": "1"}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "kind", "says"), LINES, ids=[line[:40] for line, _, _ in LINES])
def test_a_line_says_this_and_nothing_else(line: str, kind: str, says: dict[str, Any]) -> None:
    rank, samples = says.get("rank", ""), says.get("samples")
    values = {name: value for name, value in says.items() if name not in ("rank", "samples")}
    assert parse_log_line(line) == ParsedLine(kind, rank, pytest.approx(values, nan_ok=True), samples)  # pyright: ignore


def test_the_examples_that_people_are_shown_are_known() -> None:
    for kind, example in EXAMPLES.items():
        assert parse_log_line(example).format == kind


@pytest.mark.parametrize(
    "line",
    [
        "1%|" * 4000,
        "9" * 9000,
        "1: " * 4000,
        "loss: 1e999, acc: " + "9" * 400,
        "loss: " + "1," * 4000,
        "[" * 9000,
        "\x00\ud800 loss: 1",
    ],
)
def test_a_hostile_line_is_read_without_an_error(line: str) -> None:
    parse_log_line(line)
