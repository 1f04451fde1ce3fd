"""`paceline compare` as it is typed: the table, what is written down, what fails and goes on, what is refused."""

from pathlib import Path
from typing import Any

import pytest
from tests.errors import raises
from tests.lab.typed import measured

from paceline.cli.measure import compare_strategies as main

TASKS = Path(__file__).parents[1] / "lab" / "tasks_to_measure.py"
QUICK = ("--steps", 4, "--warmup", 3, "--nproc", 2, "--rounds", 1, "--batch-sizes", 16)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(540)  # 10 s on a quiet machine
def test_a_strategy_that_fails_is_a_row_with_its_reason_and_the_others_are_measured(tmp_path: Path) -> None:
    found, said = measured(tmp_path, "compare", f"{TASKS}:tied", "--strategies", "dp,zero,exact,ddp", *QUICK)
    rows = {(row["strategy"], row["world_size"], row["global_batch"]): row for row in found["rows"]}
    assert set(rows) == {("single", 1, 16), ("single", 1, 32), ("exact", 2, 32), ("ddp", 2, 32), ("no exchange", 2, 32)}
    failures = {failure["strategy"]: failure["reason"] for failure in found["failures"]}
    assert "is single-process" in failures["dp"]
    assert "(256,)" in failures["zero"]
    for row in rows.values():
        assert row["rate"]["low"] <= row["rate"]["median"] <= row["rate"]["high"]
        assert row["rate"]["median"] > 0 and row["ratio"]["median"] > 0 and row["first_step_seconds"] > 0
    assert rows["single", 1, 16]["ratio"]["median"] == 1
    assert rows["exact", 2, 32]["bits"] == "every world size"  # compared with one process
    weights = 4 * (256 * 256 + 256)
    assert rows["exact", 2, 32]["memory"]["weights"] == pytest.approx(weights, rel=0.01)
    assert rows["ddp", 2, 32]["sent_bytes"] == pytest.approx(weights, rel=0.01)
    assert found["advice"] in " ".join(said.split())
    assert "zero, batch 16 per" in said


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_what_has_failed_is_not_tried_again_and_bits_that_come_back_are_told(tmp_path: Path) -> None:
    how = ("--steps", 4, "--warmup", 3, "--nproc", 2, "--rounds", 3, "--batch-sizes", 16)
    found, said = measured(
        tmp_path, "compare", f"{TASKS}:tied", "--strategies", "zero,ddp,exact", *how, timeout=1500
    )  # fmt: skip
    assert [failure["strategy"] for failure in found["failures"]] == ["zero"]
    assert said.count("zero, batch 16 per") == 1
    bits = {row["strategy"]: row["bits"] for row in found["rows"] if row["world_size"] == 2}
    assert bits["exact"] == "every world size"
    assert bits["ddp"].endswith(", here")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(540)  # 15 s on a quiet machine
def test_meshes_are_rows_beside_the_strategies_with_the_same_batch_and_what_they_send(tmp_path: Path) -> None:
    meshes = ("--meshes", "tensor=2", "--meshes", "pipeline=2")
    Path(tmp_path, "mine.toml").write_text('[launch]\nmesh = "tensor=2"\n')  # as a run on a mesh has left it
    how = (*meshes, "--config", "mine.toml", *QUICK)
    found, said = measured(tmp_path, "compare", f"{TASKS}:large", "--strategies", "bucketed", *how)
    assert found["failures"] == []
    rows = {row["mesh"] or row["strategy"]: row for row in found["rows"] if row["world_size"] == 2}
    assert set(rows) == {"bucketed", "tensor=2", "pipeline=2", "no exchange"}
    assert {row["global_batch"] for row in rows.values()} == {32}
    assert "bucketed on tensor=2" in said
    weights, activation = 4 * (256 * 512 + 512 + 4 * (512 * 512 + 512)), 4 * 16 * 512
    assert rows["bucketed"]["memory"]["weights"] == pytest.approx(weights, rel=0.01)
    for mesh in ("tensor=2", "pipeline=2"):
        memory = rows[mesh]["memory"]
        # both, of a half; where stages are cut, decides how long layers take, and so what else the machine does
        assert memory["weights"] + memory["gradients"] < (1.3 if mesh == "tensor=2" else 1.9) * weights
        assert memory["peak"] < rows["bucketed"]["memory"]["peak"]
    # two micro-batches, of each what a cut hands over: down or up
    assert rows["pipeline=2"]["sent_bytes"] == pytest.approx(2 * activation, rel=0.05)
    assert 0 < rows["pipeline=2"]["sync_share"] < 1
    assert "1f1b, 2 micro-batches" in said
    assert rows["pipeline=2"]["bits"] in ("one process's, here", "rounding differs")


def refused(*arguments: object, code: str, **fields: Any) -> None:
    with raises(code, **fields):
        main([str(argument) for argument in arguments])


def test_what_has_no_meaning_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    refused("mnist-cnn", "--strategies", "exact,dpp", code="unknown-name", kind="strategy", value="dpp")
    refused("mnist-cnn", "--strategies", ",", code="nothing-named", kind="strategy")
    for wrong in ("32,0", "many"):
        refused("mnist-cnn", "--batch-sizes", wrong, code="not-whole-numbers", setting="batch_sizes", value=wrong)
    refused("mnist-cnn", "--warmup", 1, code="warmup-too-short", value=1, least=3)
    refused("mnist-cnn", "--rounds", 0, code="below-one", setting="rounds", value=0)
    refused("mnist-cnn", "--nproc", 0, code="below-one", setting="nproc", value=0)
    refused("mnist-cnn", "--out", tmp_path / "none" / "found.json", code="out-folder-missing", folder=tmp_path / "none")
    refused("mnist", code="unknown-name", kind="task", value="mnist")
    two = ("mnist-cnn", "--nproc", 2)
    refused(*two, "--meshes", "tensor=3", code="mesh-size", value="tensor=3", size=3, processes=2)
    refused(*two, "--meshes", "tensors=2", code="unknown-name", kind="dimension of the mesh", value="tensors")
    refused("mnist-cnn", "--nproc", 4, "--meshes", "context=2,tensor=2", code="context-with-tensor")
    refused(*two, "--sequence-parallel", code="sequence-parallel-without-meshes")
    refused("mnist-cnn", "--nproc", 1, "--meshes", "auto", code="meshes-of-one-process")
    refused("mnist-cnn", "--config", tmp_path / "none.toml", code="config-unreadable", path=tmp_path / "none.toml")
