"""`paceline scale` as it is typed: injected causes get the largest share, runs that are over can be asked, too."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.errors import ended_with, raises
from tests.lab.typed import measured, typed

from paceline.cli.measure import points_to_measure
from paceline.cli.measure import scale as main
from paceline.host.cgroup import usable_cores
from paceline.lab.scale import REST, WAITING, ScalePoint

TASKS = Path(__file__).parents[1] / "lab" / "tasks_to_measure.py"


def check_shares(one: dict[str, Any]) -> None:
    explained = sum(share["percent"] for share in one["shares"] if share["cause"] != REST)
    assert explained == pytest.approx(100, abs=5), one["shares"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(540)  # 9 s on a quiet machine
def test_slow_data_on_one_rank_get_the_largest_share_with_its_name(tmp_path: Path) -> None:
    how = ("--ranks", "1,2", "--mode", "weak", "--batch-size", 8, "--steps", 8, "--warmup", 3, "--rounds", 1)
    found, said = measured(tmp_path, "scale", f"{TASKS}:slow_data", *how, "--network", "10Gbit,20us")
    [one] = found["lost"]
    assert one["shares"][0]["cause"] == WAITING
    assert (one["slowest"], one["slow_phase"]) == (1, "data")
    check_shares(one)
    assert "ESTIMATED, not measured" in said
    assert "64 nodes, " in said


SOAK = ("--mode", "weak", "--steps", 20, "--rounds", 1)


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["bucketed", "ddp", "exact", "zero"])
def test_a_niced_rank_among_busy_ones_is_what_the_others_wait_for(tmp_path: Path, strategy: str) -> None:
    """More ranks than cores, so that the niced one does not get one for itself."""
    ranks = usable_cores() + 1
    found, said = measured(tmp_path, "scale", f"{TASKS}:niced", "--ranks", f"1,{ranks}", "--batch-size", 1024, *SOAK,
                           "--threads-per-rank", 1, "--strategy", strategy, timeout=1500)  # fmt: skip
    [one] = found["lost"]
    assert one["shares"][0]["cause"] == WAITING, one
    assert one["slowest"] == ranks - 1, one
    check_shares(one)
    assert f"{ranks} ranks x 1 thread = {ranks} threads" in said


def test_every_point_of_weak_and_strong_scaling_has_its_counterpart_on_one_rank() -> None:
    assert points_to_measure([1, 2, 4], 64, None) == [ScalePoint(1, 64), ScalePoint(2, 64), ScalePoint(4, 64)]
    both = points_to_measure([1, 2, 4], 64, 256)
    assert both == [
        ScalePoint(1, 64),
        ScalePoint(1, 128),
        ScalePoint(1, 256),
        ScalePoint(2, 64),
        ScalePoint(2, 128),
        ScalePoint(4, 64),
    ]


def refused(*arguments: object, code: str, **fields: Any) -> None:
    with raises(code, **fields):
        main([str(argument) for argument in arguments])


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", ["tensor=2", "pipeline=2"])
def test_copies_of_a_model_that_two_processes_share_are_measured_as_ranks_are(tmp_path: Path, mesh: str) -> None:
    how = ("--mesh", mesh, "--ranks", "2,4", "--batch-size", 16, "--steps", 5, "--rounds", 1, "--threads-per-rank", 1)
    found, said = measured(tmp_path, "scale", f"{TASKS}:wide", *how, "--network", "1Gbit", timeout=840)
    assert {(one["mode"], one["at"]["ranks"], one["at"]["batch"]) for one in found["lost"]} == {
        ("weak", 2, 16), ("strong", 2, 16),
    }  # fmt: skip
    assert f"bucketed on {mesh}, " in said
    assert "2 nodes, " in said and "--compress" not in said


def test_a_mesh_that_cannot_be_measured_is_refused() -> None:
    refused("mnist-cnn", "--mesh", "data=2,tensor=2", code="scale-mesh-with-data", dimension="data")
    mesh = ("mnist-cnn", "--mesh", "tensor=2")
    refused(*mesh, "--ranks", "2,3", code="ranks-no-whole-copies", processes=3, size=2)
    refused(*mesh, "--ranks", "1,2", code="nothing-to-compare", value="1,2")
    refused(*mesh, "--ranks", "2,4", "--strategy", "exact", code="strategy-not-on-mesh", strategy="exact")
    refused("--runs", "a,b", "--mesh", "tensor=2", code="mesh-with-runs")


def test_what_has_no_meaning_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    refused("mnist-cnn", "--network", "fast", code="network-not-understood", value="fast")
    refused("mnist-cnn", "--ranks", "1,two", code="not-whole-numbers", setting="ranks", value="1,two")
    refused("mnist-cnn", "--ranks", "1", code="nothing-to-compare", value="1")
    refused("mnist-cnn", "--steps", 1, code="too-few-steps", value=1, least=5)
    refused("mnist-cnn", "--warmup", 0, code="warmup-too-short", value=0)
    several = "strategy for several processes"
    refused("mnist-cnn", "--strategy", "single", code="unknown-name", kind=several, value="single")
    refused("mnist-cnn", "--ranks", "1,7,11,13", code="ranks-do-not-divide", common=1001)
    refused("mnist-cnn", "--out", tmp_path / "none" / "found.json", code="out-folder-missing", folder=tmp_path / "none")
    refused("mnist", code="unknown-name", kind="task", value="mnist")
    refused(code="scale-task-or-runs")
    refused("mnist-cnn", "--runs", tmp_path, code="scale-task-or-runs")
    refused("--runs", tmp_path, code="no-run-to-compare", folder=tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(360)  # 8 s on a quiet machine
def test_runs_that_are_over_tell_how_they_scaled(tmp_path: Path) -> None:
    for nproc in (1, 2):
        where = ("--nproc", nproc, "--run-dir", tmp_path / str(nproc), "--device", "cpu", "--strategy", "exact")
        run = typed(tmp_path, "train", f"{TASKS}:slow_data", "--steps", 9, "--batch-size", 8, *where, timeout=165)
        assert run.returncode == 0, run.stderr
    run = typed(tmp_path, "scale", "--runs", "1,2", "--out", "found.json")
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    [one] = found["lost"]
    assert (one["mode"], one["at"]) == ("weak", {"ranks": 2, "batch": 8})
    assert one["shares"][0]["cause"] == WAITING
    assert (one["slowest"], one["slow_phase"]) == (1, "data")
    check_shares(one)
    run = typed(tmp_path, "scale", "--runs", "2")
    ended_with(run, "runs-without-one-rank")
