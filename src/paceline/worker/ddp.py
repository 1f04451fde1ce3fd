"""DDP in a script that nobody changed: what is done to each DistributedDataParallel after the script has made it."""

import importlib
import sys
from functools import wraps
from typing import Any

from paceline.worker.imports import when_imported

MODULE = "torch.nn.parallel.distributed"
SHARING = "paceline.sums.ddp"  # by name: it imports torch, which the script may never do, and this room is below it


def share_gradients() -> None:
    """Offer shared memory to each DDP (`paceline launch --collectives shared`)."""
    when_imported(MODULE, _install)


def _install(*, late: bool) -> None:
    del late  # a class is changed in place: who has imported it already has the changed one
    kind: Any = sys.modules[MODULE].DistributedDataParallel
    make = kind.__init__

    @wraps(make)
    def made(ddp: Any, *args: Any, **kwargs: Any) -> None:
        make(ddp, *args, **kwargs)
        importlib.import_module(SHARING).share_memory(ddp, in_step=kwargs.get("init_sync", True))

    kind.__init__ = made
