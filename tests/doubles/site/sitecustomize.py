"""With this folder on PYTHONPATH, ranks and gloo scripts use the process group that behaves like NCCL's."""

import sys
from typing import Any

from paceline.rank.imports import when_imported


def _double() -> Any:
    from tests.doubles import nccl

    return nccl


def _in_world() -> None:
    def backend(asked: str, device: object) -> str:
        return _double().BACKEND

    module: Any = sys.modules["paceline.rank.world"]
    module.resolve_backend = backend


def _in_torch() -> None:
    module: Any = sys.modules["torch.distributed"]
    make = module.init_process_group

    def init_process_group(backend: object = None, *args: Any, **kwargs: Any) -> Any:
        double = _double()
        double.register()
        return make(double.BACKEND if backend in (None, "gloo") else backend, *args, **kwargs)

    torchs = make.__code__.co_filename  # in a stack it is torch's
    init_process_group.__code__ = init_process_group.__code__.replace(co_filename=torchs)
    module.init_process_group = module.distributed_c10d.init_process_group = init_process_group


def _in_sums() -> None:
    module: Any = sys.modules["paceline.collectives.control"]
    module.is_async_device = lambda device: True  # a step reads as it does on a GPU: once, at its end


when_imported("paceline.collectives.control", _in_sums)
when_imported("paceline.rank.world", _in_world)
when_imported("torch.distributed", _in_torch)  # the product's own hook is at distributed_c10d
