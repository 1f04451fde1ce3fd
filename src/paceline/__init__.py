"""Train a PyTorch model on one device or on many, with the same result at every world size.

Public API. Each part also works alone in a custom loop (examples/own_loop.py):

    run                          starts ranks from a script or a notebook: run(function, nproc=2)
    session                      models, data and checkpoints on all ranks, for a custom training loop
    load_adapter                 an adapter of peft, compared with its base weights
    World, process_group         rank and world size of this process; the process group
    BatchPlan, virtual_ranks_of  which rank processes which sample, and when
    load_steps, LoadingOptions   micro-batches on the device, loaded as a plan specifies
    ArrayDataset                 a dataset of tensors in memory
    STRATEGIES                   how the ranks divide the work: manual, bucketed, ddp, ...
    train_step, fit              one optimizer step; a loop of steps
    evaluate                     exact evaluation on all ranks
    Task, Metric                 model, data and loss, for `paceline train module:name`; a metric besides the loss
    on_device                    a dataset of tensors, on the GPU if they fit into its memory

Call these before a strategy is applied to the model:

    autocast_bf16, checkpoint_activations, compile_model, use_cuda_graphs; tune_malloc for the process
"""

import importlib
import random
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Imported at first use: `import paceline` must not import torch, or `paceline --help` would take seconds.
_LAZY_EXPORTS = {
    name: module
    for module, names in {
        "launch.from_python": "run",
        "sessions": "session Session",
        "train.adapters": "load_adapter",
        "rank.world": "World process_group",
        "data.plan": "BatchPlan virtual_ranks_of",
        "data.arrays": "ArrayDataset on_device",
        "compute.precision": "autocast_bf16",
        "compute.forward": "checkpoint_activations",
        "compute.compiling": "compile_model use_cuda_graphs",
        "compute.resources": "tune_malloc",
        "data.loader": "LoadingOptions MicroBatch load_steps",
        "strategies": "STRATEGIES Strategy",
        "tasks.task": "Task CallbackState",
        "tasks.metric": "Metric",
        "train.optimizer": "Schedule optimizer_maker",
        "train.evaluate": "evaluate",
        "train.step": "fit train_step",
    }.items()
    for name in names.split()
}

_RENAMED = {
    "Loading": "LoadingOptions", "Moment": "CallbackState", "graph_model": "use_cuda_graphs",
    "in_bf16": "autocast_bf16", "joined": "process_group", "keep_memory": "tune_malloc",
    "ranks_share": "virtual_ranks_of", "recompute": "checkpoint_activations",
}  # fmt: skip

__all__ = [*_LAZY_EXPORTS, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from paceline.compute.compiling import compile_model as compile_model
    from paceline.compute.compiling import use_cuda_graphs as use_cuda_graphs
    from paceline.compute.forward import checkpoint_activations as checkpoint_activations
    from paceline.compute.precision import autocast_bf16 as autocast_bf16
    from paceline.compute.resources import tune_malloc as tune_malloc
    from paceline.data.arrays import ArrayDataset as ArrayDataset
    from paceline.data.arrays import on_device as on_device
    from paceline.data.loader import LoadingOptions as LoadingOptions
    from paceline.data.loader import MicroBatch as MicroBatch
    from paceline.data.loader import load_steps as load_steps
    from paceline.data.plan import BatchPlan as BatchPlan
    from paceline.data.plan import virtual_ranks_of as virtual_ranks_of
    from paceline.launch.from_python import run as run
    from paceline.rank.world import World as World
    from paceline.rank.world import process_group as process_group
    from paceline.sessions import Session as Session
    from paceline.sessions import session as session
    from paceline.strategies import STRATEGIES as STRATEGIES
    from paceline.strategies import Strategy as Strategy
    from paceline.tasks.metric import Metric as Metric
    from paceline.tasks.task import CallbackState as CallbackState
    from paceline.tasks.task import Task as Task
    from paceline.train.adapters import load_adapter as load_adapter
    from paceline.train.evaluate import evaluate as evaluate
    from paceline.train.optimizer import Schedule as Schedule
    from paceline.train.optimizer import optimizer_maker as optimizer_maker
    from paceline.train.step import fit as fit
    from paceline.train.step import train_step as train_step


def __getattr__(name: str) -> Any:
    if name not in _LAZY_EXPORTS:
        renamed = f"It was renamed. Use paceline.{_RENAMED[name]}" if name in _RENAMED else ""
        raise AttributeError(f"module 'paceline' has no attribute {name!r}. {renamed}".rstrip())
    state = random.getstate()  # imported packages may draw from `random`, and the script may have seeded it
    try:
        return getattr(importlib.import_module(f"paceline.{_LAZY_EXPORTS[name]}"), name)
    finally:
        random.setstate(state)
