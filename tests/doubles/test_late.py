"""A step that reads once at its end, as on a GPU, gives the results of the CPU."""

import os
import subprocess
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.doubles.syncs import on_the_cpu
from tests.ended import ended
from tests.errors import raises
from tests.run_ranks import run_ranks
from tests.train.test_nonfinite import BAD, CPU, MANY, batches, bits, good, made, of_ranks, rooted
from tests.worlds import world as world
from torch import Tensor, nn

from paceline import (
    STRATEGIES,
    BatchPlan,
    LoadingOptions,
    Schedule,
    Strategy,
    World,
    fit,
    load_steps,
    virtual_ranks_of,
)
from paceline.checkpoint.shards import hash_tensors
from paceline.collectives.control import are_finite
from paceline.data.arrays import ArrayDataset
from paceline.data.loader import MicroBatch, PrefetchTrigger
from paceline.errors import PacelineError, StallError
from paceline.protocol.evidence import Phase
from paceline.rank.guard import HangGuard
from paceline.runs.events import Checkpointed, Evaluated, Notice, RolledBack, Skipped, Step, read_events
from paceline.stepping.step import Step as TrainingStep
from paceline.stepping.totals import TotalsReducer, UnreadStep
from paceline.stepping.trained_model import ModelInTraining
from paceline.strategies.average import EmaWeights
from paceline.strategies.optimizers import can_skip_step_on_device, changes_nothing_if_skipped
from paceline.train.step import TaskSteps


def trained(world: World, name: str, clip: float | None) -> tuple[Strategy, list[float | None]]:
    replica = made(name, world, 2)
    take = TaskSteps(replica, good, max_norm=clip).take_step
    results = [take(step) for step in batches(world, 2, batch=8)]
    return replica, [number for one in results for number in (one.loss, one.total_weight, one.grad_norm)]


def of_strategies(rank: int, size: int) -> dict[str, bool]:
    world, found = World(rank, size, rank, size, CPU, "gloo"), dict[str, bool]()
    for name in MANY:
        for clip in (None, 0.5):
            early, numbers = trained(world, name, clip)
            with on_the_cpu():
                late, the_same = trained(world, name, clip)
            found[f"{name} {clip}"] = bits(early) == bits(late) and numbers == the_same
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_every_strategy_comes_to_the_same_bits(tmp_path: Path) -> None:
    for found in run_ranks(of_strategies, 2, tmp_path):
        assert len(found) == 2 * len(MANY) and all(found.values()), found


def named(rank: int, size: int, folder: str) -> dict[str, Any]:
    with on_the_cpu():
        return of_ranks(rank, size, folder)


@pytest.mark.ranks
@pytest.mark.slow
def test_who_made_a_step_bad_is_found_as_early(tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting")
    assert run_ranks(named, 2, tmp_path, meeting) == run_ranks(of_ranks, 2, tmp_path, f"{meeting}-2")


def test_a_loss_counts_with_its_value_at_its_backward(world: World) -> None:
    """The loop may write into it later, and a replay of a CUDA graph writes into its output."""
    (micro_batches,), losses = batches(world, 2), list[float]()
    with on_the_cpu():
        step = TrainingStep(world, 2, lambda phase: None)
        step.parts.append(ModelInTraining(replica := made("exact", world, 2)))
        for batch in step.run_micro_batches("here", micro_batches):
            loss = good(replica.model(batch.inputs), batch.targets).mean()
            losses.append(loss.item())
            step.backward(loss)
            loss.data.zero_()
        assert step.end().loss == pytest.approx(sum(losses) / 2)


def weightless(outputs: Tensor, targets: Tensor) -> Any:
    return good(outputs, targets), torch.zeros_like(targets)


def unbounded(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets == 0, torch.inf, good(outputs, targets))


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    ("loss", "words"),
    [(rooted, "the gradient of all 2"), (unbounded, "the loss is not finite"), (weightless, "sum to 0")],
)
def test_what_is_wrong_changes_nothing(world: World, loss: Callable[..., Any], words: str, clip: float | None) -> None:
    (step,) = batches(world, 2)
    told: list[str] = []
    for around in (nullcontext, on_the_cpu):
        replica = made("exact", world, 2)
        TaskSteps(replica, good).take_step(step)  # so that buffers and moments are there
        before = bits(replica)
        with around(), pytest.raises(PacelineError, match=words) as caught:
            TaskSteps(replica, loss, max_norm=clip).take_step(step)
        assert bits(replica) == before
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert loss is weightless or all(str(sample) in told[0] for sample in BAD)


