"""Do the benchmarks still run, and write down what they promise? Numbers are judged where a machine is quiet."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rendered import rendered
from tests.small_mnist import small_mnist as small_mnist
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from paceline.data.plan import BatchPlan
from paceline.tasks import mnist

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
AGAINST_DDP = ("ddp again", "no exchange", "bucketed", "exact", "exact, any kernels", "zero")
TINY = 784 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10  # parameters of the model that --quick trains

Table = dict[tuple[str, int, str], list[float]]
"""(table, virtual ranks, name) -> a value for each round"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(450)  # 10 s on a quiet machine
def test_the_exactness_benchmark_measures_all_it_promises_and_leaves_only_its_result(tmp_path: Path) -> None:
    out = tmp_path / "exactness.json"
    command = [sys.executable, str(BENCHMARKS / "exactness.py"), "--quick", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=360)
    assert list(tmp_path.iterdir()) == [out]
    result = json.loads(out.read_text())
    found: Table = {(row["table"], row["virtual_ranks"], row["name"]): row["values"] for row in result["rows"]}
    assert all(math.isfinite(value) and value > 0 for values in found.values() for value in values)
    check_ratios(found)
    check_costs(found)
    check_machine(result, tmp_path)


def check_ratios(found: Table) -> None:
    """A ratio for each strategy and round, each of the two numbers that stand beside it."""
    for virtual_ranks in (2, 4):
        ddp = found["ms a step", virtual_ranks, "ddp"]
        assert len(ddp) == 2
        for name in AGAINST_DDP:
            own = found["ms a step", virtual_ranks, name]
            ratios = found["wall time of a step / ddp's", virtual_ranks, name]
            assert ratios == pytest.approx([a / b for a, b in zip(own, ddp, strict=True)], rel=1e-3)
            assert len(found["CPU time of a step / ddp's", virtual_ranks, name]) == 2
        exact, any_kernels = (found["ms a step", virtual_ranks, name] for name in ("exact", "exact, any kernels"))
        ratios = found["wall time of a step / ddp's", virtual_ranks, "exact / exact, any kernels"]
        assert ratios == pytest.approx([a / b for a, b in zip(exact, any_kernels, strict=True)], rel=1e-3)


def check_costs(found: Table) -> None:
    """The whole state was kept: parameters, and two numbers that AdamW keeps for each."""
    cost = {name: values for (table, _, name), values in found.items() if table.startswith("keeping")}
    state_bytes = 3 * 4 * TINY
    assert cost["checkpoint, MB of all ranks"][0] * 1e6 == pytest.approx(state_bytes, rel=0.2)  # and descriptions
    assert cost["snapshot, MB a rank"][0] * 1e6 > state_bytes / 2
    assert {
        "snapshot, ms",
        "step with snapshot / without",
        "snapshot every 10 steps, %",
        "watch, ms",
        "watch every 100 steps, %",
        "checkpoint, ms of standstill",
        "checkpoint, ms in the background",
        "step during a checkpoint / without",
    } < cost.keys()


def check_machine(result: dict[str, Any], folder: Path) -> None:
    """What kind of machine it was, and nothing that is nobody else's business."""
    assert result["machine"]["cores"] == os.cpu_count()
    assert result["machine"]["torch"] and result["machine"]["processor"]
    text = json.dumps(result)
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", text)
    assert str(folder) not in text and str(BENCHMARKS.parent) not in text


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(450)  # 25 s on a quiet machine
def test_the_guard_benchmark_measures_all_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "guard.json"
    command = [sys.executable, str(BENCHMARKS / "guard.py"), "--pairs", "1", "--steps", "4", "4", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=360)
    result = json.loads(out.read_text())
    for model in ("mnist-cnn", "mlp"):
        (on,), (off,) = (result[model]["ms a step"][name] for name in ("auto", "off"))
        assert result[model]["ratio"] == [pytest.approx(on / off)]
    assert all(abs(cost) < 1e5 for cost in result["us"].values()) and len(result["us"]) == 3  # one is a difference


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(720)  # 9 s on a quiet machine
def test_the_peers_benchmark_compares_equal_work_and_leaves_only_its_result(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    few = ["--modes", "default", "--peers", "--limits", "copying"]
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "--quick", *few, "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    assert list(tmp_path.iterdir()) == [out]
    result = json.loads(out.read_text())
    rows = {row["contender"]: row for row in result["rows"]}
    assert list(rows) == ["vanilla", "default", "copying"]
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 and row["peak_mb"] > 50 for row in rows.values())
    losses = result["works"]["tiny"]["loss_after_3_steps"]
    assert losses.keys() == {"vanilla", "default"}
    assert losses["default"] == pytest.approx(losses["vanilla"], rel=1e-5)
    assert result["versions"].keys() == {"torch", "paceline"}
    check_machine(result, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)  # 6 s on a quiet machine
