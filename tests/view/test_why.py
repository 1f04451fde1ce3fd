"""The first sentence names what was made slow, and the shares that it rests on are the whole step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.view.folders import make_run

from paceline.view.run import whole_run
from paceline.view.why import why

CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "data of one rank": ({"slow": {1: {"data": 0.03}}, "ranks": 3}, "was waiting for rank 1's data"),
    "a slow rank": ({"slow": {2: {"forward": 0.04}}, "ranks": 4}, "was waiting for rank 2, which is slower"),
    "a rank without a core": (
        {"slow": {0: {"backward": 0.06}}, "rank_cores": {0: 0.5, 1: 1.0}},
        "was waiting for rank 0, which is slower than the others in backward: it got 0.5 of a core, the others 1.0",
    ),
    "a slow link": ({"exchange": 0.03, "hosts": ("n1", "n2")}, "was the exchange between n1 and n2"),
    "the exchange on one host": ({"exchange": 0.03}, "was the exchange (0.0 MB of gradients in 30 ms)"),
    "data everywhere": ({"slow": {0: {"data": 0.05}, 1: {"data": 0.05}}}, "was waiting for data, on every rank"),
    "data of a rank on another host": (
        {"slow": {1: {"data": 0.03}}, "hosts": ("n1", "n2")}, "was waiting for rank 1's data on n2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_cause_is_the_one_that_was_injected(cause: str, tmp_path: Path) -> None:
    asked, wanted = CAUSES[cause]
    found = why(whole_run(make_run(tmp_path / "run", **asked)))
    causes = found.first.partition("; ")[2]
    assert re.match(r"\d+% " + re.escape(wanted), causes), found.first
    assert sum(share for cause, share in found.shares.items() if cause != "not explained") == pytest.approx(1, abs=0.05)
    assert found.advice


def test_more_threads_than_cores_come_first(tmp_path: Path) -> None:
    found = why(whole_run(make_run(tmp_path / "run", threads=4, cores=2)))
    assert found.first.startswith("8 threads compete for 2 cores, so they slow each other down.")
    assert "--threads-per-rank" in found.advice[0]
    assert "compete" not in why(whole_run(make_run(tmp_path / "fine", threads=1, cores=2))).first
    more_ranks = why(whole_run(make_run(tmp_path / "more", ranks=3, threads=1, cores=2))).first
    assert more_ranks.endswith(". 3 threads compete for 2 cores.")  # it is not what a rank can change, so not the first


def test_a_run_that_nothing_held_up_says_so(tmp_path: Path) -> None:
    found = why(whole_run(make_run(tmp_path / "run", slow={0: {"data": 0.0}, 1: {"data": 0.0}}, exchange=0.0)))
    assert found.first == "100% of each step was computing, so 2 ranks did the work of 2.0."
    assert not found.advice


def test_who_waited_for_whom(tmp_path: Path) -> None:
    waits = why(whole_run(make_run(tmp_path / "run", ranks=3, slow={1: {"data": 0.03}}))).waits
    assert {rank: [*of] for rank, of in waits.items()} == {0: [1], 2: [1]}
    assert waits[0][1] == pytest.approx(waits[2][1])


def test_too_little_is_said_to_be_too_little(tmp_path: Path) -> None:
    assert "Too few steps" in why(whole_run(make_run(tmp_path / "short", steps=4))).first
    (make_run(tmp_path / "run") / "events-1.jsonl").unlink()
    assert "Only 1 of 2 ranks" in why(whole_run(tmp_path / "run")).first
    (tmp_path / "run" / "events-0.jsonl").unlink()
    assert "No step was written down" in why(whole_run(tmp_path / "run")).first
