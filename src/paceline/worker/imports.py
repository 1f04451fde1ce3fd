"""How are modules imported that make a million objects? Without the garbage collector, which would look at each again.

Measured with torch and torch._dynamo: 1.5 s of a core instead of 2.1 s.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Sequence

TRAINING = ("paceline.cli.train", "paceline.train.run", "torch._dynamo")
"""what every worker of a training imports: torch's optimizers import torch._dynamo when they are first used"""


def import_all(modules: Sequence[str]) -> None:
    """Import them; raises what they raise."""
    collects = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        if collects:
            gc.enable()
