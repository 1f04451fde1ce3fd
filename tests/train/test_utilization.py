"""Each run counts its FLOPs and tokens, tasks and sessions alike, and its weights stay those of a run that does not."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.run_script import run_script

from paceline.cli.run_state import run_state
from paceline.report.page import results_table
from paceline.report.run import read_run
from paceline.runs.events import FlopsCounted, Step, event_files, read_events

PEAK = 0.125  # TFLOP/s
VOCABULARY, WIDTH, LENGTH = 11, 8, 6

MODEL = f"""
import torch
from torch import nn

torch.manual_seed(0)
TOKENS = torch.randint({VOCABULARY}, (64, {LENGTH}))

def make_model():
    torch.manual_seed(1)
    layers = nn.Linear({WIDTH}, {WIDTH}), nn.Flatten(0, 1), nn.BatchNorm1d({WIDTH}), nn.Dropout(0.2)
    return nn.Sequential(nn.Embedding({VOCABULARY}, {WIDTH}), *layers, nn.Linear({WIDTH}, {VOCABULARY}))
"""
PER_SAMPLE = LENGTH * 6 * (WIDTH * WIDTH + WIDTH * VOCABULARY)

TASK = """
import torch.nn.functional as F
from paceline import ArrayDataset, Task

def loss(scores, tokens):
    return F.cross_entropy(scores, tokens.flatten(), reduction="none").view_as(tokens).mean(1)

def task():
    return Task(make_model=make_model, make_dataset=lambda _: ArrayDataset(TOKENS, TOKENS), loss=loss)
"""

LOOP = """
import json, sys
import torch.nn.functional as F
import paceline

strategy, peak = sys.argv[1], float(sys.argv[2])
with paceline.session("run", seed=3, strategy=strategy, virtual_ranks=2, peak_tflops=peak) as s:
    model, optimizer = s.prepare(make_model(), lambda p: torch.optim.Adam(p, lr=0.01, fused=True))
    train = s.loader(torch.utils.data.TensorDataset(TOKENS, TOKENS), global_batch=7)
    for epoch in s.epochs(1):
        assert s.throughput() == {}
        for x, y in train:
            optimizer.zero_grad()
            s.backward(F.cross_entropy(model(x), y.flatten()))
            optimizer.step()
        s.log(s.throughput())
"""


def summary(folder: Path, ranks: int, *arguments: object) -> dict[str, Any]:
    done = run_script(ranks, *arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "run" / "summary.json").read_text())


def check(found: dict[str, Any], ranks: int) -> None:
    rate = found["samples_per_second"]
    assert found["flops_per_sample"] == PER_SAMPLE and found["tokens_per_second"] == pytest.approx(LENGTH * rate)
    assert (found["devices"], found["peak_tflops"]) == (ranks, PEAK)
    assert found["mfu"] == pytest.approx(PER_SAMPLE * rate / (ranks * PEAK * 1e12))
    assert 0 < found["goodput"] < 1


def check_readers(folder: Path, found: dict[str, Any], ranks: int) -> None:
    events = [*read_events(folder / "run" / "events-0.jsonl")]
    assert [e for e in events if isinstance(e, FlopsCounted)] == [FlopsCounted(PER_SAMPLE, ranks, PEAK)]
    steps = [e for e in events if isinstance(e, Step)]
    of_all = [e for path in event_files(folder / "run").values() for e in read_events(path) if isinstance(e, Step)]
    assert sum(e.consumed for e in of_all) == sum(e.samples for e in steps)
    assert all(e.tokens == LENGTH * e.consumed > 0 for e in steps)
    state = run_state(folder / "run")
    assert (state.mfu, state.goodput, state.tokens_per_second) == tuple(
        found[name] for name in ("mfu", "goodput", "tokens_per_second")
    )
    rows = dict(row[:2] for row in results_table([read_run(folder / "run")]).rows)
    assert {"MFU", "FLOP/s", "goodput", "tokens/s"} <= rows.keys()


@pytest.mark.sample(4)
@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "ranks"), [("exact", 1), ("exact", 2), ("bucketed", 2), ("fsdp", 2)])
def test_a_task_counts_and_keeps_its_weights(tmp_path: Path, strategy: str, ranks: int) -> None:
    words = ("-m", "paceline", "train", "mine.py:task", "--steps", 9, "--global-batch", 7, "--virtual-ranks", 2)
    found = []
    for peak in (PEAK, 0):
        folder = tmp_path / str(peak)
        folder.mkdir()
        (folder / "mine.py").write_text(MODEL + TASK)
        found.append(summary(folder, ranks, *words, "--strategy", strategy, "--run-dir", "run", "--peak-tflops", peak))
    check(found[0], ranks)
    check_readers(tmp_path / str(PEAK), found[0], ranks)
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert "mfu" not in found[1] and "flops_per_sample" not in found[1] and found[1]["tokens_per_second"] > 0


@pytest.mark.sample(4)
@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "ranks"), [("bucketed", 1), ("bucketed", 2), ("ddp", 2), ("fsdp", 2)])
def test_a_session_counts_and_keeps_its_weights(tmp_path: Path, strategy: str, ranks: int) -> None:
    found = []
    for peak in (PEAK, 0.0):
        folder = tmp_path / str(peak)
        folder.mkdir()
        (folder / "loop.py").write_text(MODEL + LOOP)
        found.append(summary(folder, ranks, "loop.py", strategy, peak))
    check(found[0], ranks)
    check_readers(tmp_path / str(PEAK), found[0], ranks)
    assert found[0]["test_metrics"].keys() == {"samples_per_second", "tokens_per_second", "flops_per_second", "mfu"}
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[1]["test_metrics"].keys() == {"samples_per_second", "tokens_per_second"}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "compiled"), [("bucketed", True), ("exact", False)])
def test_a_session_compiled_or_exact_is_not_counted(tmp_path: Path, strategy: str, compiled: bool) -> None:
    loop = LOOP.replace("make_model()", 'torch.compile(make_model(), backend="eager")') if compiled else LOOP
    (tmp_path / "loop.py").write_text(MODEL + loop)
    found = summary(tmp_path, 1, "loop.py", strategy, PEAK)
    assert "flops_per_sample" not in found and found["tokens_per_second"] > 0


def test_a_compiled_task_is_counted_in_eager_mode(tmp_path: Path) -> None:
    patched = "import torch\nwhole = torch.nn.Module.compile\n"
    patched += "torch.nn.Module.compile = lambda self: whole(self, backend='eager')\n"
    (tmp_path / "mine.py").write_text(patched + MODEL + TASK)
    words = ("-m", "paceline", "train", "mine.py:task", "--steps", 7, "--global-batch", 8, "--compile", "--run-dir")
    assert summary(tmp_path, 1, *words, "run", "--peak-tflops", PEAK)["flops_per_sample"] == PER_SAMPLE