def test_who_computes_something_else_or_dies_takes_no_part_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heats, starter = of_race(monkeypatch, "heats"), of_race(monkeypatch, "starter")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\nfrom race.gate import Gate\n"
        "gate = Gate()\nloss = gate.hear(lambda *_: torch.tensor([float(sys.argv[1])]))\n"
        "while True:\n    gate.step()\n    loss(0, 0)\n    assert sys.argv[1:] != ['3'], 'it dies'\n"
    )

    def contender(name: str, loss: str) -> Any:
        return starter.Contender(name, [starter.Launch([sys.executable, str(script), loss])], ranks=1, samples=1)

    taking_part = [contender(*one) for one in (("base", "2"), ("same", "2.001"), ("other", "2.5"), ("dying", "3"))]
    outcome = heats.race(taking_part, heats.Pace(rounds=2, steps=1, patience_seconds=0.0))
    assert outcome.left_out.keys() == {"other", "dying"}
    assert "2.5" in outcome.left_out["other"] and "it dies" in outcome.left_out["dying"]
    assert {name: len(laps) for name, laps in outcome.laps.items()} == {"base": 2, "same": 2}
    assert len(outcome.faults) == 2


def of_race(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A part of what the benchmarks against peers share, which is no package of ours."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(f"race.{name}")


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_peer_gets_the_samples_of_the_plan_whatever_its_sampler_asks_for(
    loaders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = of_race(monkeypatch, "samples")
    batch, ranks = 4, 2
    plan = BatchPlan(24, batch * ranks, ranks, seed=0)
    for rank in range(ranks):
        dealt = samples.Dealt(TensorDataset(torch.arange(24)), batch, rank, ranks)
        sampler = RandomSampler(dealt, num_samples=24)
        loader = DataLoader(dealt, batch, sampler=sampler, num_workers=loaders)
        seen = [inputs.tolist() for (inputs,) in loader]  # two of its epochs
        where = [(epoch, step) for epoch in (0, 1) for step in range(3)]
        assert seen == [plan.indices(*one, rank).tolist() for one in where]


def test_a_peers_image_is_the_one_that_paceline_trains_on(monkeypatch: pytest.MonkeyPatch, small_mnist: Path) -> None:
    images = of_race(monkeypatch, "samples").Images("train", small_mnist)
    ours = mnist.dataset("train", small_mnist)
    for index in (0, 7, len(ours) - 1):
        (theirs, label), (own, target) = images[index], ours[index]
        torch.testing.assert_close(theirs, own)
        assert label == int(target) and len(images) == len(ours)


def test_a_ratio_pairs_laps_of_one_round_that_were_both_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = of_race(monkeypatch, "figures")
    base = made_row(figures, "vanilla", [10.0, 20.0, None, 40.0])
    own = made_row(figures, "default", [5.0, None, 1.0, 10.0])
    assert figures.ratios(own, base) == [2.0, 4.0]
    alone = made_row(figures, "one-rank", [10.0, 20.0, None, 40.0], samples=4)
    assert figures.ratios(alone, base) == [0.5, 0.5, 0.5]  # half the samples in the same time


def test_fewer_than_five_pairs_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = of_race(monkeypatch, "figures")
    assert figures.lower_quartile([3.0, 3.0, 3.0, 3.0]) is None
    assert figures.lower_quartile([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0


def test_the_summary_tells_reached_missed_and_not_measured_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = of_race(monkeypatch, "figures")
    summary = importlib.import_module("summary")
    rows = [made_row(figures, "vanilla", [10.0] * 6, work="W1"), made_row(figures, "default", [5.0] * 6, work="W1")]
    rows += [made_row(figures, "vanilla", [10.0] * 6, work="W2"), made_row(figures, "default", [9.0] * 6, work="W2")]
    rows += [made_row(figures, "vanilla", [10.0] * 6, work="W3"), made_row(figures, "default", [None] * 6, work="W3")]
    rows.append(made_row(figures, "one-rank", [4.0] * 6, samples=4, work="W1"))
    rows.append(made_row(figures, "no-exchange", [8.0] * 6, work="W2"))
    figures.write(tmp_path / "peers.json", {}, rows)
    rendered(summary.summary(summary.goals(), tmp_path).splitlines())


def test_the_summary_judges_sums_by_their_worst_size_and_memory_by_its_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_race(monkeypatch, "figures")
    summary = importlib.import_module("summary")

    kib, mib, kinds = 1 << 10, 1 << 20, ("weights", "gradients", "optimizer")
    sizes = ((4 * kib, 5, 80.0), (64 * kib, 6, 31.0), (mib, 4, 20.0), (8 * mib, 6, 12.0), (25 * mib, 6, 5.0),
             (100 * mib, 6, 4.0))  # fmt: skip
    lines = [
        {"bytes": size, "quiet": quiet, "gloo / shared": [ratio, 99, 99], "memcpy / shared": [0.7, 9, 9]}
        for size, quiet, ratio in sizes
    ]
    (tmp_path / "collectives.json").write_text(json.dumps({"lines": lines}))
    rows = [
        {"strategy": name, "world_size": ranks, "memory": dict(zip(kinds, memory, strict=True))}
        for name, ranks, memory in (("single", 1, (10, 10, 20)), ("zero", 2, (10, 5, 10)), ("fsdp", 2, (8, 5, 10)))
    ]
    (tmp_path / "memory.json").write_text(json.dumps({"rows": rows}))
    said = summary.summary(summary.goals(), tmp_path).splitlines()
    rendered(line for line in said if "all-reduce" in line or "bytes" in line)


def made_row(figures: Any, contender: str, ms: list[float | None], *, samples: int = 8, work: str = "W1") -> Any:
    return figures.Row(work, contender, 2, samples, ms, ms, ms, ms, 100.0, 0.0)


def test_what_others_compute_meanwhile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = of_race(monkeypatch, "quiet")
    cores = os.cpu_count() or 1
    before, after = quiet.Spent(100.0, 50.0), quiet.Spent(101.0, 50.0 + cores)  # all processors were busy for a second
    assert quiet.foreign_share(before, after, own_seconds=0.75 * cores) == pytest.approx(0.25)
    assert quiet.foreign_share(before, after, own_seconds=1.1 * cores) == 0.0  # clocks tick in 10 ms
    assert quiet.look().busy_seconds > 0


@pytest.mark.slow
def test_the_gpu_benchmark_says_that_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(BENCHMARKS / "gpu.py")], capture_output=True, text=True, timeout=150)
    assert done.returncode == 2 and "no CUDA device" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(720)  # 14 s on a quiet machine
def test_the_epoch_benchmark_hears_both_accuracies(tmp_path: Path, small_mnist: Path) -> None:
    out = tmp_path / "epoch.json"
    command = [sys.executable, str(BENCHMARKS / "epoch.py"), "--quick", "--data-dir", str(small_mnist)]
    subprocess.run([*command, "--out", str(out)], check=True, stdout=subprocess.DEVNULL, timeout=600)
    result = json.loads(out.read_text())
    (ours,), (theirs,) = result["seconds"]["paceline"], result["seconds"]["tutorial"]
    assert result["ratio"] == [pytest.approx(theirs / ours)]
    assert all(0 <= accuracy <= 1 for found in result["accuracy"].values() for accuracy in found)
    check_machine(result, tmp_path)


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.root
@pytest.mark.timeout(900)  # 20 s on a quiet machine
def test_the_benchmark_of_two_hosts_compares_equal_work(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: hosts are made of namespaces")
    out = tmp_path / "two-hosts.json"
    command = [sys.executable, str(BENCHMARKS / "two_hosts.py"), "--quick", "--modes", "default", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=840)
    result = json.loads(out.read_text())
    assert [row["contender"] for row in result["rows"]] == ["vanilla", "default"]
    losses = result["works"]["tiny 1gbit"]["loss_after_3_steps"]
    assert losses["default"] == pytest.approx(losses["vanilla"], rel=1e-5)
    assert 0 < result["works"]["tiny 1gbit"]["wire_ms"] < 1
    check_machine(result, tmp_path)


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_day")


def results(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text())["steps"]


def test_a_gpu_day_tells_right_from_wrong_and_unknown_and_goes_on_with_what_was_not_right(
    day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def found(words: str) -> Any:
        def run(folder: Path) -> str:
            tried.append(words)
            if words.startswith("differ"):
                raise day.Wrong(words)
            return words

        return day.Step(words, "", run)

    monkeypatch.setattr(day, "MEASURED", {"b": found("98 %"), "a": found(day.NEEDS)})
    monkeypatch.setattr(day, "TESTS", {"3": found("differ: a, b")})
    out = ["--steps", "a,b,3", "--out", str(tmp_path / "day.json")]
    assert day.main(out) == 1
    assert {key: one["right"] for key, one in results(tmp_path / "day.json").items()} == {
        "a": None, "b": True, "3": False
    }  # fmt: skip
    day.TESTS["3"] = found("one digest")
    assert day.main(out) == 0 and tried == ["98 %", day.NEEDS, "differ: a, b", day.NEEDS, "one digest"]


def test_a_gpu_day_keeps_each_result_when_it_is_stopped_or_the_time_is_over(
    day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(folder: Path) -> str:
        raise KeyboardInterrupt

    def endless(folder: Path) -> str:
        return day.command(folder, "-c", "import time; time.sleep(1000)")

    steps = {"a": day.Step("", "", lambda folder: "fine"), "b": day.Step("", "", stopped)}
    monkeypatch.setattr(day, "MEASURED", steps)
    monkeypatch.setattr(day, "TESTS", {"1": day.Step("", "", endless, 1.0 / day.SLOWER)})
    out = tmp_path / "day.json"
    with pytest.raises(KeyboardInterrupt):
        day.main(["--steps", "a,b", "--out", str(out)])
    assert results(out)["a"]["right"] is True and "b" not in results(out)
    assert day.main(["--steps", "1", "--out", str(out)]) == 1
    assert results(out)["1"]["right"] is False  # its time limit
    assert day.main(["--steps", "b", "--out", str(out), "--seconds", "1"]) == 1
    assert "b" not in results(out)  # not begun


def test_a_gpu_day_judges_speeds_and_skipped_steps(day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(mfu: float, ratio: float) -> dict[str, Any]:
        speeds = {"tokens/s": 1e5, "samples/s": 100.0, "MFU": mfu, "host ms": 1.0}
        return {"session x plain": ratio, "product TFLOP/s": 1, "functions": [], "plain": speeds, "session": speeds}

    for ranks, judged, right in ((0, (0.1, 0.1), True), (1, (0.41, 1.0), True), (1, (0.39, 1.0), False),
                                 (1, (0.41, 0.9), False)):  # fmt: skip
        monkeypatch.setattr(day, "GPUS", ranks)
        monkeypatch.setattr(day, "modelled", lambda folder, name, judged=judged: {name: of(*judged)})
        with nullcontext() if right else pytest.raises(day.Wrong):
            day.gpt2(tmp_path)
    for name, right in ((day.DEFECT, True), ("AdamW, first step skipped", False)):
        said = json.dumps({day.DEFECT: True} | {name: False})
        monkeypatch.setattr(day, "command", lambda *_, said=said, **__: said)
        with nullcontext() if right else pytest.raises(day.Wrong):
            day.skipped(tmp_path)


@pytest.mark.slow
def test_the_benchmark_of_models_has_both_loops_and_the_longest_functions(tmp_path: Path) -> None:
    out, models = tmp_path / "models.json", ("gpt2", "resnet50")
    command = [sys.executable, str(BENCHMARKS / "gpu_models.py"), *models, "--quick", "--device", "cpu"]
    subprocess.run([*command, "--out", str(out)], check=True, stdout=subprocess.DEVNULL, timeout=150)
    found = json.loads(out.read_text())
    assert {*found["models"]} == {*models} and found["models"]["gpt2"]["session"]["tokens/s"] > 0
    for model in found["models"].values():
        assert len(model["plain"]["ms"]) == 2 and model["session"].keys() >= {"MFU", "host ms"} and model["functions"]
    check_machine(found, tmp_path)


@pytest.mark.parametrize(("name", "gflop"), [("gpt2", 875.17), ("resnet50", 24.3)])
def test_the_flops_of_a_model_are_those_counted_by_hand(
    name: str, gflop: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # GPT-2: 1024 tokens x (6 x 123.57 M weights + 12 layers x 12 x 1024 x 768); ResNet-50: 4.09 G products, twice each
    assert importlib.import_module("gpu_models").MODELS[name].flops() / 1e9 == pytest.approx(gflop, rel=0.01)
