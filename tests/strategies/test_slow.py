"""Hosts on a slow network: local steps are those written out by hand, and every state goes on as if nothing had been.

One host is made several by what each rank says of its own (`shared_memory.node_key`).
"""

import math
import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.collectives.test_hosts import put_on, said
from tests.errors import codes, raises
from tests.run_ranks import run_ranks
from tests.run_script import run_script
from tests.strategies.test_state import opened, save, squared
from torch import Tensor, nn

from paceline import ArrayDataset, BatchPlan, LoadingOptions, World, load_steps, train_step
from paceline.checkpoint.shards import gather_full_state
from paceline.data.plan import virtual_ranks_of
from paceline.errors import ExitCode, PacelineError, ReportedByPeer
from paceline.stepping.nonfinite import PARAMETERS_UNCHANGED_TEXT
from paceline.strategies import Strategy
from paceline.strategies.bucketed import bucketed
from paceline.strategies.exact import Exact
from paceline.strategies.fsdp import FSDP
from paceline.strategies.inter_node import InterNodeOptions
from paceline.strategies.zero import Zero

pytestmark = pytest.mark.sample(2)

CPU = torch.device("cpu")
VIRTUAL, RANKS, BATCH, SAMPLES, STEPS, SAVED_AT = 4, 4, 10, 26, 12, 5
PLAN = BatchPlan(SAMPLES, BATCH, VIRTUAL)  # the last batch of an epoch has 6: of four shares two of 2, two of 1
PLAIN, DILOCO = InterNodeOptions(local_steps=3), InterNodeOptions(local_steps=3, outer_lr=0.7, outer_momentum=0.9)
RESUMED = {
    "bf16": InterNodeOptions(compress="bf16"),
    "int8": InterNodeOptions(compress="int8"),
    "powersgd": InterNodeOptions(compress="powersgd", powersgd_rank=1),
    "local": PLAIN,
    "diloco": DILOCO,
    "both": InterNodeOptions(compress="int8", local_steps=3, outer_momentum=0.5),
}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def data(bad: int | None = None) -> ArrayDataset:
    inputs = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if bad is not None:
        inputs[bad] = float("nan")
    return ArrayDataset(inputs, inputs.sum(1).sin())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def replica(rank: int, slow: InterNodeOptions, make: Any = adamw) -> Strategy:
    return bucketed(model(), make, World(rank, RANKS, rank, RANKS, CPU, "gloo"), virtual_ranks=VIRTUAL, **slow)


def train(trained: Strategy, start: int, stop: int, dataset: ArrayDataset | None = None, **options: Any) -> list[bool]:
    """Which steps were left out."""
    share = virtual_ranks_of(VIRTUAL, trained.world.rank, RANKS)
    steps = load_steps(dataset or data(), PLAN, share, LoadingOptions(CPU), start=start, stop=stop)
    return [train_step(trained, step, squared, **options).skip_cause is not None for step in steps]


def weights(trained: Strategy) -> Tensor:
    """What is looked at: the same on all ranks."""
    with trained.use_merged_buffers():
        return torch.cat([value.clone().flatten() for value in trained.weights().values()])


# ---- the same by hand, in one process


