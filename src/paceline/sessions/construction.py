"""Creates loaders, prepared models and optimizers from the arguments of `Session.loader` and `Session.prepare`."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from paceline.collectives.control import all_gather_object, raise_on_all_ranks
from paceline.data.loader import LoadingOptions, is_stream
from paceline.data.plan import BatchPlan, LastBatch
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.sessions.lifecycle import SessionRun
from paceline.sessions.loader import IterateLoader, Loader, adopt_worker_settings, check_dataloader
from paceline.sessions.order import covers_each_sample_once, dataloader_length, is_sequential
from paceline.sessions.prepared import PreparedModel
from paceline.sessions.session_step import SessionStep
from paceline.sessions.sharded_tensors import invalidate_replaced_parameters
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.optimizers import each_optimizer
from paceline.train.compute_settings import apply_autocast
from paceline.train.optimizer import as_single_optimizer

if TYPE_CHECKING:
    from paceline.train.adapters import InitialAdapters

OptimizersLike = Sequence[Optimizer] | Callable[[Iterable[nn.Parameter]], Sequence[Optimizer]]
OptimizerLike = Optimizer | MakeOptimizer
NEEDS_WHOLE = {"ADALORA"}
"""Adapters of peft that compute with weights outside the forward of their layers, where `fsdp` has only shards."""
SchedulerLike = LRScheduler | Callable[[Optimizer], LRScheduler]
SchedulersLike = Sequence[LRScheduler | Callable[[Optimizer], LRScheduler]] | Callable[[Optimizer], LRScheduler]


def make_loader(
    data: Dataset[Any] | DataLoader[Any] | Iterable[Any], iterate: IterateLoader, run: SessionRun, split: bool,
    loading: LoadingOptions, *, global_batch: int | None, batch_size: int | None, per_rank: bool, accumulation: int,
    shuffle: bool | None, last_batch: LastBatch,
) -> Loader:  # fmt: skip
    existing: DataLoader[Any] | None = None
    dataset: Any = data
    virtual_ranks, seed = run.virtual_ranks, run.definition["seed"]
    if isinstance(data, DataLoader):
        check_dataloader(data)
        options = {"shuffle": shuffle, "num_workers": loading.num_workers or None, "collate": loading.collate,
                   "global_batch": global_batch, "batch_size": batch_size}  # fmt: skip
        if duplicates := [name for name, value in options.items() if value is not None]:
            raise UsageError(code="said-twice", option=duplicates[0])
        existing, dataset = data, data.dataset
        loading = adopt_worker_settings(data, loading)
        steps = 0 if is_stream(dataset) else dataloader_length(data)
        batch = data.batch_size or max(len(dataset) // max(1, steps), 1)
        global_batch = batch * virtual_ranks * accumulation if per_rank else batch
        if per_rank and not is_stream(dataset):
            if data.batch_size is None or not covers_each_sample_once(data):
                raise UsageError(code="loader-with-own-order")
            existing, shuffle = None, not is_sequential(data)
        if data.drop_last or not (is_stream(dataset) or covers_each_sample_once(data)):
            last_batch = "drop"
    if (global_batch is None) == (batch_size is None):
        raise UsageError(code="no-batch-size")
    batch = global_batch or (batch_size or 0) * virtual_ranks * accumulation
    if is_stream(dataset):
        from paceline.sessions.stream_loader import make_stream_loader

        return make_stream_loader(
            iterate, dataset, run, split and virtual_ranks > 1, loading, existing,
            batch=batch, accumulation=accumulation, shuffle=shuffle, last_batch=last_batch, sets_epoch=data is dataset,
        )  # fmt: skip
    if split:
        raise UsageError(code="samples-split")
    size: int = len(dataset)
    if size == 0:
        raise UsageError(code="dataset-is-empty")
    plan = BatchPlan(size, batch, virtual_ranks, accumulation, seed, shuffle is not False, last_batch)
    return Loader(iterate, dataset, plan, loading, existing)


def prepare_model(
    model: nn.Module, optimizer: Any, scheduler: Any, strategy: Callable[[nn.Module, MakeOptimizer, World], Strategy],
    world: World, number: int, gate: SessionStep, precision: str | None = None,
) -> PreparedModel:  # fmt: skip
    with raise_on_all_ranks(world):
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(code="not-a-module-to-train", kind=type(model).__name__)
        if not any(p.requires_grad for p in model.parameters()):
            raise UsageError(code="nothing-to-train")
        if isinstance(scheduler, Optimizer):
            raise UsageError(code="optimizer-as-scheduler")
        make_optimizer = optimizer_factory(optimizer)
        adapters = _adapters_of(model) if world.rank == 0 else None  # rank 0's weights are those of all ranks
        model = model.to(world.device)
        apply_autocast(precision, model, world.device)
    # on all ranks: a script may import peft on some ranks only
    adapters = _adapters_from(all_gather_object(msgspec.to_builtins(adapters), world)[0])
    original_parameters = [*model.parameters()]
    replica = strategy(model, make_optimizer, world)
    with raise_on_all_ranks(world):
        if adapters is not None and replica.in_lockstep and (odd := adapters.kinds & NEEDS_WHOLE):
            raise UsageError(code="adapter-needs-whole-weights", kind=odd.pop())
        invalidate_replaced_parameters(original_parameters, model)
        return PreparedModel(replica, resolve_schedulers(replica.optimizers, scheduler), number, gate, adapters)


def _adapters_of(model: nn.Module) -> "InitialAdapters | None":
    if "peft" not in sys.modules:  # a script that has not imported it has no adapter
        return None
    from paceline.train.adapters import InitialAdapters

    return InitialAdapters.of(model)


def _adapters_from(gathered: Any) -> "InitialAdapters | None":
    if gathered is None:
        return None
    from paceline.train.adapters import InitialAdapters

    return msgspec.convert(gathered, InitialAdapters)


def prepare_optimizer(part: PreparedModel, optimizer: Any, scheduler: Any, world: World) -> Optimizer:
    with raise_on_all_ranks(world):
        optimizer = optimizer_factory(optimizer)(part.replica.model.parameters())
        optimizers = each_optimizer(optimizer)
        for opt, its_scheduler in zip(optimizers, resolve_schedulers(optimizers, scheduler), strict=True):
            part.add_optimizer(opt, its_scheduler)
        return optimizer


def resolve_schedulers(optimizers: Sequence[Optimizer], scheduler: Any) -> list[Any]:
    is_function = callable(scheduler) and not hasattr(scheduler, "state_dict")
    given = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
    if scheduler is None or is_function:
        given = [scheduler] * len(optimizers)
    if len(given) != len(optimizers):  # pyright: ignore[reportUnknownArgumentType]
        raise UsageError(code="schedulers-of-optimizers", schedulers=len(given), optimizers=len(optimizers))  # pyright: ignore[reportUnknownArgumentType]
    pairs: Any = zip(given, optimizers, strict=True)  # pyright: ignore[reportUnknownArgumentType]
    return [entry(optim) if callable(entry) and not hasattr(entry, "state_dict") else entry for entry, optim in pairs]


def optimizer_factory(optimizer: Any) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    if isinstance(optimizer, (Optimizer, list, tuple)):
        existing = as_single_optimizer(optimizer)
        states = [state for opt in each_optimizer(existing) for state in opt.state.values()]
        if any(state and state.get("step", 1) for state in states):  # Adagrad's starts at 0
            raise UsageError(code="optimizer-has-stepped")
        return lambda _: _on_device(existing)
    if not callable(optimizer):
        raise UsageError(code="not-optimizer", kind=type(optimizer).__name__)

    return lambda parameters: as_single_optimizer(optimizer(parameters))


def _on_device(optimizer: Optimizer) -> Optimizer:
    for parameter, state in (item for opt in each_optimizer(optimizer) for item in opt.state.items()):
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor):
                state[name] = value.to(parameter.device)
    return optimizer
