"""A trace has every rank's steps, phases and collectives, on one clock."""

import json
from pathlib import Path

import msgspec
import pytest
from tests.errors import raises
from tests.report.folders import make_run

from paceline.cli.report import trace
from paceline.runs.machine import ClockOffset


def written(folder: Path, out: Path) -> list[dict[str, object]]:
    assert trace([str(folder), "-o", str(out), "--overwrite"]) == 0
    return json.loads(out.read_text())["traceEvents"]


def test_phases_and_collectives_of_every_rank_lie_within_their_steps(tmp_path: Path) -> None:
    found = written(make_run(tmp_path / "run", steps=10), tmp_path / "trace.json")
    assert {one["args"]["name"] for one in found if one["name"] == "thread_name"} == {
        "rank 0", "rank 0: collectives", "rank 1", "rank 1: collectives",
    }  # fmt: skip
    spans = [one for one in found if one["ph"] == "X"]
    steps = {(one["tid"], one["name"]): one for one in spans if one["cat"] == "step"}
    assert len(steps) == 20
    for one in spans:
        if one["cat"] != "step":
            of = [s for (tid, _), s in steps.items() if tid == one["tid"] - one["tid"] % 2]
            assert any(s["ts"] - 1 <= one["ts"] and one["ts"] + one["dur"] <= s["ts"] + s["dur"] + 2 for s in of), one


def test_a_host_whose_clock_is_ahead_is_put_right(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", hosts=("n1", "n2"))
    before = {
        one["tid"]: one["ts"] for one in reversed(written(folder, tmp_path / "a.json")) if one["name"] == "step 5"
    }
    assert before[0] == before[2]
    with (folder / "machine-0.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(ClockOffset(1.0, 1, 0.5, 0.001)) + b"\n")
    after = {one["tid"]: one["ts"] for one in reversed(written(folder, tmp_path / "a.json")) if one["name"] == "step 5"}
    assert after[0] - after[2] == pytest.approx(0.5e6)


def test_bad_input(tmp_path: Path) -> None:
    folder, there = make_run(tmp_path / "run"), tmp_path / "there.json"
    there.write_text("mine")
    with raises("trace-exists", out=there):
        trace([str(folder), "-o", str(there)])
    with raises("unknown-name", kind="run"):
        trace([str(tmp_path / "no")])
    for path in folder.glob("events-*"):
        path.write_text("")
    with raises("nothing-to-trace"):
        trace([str(folder), "-o", str(tmp_path / "new.json")])
