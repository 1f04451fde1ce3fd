"""From what a user gives a session, a model or data, to parts of a training and a plan of who sees which sample."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from paceline.collectives.control import together
from paceline.data.loader import Loading
from paceline.data.plan import BatchPlan, Tail
from paceline.data.streams import ENDLESS, StreamPlan, is_stream
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.sessions.loader import Loader, Run, StreamLoader, check_taken, taken_over
from paceline.sessions.order import covers_all, keeps_order, steps_of
from paceline.sessions.prepared import PreparedModel, PreparedOptimizer
from paceline.sessions.session_step import SessionStep
from paceline.sessions.sharded_tensors import invalidate_replaced_parameters
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.train.optimizer import checked_optimizer

OptimizerLike = Optimizer | MakeOptimizer
SchedulerLike = LRScheduler | Callable[[Optimizer], LRScheduler]


def make_loader(
    data: Dataset[Any] | DataLoader[Any] | Iterable[Any],
    run: Run,
    world: World,
    virtual_ranks: int,
    seed: int,
    say: Callable[[str], None],
    split: bool,
    loading: Loading,
    *,
    global_batch: int | None,
    batch_size: int | None,
    per_rank: bool,
    accumulation: int,
    shuffle: bool | None,
    tail: Tail,
) -> Loader:
    """What `Session.loader` returns; see there.

    Raises:
        UsageError: for what cannot be shared out.
    """
    existing: DataLoader[Any] | None = None
    dataset: Any = data
    if isinstance(data, DataLoader):
        check_taken(data)
        given = {"shuffle": shuffle, "num_workers": loading.num_workers or None, "collate": loading.collate,
                 "global_batch": global_batch, "batch_size": batch_size}  # fmt: skip
        if twice := [name for name, value in given.items() if value is not None]:
            raise UsageError(code="said-twice", option=twice[0])
        existing, dataset = data, data.dataset
        loading = taken_over(data, loading)
        if data.persistent_workers:
            say("NOTE: persistent_workers=True: a session starts a loader's processes anew in each epoch")
        known = 0 if is_stream(dataset) else steps_of(data)
        batch = data.batch_size or max(len(dataset) // max(1, known), 1)
        global_batch = batch * virtual_ranks * accumulation if per_rank else batch
        if per_rank and not is_stream(dataset):
            if data.batch_size is None or not covers_all(data):
                raise UsageError(code="loader-with-own-order")
            existing, shuffle = None, not keeps_order(data)
        tail = "drop" if data.drop_last or not (is_stream(dataset) or covers_all(data)) else tail
    if (global_batch is None) == (batch_size is None):
        raise UsageError(code="no-batch-size")
    batch = global_batch or (batch_size or 0) * virtual_ranks * accumulation
    if is_stream(dataset):
        _check_stream(dataset, shuffle, tail, loading.num_workers)
        parts = virtual_ranks if split else 1
        plan = StreamPlan(ENDLESS, batch, virtual_ranks, accumulation, seed, False, tail, parts)
        return StreamLoader(run, dataset, plan, loading, world, say)
    if split:
        raise UsageError(code="samples-split")
    size: int = len(dataset)
    if size == 0:
        raise UsageError(code="dataset-is-empty")
    plan = BatchPlan(size, batch, virtual_ranks, accumulation, seed, shuffle is not False, tail)
    return Loader(run, dataset, plan, loading, existing)


def _check_stream(stream: object, shuffle: bool | None, tail: Tail, num_workers: int) -> None:
    if not isinstance(stream, Iterable):
        raise UsageError(code="not-data", kind=type(stream).__name__)
    if shuffle:
        raise UsageError(code="stream-shuffled")
    if tail == "pad":
        raise UsageError(code="stream-padded")
    if num_workers > 1:
        raise UsageError(code="stream-in-processes", value=num_workers)


def prepare_model(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    strategy: Callable[[nn.Module, MakeOptimizer, World], Strategy],
    world: World,
    number: int,
    gate: SessionStep,
) -> PreparedModel:
    """The model as this rank's part, with its optimizer and scheduler; see `Session.prepare` (a collective)."""
    with together(world):
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(code="not-a-module-to-train", kind=type(model).__name__)
        if not any(p.requires_grad for p in model.parameters()):
            raise UsageError(code="nothing-to-train")
        make = optimizer_factory(model, optimizer)
        model = model.to(world.device)
    given = [*model.parameters()]
    replica = strategy(model, make, world)
    with together(world):
        invalidate_replaced_parameters(given, model)
        if callable(scheduler) and not hasattr(scheduler, "state_dict"):
            scheduler = scheduler(replica.optimizer)
        return PreparedModel(replica, scheduler, number, gate)


def prepare_optimizer(part: PreparedModel, optimizer: Any, scheduler: Any, world: World) -> PreparedOptimizer:
    """Another optimizer of a model that was prepared already (a collective)."""
    with together(world):
        made = optimizer_factory(part.replica.model, optimizer)(part.replica.model.parameters())
        if callable(scheduler) and not hasattr(scheduler, "state_dict"):
            scheduler = scheduler(made)
        return part.add_optimizer(made, scheduler)


def optimizer_factory(model: nn.Module, asked: Any) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """What makes the optimizer, from the user's function or from an optimizer that is there already.

    Raises:
        UsageError: it is neither, or the optimizer has taken steps already, trains another model or needs closures.
    """
    if isinstance(asked, Optimizer):
        checked_optimizer(asked)
        if any(_has_stepped(state) for state in asked.state.values()):
            raise UsageError(code="optimizer-has-stepped")
        return lambda _: _on_device(asked)
    if not callable(asked):
        raise UsageError(code="not-optimizer", kind=type(asked).__name__)

    return lambda parameters: checked_optimizer(asked(parameters))


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """By an optimizer's state of one parameter, which Adagrad has from the start."""
    return bool(state) and bool(state.get("step", 1))


def _on_device(optimizer: Optimizer) -> Optimizer:
    """With the state that it has from the start where its parameters are now."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor):
                state[name] = value.to(parameter.device)
    return optimizer
