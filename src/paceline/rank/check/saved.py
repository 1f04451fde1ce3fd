"""`--check`: loads each of the first checkpoints that a framework saves, and compares it with memory, bit for bit.

A part of the state is in a checkpoint if one of its files has a value with the same digest, at any depth. So the
comparison needs no loader of a framework, and changes nothing in the training. Rank 0 looks for models, optimizers and
schedules. Each rank looks for its random states.
"""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.protocol.facts import ORDER, CheckpointDiff, ScriptFacts
from paceline.rank.probes import ScriptListener, short_hash, wrap_when_imported
from paceline.rank.probes.steps import is_sharded
from paceline.rank.sites import format_user_site
from paceline.runs.owners import UntrustedFileError, open_file

MAX_STATES, MAX_BYTES = 2, 2 << 30  # checkpoints that are loaded, and the size of one
RECENT_STEPS = 8  # an optimizer that is not among these steps belongs to an earlier training
TENSORS, PICKLES = (".safetensors",), (".pt", ".pth", ".bin", ".pkl", ".ckpt")
SHARDING = ("DEEPSPEED", "FSDP", "MEGATRON")  # parts of states that have no file with a whole optimizer
LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
Parts = Iterator[tuple[str, Any]]  # the name and the value of each part of the state in memory


class SavedStateRecorder(ScriptListener):
    def __init__(self, facts: ScriptFacts, schedules: Mapping[int, tuple[Any, str, str]]) -> None:
        """`schedules`: all schedules that have stepped, first in each value."""
        self._facts, self._schedules = facts, schedules
        self._stepped: deque[Any] = deque(maxlen=RECENT_STEPS)
        wrap_when_imported("transformers.trainer", "Trainer", "_save_checkpoint", after=self._on_trainer_saved)
        wrap_when_imported("accelerate.accelerator", "Accelerator", "save_state", after=self._on_accelerate_saved)
        for module in LIGHTNING:
            wrap_when_imported(module, "Trainer", "save_checkpoint", after=self._on_lightning_saved)

    def on_step_end(self, optimizer: Any) -> None:
        self._stepped.append(optimizer)

    def _on_trainer_saved(self, _: Any, trainer: Any, model: Any, trial: Any, *__: Any) -> None:
        folder = Path(trainer._get_output_dir(trial)) / f"checkpoint-{trainer.state.global_step}"
        parts = _parts([trainer.model], [trainer.optimizer], [trainer.lr_scheduler])
        parts = parts if trainer.args.should_save else iter(())
        if not _shards(trainer.accelerator.distributed_type):
            self._compare(folder, parts, weights_only=trainer.args.save_only_model)

    def _on_accelerate_saved(self, folder: Any, accelerator: Any, *_: Any, **__: Any) -> None:
        optimizers = [*{id(optimizer): optimizer for optimizer in self._stepped}.values()]
        seen = (schedule for schedule, *_ in self._schedules.values())
        schedules = [schedule for schedule in seen if getattr(schedule, "optimizer", None) in optimizers]
        parts = _parts(accelerator._models, optimizers, schedules) if accelerator.is_main_process else iter(())
        generators = (getattr(loader, "synchronized_generator", None) for loader in accelerator._dataloaders)
        orders = [(ORDER, generator.get_state()) for generator in generators if generator is not None]
        if not _shards(accelerator.distributed_type):
            self._compare(Path(folder), parts, orders, open_window=not accelerator.sync_gradients)

    def _on_lightning_saved(self, _: Any, trainer: Any, path: Any, weights_only: bool | None = False, *__: Any) -> None:
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        parts = _parts([trainer.lightning_module], trainer.optimizers, schedules)
        if trainer.is_global_zero and trainer.state.fn == "fit" and not _shards(type(trainer.strategy).__name__):
            self._compare(Path(path), parts, weights_only=bool(weights_only))

    def _compare(self, path: Path, parts: Parts, orders: Iterable[tuple[str, Any]] = (), **flags: Any) -> None:
        if len(self._facts.saved_states) >= MAX_STATES:
            return
        state = CheckpointDiff(format_user_site(), path.name, **flags)
        self._facts.saved_states.append(state)
        in_memory = [*parts]
        if state.weights_only or any(is_sharded(value) for _, value in in_memory):
            return
        files = _files(path, self._facts.rank, all_files=bool(in_memory))
        if sum(file.stat().st_size for file in files) <= MAX_BYTES:
            in_files = set[str]()
            try:
                for file in files:
                    hash_nested(_load(file), in_files)
            except UntrustedFileError:  # to load it could run code of a different user
                return
            state.parts = len(in_memory)
            state.missing = [name for name, value in in_memory if hash_nested(value, set()) not in in_files]
            in_memory = [*_random_states(), *orders]
            state.random = [name for name, value in in_memory if hash_nested(value, set()) not in in_files]


def _shards(name: object) -> bool:
    return any(word in str(name).upper() for word in SHARDING)


def _parts(models: list[Any], optimizers: list[Any], schedules: list[Any]) -> Parts:
    """What a checkpoint must have: all that training changes, which excludes the base of adapters."""
    for model in models:
        parameters = model.named_parameters()
        yield from ((f"{name} of the model", tensor) for name, tensor in parameters if tensor.requires_grad)
        if not hasattr(getattr(model, "module", model), "peft_config"):
            kept = model.state_dict()
            yield from ((f"{name} of the model", tensor) for name, tensor in model.named_buffers() if name in kept)
    for kind, inner, objects in (("optimizer", "optimizer", optimizers), ("schedule", "scheduler", schedules)):
        for wrapper in objects:  # Accelerate wraps them
            yield f"the {kind} {type(getattr(wrapper, inner, wrapper)).__name__}", wrapper.state_dict()


def _random_states() -> Parts:
    torch: Any = sys.modules["torch"]
    yield "random", random.getstate()
    yield "torch", torch.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "numpy", numpy.random.get_state()
    if torch.cuda.is_initialized():
        yield "torch.cuda", torch.cuda.get_rng_state()


def _files(path: Path, rank: int, *, all_files: bool) -> list[Path]:
    """The files of a checkpoint; without `all_files`, those of this rank: other ranks may still write theirs."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    kept = [file for file in files if file.suffix in (*TENSORS, *PICKLES)]
    return kept if all_files else [file for file in kept if file.stem.endswith(f"_{rank}")]


def _load(file: Path) -> Any:
    if file.suffix in TENSORS:
        from safetensors.torch import load_file

        return load_file(file)
    load: Any = sys.modules["torch"].load
    with open_file(file.resolve(), must_be_ours=True) as opened, os.fdopen(os.dup(opened.descriptor), "rb") as content:
        return load(content, map_location="cpu", weights_only=False)  # random states and settings are not only tensors


def hash_nested(value: Any, digests: set[str]) -> str:
    """The digest of a nested value, with all bits of its tensors. Adds the digests of its parts to `digests`."""
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        text = f"{value.dtype} {tuple(value.shape)} {short_hash(content)}"
    elif isinstance(value, Mapping):
        text = "{" + " ".join(sorted(f"{key!r}: {hash_nested(inner, digests)}" for key, inner in value.items())) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + " ".join(hash_nested(inner, digests) for inner in value) + "]"
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        text = f"{value.dtype} {value.shape} {short_hash(value.tobytes())}"
    else:  # the text of other objects may contain their addresses
        text = repr(value) if isinstance(value, (str, bytes, int, float, type(None))) else type(value).__name__
    digest = short_hash(text.encode())
    digests.add(digest)
    return digest
