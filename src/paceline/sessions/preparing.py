"""Makes a user's model, optimizer and scheduler parts of a training."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import UsageError
from paceline.sessions.elsewhere import replace_in_place
from paceline.sessions.gate import Gate
from paceline.sessions.prepared import Prepared
from paceline.strategies.base import MakeOptimizer, Replica
from paceline.sums import together
from paceline.train.optimizer import checked_optimizer
from paceline.worker.world import World

OptimizerLike = Optimizer | MakeOptimizer
SchedulerLike = LRScheduler | Callable[[Optimizer], LRScheduler]


def prepared(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    strategy: Callable[[nn.Module, MakeOptimizer, World], Replica],
    world: World,
    number: int,
    gate: Gate,
) -> Prepared:
    """The model as this rank's part, with its optimizer and scheduler; see `Session.prepare` (a collective)."""
    with together(world):
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"s.prepare takes a torch module first, not a {type(model).__name__}")
        if not any(p.requires_grad for p in model.parameters()):
            raise UsageError("the model has no parameter that requires a gradient: there is nothing to train")
        make = made_optimizer(model, optimizer)
        model = model.to(world.device)
    given = [*model.parameters()]
    replica = strategy(model, make, world)
    with together(world):
        replace_in_place(given, model)
        if callable(scheduler) and not hasattr(scheduler, "state_dict"):
            scheduler = scheduler(replica.optimizer)
        return Prepared(replica, scheduler, number, gate)


def made_optimizer(model: nn.Module, asked: Any) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """What makes the optimizer, from the user's function or from an optimizer that is there already.

    Raises:
        UsageError: it is neither, or the optimizer has taken steps already, trains another model or needs closures.
    """
    if isinstance(asked, Optimizer):
        checked_optimizer(asked)
        if asked.state:
            raise UsageError("the optimizer has taken steps already: prepare it before the first")
        return lambda _: asked
    if not callable(asked):
        raise UsageError(
            f"s.prepare(model, {type(asked).__name__}): the second must be a torch optimizer, or a function that makes "
            "one from the parameters, as in s.prepare(model, lambda p: torch.optim.AdamW(p, lr=1e-3))"
        )

    return lambda parameters: checked_optimizer(asked(parameters))
