"""Finds the modules that a rule like `blocks.*,Attention` names, and changes the forward of a module."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.jit import ScriptModule  # pyright: ignore[reportPrivateImportUsage]

from paceline.errors import UsageError, first_few

MAX_SHOWN = 20
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # have no forward of their own

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(the module's own forward, args, kwargs) -> what forward gives now"""


def matching(model: nn.Module, rule: str, *, flag: str) -> dict[str, nn.Module]:
    """The modules inside `model` whose name or class matches one of the comma-separated patterns, by name.

    Of a module and those inside it only the outer one. Patterns are a shell's: * and ? match any characters, dots too.

    Raises:
        UsageError: a pattern matches nothing; lists what there is. `flag` is the option of the rule.
    """
    there = {name: module for name, module in model.named_modules() if name and not isinstance(module, CONTAINERS)}
    chosen: set[str] = set()
    for pattern in (p.strip() for p in rule.split(",")):
        found = {name for name, module in there.items() if _matches(pattern, name, module)}
        if not found:
            names = [f"{name} ({type(module).__name__})" for name, module in there.items()]
            shown = first_few(names, MAX_SHOWN) or "none but the model itself"
            raise UsageError(code="no-such-module", setting=flag, rule=rule, pattern=pattern, shown=shown)
        chosen |= found
    outer = [name for name in there if name in chosen and not any(name.startswith(f"{other}.") for other in chosen)]
    return {name: there[name] for name in outer}


def around_forward(module: nn.Module, around: Around) -> None:
    """Let `module` compute `around(its own forward, args, kwargs)`; nothing else of it changes.

    Its class becomes a subclass, as torch's fully_shard makes it. So names, hooks, state and nn.DataParallel's copies
    stay what they were; with a wrapper, or a forward bound to one instance, they would not.

    Raises:
        UsageError: for a module whose forward is not its class's.
    """
    kind = type(module)
    if isinstance(module, ScriptModule) or "forward" in vars(module):
        raise UsageError(code="forward-cannot-change", kind=kind.__name__)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(partial(kind.forward, self), args, kwargs)

    forward.__dict__["__wrapped__"] = kind.forward  # so that its signature is the model's
    subclassed(module, forward=forward)


def subclassed(module: nn.Module, **members: Any) -> None:
    """Give `module` a subclass of its class, of the same name, with `members`."""
    kind: Any = type(module)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind)(kind.__name__, (kind,), {**names, **members})


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)
