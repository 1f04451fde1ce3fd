"""fp16 with loss scaling: no bit of a gradient changes, one rank's overflow leaves the step out on all of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run_ranks import run_ranks
from tests.worlds import world as world
from tests.worlds import worlds
from torch import Tensor, nn

from paceline import BatchPlan, LoadingOptions, World, load_steps
from paceline.checkpoint.shards import hash_tensors
from paceline.compute.precision import autocast_fp16
from paceline.data.arrays import ArrayDataset
from paceline.data.plan import virtual_ranks_of
from paceline.stepping import trained_model
from paceline.stepping.nonfinite import NonFiniteCause, SkippedSteps
from paceline.stepping.trained_model import INITIAL_LOSS_SCALE, SMALLEST, LossScale
from paceline.strategies import STRATEGIES, Strategy
from paceline.train.step import TaskSteps

CPU = torch.device("cpu")
V, LARGE = 3, 5  # virtual ranks; the sample whose gradient does not fit into fp16 at first
HALF = ("0.weight", "2.weight")  # whose gradients are products of matrices in fp16
MANY = ("manual", "bucketed", "ddp", "fsdp")


def data() -> ArrayDataset:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1)
    targets[LARGE] = 60.0
    return ArrayDataset(inputs, targets)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def made(name: str, world: World, *, fp16: bool = True) -> Strategy:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    if fp16:
        autocast_fp16(model, CPU)
    return STRATEGIES[name](model, lambda p: torch.optim.AdamW(p, lr=0.05), world, virtual_ranks=V)


def trained(replica: Strategy, scale: LossScale | None, world: World) -> list[str]:
    """Two epochs of 3 uneven global batches, each in 2 micro-batches of a virtual rank; why steps were left out."""
    plan, share = BatchPlan(24, 10, V, accumulation=2), virtual_ranks_of(V, world.rank, world.size)
    take = TaskSteps(replica, squared, scale=scale, max_norm=1.0).take_step
    results = [take(step) for step in load_steps(data(), plan, share, LoadingOptions(CPU), start=0, stop=6)]
    return ["" if one.skip_cause is None else one.skip_cause.message for one in results]


def bits(replica: Strategy) -> str:
    with replica.use_merged_buffers():
        return hash_tensors({held.name: held.tensor for held in replica.state()})


def test_a_scale_that_fits_changes_no_bit(world: World) -> None:
    plain, scaled = (made("exact", world, fp16=False) for _ in range(2))
    assert trained(plain, None, world) == trained(scaled, LossScale(), world) == [""] * 6
    assert bits(plain) == bits(scaled)


def test_small_gradients_are_zeros_without_it(world: World) -> None:
    found: list[float] = []
    for scale in (None, LossScale()):
        replica = made("single", world)
        plan, gradients = BatchPlan(24, 24, V), list[Tensor]()
        (step,) = load_steps(data(), plan, range(V), LoadingOptions(CPU), start=0, stop=1)
        replica.optimizer.register_step_pre_hook(
            lambda *_, r=replica, g=gradients: g.extend(h.tensor.clone() for h in r.gradients() if h.name in HALF)
        )
        TaskSteps(replica, lambda o, t: squared(o, t) * 1e-10, scale=scale).take_step(step)
        found.append(float(torch.cat([g.flatten() for g in gradients]).abs().max()))
    assert found[0] == 0 < found[1]


def test_the_scale_halves_and_doubles_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_model, "STEPS_UNTIL_DOUBLED", 3)
    scale = LossScale()
    assert scale.halve_after_overflow("step 1") and scale.value == INITIAL_LOSS_SCALE / 2
    for _ in range(5):
        scale.count_good_step()
    again = LossScale()
    again.load_json_state(json.loads(json.dumps(scale.json_state())))
    again.count_good_step()  # the third since the last change
    assert (again.value, again.skipped) == (2 * INITIAL_LOSS_SCALE, 1)
    again.load_json_state({"loss_scale": [SMALLEST, 0, 1]})
    assert (
        again.halve_after_overflow("step 2") == "" and again.value == SMALLEST
    )  # now the policy for what is not finite counts


def test_an_overflow_is_told_but_ends_no_run(world: World) -> None:
    said: list[str] = []
    left_out = SkippedSteps("stop", world, said.append)
    assert not any(
        left_out.record_skip(step, NonFiniteCause("too large", is_loss_scale_overflow=True)) for step in range(1, 30)
    )
    assert len(said) == 29


def of_ranks(rank: int, size: int, folder: str) -> dict[str, Any]:
    """What each strategy comes to in worlds of 3, 2 and 1."""
    found: dict[str, Any] = {}
    for number in worlds(rank, [3, 2, 1], folder):
        world = World(rank, number, rank, number, CPU, "gloo")
        for name in ("exact", "zero", *(MANY if number == 3 else ())):
            scale, replica = LossScale(), made(name, world)
            words = trained(replica, scale, world)
            with replica.use_merged_buffers():
                found[f"{name} {number}"] = [words, scale.value, hash_tensors(replica.weights())]
    return found


def test_a_step_that_overflows_is_left_out_and_counted(world: World) -> None:
    replica, scale = made("exact", world), LossScale()
    words = trained(replica, scale, world)
    overflows = sum(map(bool, words))
    assert 1 <= overflows == scale.skipped < 6 and scale.value == INITIAL_LOSS_SCALE / 2**overflows
    assert all(step.endswith(f"{INITIAL_LOSS_SCALE / 2**n:g}") for n, step in enumerate(filter(None, words), 1))


@pytest.mark.slow
@pytest.mark.ranks
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all_at_every_world_size(tmp_path: Path) -> None:
    ranks = run_ranks(of_ranks, 3, tmp_path, str(tmp_path / "meeting"))
    (expected, *others) = [found for one in ranks for name, found in one.items() if name.startswith(("exact", "zero"))]
    assert len(others) == 11 and all(one == expected for one in others)
    words, value, _ = expected
    assert 1 <= sum(map(bool, words)) < 6 and value == INITIAL_LOSS_SCALE / 2 ** sum(map(bool, words))
    for name in MANY:
        assert [of_rank[f"{name} 3"][:2] for of_rank in ranks] == [[words, value]] * 3


TASK = """
import paceline, torch
from paceline.data.arrays import ArrayDataset

def data():
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1)
    targets[5] = 60.0
    return ArrayDataset(inputs, targets)

def squared(outputs, targets):
    return (outputs[:, 0] - targets).square()

def task():
    def model():
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return paceline.Task(make_model=model, make_dataset=lambda _: data(), loss=squared)
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_the_scale_is_kept_in_checkpoints(paceline: Any, tmp_path: Path) -> None:
    """Without it a run that goes on would leave out other steps."""
    (tmp_path / "scaled.py").write_text(TASK)
    digests: list[str] = []
    for nproc, more in ((1, ""), (2, "--rehearse-preemption 4")):
        run = paceline(
            *f"train {tmp_path}/scaled.py:task --strategy exact --virtual-ranks 3 --global-batch 10 --epochs 4".split(),
            *f"--precision fp16 --nproc {nproc} --run-dir {tmp_path}/{nproc} {more}".split(),
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert "beyond fp16's range" in run.stdout and "fp16: " in run.stdout
        digests.append(json.loads((tmp_path / f"{nproc}" / "summary.json").read_text())["weights_sha256"])
    assert digests[0] == digests[1]
