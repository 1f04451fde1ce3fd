"""Do the benchmarks still run, and write down what they promise? Numbers are judged where a machine is quiet."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
AGAINST_DDP = ("ddp again", "no exchange", "bucketed", "exact", "exact, any kernels", "zero")
TINY = 784 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10  # parameters of the model that --quick trains

Table = dict[tuple[str, int, str], list[float]]
"""(table, virtual ranks, name) -> a value for each round"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(150)  # 10 s on a quiet machine
def test_the_exactness_benchmark_measures_all_it_promises_and_leaves_only_its_result(tmp_path: Path) -> None:
    out = tmp_path / "exactness.json"
    command = [sys.executable, str(BENCHMARKS / "exactness.py"), "--quick", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
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


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(150)  # 25 s on a quiet machine
def test_the_guard_benchmark_measures_all_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "guard.json"
    command = [sys.executable, str(BENCHMARKS / "guard.py"), "--pairs", "1", "--steps", "4", "4", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    result = json.loads(out.read_text())
    for model in ("mnist-cnn", "mlp"):
        (on,), (off,) = (result[model]["ms a step"][name] for name in ("auto", "off"))
        assert result[model]["ratio"] == [pytest.approx(on / off)]
    assert all(0 < cost < 1000 for cost in result["us"].values()) and len(result["us"]) == 3