def test_a_freed_rank_believes_nothing_that_it_has_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (step,) = batches(world, 2)
    replica = made("exact", world, 2)
    TaskSteps(replica, good).take_step(step)
    before, heard = bits(replica), list[str]()

    def freed(guard: HangGuard) -> None:
        raise StallError("freed")

    monkeypatch.setattr(HangGuard, "check_not_released", freed)
    monkeypatch.setattr(
        "paceline.stepping.totals.TotalsReducer.read_totals", lambda self, totals: heard.append("totals")
    )
    with on_the_cpu(), pytest.raises(StallError):
        TaskSteps(replica, good, max_norm=1.0).take_step(step)
    assert bits(replica) == before
    assert not heard


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_gradients_of_several_types_are_looked_at_at_once(bad: float) -> None:
    gradients = [torch.full((100,), 3e4, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)]
    with on_the_cpu():
        assert are_finite([*gradients, torch.full((100,), 3e38)], CPU).numbers.tolist() == [0.0]  # nothing overflows
        for gradient in gradients:
            gradient[7] = bad
            assert not are_finite(gradients, CPU).result()
            gradient[7] = 1


def test_the_next_batches_are_begun_while_the_device_is_busy_with_the_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (step,), said, ahead = batches(world, 2), list[str](), PrefetchTrigger()
    replica = made("exact", world, 2)
    ahead.start_batches = lambda: said.append("begin")
    freed, start = HangGuard.check_not_released, TotalsReducer.start
    monkeypatch.setattr(HangGuard, "check_not_released", lambda self: (said.append("read"), freed(self)))
    monkeypatch.setattr(TotalsReducer, "start", lambda self: (said.append("last backward"), start(self))[1])
    replica.optimizer.register_step_pre_hook(lambda *_: said.append("update"))
    for around, wanted in (
        (on_the_cpu, ["last backward", "begin", "read", "read", "update"]),  # the last read looks again
        (nullcontext, ["last backward", "read", "update"]),
    ):
        with around():
            TaskSteps(replica, good, ahead=ahead).take_step(step)
        assert [*said] == wanted
        said.clear()


# ---- results that are read in the next step

LATE_STEPS = 9
FAILS = 400.0
NAN_LOSS, NAN_GRADIENT, HUGE_GRADIENT = 100.0, 200.0, 300.0  # targets
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}


def spoiled(outputs: Tensor, targets: Tensor) -> Tensor:
    """For some targets not finite, or with a gradient that is not, or whose norm needs float64."""
    losses = (outputs[:, 0] - targets.clamp(max=2)).square()
    root = torch.where(targets == NAN_GRADIENT, outputs[:, 0] * 0, 1).abs().sqrt()
    huge = outputs[:, 0] * torch.where(targets == HUGE_GRADIENT, 1e25, 0)  # its square is not a float32
    return torch.where(targets == NAN_LOSS, torch.nan, losses + root + huge)