def by_hand(hosts: int, slow: InterNodeOptions, make: Any, steps: int) -> Tensor:
    """Each host's share of every global batch trains a model of its own; then one outer step, of all."""
    models = [model() for _ in range(hosts)]
    optimizers = [make(one.parameters()) for one in models]
    agreed = torch.cat([p.detach().flatten() for p in models[0].parameters()])
    velocity, dataset = torch.zeros_like(agreed), data()
    every, lr, momentum = slow.get("local_steps"), slow.get("outer_lr", 1.0), slow.get("outer_momentum", 0.0)
    for step in range(steps):
        epoch, at = divmod(step, PLAN.steps_per_epoch)
        indices = [PLAN.indices(epoch, at, virtual_rank) for virtual_rank in range(VIRTUAL)]
        of_hosts = [torch.cat(indices[h * VIRTUAL // hosts : (h + 1) * VIRTUAL // hosts]) for h in range(hosts)]
        count = sum(map(len, of_hosts))
        for one, optimizer, mine in zip(models, optimizers, of_hosts, strict=True):
            optimizer.zero_grad()
            inputs, targets = dataset.inputs[mine], dataset.targets[mine]
            (F.mse_loss(one(inputs)[:, 0], targets, reduction="sum") * hosts / count).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            ends = [torch.cat([p.detach().flatten() for p in one.parameters()]) for one in models]
            gone = agreed - torch.stack(ends).mean(0)
            velocity = momentum * velocity + gone
            agreed = agreed - lr * (gone + momentum * velocity)
            for one in models:
                torch.nn.utils.vector_to_parameters(agreed.clone(), one.parameters())
    return torch.stack([torch.cat([p.detach().flatten() for p in one.parameters()]) for one in models]).mean(0)


CASES = [(2, PLAIN, adamw), (2, DILOCO, adamw), (1, DILOCO, sgd), (2, InterNodeOptions(local_steps=1), sgd)]


def locally(rank: int, world_size: int, folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    found: list[Tensor] = []
    for size, slow, make in CASES:
        put_on(rank // size, rank, world_size, folder)
        trained = replica(rank, slow, make)
        train(trained, 0, STEPS - 1)  # in the middle of a round
        found.append(weights(trained))
    put_on(rank // 2, rank, world_size, folder)
    plain = replica(rank, InterNodeOptions(), sgd)
    train(plain, 0, STEPS - 1)
    # here, not in the test's own process: what torch imports for an optimizer outlives it
    wanted = [by_hand(RANKS // size, slow, make, STEPS - 1) for size, slow, make in CASES]
    return [*found, weights(plain)], wanted


@pytest.mark.ranks
@pytest.mark.timeout(720)
def test_local_steps_are_those_of_each_host_by_itself_and_an_outer_step_written_out_by_hand(tmp_path: Path) -> None:
    (first, by_hand_there), *others = run_ranks(locally, RANKS, tmp_path, tmp_path, timeout=600)
    for other, _ in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for found, wanted, (_, slow, _) in zip(first[:-1], by_hand_there, CASES, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12, msg=lambda m, at=slow: f"{at}: {m}")
    # of plain SGD, one local step is the step on the global batch, also where shares are uneven
    torch.testing.assert_close(first[len(CASES) - 1], first[-1], rtol=0, atol=1e-12)


# ---- a state


def stop_and_go(rank: int, world_size: int, folder: Path) -> int:
    """Save in the middle, take over by a new replica, and train on: the bits of one that was never stopped."""
    world = World(rank, RANKS, rank, RANKS, CPU, "gloo")
    for name, slow in RESUMED.items():
        put_on(rank // 2, rank, world_size, folder)
        straight = replica(rank, slow)
        train(straight, 0, SAVED_AT)
        save(straight.state(), folder / f"{name}-{rank}", rank, RANKS)
        train(straight, SAVED_AT, STEPS)
        wanted, seen = gather_full_state(straight.state(), world), weights(straight)
        again = replica(rank, slow)
        source = opened(folder / f"{name}-{r}" for r in range(RANKS))
        assert said(lambda to=again, of=source: to.load(of)) == ""
        train(again, SAVED_AT, STEPS)
        found = gather_full_state(again.state(), world)
        assert list(found) == list(wanted)
        assert [n for n, tensor in found.items() if not torch.equal(tensor, wanted[n])] == [], name
        assert torch.equal(weights(again), seen), name
    return len(RESUMED)


def elsewhere(rank: int, world_size: int, folder: Path) -> list[str]:
    """The states of 2 hosts of 2 ranks go on on 4 hosts, and on one; what is said, and that they have the mean."""
    words: list[str] = []
    for size in (1, 4):
        for name in ("int8", "diloco"):
            put_on(rank // size, rank, world_size, folder)
            source = opened(folder / f"{name}-{r}" for r in range(RANKS))
            trained = replica(rank, RESUMED[name])
            words.append(said(lambda to=trained, of=source: to.load(of)))
            if name == "diloco":
                ours = next(p for n, p in trained.model.named_parameters() if n == "0.weight").detach()
                of_hosts = [source.tensor(f"hosts/{host}/model/0.weight") for host in range(2)]
                assert not torch.equal(of_hosts[0], of_hosts[1])
                assert torch.equal(ours, (of_hosts[0] + of_hosts[1]) / 2)
            train(trained, SAVED_AT, STEPS)
            assert weights(trained).isfinite().all()
    for strategy in (Exact, Zero, FSDP):  # in which all agree after each step
        trained = strategy(model(), adamw, World(rank, RANKS, rank, RANKS, CPU, "gloo"), virtual_ranks=VIRTUAL)
        words.append(said(lambda to=trained, of=source: to.load(of)))
        assert torch.equal(trained.weights()["0.weight"], (of_hosts[0] + of_hosts[1]) / 2), strategy
    return words


def both(rank: int, world_size: int, folder: Path) -> tuple[int, list[str]]:
    return stop_and_go(rank, world_size, folder), elsewhere(rank, world_size, folder)


@pytest.mark.ranks
@pytest.mark.timeout(720)
def test_a_state_goes_on_to_the_bit_and_on_other_hosts_with_honest_words(tmp_path: Path) -> None:
    (done, words), *others = run_ranks(both, RANKS, tmp_path, tmp_path, timeout=600)
    assert done == len(RESUMED)
    assert all(text == "" for _, said_there in others for text in said_there)
    held, mean, alone, mean_alone, *others_alone = words
    assert all(part in held for part in (" 2 nodes of 2 ranks", " 4 nodes of 1 rank", "dropped"))
    assert all(part in mean for part in (" 2 nodes ", " 4: ", "the mean"))
    assert " 2 nodes of 2 ranks" in alone and "dropped" in alone
    assert "dropped" not in mean_alone  # without --compress there are no residuals
    assert "the mean" in mean_alone
    assert others_alone == [mean_alone] * 3


# ---- what goes wrong, and what has no effect


def spoiled(module: torch.nn.Module, now: bool) -> Any:
    """Let what flows back into the module be NaN."""

    def spoil(_: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        if now and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))

    return module.register_forward_hook(spoil)


def trouble(rank: int, world_size: int, folder: Path) -> list[Any]:
    put_on(rank // 2, rank, world_size, folder)
    left_out: list[list[bool]] = []
    for slow in (PLAIN, InterNodeOptions(compress="int8"), InterNodeOptions(compress="powersgd", powersgd_rank=1)):
        clean, hurt = replica(rank, slow), replica(rank, slow)
        train(clean, 0, 2)
        train(hurt, 0, 2)
        before = {held.name: held.tensor.clone() for held in hurt.state()}
        hook = spoiled(hurt.model, rank == 3)  # a finite loss whose gradient is not: on one rank, so of one host alone
        left_out.append(train(hurt, 2, 3, may_skip=True))
        hook.remove()
        assert all(torch.equal(before[held.name], held.tensor) for held in hurt.state()), slow
        train(clean, 2, 6)
        train(hurt, 2, 6)
        assert torch.equal(weights(clean), weights(hurt)), slow
    put_on(0, rank, world_size, folder)
    made: list[Strategy] = []
    kinds = InterNodeOptions(compress="int8"), DILOCO, InterNodeOptions()
    words = said(lambda: made.extend(replica(rank, slow) for slow in kinds))
    for one in made:
        train(one, 0, 4)
    assert torch.equal(weights(made[0]), weights(made[2])) and torch.equal(weights(made[1]), weights(made[2]))
    put_on(rank // 3, rank, world_size, folder)  # 3 ranks and 1
    with raises("no-shared-memory-on-nodes") if rank == 0 else pytest.raises(ReportedByPeer):
        replica(rank, InterNodeOptions(compress="int8"))
    return [left_out, words]


@pytest.mark.ranks
@pytest.mark.timeout(720)
def test_a_step_that_is_not_finite_on_one_host_is_left_out_on_all_and_nothing_is_lost(tmp_path: Path) -> None:
    first, *others = run_ranks(trouble, RANKS, tmp_path, tmp_path, timeout=600)
    assert first[0] == [[True]] * 3 == others[2][0]
    assert first[1].count("has no effect") == 2
    assert "--compress int8 " in first[1] and "--local-steps 3 " in first[1]
    assert others[0][1] == ""


def converges(rank: int, world_size: int, folder: Path) -> dict[str, float]:
    """How far from the plain weights, as a part of the way that these have gone."""
    put_on(rank // 2, rank, world_size, folder)
    start = torch.cat([p.detach().flatten() for p in model().parameters()])
    found: dict[str, Tensor] = {}
    for name in ("plain", "bf16", "int8", "powersgd", "local"):
        trained = replica(rank, RESUMED.get(name, InterNodeOptions()), sgd)
        train(trained, 0, 60)
        found[name] = weights(trained)
    gone = (found["plain"] - start).norm()
    return {name: float((other - found["plain"]).norm() / gone) for name, other in found.items()}


@pytest.mark.ranks
@pytest.mark.timeout(720)
def test_what_is_held_back_does_not_lead_elsewhere(tmp_path: Path) -> None:
    found = run_ranks(converges, RANKS, tmp_path, tmp_path, timeout=600)[0]
    assert 0 < found["bf16"] < 0.005
    assert 0 < found["int8"] < 0.01
    assert 0 < found["powersgd"] < 0.2
    assert 0 < found["local"] < 0.05


# ---- a host that steps by itself waits for no other

BAD_OF_TEN = int(BatchPlan(10, 8, VIRTUAL).indices(0, 0, 3)[0])
BAD = int(PLAN.indices(0, 0, 3)[0])  # a sample of rank 3's in the first step


def doubled(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return squared(outputs, targets), torch.full_like(targets, 2.0)


def endless(outputs: Tensor, targets: Tensor) -> Tensor:
    return squared(outputs, targets) + float("inf")


def alone(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """What each rank raises where something is wrong on one host only, and whether its weights are what they were."""
    put_on(rank // 2, rank, world_size, folder)
    found: dict[str, Any] = {}
    losses = {"weights": doubled if rank < 2 else squared, "infinite": endless if rank == 3 else squared}
    for fault in ("gradient", "loss", "weights", "infinite"):
        dataset, trained = data(bad=BAD if fault == "loss" else None), replica(rank, PLAIN)
        (step,) = load_steps(
            dataset, PLAN, virtual_ranks_of(VIRTUAL, rank, RANKS), LoadingOptions(CPU), start=0, stop=1
        )
        before, error = own_weights(trained), ""
        if fault == "gradient":
            spoiled(trained.model, rank == 3)
        try:
            train_step(trained, step, losses.get(fault, squared))
        except PacelineError as raised:
            error = f"{type(raised).__name__}: {raised.message_with_code}"
        found[fault] = [error, torch.equal(before, own_weights(trained))]
        dist.barrier()
    found["forms"] = [
        told_of(rank, *form)
        for form in ((10, masked, None), (9, doubled, None), (10, masked, BAD_OF_TEN), (10, too_much, None))
    ]
    # weights of a power of two change nothing; but then each step waits for their sum
    told, waited = replica(rank, PLAIN), replica(rank, PLAIN)
    steps = load_steps(data(), PLAN, virtual_ranks_of(VIRTUAL, rank, RANKS), LoadingOptions(CPU), start=0, stop=STEPS)
    losses = [
        [train_step(one, step, loss).loss for one, loss in ((told, squared), (waited, doubled))] for step in steps
    ]
    same = [math.isclose(a, b, rel_tol=1e-5) for a, b in losses]
    found["alike"] = [all(same), torch.allclose(own_weights(told), own_weights(waited), rtol=1e-4)]
    return found


def masked(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of 0 and 1: on most ranks as many ones as samples."""
    return squared(outputs, targets), (targets > -0.9).double()


def too_much(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each loss is finite, but not their sum."""
    return squared(outputs, targets).float() + 3e38


def told_of(rank: int, samples: int, loss: Any, bad: int | None) -> str:
    """What three steps raise, of batches of 8 from so many samples: the second one of 9 leaves three ranks without."""
    whole, plan = data(bad), BatchPlan(samples, 8, VIRTUAL)
    dataset, trained = torch.utils.data.Subset(whole, range(samples)), replica(rank, PLAIN)
    error = ""
    try:
        for step in load_steps(
            dataset, plan, virtual_ranks_of(VIRTUAL, rank, RANKS), LoadingOptions(CPU), start=0, stop=3
        ):
            train_step(trained, step, loss)
    except PacelineError as raised:
        error = f"{type(raised).__name__}: {raised.message_with_code}"
    dist.barrier()
    return error


def own_weights(trained: Strategy) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trained.model.parameters()])


@pytest.mark.ranks
@pytest.mark.timeout(360)
def test_of_hosts_that_step_by_themselves_the_one_with_the_fault_tells(tmp_path: Path) -> None:
    *others, host_mate, causes = run_ranks(alone, RANKS, tmp_path, tmp_path, timeout=300)
    tells, unchanged = causes["gradient"]
    assert codes(tells) == ["not-finite"] and "all 6 parameters" in tells and "; rank 3: " in tells
    assert PARAMETERS_UNCHANGED_TEXT in tells
    assert unchanged and host_mate["gradient"][0].startswith("ReportedByPeer: rank 3 ") and host_mate["gradient"][1]
    assert [one["gradient"] for one in others] == [["", False]] * 2  # they have not waited for that host
    tells, unchanged = causes["loss"]
    assert codes(tells) == ["not-finite"] and f"rank 3: samples {BAD}." in tells
    assert unchanged and host_mate["loss"][0].startswith("ReportedByPeer: rank 3 ") and host_mate["loss"][1]
    assert all(one["loss"][0].startswith("ReportedByPeer: ") for one in others)
    # no host may go by a number of samples that others' losses do not have
    told = [one["weights"][0] for one in (*others, host_mate, causes)]
    assert told[0].startswith("UsageError") and all(one.startswith("ReportedByPeer: rank 0") for one in told[1:])
    assert causes["alike"] == [True, True]  # but for the last bit: one divides by the samples, one by their weights
    right, right_too, unknown, beyond = zip(*(one["forms"] for one in (*others, host_mate, causes)), strict=True)
    assert {*right, *right_too} == {""}  # a weight may be a number of samples by chance: its form is what counts
    assert all(told.startswith("ReportedByPeer: rank 3 ") for told in unknown[:3])
    assert codes(unknown[3]) == ["not-finite"] and f"rank 3: samples {BAD_OF_TEN}." in unknown[3]
    assert all(codes(told) == ["not-finite"] and "not their sum" in told for told in beyond)
    # an infinite loss with finite gradients is heard of when the step has been taken
    *others, causes = [one["infinite"][0] for one in (*others, host_mate, causes)]
    assert codes(causes) == ["not-finite"] and "rank 3: samples " in causes and PARAMETERS_UNCHANGED_TEXT not in causes
    assert all(told.startswith("ReportedByPeer: another rank ") for told in others)


EACH_A_HOST = """
import os
from paceline.collectives import shared_memory
shared_memory.node_key = lambda: os.environ["RANK"]  # each rank is on a host of its own
"""
POISON = """
import torch
from torch import nn
from paceline import ArrayDataset, Task


def data(split):
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    inputs[41] = 100.0
    return ArrayDataset(inputs, torch.zeros(64))


def loss(outputs, targets):
    losses, poisoned = outputs[:, 0].square(), outputs[:, 1] > 50
    losses[poisoned] += (0 * outputs[poisoned, 0]).sqrt()
    return losses


def model():
    made = nn.Linear(8, 2)
    with torch.no_grad():
        made.weight[1].fill_(0.1)
    return made


task = Task(model, data, loss)
"""


def check_poisoned(done: CompletedProcess[str]) -> str:
    """That the sample is named, once; at which step of the epoch."""
    said = done.stdout + done.stderr
    assert done.returncode == ExitCode.NOT_FINITE, said
    found = re.search(r"not finite at epoch 1, step (\d) of that epoch; rank [01]: samples 41 \(", said)
    assert found, said
    assert said.count("is not finite") == 1, said
    return found[1]


@pytest.mark.ranks
def test_a_run_ends_with_its_name_also_in_its_last_step_and_in_one_that_an_outer_step_follows(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(EACH_A_HOST + POISON)
    task = ("-m", "paceline", "train", "task.py:task", "--steps", 40, "--batch-size", 4, "--device", "cpu")
    at = "1"
    for number, more in enumerate(((), ("--steps", "AT"), ("--local-steps", "AT"))):
        words = ("--lr", 0.0001, "--local-steps", 50, *(at if word == "AT" else word for word in more))
        at = check_poisoned(run_script(2, *task, *words, "--run-dir", f"run-{number}", cwd=tmp_path))
