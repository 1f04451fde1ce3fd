"""A candidate on this rank: a whole training, taken some steps at a time."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.data import Dataset

from paceline.bench.spec import NO_EXCHANGE, Candidate
from paceline.checkpoint.resume import RunLocation
from paceline.compute.flops import FlopCount, Utilization
from paceline.config import TrainConfig, batch_shape, task_options
from paceline.contract.evidence import Phase
from paceline.data.arrays import on_device
from paceline.data.loader import Loading, MicroBatch, load_steps
from paceline.data.plan import ranks_share
from paceline.data.streams import first_of, is_stream
from paceline.errors import PacelineError, UsageError, plural
from paceline.ladder import options_of_others
from paceline.mesh import strategy_on
from paceline.stepping.scaling import loss_scale
from paceline.strategies import Replica
from paceline.strategies.base import MakeOptimizer, replica
from paceline.tasks import load_task
from paceline.tasks.task import Task
from paceline.train.computing import check_precision, settle
from paceline.train.fit import StepRecord, fit
from paceline.train.optimizer import maker_for, schedule_for
from paceline.train.prepare import Parts, check_loss, make_model, make_plan, make_replica, wish_of
from paceline.train.records import Records
from paceline.train.sharing import share_model
from paceline.train.stream_task import check_stream
from paceline.worker.world import World

MOST_SAMPLES = 4096  # of a stream, taken again and again


@dataclass(frozen=True)
class Ground:
    """What all candidates share, on one rank."""

    config: TrainConfig
    task: Task
    dataset: Dataset[Any]
    world: World
    notes: tuple[str, ...] = ()
    """what is not measured"""
    count: FlopCount = field(default_factory=FlopCount)
    """the FLOPs of two samples; of none, where they cannot be counted"""


def load_ground(config: TrainConfig, candidates: Iterable[Candidate], world: World) -> Ground:
    """Load what all candidates train on.

    Raises:
        UsageError: for what would fail with each of them, or give one of them smaller batches than it is named for.
    """
    check_precision(config.compute.precision, world.device)
    task = load_task(str(config.task), task_options(config))
    data, notes = task.make_dataset("train"), ()
    largest = max(batch_shape(_configured(config, one).data, world.size).global_batch for one in candidates)
    if is_stream(data):
        check_stream(config, data)
        data = first_of(data, max(MOST_SAMPLES, largest))
        notes = (
            f"the training data are a stream: its first {len(data):,} samples were read before, and taken from memory, "
            "so the time of reading it is in no step",
        )
    samples: int = len(data)  # pyright: ignore[reportArgumentType]
    if samples == 0:
        raise UsageError("the training data are empty")
    if samples < largest:
        raise UsageError(
            f"a step of {largest:,} samples on {plural(world.size, 'rank')} was asked for, and "
            f"there are {samples:,} to train on: smaller batches than named would be measured. Lower the batch size"
        )
    count = FlopCount()
    if config.compute.peak_tflops != 0:
        with suppress(PacelineError):  # each candidate raises it again, and is not measured
            check_loss(task, make_model(task, config.run.seed, world), data, Loading(world.device, 0, task.collate),
                       count=count)  # fmt: skip
    if config.data.data_on_device == "auto":
        data = on_device(data, world.device, collate=task.collate)
    return Ground(config, task, data, world, notes, count)


class CandidateTraining:
    """A candidate's training; nothing of it is left when it is closed."""

    def __init__(
        self, ground: Ground, candidate: Candidate, folder: Path, steps: int, enter: Callable[[Phase], object]
    ) -> None:
        """A collective: the strategy is applied to a new model.

        Raises:
            UsageError: for what the strategy refuses.
        """
        self._open = ExitStack()
        self.sync_seconds = 0.0
        """spent waiting for other ranks in the steps that were taken last"""
        config = _configured(ground.config, candidate)
        world, data = ground.world, ground.world.data
        shape = batch_shape(config.data, data.size)
        samples: int = len(ground.dataset)  # pyright: ignore[reportArgumentType]
        plan = make_plan(replace(config, data=replace(config.data, tail="drop")), shape, samples)
        share = ranks_share(shape.virtual_ranks, data.rank, data.size)
        model = make_model(ground.task, config.run.seed, world)
        loading = Loading(world.device, config.data.num_workers, ground.task.collate)
        batch = candidate.batch_size
        settled = settle(config.compute, model, ground.task, ground.dataset, loading, batch, world)
        o = replace(config.optimizer, schedule="constant", warmup_steps=0)
        maker = maker_for(o, o.lr, ground.task, model)
        alone = replace(loading, num_workers=0)
        sharing = share_model(ground.task, model, ground.dataset, alone, plan, world, wish_of(config))
        who = strategy_on(candidate.strategy, candidate.mesh)
        told = sharing.lines if sharing.division else ()  # which stages there are; a table of cut layers is too long
        self.notes = tuple(f"{who}: {line.strip()}" for line in told)
        if candidate.strategy == NO_EXCHANGE:
            made = sharing.apply(_without_exchange, model, maker, world, shape.virtual_ranks)
        else:
            made = make_replica(config, maker, model, world, shape.virtual_ranks, sharing)
        schedule = schedule_for(o, o.lr, ground.task, made.optimizer, steps)
        self.use = Utilization(world, config.compute.peak_tflops, ground.count, settled.precision)
        self.parts = Parts(
            config, ground.task, ground.dataset, {}, made, plan, share, schedule, loading, steps, {},
            settled,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        place = RunLocation(folder, 1, 0, None)
        self._records = self._open.enter_context(closing(Records(place, world, print)))
        self._records.begin(place, None)
        self._records.started(plan, 0)
        batches = load_steps(ground.dataset, plan, share, loading, start=0, stop=steps)
        self._open.enter_context(closing(batches))
        norm = config.optimizer.clip_norm
        taken = fit(
            self.parts.replica, batches, ground.task.loss, schedule, max_norm=norm, enter=enter, ahead=loading.ahead,
            scale=loss_scale(settled.precision),
        )  # fmt: skip
        self._taken = self._open.enter_context(closing(taken))

    def take(self, steps: int) -> int:
        """Take so many steps (a collective); how many samples they had, over all ranks."""
        self.sync_seconds = 0.0
        return sum(self._note(next(self._taken)) for _ in range(steps))

    def take_one(self) -> Sequence[MicroBatch]:
        """Take a step (a collective); this rank's data of it."""
        record = next(self._taken)
        self._note(record)
        return record.microbatches

    def _note(self, record: StepRecord) -> int:
        plan = self.parts.plan
        self.sync_seconds += record.phase_seconds.get(Phase.SYNC.word, 0.0)
        samples = len(plan.global_indices(*divmod(record.step - 1, plan.steps_per_epoch)))
        self.use.add(record.consumed)
        self._records.stepped(record, samples, self.parts.share, listed=self.parts.config.run.record_samples)
        return samples

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def _configured(config: TrainConfig, candidate: Candidate) -> TrainConfig:
    virtual_ranks = candidate.virtual_ranks or None
    data = replace(config.data, batch_size=candidate.batch_size, global_batch=None, virtual_ranks=virtual_ranks)
    launch = replace(config.launch, mesh=candidate.mesh or None, sequence_parallel=candidate.sequence)
    config = replace(config, launch=launch)
    if candidate.strategy == NO_EXCHANGE:
        return replace(config, data=data)
    others = dict.fromkeys(options_of_others(candidate.strategy))
    model = replace(config.model, **{name: None for name in others if hasattr(config.model, name)})
    network = replace(config.network, **{name: None for name in others if hasattr(config.network, name)})
    return replace(config, data=data, model=model, network=network, strategy=candidate.strategy)


def _without_exchange(model: torch.nn.Module, maker: MakeOptimizer, world: World, /, *, virtual_ranks: int) -> Replica:
    """Every copy of the model is trained alone: what its computation takes by itself."""
    return replica(model, maker(model.parameters()), world, virtual_ranks=virtual_ranks)
