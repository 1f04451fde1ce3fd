"""`paceline scale`: runs are read, their loss is split by cause, and a step on more nodes is estimated."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises
from tests.rendered import rendered

from paceline.cli.measure import scale
from paceline.lab.scale import (
    COMPUTE,
    DATA,
    EXCHANGE,
    REST,
    SMALLER,
    WAITING,
    ExchangeCost,
    NetworkSpeed,
    Runs,
    ScalePoint,
    ScalingInputs,
    ScalingLoss,
    ScalingLossShare,
    compute_scaling_losses,
    describe_scaling_loss,
    estimate_scaling,
    estimate_step_seconds,
    parse_network,
    read_run_steps,
    slowdown_causes,
    step_parts_by_point,
    used_several_hosts,
    weak_and_strong_batches,
)
from paceline.report.step_parts import (
    PhaseSeconds,
    RecordedSteps,
    StepParts,
    backward_to_forward_ratio,
    split_step_time,
)
from paceline.runs.events import Evaluated, Event, Started, Step
from paceline.runs.writers import EventWriter


@dataclass(frozen=True)
class Rank:
    """Seconds of a step."""

    data: float = 0.001
    forward: float = 0.01
    backward: float = 0.02
    optimizer: float = 0.002
    between: float = 0.0001
    jitter: float = 0.0  # each of them is longer by up to this part, at random


def lockstep(
    ranks: Sequence[Rank], *, exchange: float = 0.0, in_backward: bool = False, steps: int = 60, seed: int = 0,
    hidden: float = 0.0,
) -> RecordedSteps:  # fmt: skip
    """A run in which everybody waits for the slowest, and then `exchange` seconds for the sums.

    Args:
        ranks: how long each works.
        exchange: seconds that every rank needs for it.
        in_backward: whether they wait within backward, as DDP does, or after it.
        steps: how many.
        seed: of the jitter.
        hidden: seconds of a step that no phase accounts for.
    """
    chance = random.Random(seed)
    found: list[Mapping[int, PhaseSeconds]] = []
    for _ in range(steps):
        own = [_drawn(rank, chance) for rank in ranks]
        end = max(sum(each.values()) for each in own) + exchange
        step: dict[int, PhaseSeconds] = {}
        for rank, each in enumerate(own):
            waits = end - sum(each.values())
            backward = each["backward"] + (waits if in_backward else 0.0)
            sync = 0.0 if in_backward else waits
            step[rank] = PhaseSeconds(
                each["data"], each["forward"], backward, sync, each["optimizer"], end + hidden, each["between"]
            )
        found.append(step)
    return RecordedSteps(found, 64.0 * len(ranks), dict.fromkeys(range(len(ranks)), "here"))


def _drawn(rank: Rank, chance: random.Random) -> dict[str, float]:
    def some(seconds: float) -> float:
        return seconds * (1 + rank.jitter * chance.random())

    return {
        "data": some(rank.data), "forward": some(rank.forward), "backward": some(rank.backward),
        "optimizer": some(rank.optimizer), "between": rank.between,
    }  # fmt: skip


BASE = lockstep([Rank()])
RATIO = backward_to_forward_ratio(BASE)


def weak(run: RecordedSteps) -> list[ScalingLossShare]:
    return slowdown_causes(split_step_time(BASE), split_step_time(run, RATIO))


def explained(shares: list[ScalingLossShare]) -> float:
    return sum(share.percent for share in shares if share.cause != REST)


AFTER, WITHIN = [False], [False, True]  # where ranks wait: after backward, within it


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("change", "phase", "waits_within"),
    [
        ({"data": 0.021}, "data", WITHIN),
        ({"forward": 0.02, "backward": 0.04, "optimizer": 0.004}, "backward", WITHIN),  # niced
        ({"forward": 0.03}, "forward", AFTER),  # elsewhere a forward tells how long a backward takes
        ({"between": 0.02}, "between", WITHIN),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_slow_rank_is_what_the_others_wait_for(change, phase, waits_within, ranks) -> None:
    slow = ranks - 1
    everybody = [Rank(jitter=0.02)] * slow + [replace(Rank(jitter=0.02), **change)]
    for in_backward in waits_within:
        run = lockstep(everybody, exchange=0.002, in_backward=in_backward)
        shares, parts = weak(run), split_step_time(run, RATIO)
        assert shares[0].cause == WAITING
        assert (parts.slowest, parts.slow_phase) == (slow, phase)
        assert explained(shares) == pytest.approx(100, abs=5)


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_exchange_that_takes_long_is_communication_wherever_it_is_waited_for(in_backward) -> None:
    run = lockstep([Rank(jitter=0.02)] * 2, exchange=0.02, in_backward=in_backward)
    shares = weak(run)
    assert shares[0].cause == EXCHANGE
    assert shares[0].seconds == pytest.approx(0.02, rel=0.05)
    assert explained(shares) == pytest.approx(100, abs=5)


def test_ranks_that_are_all_slower_are_slower_compute() -> None:
    slow = Rank(forward=0.016, backward=0.032, optimizer=0.0032)  # too many threads, say
    shares = weak(lockstep([slow] * 4, exchange=0.001))
    assert shares[0].cause == COMPUTE
    assert shares[0].percent > 80
    assert weak(lockstep([Rank(data=0.02)] * 2))[0].cause == DATA


def test_ranks_that_are_slow_in_turn_blame_nobody() -> None:
    run = lockstep([Rank(jitter=1.0)] * 4, steps=200)
    assert split_step_time(run).slowest is None
    assert weak(run)[0].cause in (WAITING, COMPUTE)


def test_strong_scaling_tells_smaller_batches_from_slower_compute() -> None:
    """4 times fewer samples in half of the time: the rest is what a small batch costs, whoever computes it."""
    whole = split_step_time(lockstep([Rank(data=0.004, forward=0.04, backward=0.08, optimizer=0.002)]))
    small = split_step_time(lockstep([Rank(data=0.001, forward=0.02, backward=0.04, optimizer=0.002)]))
    run = split_step_time(
        lockstep([Rank(data=0.001, forward=0.02, backward=0.04, optimizer=0.002)] * 4, exchange=0.003)
    )
    shares = {share.cause: share for share in slowdown_causes(whole, run, 4, small)}
    assert shares[SMALLER].seconds == pytest.approx(0.0621 - 0.1221 / 4)
    assert shares[COMPUTE].seconds == pytest.approx(0, abs=1e-9)
    assert shares[EXCHANGE].seconds == pytest.approx(0.003)
    unknown = {share.cause: share for share in slowdown_causes(whole, run, 4)}
    assert SMALLER not in unknown
    assert unknown[COMPUTE].seconds == pytest.approx(shares[SMALLER].seconds)


seconds = st.floats(1e-4, 0.1)
ranks = st.builds(Rank, data=seconds, forward=seconds, backward=seconds, optimizer=seconds, jitter=st.floats(0, 0.5))


@given(st.lists(ranks, min_size=1, max_size=5), st.floats(0, 0.1), st.booleans(), st.floats(0, 0.05))
def test_all_shares_together_are_all_that_is_lost(everybody, exchange, in_backward, hidden) -> None:
    run = lockstep(everybody, exchange=exchange, in_backward=in_backward, steps=8, hidden=hidden)
    base = split_step_time(lockstep([Rank()], steps=8))
    for parts in (split_step_time(run), split_step_time(run, RATIO)):
        for shares, ideal in (
            (slowdown_causes(base, parts), base.step),
            (slowdown_causes(base, parts, 3), base.step / 3),
        ):
            lost = parts.step - ideal
            assert sum(share.seconds for share in shares) == pytest.approx(lost, abs=1e-9)
            if abs(lost) > 1e-6:
                assert sum(share.percent for share in shares) == pytest.approx(100, abs=1e-3)
            assert shares == sorted(shares, key=lambda share: -share.seconds)


@given(st.lists(ranks, min_size=2, max_size=5), st.floats(0, 0.1))
def test_what_is_waited_for_is_the_exchange_or_the_slowest_and_never_less_than_nothing(everybody, exchange) -> None:
    run = lockstep(everybody, exchange=exchange, steps=8)
    parts = split_step_time(run)
    assert parts.exchange == pytest.approx(exchange, abs=1e-9)
    assert parts.waiting >= -1e-12
    work = parts.compute + parts.data + parts.waiting
    assert parts.step - work - parts.exchange == pytest.approx(0, abs=1e-9)
    assert parts.step >= parts.data + parts.compute - 1e-9


ROOMY, NARROW = ScalingInputs(64, 1, 1_000_000), ScalingInputs(2, 2, 1_000_000)


def loss(run: RecordedSteps, machine: ScalingInputs = ROOMY) -> ScalingLoss:
    """What a run of made-up ranks loses against one of them alone."""
    at = ScalePoint(run.world_size, 64)
    runs: Runs = {ScalePoint(1, 64): [BASE] * 3, at: [run] * 3}
    [lost] = compute_scaling_losses(runs, step_parts_by_point(runs, {}), machine, "weak", 64)
    return lost


def test_the_sentence_names_rank_and_phase_of_whom_all_wait_for() -> None:
    late = loss(lockstep([Rank(), Rank(), replace(Rank(), data=0.05)]))
    assert (late.shares[0].cause, late.slowest, late.slow_phase) == (WAITING, 2, "data")
    rendered(describe_scaling_loss(late))


def test_the_sentence_says_that_another_rank_is_late_each_time() -> None:
    late = loss(lockstep([Rank(data=0.0001, forward=0.004, backward=0.006, jitter=5.0)] * 4, steps=200))
    assert (late.shares[0].cause, late.slowest) == (WAITING, None)
    rendered(describe_scaling_loss(late))


def test_too_many_threads_are_named_beside_the_slower_compute_that_they_cause() -> None:
    slow = lockstep([Rank(forward=0.02, backward=0.04)] * 2, exchange=0.001)
    crowded, alone = loss(slow, NARROW), loss(slow)
    assert crowded.shares[0].cause == alone.shares[0].cause == COMPUTE
    assert crowded.crowd == 2 and alone.crowd <= 1
    rendered(map(describe_scaling_loss, (crowded, alone)))


def test_what_is_hardly_lost_is_not_blamed_on_anybody() -> None:
    rendered(describe_scaling_loss(loss(lockstep([Rank()] * 2, exchange=0.0001))))


PHASES = {"data": 0.01, "forward": 0.02, "backward": 0.03, "sync": 0.04, "optimizer": 0.05}
ONE, TWO = BASE, lockstep([Rank()] * 2)


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
    run = read_run_steps(tmp_path, skip=2)
    assert (run.world_size, run.mean_global_batch, run.hosts) == (2, 64, {0: "n0", 1: "n1"})
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
    found = [each[0] for each in read_run_steps(tmp_path, skip=1).steps]
    assert [spent.optimizer for spent in found] == [0.05, 0.25, 0.05]
    assert [spent.seconds for spent in found] == pytest.approx([0.8, 1.2, 1.0])


def test_only_the_last_start_and_the_steps_of_all_ranks_count(tmp_path: Path) -> None:
    for rank, last in ((0, 9), (1, 8)):
        before, after = (step(n, n) for n in range(1, 3)), (step(n, n) for n in range(3, last))
        write(tmp_path, rank, started(rank), *before, started(rank), *after)
    assert len(read_run_steps(tmp_path, skip=0).steps) == 5  # 3 to 7


def test_what_cannot_be_taken_apart_says_why(tmp_path: Path) -> None:
    with raises("no-run-to-compare", what="there are no events of a run"):
        read_run_steps(tmp_path, skip=0)
    write(tmp_path, 0, started(0), *(step(n, n) for n in range(1, 5)))
    with raises("no-run-to-compare", what="the events of rank 1 of 2 are missing"):
        read_run_steps(tmp_path, skip=0)
    write(tmp_path, 1, started(1), *(step(n, n, {}) for n in range(1, 5)))
    with raises("run-without-phases"):
        read_run_steps(tmp_path, skip=0)
    with raises("run-too-short", least=6):
        read_run_steps(tmp_path, skip=4)


def test_runs_met_over_a_network_if_any_of_them_was_on_several_hosts() -> None:
    apart = replace(TWO, hosts={0: "n1", 1: "n2"})
    assert not used_several_hosts({ScalePoint(1, 64): [ONE], ScalePoint(2, 64): [TWO]})
    assert used_several_hosts({ScalePoint(1, 64): [ONE], ScalePoint(2, 64): [TWO, apart]})


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
            scale([*words, "--out", str(out)])
            rows = json.loads(out.read_text())["estimates"]
            times.setdefault(device, []).append(next(a["step_seconds"] for a in rows if a["where"].startswith("8 ")))
    trips = 2 * (8 - 1) * 0.01
    assert times["cpu"][1] - times["cpu"][0] == pytest.approx(2 * trips)
    assert times["cuda:0"][1] - times["cuda:0"][0] == pytest.approx(trips)


def test_only_runs_on_as_many_samples_can_be_compared() -> None:
    assert weak_and_strong_batches({ScalePoint(1, 64): [ONE], ScalePoint(2, 64): [TWO]}) == (64, None)
    assert weak_and_strong_batches({ScalePoint(1, 64): [ONE], ScalePoint(2, 32): [TWO]}) == (None, 64)
    with raises("runs-do-not-match", runs="1 x 64, 2 x 48"):
        weak_and_strong_batches({ScalePoint(1, 64): [ONE], ScalePoint(2, 48): [TWO]})


MACHINE = ScalingInputs(cores=2, threads=1, weight_bytes=40_000_000)
LINK = NetworkSpeed(12.5e6, 0.05)
MESSAGE = 0.1  # with gloo a message takes the latency twice


def alone(batch: int) -> StepParts:
    return StepParts(0.01 + 1e-4 * batch, 0.0, 0.01 + 1e-4 * batch, 0.0, 0.0)


POINTS = {ScalePoint(1, 64): alone(64), ScalePoint(1, 256): alone(256)}
BESIDE = replace(alone(64), step=1.25 * alone(64).step + 0.004, exchange=0.004)


def test_one_rank_each_takes_its_work_and_the_messages_and_bytes_of_a_ring() -> None:
    steps = [estimate_step_seconds(POINTS, MACHINE, count, 64, LINK) for count in (1, 2, 4)]
    ring = [0.0, 2 * MESSAGE + 40e6 / 12.5e6, 6 * MESSAGE + 1.5 * 40e6 / 12.5e6]
    assert steps == pytest.approx([alone(64).step + seconds for seconds in ring])
    assert estimate_step_seconds(POINTS, replace(MACHINE, uses_gloo=False), 2, 64, LINK) == pytest.approx(
        steps[1] - MESSAGE
    )


def test_the_work_of_a_batch_that_was_not_measured_lies_on_the_line_through_the_others() -> None:
    assert estimate_step_seconds(POINTS, MACHINE, 1, 128, LINK) == pytest.approx(alone(128).step)
    assert estimate_step_seconds({ScalePoint(1, 64): alone(64)}, MACHINE, 1, 128, LINK) == pytest.approx(
        2 * alone(64).step
    )


def test_ranks_of_one_machine_slow_each_other_down_and_add_up_there_first() -> None:
    points = {
        **POINTS,
        ScalePoint(2, 64): BESIDE,
        ScalePoint(4, 64): replace(BESIDE, step=9.0),
    }  # 4 ranks take turns: not used
    work = 1.25 * alone(256).step + 0.004
    assert estimate_step_seconds(points, MACHINE, 1, 256, LINK) == pytest.approx(work)
    over_network = replace(MACHINE, exchanges_over_network=True)
    assert estimate_step_seconds(points, over_network, 1, 256, LINK) == pytest.approx(alone(256).step)


def test_less_traffic_is_less_time_by_its_bytes_and_messages() -> None:
    rows = estimate_scaling(POINTS, replace(MACHINE, low_rank_bytes=400_000), 64, None, LINK)
    steps = {row.where.rpartition(", ")[2]: row.step_seconds for row in rows if row.where.startswith("2 nodes")}
    work = alone(64).step
    assert steps == pytest.approx({
        "1 rank each": work + 2 * MESSAGE + 40e6 / 12.5e6,
        "--compress bf16": work + 2 * MESSAGE + 20e6 / 12.5e6,
        "--compress int8": work + 2 * MESSAGE + 40e6 * (1 + 4 / 512) / 4 / 12.5e6,
        "--compress powersgd": work + 2 * MESSAGE + 0.4e6 / 12.5e6,
        "--local-steps 16": work + (2 * MESSAGE + 40e6 / 12.5e6) / 16,
    })  # fmt: skip
    few = estimate_scaling(POINTS, replace(MACHINE, has_split_model=True), 64, None, LINK)
    assert not [row for row in few if "--" in row.where]


def test_efficiency_is_against_one_rank_with_the_same_or_the_whole_batch() -> None:
    rows = [row for row in estimate_scaling(POINTS, MACHINE, 64, 256, LINK) if row.where == "2 nodes, 1 rank each"]
    ring = 2 * MESSAGE + 40e6 / 12.5e6
    assert {row.mode: row.at for row in rows} == {"weak": ScalePoint(2, 64), "strong": ScalePoint(2, 128)}
    assert {row.mode: row.efficiency for row in rows} == pytest.approx(
        {"weak": alone(64).step / (alone(64).step + ring), "strong": alone(256).step / 2 / (alone(128).step + ring)}
    )
    assert estimate_step_seconds(POINTS, MACHINE, 2, 64, LINK, ExchangeCost(0.0, 0.0)) == pytest.approx(alone(64).step)


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [
        ("100Gbit,5us", 12.5e9, 5e-6),
        ("100 Gbit/s, 5 us", 12.5e9, 5e-6),
        ("10Gbps,30us", 1.25e9, 30e-6),
        ("12.5GB,2us", 12.5e9, 2e-6),
        ("1GiB/s,1ms", 2.0**30, 1e-3),
        ("100mbit", 12.5e6, 0.0),  # as tc writes it
        ("1Gbit,\u00b5s".replace("\u00b5", "7\u00b5"), 125e6, 7e-6),
        ("25gbit,900ns", 25e9 / 8, 900e-9),
    ],
)
def test_a_link_is_a_rate_and_a_latency(text: str, rate: float, latency: float) -> None:
    found = parse_network(text)
    assert found.bytes_per_second == pytest.approx(rate)
    assert found.latency_seconds == pytest.approx(latency)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "100", "100Gb", "0Gbit,5us", "-1Gbit,5us", "5us,100Gbit", "100Gbit,", "100Gbit,5", "1Gbit,5us,2"],
)
def test_what_is_no_link_is_refused_with_examples(text: str) -> None:
    with raises("network-not-understood", setting="network", value=text):
        parse_network(text)


@given(st.floats(0.001, 1e6), st.floats(0, 1e6))
def test_bits_are_eighths_of_bytes_and_every_prefix_is_a_thousand(rate: float, latency: float) -> None:
    value, delay = f"{rate:.6f}", f"{latency:.6f}"
    in_bits, in_bytes = parse_network(f"{value}Gbit,{delay}us"), parse_network(f"{value}GB,{delay}us")
    assert in_bytes.bytes_per_second == pytest.approx(8 * in_bits.bytes_per_second)
    assert parse_network(f"{value}Mbit,{delay}ms") == NetworkSpeed(
        pytest.approx(in_bits.bytes_per_second / 1000), pytest.approx(in_bits.latency_seconds * 1000)
    )
