"""A run's events become seconds by step and rank; a folder that cannot tell says why; which runs can be compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.bench.made_up import Rank, lockstep
from tests.errors import raises

from paceline.bench.runs import At, comparable, over_network, read_run
from paceline.cli import scale
from paceline.runs.events import Evaluated, Event, Started, Step
from paceline.runs.writers import EventWriter

PHASES = {"data": 0.01, "forward": 0.02, "backward": 0.03, "sync": 0.04, "optimizer": 0.05}
ONE, TWO = lockstep([Rank()]), lockstep([Rank()] * 2)


def started(rank: int, world_size: int = 2, device: str = "cpu") -> Started:
    return Started(1, rank, world_size, f"n{rank}", 1, device, 0.0)


def step(number: int, at: float, phases: dict[str, float] | None = None) -> Step:
    spent = PHASES if phases is None else phases
    return Step(number, 0, 1.0, 64, 0.1, 0.15, 0.01, at, phase_seconds=spent)


def write(folder: Path, rank: int, *events: Event) -> None:
    with EventWriter(folder / f"events-{rank}.jsonl") as writer:
        for event in events:
            writer.write(event)


def test_steps_are_read_by_rank_without_the_warm_up_and_with_what_lies_between_them(tmp_path: Path) -> None:
    for rank in (0, 1):
        steps = [step(number, number * (0.2 + rank / 10)) for number in range(1, 7)]
        write(tmp_path, rank, started(rank), *steps[:4], Evaluated(4, {}, 9.0), *steps[4:])
    run = read_run(tmp_path, skip=2)
    assert (run.world_size, run.samples, run.hosts) == (2, 64, {0: "n0", 1: "n1"})
    assert len(run.steps) == 4
    assert run.steps[0][0].between == pytest.approx(0.05)
    assert run.steps[0][1].between == pytest.approx(0.15)
    assert run.steps[0][1].seconds == pytest.approx(0.3)
    assert run.steps[2][0].between == 0  # an evaluation lies between, which is no training
    assert (run.steps[0][0].sync, run.steps[0][0].optimizer) == (0.04, 0.05)


def test_a_late_optimizer_counts_for_the_step_in_which_others_wait_for_it(tmp_path: Path) -> None:
    late = {**PHASES, "optimizer": 0.25}
    for rank in (0, 1):
        at = (step(1, 1.0), step(2, 2.0, late), step(3, 3.0), step(4, 4.0))
        write(tmp_path, rank, started(rank), *at)
    found = [each[0] for each in read_run(tmp_path, skip=1).steps]
    assert [spent.optimizer for spent in found] == [0.05, 0.25, 0.05]
    assert [spent.seconds for spent in found] == pytest.approx([0.8, 1.2, 1.0])


def test_only_the_last_start_and_the_steps_of_all_ranks_count(tmp_path: Path) -> None:
    for rank, last in ((0, 9), (1, 8)):
        before, after = (step(n, n) for n in range(1, 3)), (step(n, n) for n in range(3, last))
        write(tmp_path, rank, started(rank), *before, started(rank), *after)
    assert len(read_run(tmp_path, skip=0).steps) == 5  # 3 to 7


def test_what_cannot_be_taken_apart_says_why(tmp_path: Path) -> None:
    with raises("no-run-to-compare", what="there are no events of a run"):
        read_run(tmp_path, skip=0)
    write(tmp_path, 0, started(0), *(step(n, n) for n in range(1, 5)))
    with raises("no-run-to-compare", what="the events of rank 1 of 2 are missing"):
        read_run(tmp_path, skip=0)
    write(tmp_path, 1, started(1), *(step(n, n, {}) for n in range(1, 5)))
    with raises("run-without-phases"):
        read_run(tmp_path, skip=0)
    with raises("run-too-short", least=6):
        read_run(tmp_path, skip=4)


def test_runs_met_over_a_network_if_any_of_them_was_on_several_hosts() -> None:
    apart = replace(TWO, hosts={0: "n1", 1: "n2"})
    assert not over_network({At(1, 64): [ONE], At(2, 64): [TWO]})
    assert over_network({At(1, 64): [ONE], At(2, 64): [TWO, apart]})


def test_a_message_takes_the_stated_latency_twice_with_gloo_and_once_with_nccl(tmp_path: Path) -> None:
    times: dict[str, list[float]] = {}
    for device in ("cpu", "cuda:0"):
        folders = [tmp_path / f"{device[:4]}-{ranks}" for ranks in (1, 2)]
        for ranks, folder in enumerate(folders, start=1):
            folder.mkdir()
            for rank in range(ranks):
                write(folder, rank, started(rank, ranks, device), *(step(n, n) for n in range(1, 9)))
        for delay in (0, 10):
            out = tmp_path / f"{device[:4]}-{delay}.json"
            words = ["--runs", ",".join(map(str, folders)), "--network", f"1Gbit,{delay}ms", "--mode", "strong"]
            scale.main([*words, "--out", str(out)])
            rows = json.loads(out.read_text())["estimates"]
            times.setdefault(device, []).append(next(a["step_seconds"] for a in rows if a["where"].startswith("8 ")))
    trips = 2 * (8 - 1) * 0.01
    assert times["cpu"][1] - times["cpu"][0] == pytest.approx(2 * trips)
    assert times["cuda:0"][1] - times["cuda:0"][0] == pytest.approx(trips)


def test_only_runs_on_as_many_samples_can_be_compared() -> None:
    assert comparable({At(1, 64): [ONE], At(2, 64): [TWO]}) == (64, None)
    assert comparable({At(1, 64): [ONE], At(2, 32): [TWO]}) == (None, 64)
    with raises("runs-do-not-match", told="1 x 64, 2 x 48"):
        comparable({At(1, 64): [ONE], At(2, 48): [TWO]})
