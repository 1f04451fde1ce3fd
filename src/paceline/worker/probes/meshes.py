"""Which ranks hold parts of the same layers (tensor parallel), and so are given the same batches on purpose.

A parameter that is a DTensor is split along the dimensions of its mesh. Those along which `fully_shard` was asked to
share a model out are data parallel: each rank has batches of its own. The others split the work on one batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from paceline.worker.imports import when_imported
from paceline.worker.probes.hooks import hang

PACKAGE = "torch.distributed.fsdp"
OFFERED_BY = (f"{PACKAGE}._fully_shard._fully_shard", f"{PACKAGE}._fully_shard", PACKAGE)


class Meshes:
    """Of one process."""

    def __init__(self) -> None:
        self._shared_out = set[int]()  # ranks among which FSDP has shared out models

    def watch(self) -> None:
        """See each `fully_shard` from now on."""
        when_imported(OFFERED_BY[0], self._watch)

    def _watch(self, *, late: bool) -> None:
        first: Any = sys.modules[OFFERED_BY[0]]
        plain = first.fully_shard
        hang(first, "fully_shard", before=self._shares_out)
        for module in (sys.modules.get(name) for name in OFFERED_BY[1:]):
            if getattr(module, "fully_shard", None) is plain:
                vars(module)["fully_shard"] = first.fully_shard

    def _shares_out(self, *_: Any, mesh: Any = None, **__: Any) -> None:
        world_size = sys.modules["torch.distributed"].get_world_size
        self._shared_out.update(range(world_size()) if mesh is None else mesh.mesh.flatten().tolist())

    def split(self, parameters: Iterable[Any]) -> tuple[int, int]:
        """Among how many ranks layers are split, and which of them this one is."""
        count, number = 1, 0
        for parameter in parameters:
            if not hasattr(parameter, "device_mesh") or (where := parameter.device_mesh.get_coordinate()) is None:
                continue
            mesh, placements, of, at = parameter.device_mesh, parameter.placements, 1, 0
            for dimension, placement in enumerate(placements):
                here = tuple(slice(None) if n == dimension else place for n, place in enumerate(where))
                if not placement.is_replicate() and not self._shared_out.issuperset(mesh.mesh[here].tolist()):
                    of, at = of * mesh.size(dimension), at * mesh.size(dimension) + where[dimension]
            count, number = max((count, number), (of, at))
        return count, number