def late_batches(
    world: World, virtual_ranks: int, bad: Collection[int], kind: float, size: int = 12
) -> list[list[MicroBatch]]:
    """Two micro-batches for each virtual rank and step."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(LATE_STEPS * size, 4, generator=generator)
    targets = inputs.sum(1).clamp(max=2)
    for step in bad:
        targets[size * step + 7] = kind
    plan = BatchPlan(len(inputs), size, virtual_ranks, 2, shuffle=False)
    share = virtual_ranks_of(virtual_ranks, world.rank, world.size)
    return [*load_steps(ArrayDataset(inputs, targets), plan, share, LoadingOptions(CPU), start=0, stop=LATE_STEPS)]


def is_late(step: int) -> bool:
    return step not in (6, LATE_STEPS)  # after these steps the state is used


def normalized(world: World, strategy: str = "single", optimizer: str = "adamw", virtual_ranks: int = 1) -> Strategy:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    return STRATEGIES[strategy](model, OPTIMIZERS[optimizer], world, virtual_ranks=virtual_ranks)


def recorded(
    world: World, strategy: str, optimizer: str, bad: Collection[int], *, kind: float = NAN_LOSS, late: bool,
    virtual_ranks: int = 1, may_skip: bool = True, clip: float | None = None, loss: Any = spoiled,
    make_steps: Any = late_batches, make_replica: Callable[..., Strategy] | None = None, **options: Any,
) -> tuple[list[str], int]:  # fmt: skip
    """What `fit` reports, digests of all state and of an average of the weights; and the number of late steps."""
    replica = (make_replica or normalized)(world, strategy, optimizer, virtual_ranks)
    average, found, lates = EmaWeights(replica.state(), 0.9), list[Any](), list[int]()
    with on_the_cpu(), pytest.MonkeyPatch.context() as patch:
        step_unless = Strategy.step_unless
        patch.setattr(Strategy, "step_unless", lambda self, bad: (lates.append(1), step_unless(self, bad)))
        try:
            for record in fit(
                replica, make_steps(world, virtual_ranks, bad, kind), loss, Schedule(0.1, LATE_STEPS, 2, "linear"),
                may_defer_read=is_late if late else None, may_skip=may_skip, max_norm=clip, **options,
            ):  # fmt: skip
                result = record.result
                assert result.unread is None
                if result.skip_cause is None:
                    average.update()
                cause = result.skip_cause and (result.skip_cause.message, result.skip_cause.samples)
                found.append((record.step, result.loss, result.grad_norm, result.total_weight, record.lr, cause))
                if not is_late(record.step):
                    found.append(bits(replica))
                if result.votes.stop:
                    break
        except (PacelineError, OSError, RuntimeError) as error:
            found.append(str(error))
    found += [bits(replica), hash_tensors({shard.name: shard.tensor for shard in average.state()})]
    return [*map(repr, found)], len(lates)


LATE_CASES: list[tuple[str, str, float | None, Collection[int], float, bool]] = [
    ("adamw", "single", None, (), 0.0, True),
    ("adamw", "bucketed", 0.5, (3, 4), NAN_GRADIENT, True),
    ("adamw", "exact", 0.5, (5, 6, 7, 8), NAN_LOSS, True),
    ("adamw", "single", None, (4,), NAN_GRADIENT, False),
    ("adamw", "exact", 0.5, (4,), HUGE_GRADIENT, False),
    ("sgd", "single", 0.5, (4,), HUGE_GRADIENT, False),
    ("amsgrad", "single", 100.0, (0, 3), NAN_LOSS, True),  # the norm is smaller
    ("adagrad", "single", None, (0, 1, 4), NAN_GRADIENT, True),
    ("sgd", "exact", None, (0, 4), NAN_GRADIENT, True),
    ("momentum", "single", 0.5, (0, 1, 4), NAN_LOSS, True),
    ("momentum", "bucketed", None, (7,), NAN_LOSS, False),
]
"""optimizer, strategy, clip, steps that are not finite, how, whether they are skipped"""


@pytest.mark.parametrize(("optimizer", "strategy", "clip", "bad", "kind", "may_skip"), LATE_CASES)
def test_late_steps_have_the_results_and_reports_of_others(
    world: World, optimizer: str, strategy: str, clip: float | None, bad: Collection[int], kind: float, may_skip: bool
) -> None:
    virtual_ranks = 2 if strategy == "exact" else 1
    options: Any = {"kind": kind, "virtual_ranks": virtual_ranks, "clip": clip, "may_skip": may_skip}
    wanted, number = recorded(world, strategy, optimizer, bad, late=False, **options)
    found, late_number = recorded(world, strategy, optimizer, bad, late=True, **options)
    assert found == wanted
    assert number == 0 and late_number >= 2


def broken_after(steps: Sequence[Any], number: int) -> Generator[Any]:
    yield from steps[:number]
    raise OSError("the dataset cannot be read")


@pytest.mark.parametrize("bad", [(), (3,)])
@pytest.mark.parametrize("where", ["data", "forward"])
def test_an_error_follows_the_record_of_a_late_step(
    world: World, where: str, bad: Collection[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record counts the step, so that the saved state has the right number."""

    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets[0] == FAILS:
            raise OSError("the loss cannot be computed")
        return spoiled(outputs, targets)

    def broken(*arguments: Any) -> Any:
        steps = late_batches(*arguments)
        if where == "data":
            return broken_after(steps, 4)
        steps[4][0].targets[0] = FAILS
        return steps

    options: Any = {"bad": bad, "loss": fails, "make_steps": broken}
    wanted, _ = recorded(world, "single", "adamw", late=False, **options)
    found, late_number = recorded(world, "single", "adamw", late=True, **options)
    assert found == wanted and "cannot be" in wanted[-3]
    assert late_number >= 2


