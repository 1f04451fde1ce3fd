"""A small training with audits, as the ranks of `run_ranks`."""

import random
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.bit_flips import Flip, Flipper, Part
from torch import Tensor, nn

from paceline.checkpoint.shards import hash_tensors
from paceline.data.arrays import ArrayDataset
from paceline.data.loader import LoadingOptions, load_micro_batch_for_audit, load_steps, split_inputs_and_targets
from paceline.data.plan import BatchPlan
from paceline.errors import PacelineError
from paceline.rank.world import World
from paceline.stepping.audit import StepAuditor
from paceline.strategies import STRATEGIES
from paceline.train.step import TaskSteps

SAMPLES, BATCH, WIDTH = 96, 24, 8
COST_EVERY, COST_RANKS, ROUND, ROUNDS = 10, 4, 40, 24


class Net(nn.Module):
    """With batch norm, whose buffers belong to virtual ranks, dropout, and a buffer that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(),
            nn.Linear(8, 1),
        )  # fmt: skip
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(()))
        self.buffer_reductions = {"scale": "mean"}

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x) * self.scale
        if self.training:
            self.scale = self.scale * 0.9 + 0.1 * x.detach().abs().mean()
        return out


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs[:, 0], targets, reduction="none")


class Training:
    """This rank's part. After an error the same step can be taken again."""

    def __init__(
        self, rank: int, size: int, virtual_ranks: int, every: int | None, *, strategy: str = "exact",
        accumulation: int = 1, model: nn.Module | None = None, samples: int = SAMPLES, batch: int = BATCH,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
        self.model = Net() if model is None else model
        self.flipper = Flipper(self.model)
        self.replica = STRATEGIES[strategy](
            self.model, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), self.world, virtual_ranks=virtual_ranks
        )
        x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))
        self.data = ArrayDataset(x, x.sum(1))
        self.plan = BatchPlan(samples, batch, virtual_ranks, accumulation)
        self.loading, self.saved, self.said = LoadingOptions(self.world.device), 0, list[str]()
        self.audits, self.every = None, every or 1
        if every is not None:
            self.audits = StepAuditor(every, self.world, virtual_ranks, "stop", self._save, self.said.append)
            self.audits.set_batch_source(self._load_again, self.plan)
        self.steps = TaskSteps(self.replica, losses, audits=self.audits)

    def _load_again(self, *place: Any) -> Any:
        batch = load_micro_batch_for_audit(self.data, self.loading, *place)
        return None if batch is None else split_inputs_and_targets(batch)

    def _save(self) -> None:
        self.saved += 1

    def step(self, number: int, flip: Flip | None = None) -> PacelineError | None:
        """Take the step with this number, from 0. Returns its error."""
        share = self.world.share(self.plan.virtual_ranks)
        (batches,) = load_steps(self.data, self.plan, share, self.loading, start=number, stop=number + 1)
        with self.flipper.flipping(flip):
            try:
                self.steps.take_step(batches)
            except PacelineError as error:
                return error
        return None

    def roles(self, number: int) -> tuple[int, int, int]:
        """In an audit at this step: the virtual rank, its rank, and the rank that repeats it."""
        assert self.audits is not None
        shares, size = self.world.shares(self.plan.virtual_ranks), self.world.size
        others, virtual_rank = divmod((number + 1) // self.every, self.plan.virtual_ranks)
        owner = next(rank for rank, share in enumerate(shares) if virtual_rank in share)
        return virtual_rank, owner, (owner + 1 + others % (size - 1)) % size

    def digest(self) -> str:
        """Of the weights, the buffers and the optimizer's state on this rank."""
        return hash_tensors({shard.name: shard.tensor for shard in self.replica.state()})


BITS = {"sign": [31], "exponent": [*range(23, 31)], "mantissa": [*range(8, 23)]}


def random_flip(dice: random.Random, call: int | None) -> tuple[str, Flip]:
    kind = dice.choice([*BITS])
    part: Part = dice.choice(["forward", "backward"])
    return f"{part} {kind}", Flip(part, dice.randrange(7), dice.randrange(10**6), dice.choice(BITS[kind]), call)


def outcome(training: Training, error: PacelineError | None) -> dict[str, Any]:
    """The error that one of the ranks has reported: its code and the named ranks; empty if there was none."""
    here = None if error is None or not error.code else {"code": error.code, "ranks": error.fields.get("ranks")}
    by_rank: list[Any] = [None] * training.world.size
    dist.all_gather_object(by_rank, here)
    found = next((report for report in by_rank if report is not None), {})
    if isinstance(named := found.get("ranks"), list):
        found["ranks"] = [int(str(rank).partition(" ")[0]) for rank in named]
    return found


def are_equal(training: Training, twin: Training) -> bool:
    """Whether both have the same state on all ranks."""
    by_rank: list[Any] = [None] * training.world.size
    dist.all_gather_object(by_rank, training.digest() == twin.digest())
    return all(by_rank)


def flip_once(rank: int, size: int, seed: int, count: int, strategy: str, virtual_ranks: int, accumulation: int) -> Any:
    """In each step one bit flips on one of the two ranks, in the audited micro-batch; then the step is repeated."""
    options: Any = {"strategy": strategy, "accumulation": accumulation}
    training, twin = (Training(rank, size, virtual_ranks, every, **options) for every in (1, None))
    results: list[dict[str, Any]] = []
    for number in range(count + 1):
        dice = random.Random(f"{seed} {size} {number}")
        virtual_rank, owner, auditor = training.roles(number)
        faulty = dice.choice([owner, auditor])
        share = training.world.shares(virtual_ranks)[owner]
        kind, flip = random_flip(dice, 0 if faulty == auditor else (virtual_rank - share.start) * accumulation)
        found = outcome(training, training.step(number, flip if number and rank == faulty else None))
        if found:
            assert training.step(number) is None
        assert twin.step(number) is None
        same = are_equal(training, twin)
        if number:  # the first step proves that the ranks are repeatable
            results.append({"kind": kind, "faulty": faulty, "steps": 1, "same": same, **found})
        if not same:
            break
    return results


def flip_always(rank: int, size: int, seed: int, count: int, strategy: str, virtual_ranks: int, every: int) -> Any:
    """From a random step on, a bit flips in each micro-batch of one rank, until it is found: at most two full turns."""
    results: list[dict[str, Any]] = []
    for number in range(count):
        dice = random.Random(f"{seed} {size} {number} always")
        training, twin = (Training(rank, size, virtual_ranks, n, strategy=strategy) for n in (every, None))
        faulty, begin, turn, found = dice.randrange(size), dice.randrange(1, 9), virtual_ranks * every, {}
        for step in range(begin + 2 * turn):
            kind, flip = random_flip(dice, None)
            found = outcome(training, training.step(step, flip if step >= begin and rank == faulty else None))
            if found:
                results.append({"kind": kind, "faulty": faulty, "steps": step - begin + 1, "turn": turn, **found})
                break
            assert twin.step(step) is None
        if not found:
            same = are_equal(training, twin)
            results.append({"kind": "any", "faulty": faulty, "steps": 2 * turn, "turn": turn, "same": same})
    return results


class Wide(nn.Module):
    """Whose forward and backward take most of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(w, 512), nn.Tanh()) for w in (WIDTH, 512, 512)))
        self.head = nn.Linear(512, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.01 * self.head(self.layers(x))  # or the loss would diverge


def timed(rank: int, size: int) -> tuple[list[tuple[float, ...]], str]:
    """For each round: the seconds of steps with audits and without, of the processors of all ranks and of the clock.

    And the cost that the audits state.
    """
    trainings = [
        Training(rank, size, COST_RANKS, every, model=Wide(), samples=64 * 512, batch=512)
        for every in (COST_EVERY, None)
    ]
    rounds: list[tuple[float, ...]] = []
    for number in range(ROUNDS + 1):
        spent: list[float] = []
        for training in trainings:
            dist.barrier()
            cpu, clock = time.process_time(), time.monotonic()
            for step in range(number * ROUND, (number + 1) * ROUND):
                error = training.step(step)
                assert error is None, error
            seconds = torch.tensor([time.process_time() - cpu])
            dist.barrier()
            wall = time.monotonic() - clock
            dist.all_reduce(seconds)
            spent += [float(seconds), wall]
        rounds.append(tuple(spent))
    return rounds[1:], *trainings[0].said
