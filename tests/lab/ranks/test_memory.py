"""What a rank holds: levels out of made-up allocations, and a real training whose sizes are known."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.run_ranks import run_ranks
from torch import nn

from paceline.compute.memory import storage_bytes
from paceline.lab.ranks.memory import collective_sent_bytes, compute_memory_levels

WIDTH, DEPTH, BATCH = 512, 4, 64


def test_a_piece_of_memory_counts_once_however_many_tensors_lie_in_it() -> None:
    flat = torch.zeros(1000)
    assert storage_bytes([flat, flat[:10], flat.view(10, 100), None, "no tensor"]) == 4000
    assert storage_bytes([torch.zeros(10), torch.zeros(10, dtype=torch.float64)]) == 120


def test_levels_are_those_of_the_last_step_and_the_peak_of_all() -> None:
    first = ["data", 100, "forward", 500, "backward", -500, "sync", "optimizer", 200]  # 300 are kept
    # 50 of the step before
    last = ["data", "forward", -50, 90, "backward", -40, 100, "sync", 70, -70, "optimizer", -100]
    assert compute_memory_levels([*first, *last], known=350) == (90, 120, 600)


@given(st.lists(st.integers(-1000, 1000) | st.sampled_from(["data", "forward", "backward", "sync", "optimizer"])))
def test_no_allocations_however_odd_make_a_level_below_nothing(events: list[int | str]) -> None:
    activations, exchange, peak = compute_memory_levels(events, known=100)
    assert min(activations, exchange, peak) >= 0
    assert exchange <= peak


def looked_at(rank: int, world_size: int, folder: str) -> dict[str, dict[str, object]]:
    """What `compare`'s worker measures of an MLP, by strategy."""
    import msgspec

    from paceline.collectives.communicator import make_communicator
    from paceline.config.settings import TrainConfig
    from paceline.lab.measurement import CHUNKS, NO_EXCHANGE, Candidate, Measurement, MeasurementRequest
    from paceline.lab.ranks import measure
    from paceline.lab.ranks.measure import Workload
    from paceline.rank.world import World

    measure.query_gpu_problems = lambda pids, *, wait_seconds: (
        dict.fromkeys(pids, "GPU 0: at its power limit") if rank else {}
    )
    names = [NO_EXCHANGE, "manual", "bucketed", "ddp", "exact", "zero"]
    order = MeasurementRequest([Candidate(name, name, BATCH, 1) for name in names], 3, 2, folder, 0.0, memory=True)
    world = World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    make_communicator()
    measure.measure_candidates(order, Workload(TrainConfig(task="none"), task(), task().make_dataset("train"), world))
    lines = Path(folder, CHUNKS).read_bytes().splitlines() if rank == 0 else []
    found = [msgspec.json.decode(one, type=Measurement) for one in lines]
    return {one.candidate.strategy: msgspec.to_builtins(one) for one in found}


def task():
    from paceline import ArrayDataset, Task

    def model() -> nn.Module:
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
        return nn.Sequential(*layers)

    def data(split: str) -> ArrayDataset:
        return ArrayDataset(torch.randn(1024, WIDTH), torch.zeros(1024))

    return Task(model, data, lambda outputs, targets: outputs.square().mean(1))


@pytest.mark.ranks
@pytest.mark.slow
def test_every_part_of_memory_and_every_byte_sent_is_what_arithmetic_says(tmp_path: Path) -> None:
    found = run_ranks(looked_at, 2, tmp_path, str(tmp_path))[0]
    weights = 4 * WIDTH * WIDTH * DEPTH
    kept = 4 * BATCH * WIDTH * DEPTH  # the outputs of the tanhs; those of the linears are let go
    for strategy, chunk in found.items():
        memory = chunk["memory"]
        assert memory["weights"] == pytest.approx(weights, rel=0.01), strategy
        assert memory["activations"] == pytest.approx(kept, rel=0.2), strategy
        assert memory["rss_peak"] > memory["peak"] > weights, strategy
        assert chunk["samples"] == 2 * 2 * BATCH
        assert chunk["seconds"] > 0 and chunk["cpu_seconds"] > 0
        assert [*chunk["gpus"]] == [1] and "power limit" in chunk["gpus"][1]
    state = {strategy: chunk["memory"]["optimizer"] for strategy, chunk in found.items()}
    assert state["ddp"] == pytest.approx(2 * weights, rel=0.01)
    assert state["zero"] == pytest.approx(weights, rel=0.05)  # half of it on each of 2 ranks
    assert found["manual"]["memory"]["gradients"] == pytest.approx(weights, rel=0.01)
    assert found["no exchange"]["memory"]["exchange"] < 0.07 * weights  # of these 128 KiB for checksums of any size
    assert found["ddp"]["memory"]["exchange"] < 0.07 * weights  # its gradients lie in its buckets
    totals = 110  # bytes: loss and weight of each virtual rank, and votes
    assert found["no exchange"]["sent_bytes"] < totals
    for strategy in ("manual", "bucketed", "ddp", "exact", "zero"):
        # all-reduce of two: each sends as much as it has; zero sends half of the sums and half of the weights
        assert found[strategy]["sent_bytes"] == pytest.approx(weights, rel=0.02), strategy
    digests = {strategy: chunk["digest"] for strategy, chunk in found.items()}
    assert digests["exact"] == digests["zero"] != digests["no exchange"]


# ---- how much a rank sends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ranks", "sent"),
    [
        ("all_reduce", 2, 100), ("all_reduce", 4, 150), ("all_gather", 4, 300), ("all_gather_into_tensor", 2, 100),
        ("reduce_scatter", 4, 75), ("all_to_all", 4, 75), ("all_reduce", 1, 0), ("all_gather", 1, 0),
    ],
)  # fmt: skip
def test_the_volume_is_that_of_a_ring(kind: str, ranks: int, sent: float) -> None:
    assert collective_sent_bytes(kind, 100, ranks) == sent


@pytest.mark.parametrize(("ranks", "size"), [(2, 1000), (3, 999), (8, 64)])
def test_a_reduce_scatter_and_an_all_gather_of_the_shares_are_an_all_reduce(ranks: int, size: int) -> None:
    both = collective_sent_bytes("reduce_scatter", size, ranks) + collective_sent_bytes(
        "all_gather", size // ranks, ranks
    )
    assert both == pytest.approx(collective_sent_bytes("all_reduce", size, ranks))