def test_a_late_step_that_is_finite_when_it_is_repeated_does_not_count(world: World) -> None:
    calls: list[int] = []

    def fails_once(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        return spoiled(outputs, targets) * (torch.nan if len(calls) == 2 * 3 + 1 else 1)  # in step 4

    found, _ = recorded(world, "single", "adamw", (), late=True, loss=fails_once)
    skipped = [text for text in found if "computed again" in text]
    assert len(skipped) == 1 and skipped[0].startswith("(4, ")


def test_a_training_that_is_left_at_the_record_of_a_late_step_has_its_state(world: World) -> None:
    states: list[str] = []
    for late in (None, is_late):
        replica = normalized(world)
        with on_the_cpu():
            records = fit(replica, late_batches(world, 1, (), 0.0), spoiled, Schedule(0.1, 9), may_defer_read=late)
            while next(records).step < 4:
                pass
            records.close()
        states.append(bits(replica))
    assert states[0] == states[1]


def test_a_late_step_that_cannot_be_read_leaves_no_state_to_save(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: UnreadStep, *, alone: bool = False) -> bool:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(UnreadStep, "read", lost)
    phases: list[Phase] = []
    replica = normalized(world)
    with on_the_cpu(), pytest.raises(RuntimeError, match="lost"):
        for _ in fit(
            replica, late_batches(world, 1, (), 0.0), spoiled, Schedule(0.1, 9), may_defer_read=is_late,
            enter=phases.append,
        ):  # fmt: skip
            pass
    assert phases[-1] is Phase.OPTIMIZER


class WritesInForward(nn.Module):
    """Writes into its inputs after the first `since` calls, or into a parameter."""

    def __init__(self, since: int, max_norm: float | None = None) -> None:
        super().__init__()
        self.calls, self.since, self.limited = 0, since, max_norm is not None
        self.table, self.linear = nn.Embedding(6, 4, max_norm=max_norm), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.limited:
            return self.linear(self.table((inputs.abs() * 2).long().clamp(max=5)).sum(1))
        return self.linear(inputs.mul_(0.5) if self.calls > self.since else inputs * 0.5)


@pytest.mark.parametrize("kind", [NAN_LOSS, HUGE_GRADIENT])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_steps_of_a_forward_that_writes_into_its_batch_or_a_parameter_are_not_late(
    world: World, kind: float, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second forward would change the batch again. The average would contain what the next forward has written."""

    def made(*_: object) -> Strategy:
        torch.manual_seed(0)
        return STRATEGIES["single"](WritesInForward(0, max_norm), OPTIMIZERS["adamw"], world)

    monkeypatch.setattr(f"{__name__}.normalized", made)
    options: Any = {"kind": kind, "clip": 0.5}
    wanted, _ = recorded(world, "single", "adamw", (4,), late=False, **options)
    found, late_number = recorded(world, "single", "adamw", (4,), late=True, **options)
    assert found == wanted
    assert not late_number


@pytest.mark.parametrize("since", [2 * 4, 2 * 5])  # in the step that is not finite, or in the next one
def test_a_step_that_cannot_be_repeated_is_an_error(world: World, since: int) -> None:
    replica = STRATEGIES["single"](WritesInForward(since), OPTIMIZERS["adamw"], world)
    steps, seen = late_batches(world, 1, (4,), NAN_LOSS), list[str]()
    with on_the_cpu(), raises("written-in-forward", step=5):
        for _ in fit(replica, steps, spoiled, Schedule(0.1, 9), may_defer_read=is_late, may_skip=True):
            seen.append(bits(replica))
    assert len(seen) == 4 and bits(replica) == seen[-1]


class Own(torch.optim.AdamW):
    """May ignore `found_inf`."""


def test_only_optimizers_that_can_skip_are_late() -> None:
    def can_skip(make: Callable[[Any], Any], steps: int = 1) -> bool:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = make([parameter])
        for _ in range(steps):
            parameter.grad = torch.ones(3)
            optimizer.step()
        parameter.grad = torch.ones(3)
        return can_skip_step_on_device(optimizer) and changes_nothing_if_skipped(optimizer)

    def hooked(parameters: Any) -> Any:
        optimizer = OPTIMIZERS["adamw"](parameters)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    def wrapped(parameters: Any) -> Any:
        optimizer = OPTIMIZERS["adamw"](parameters)
        optimizer.step = partial(optimizer.step)
        return optimizer

    assert all(can_skip(make) for make in OPTIMIZERS.values())
    assert [name for name, make in OPTIMIZERS.items() if can_skip(make, steps=0)] == ["adagrad", "sgd"]
    for make in (
        hooked, wrapped, lambda p: Own(p, fused=True), torch.optim.RMSprop, torch.optim.AdamW,
        lambda p: torch.optim.SGD(p, momentum=0.9),
    ):  # fmt: skip
        assert not can_skip(make)


TASK = (
    f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
"""
    + """
import os
import torch
from tests.doubles.syncs import on_the_cpu
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from paceline import Strategy, Task

if os.environ.get("LATE"):
    kept = on_the_cpu()
    kept.__enter__()
    step_unless = Strategy.step_unless
    late_file = os.environ.get("LATE_FILE", "late.txt")
    Strategy.step_unless = lambda self, bad: (print("late", file=open(late_file, "a")), step_unless(self, bad))


class Data(Dataset):
    def __init__(self, split):
        self.bad = 7 if split == "train" else None

    def __len__(self):
        return 60

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, x.sum() * (torch.nan if index == self.bad else 1)


class Stream(IterableDataset):
    def __iter__(self):
        return map(Data("test").__getitem__, range(60))


def loss(outputs, targets):
    return (outputs[:, 0] - targets).square()


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


task = Task(model, Data, loss)
finite = Task(  # without buffers, which a rank could not save alone
    lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), lambda split: Data("test"), loss
)
streamed = Task(model, lambda split: Stream() if split == "train" else Data(split), loss)
"""
)


def train(folder: Path, task: str, *options: str, late: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(TASK)
    command = ["-m", "paceline", "train", f"mine.py:{task}", "--global-batch", "12", "--epochs", "2", *options]
    return warm.run(
        [*command, "--collectives", "torch", "--run-dir", "run"], torch=True, cwd=folder, timeout=170,
        env=os.environ | {"LATE": late},
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(
    "arguments",
    [
        ("task", "--not-finite", "skip", "--ema", "0.9", "--eval-every", "4"),
        ("task", "--not-finite", "rollback", "--checkpoint-every", "6", "--clip-norm", "0.5"),
        ("task", "--checkpoint-every", "5"),  # stops at step 3
        ("task", "--nproc", "2", "--not-finite", "skip", "--ema", "0.9", "--eval-every", "4"),
        pytest.param(
            (
                "task",
                "--nproc",
                "3",
                "--not-finite",
                "rollback",
                "--checkpoint-every",
                "6",
                "--clip-norm",
                "0.5",
                "--strategy",
                "exact",
            ),
            marks=pytest.mark.slow,
        ),
        ("streamed", "--schedule", "constant"),  # its end is known only after the last step
    ],
)
def test_a_run_with_late_steps_writes_what_others_write(arguments: Sequence[str], tmp_path: Path) -> None:
    found: list[Any] = []
    said: list[Any]
    task, *options = arguments
    for late in ("", "1"):
        folder = tmp_path / f"run{late}"
        done = train(folder, task, *options, late=late)
        events = [*read_events(folder / "run" / "events-0.jsonl")]
        said = [e.text.replace(str(folder), "") for e in events if isinstance(e, Notice)]
        said += [(e.step, e.samples) for e in events if isinstance(e, Skipped)]
        said += [(e.step, e.to) for e in events if isinstance(e, RolledBack)]
        said += [(e.step, e.metrics) for e in events if isinstance(e, Evaluated)]
        steps = [e for e in events if isinstance(e, Step)]
        numbers = [(e.step, e.loss, e.grad_norm, e.lr, e.skipped, e.samples) for e in steps]
        shards = (folder / "run" / "checkpoints").glob("*/*.safetensors")
        saved = sorted((path.parent.name, sha256(path.read_bytes()).hexdigest()) for path in shards)
        found.append((done.returncode, said, numbers, saved, ended(folder / "run").weights_sha256))
        assert (folder / "late.txt").exists() == (bool(late) and task == "task")
    assert found[0] == found[1]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_late_run_that_one_rank_is_asked_to_stop_is_saved_and_resumed(tmp_path: Path) -> None:
    digests: list[str | None] = []
    for late, last in (("", 3), ("1", 4)):  # rank 1 gets the request after step 2
        folder = tmp_path / f"run{late}"
        done = train(folder, "finite", "--nproc", "2", "--rehearse-preemption", "2", late=late)  # and resumes
        assert done.returncode == 0, done.stderr
        for rank in range(2):
            events = [*read_events(folder / "run" / f"events-{rank}.jsonl")]
            assert [e.step for e in events if isinstance(e, Step)] == [*range(1, 11)]
            assert rank or next(e.step for e in events if isinstance(e, Checkpointed)) == last
        digests.append(ended(folder / "run").weights_sha256)
    assert len({*digests}) == 1
