"""Which optimizers need whole parameters.

Under `zero` and `fsdp` a rank holds pieces of parameters. An optimizer may update the pieces if it is element-wise. An
optimizer that reads whole matrices needs whole parameters, each on one rank (`collectives.owners`). An optimizer whose
update of one parameter depends on others cannot be divided at all.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.collectives.owners import replace_optimizer_parameters
from paceline.errors import UsageError
from paceline.seeding import preserve_generator_states

Scope = Literal["element", "parameter"]
"""What an update reads: only the gradient and the history of the same element, or those of the whole parameter."""
ELEMENT_WISE_OPTIMIZERS = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.RMSprop,
    optim.Rprop, optim.ASGD,
)  # fmt: skip
PARAMETER_WISE_OPTIMIZERS = (optim.Muon, optim.Adafactor, optim.Adagrad)  # Adagrad: it makes its state in __init__
DECLARATION = "parameter_wise"
"""The attribute with which an optimizer or its class declares that it updates each parameter separately."""
TRIAL_STEPS = 12  # some optimizers compute a preconditioner in every tenth step only
TRIAL_LENGTH = 4  # the most elements of a dimension
TRIAL_LR = 0.01  # the least learning rate: with a smaller one, changes could be lost in rounding
COLLECTIVES = ("c10d", "_c10d_functional")
"""The namespaces of torch's collectives."""
_NOT_TRIED = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def find_update_scope(optimizer: Optimizer, owner: str) -> Scope:
    """What an update reads. Unknown optimizers are tried on small tensors. `owner`: of the parts, for errors."""
    if type(optimizer) in ELEMENT_WISE_OPTIMIZERS:
        return "element"
    if type(optimizer) in PARAMETER_WISE_OPTIMIZERS or getattr(optimizer, DECLARATION, False):
        return "parameter"
    kind = type(optimizer).__name__
    try:
        is_separate = _updates_separately(optimizer)
    except _CollectiveError as error:
        raise UsageError(code="optimizer-communicates", kind=kind, operation=str(error), owner=owner) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(code="optimizer-not-tried", kind=kind, reason=reason, owner=owner) from error
    if not is_separate:
        raise UsageError(code="optimizer-joins-parameters", kind=kind, owner=owner)
    return "parameter"


def _updates_separately(optimizer: Optimizer) -> bool:
    """Whether parameters that are updated together change as they do without the others."""
    numbers = range(sum(len(group["params"]) for group in optimizer.param_groups))
    together = _trial(optimizer, lambda _: True)
    if not any(change.any() for change in together.values()) and any(map(Tensor.numel, together.values())):
        raise RuntimeError("its steps changed none of the parameters in its groups")
    for remainder in (0, 1):
        apart = _trial(optimizer, lambda number, rest=remainder: number % 2 == rest)
        for number in numbers[remainder::2]:
            if number in apart and not torch.allclose(apart[number], together[number], rtol=1e-9, atol=1e-12):
                return False
    return True


@torch.no_grad()
def _trial(optimizer: Optimizer, is_trained: Callable[[int], bool]) -> dict[int, Tensor]:
    """How steps of a copy of `optimizer` change small parameters, by their numbers: the first three of each group.

    As in a strategy, other parameters replace those that the optimizer was made for. RuntimeError: the copy changes
    those.
    """
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with preserve_generator_states(), _NoCollectives(), _without_hooks():
        torch.manual_seed(0)
        small = [nn.Parameter(_small_values(parameter)) for parameter in every]
        gradients = [[_small_values(p).mul_(10.0 ** (n % 3)) for n, p in enumerate(every)] for _ in range(TRIAL_STEPS)]
        copies: dict[int, Any] = {id(parameter): copied for parameter, copied in zip(every, small, strict=True)}
        tried = _copy(optimizer, copies)
        number, trained, names = 0, dict[str, nn.Parameter](), list[list[str]]()
        for group in tried.param_groups:
            numbered = [*enumerate(group["params"], number)]
            names.append([str(n) for n, _ in numbered])
            trained |= {str(n): nn.Parameter(p.clone()) for n, p in numbered[:3] if is_trained(n)}
            number += len(numbered)
            if "lr" in group:  # a warm-up may begin at 0
                lr = group["lr"]
                group["lr"] = lr.clamp(min=TRIAL_LR) if isinstance(lr, Tensor) else max(lr, TRIAL_LR)
        replace_optimizer_parameters(tried, names, trained)
        before = [p.clone() for p in small]
        for at_step in gradients:
            for n, parameter in trained.items():
                parameter.grad, small[int(n)].grad = at_step[int(n)].clone(), at_step[int(n)].clone()
            torch.manual_seed(1)
            type(optimizer).step(tried)
    if not all(map(torch.equal, small, before)):
        raise RuntimeError("its steps change the parameters that it was made for, instead of those in its groups")
    return {int(n): parameter.detach() - before[int(n)] for n, parameter in trained.items()}


def _copy(optimizer: Optimizer, copies: dict[int, Any]) -> Any:
    copy: Any = object.__new__(type(optimizer))
    vars(copy).update(deepcopy({k: v for k, v in vars(optimizer).items() if k not in _NOT_TRIED}, copies))
    vars(copy).update({name: OrderedDict[int, Any]() for name in _NOT_TRIED[1:]})
    copy.state = defaultdict(dict, copy.state)
    return copy


class _CollectiveError(Exception):
    """An optimizer has called the collective that the text names."""


class _NoCollectives(TorchDispatchMode):
    """Inside, a collective raises an error: an optimizer must not divide parameters that a strategy divides."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise _CollectiveError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_hooks() -> Generator[None]:
    every: Any = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    kept = [dict(hooks) for hooks in every]
    for hooks in every:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, by_number in zip(every, kept, strict=True):
            hooks.update(by_number)


def _small_values(parameter: Tensor) -> Tensor:
    shape = [min(length, TRIAL_LENGTH) for length in parameter.shape]
    dtype = torch.complex128 if parameter.is_complex() else torch.float64
    return torch.randn(shape, dtype=dtype, device=parameter.device)
