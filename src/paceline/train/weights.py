"""Files of weights: atomic save, rescue after an error, and initial weights (`--init-from`)."""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.checkpoint.export import state_dict_from_checkpoint
from paceline.checkpoint.manager import Checkpoints, MessageCallback
from paceline.checkpoint.shards import gather_full_state, hash_tensors
from paceline.checkpoint.state import TensorShard
from paceline.collectives.control import check_equal, raise_on_all_ranks
from paceline.errors import UsageError, first_few
from paceline.runs import writing
from paceline.runs.folder import CHECKPOINTS, WEIGHTS, check_usable_as_run_dir
from paceline.runs.owners import UnreadableFileError, open_file
from paceline.runs.reading import real_path
from paceline.strategies.base import Strategy

MAX_NAMES = 5  # in a line
COMPLEX_METADATA_KEY = "paceline.complex"
"""The metadata key that lists complex tensors. They are saved as real tensors with a last dimension of 2, because
safetensors has no complex128, and older versions have no complex64."""


def save(
    weights: Mapping[str, Tensor], path: Path, *, pickled: bool = False, metadata: Mapping[str, str] | None = None
) -> None:
    """Save a model's state as safetensors, with `metadata`, or with torch.save if `pickled`. Raise OSError if it fails.

    safetensors: a tensor with two names (tied weights) is stored once, as `load_model` expects. A complex tensor is
    stored with its real and imaginary parts in a last dimension of 2; `torch.view_as_complex` converts it back.
    """
    try:
        with writing.replace_atomically(path) as (folder, partial_name):
            if pickled:
                torch.save(dict(weights), f"/proc/self/fd/{folder}/{partial_name}")
            else:
                tensors, ties = _unique(weights)
                pairs = {name: torch.view_as_real(t) for name, t in tensors.items() if t.is_complex()}
                shapes = {COMPLEX_METADATA_KEY: json.dumps([*pairs])} if pairs else {}
                described = {"format": "pt", **ties, **shapes, **(metadata or {})}
                save_file(tensors | pairs, f"/proc/self/fd/{folder}/{partial_name}", described)
            os.chmod(partial_name, writing.FILE, dir_fd=folder)
    except Exception as error:  # safetensors and torch do not raise OSError themselves
        raise OSError(f"{path} cannot be written: {error}") from error


def read_weight_file(path: Path, *, require_trusted_owner: bool) -> dict[str, Tensor]:
    """Load a file of `save`, with tied weights under all their names. Raises OSError if it is missing or damaged."""
    try:
        with (
            open_file(path, must_be_ours=require_trusted_owner) as source,
            safe_open(f"/proc/self/fd/{source.descriptor}", "pt") as file,
        ):
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            metadata: dict[str, str] = file.metadata() or {}
            for name in json.loads(metadata.pop(COMPLEX_METADATA_KEY, "[]")):
                tensors[name] = torch.view_as_complex(tensors[name])
            ties = {name: tensors[first_name] for name, first_name in metadata.items() if first_name in tensors}
    except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise UnreadableFileError(path, f"is damaged: {error}") from None
    return ties | tensors


def _unique(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each distinct tensor in separate memory, by its first name, and the first name for each other name."""
    first_names: dict[object, str] = {}
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for name, tensor in sorted(weights.items()):
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if identity in first_names:
            ties[name] = first_names[identity]
            continue
        first_names[identity] = name
        # some strategies put all parameters into one flat tensor, and safetensors does not accept shared memory
        owns_storage = tensor.untyped_storage().nbytes() == tensor.nbytes
        tensors[name] = tensor.contiguous() if owns_storage else tensor.clone(memory_format=torch.contiguous_format)
    return tensors, ties


def save_weights_on_one_rank(replica: Strategy, run_dir: Path) -> str:
    if replica.world.size > 1 and any(h.name.startswith("model/") and not h.replicated for h in replica.state()):
        return "the weights are sharded over all ranks, so one rank cannot save them. Resume from the newest checkpoint"
    return save_with_fallback_folders(replica.weights(), run_dir)


def save_with_fallback_folders(weights: Mapping[str, Tensor], run_dir: Path) -> str:
    """Save the weights in the first folder with enough space, e.g. if the disk is full. Return a text with the path."""
    for folder in (run_dir, Path.cwd(), Path(tempfile.gettempdir()), Path("/dev/shm"), Path.home()):
        path = folder.resolve() / f"{run_dir.name}-rescued.safetensors"
        try:
            save(weights, path)
        except OSError:
            continue
        return f"the weights were rescued to {path}"
    return "the weights could not be saved in any folder: they are LOST"


def load_initial_weights(replica: Strategy, path: Path, *, trust: bool, report: MessageCallback) -> str:
    """Load weights into the model, by name (collective). Return their SHA-256.

    Tensors that are missing in `path`, or have a different shape there, keep their initial values. With `trust`, `path`
    can be a run folder that another user could have written.
    """
    shards = replica.state()
    if replica.world.data is not replica.world:  # the state has shards of parameters
        shards = [TensorShard(name, tensor) for name, tensor in gather_full_state(shards, replica.world).items()]
    with raise_on_all_ranks(replica.world):
        weights = read_weights(path, trust=trust, report=report)
        source = _matching(replica, shards, weights, path, report)
    digest = hash_tensors(weights)
    check_equal("initial weights", digest, replica.world)
    with raise_on_all_ranks(replica.world):
        replica.load(source)
    return digest


def read_weights(path: Path, *, trust: bool, report: MessageCallback) -> dict[str, Tensor]:
    """Read a state_dict to the CPU from a file, or from the final weights or the newest checkpoint of a run folder."""
    if path.is_dir():
        run_dir = real_path(path)
        check_usable_as_run_dir(run_dir, trust=trust)
        path = run_dir / WEIGHTS
        if not path.is_file():
            newest = Checkpoints(run_dir / CHECKPOINTS, trust=trust).newest_valid(report)
            if newest is None:
                raise UsageError(code="init-from-no-weights", folder=run_dir, weights=WEIGHTS)
            report(f"--init-from: newest checkpoint of the run, {newest[0].name}")
            return state_dict_from_checkpoint(*newest)
    try:
        if path.suffix != ".safetensors":
            return _state_dict_in(torch.load(path, map_location="cpu", weights_only=True), path)
        return read_weight_file(real_path(path), require_trusted_owner=False)  # safetensors cannot contain code
    except (OSError, UnpicklingError, RuntimeError, EOFError) as error:
        raise UsageError(code="init-from-unreadable", path=path, reason=str(error).splitlines()[0]) from None


def _state_dict_in(content: Any, path: Path) -> dict[str, Tensor]:
    state = content.get("state_dict", content) if isinstance(content, Mapping) else {}
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        keys = f" (it has {first_few([str(key) for key in state], MAX_NAMES)})" if state else ""
        raise UsageError(code="init-from-no-state-dict", path=path, keys=keys)
    return dict(state)


class _PartialSource:
    """A `checkpoint.state.Source` of the given values, and of the current values for all other names."""

    def __init__(self, values: Mapping[str, Tensor], current: Iterable[TensorShard]) -> None:
        self._values, self._current = values, {shard.name: shard for shard in current}

    def names(self, prefix: str) -> list[str]:
        return [name for name in {**self._current, **self._values} if name.startswith(prefix)]

    def shape(self, name: str) -> torch.Size:
        return self._values[name].shape if name in self._values else self._current[name].full_shape

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        shard = None if name in self._values else self._current.get(name)
        if (value := self._values.get(name) if shard is None else shard.tensor) is None:
            return None
        value = value.detach().cpu().clone()  # each virtual rank gets its own buffers
        # of a shard, the loader requests exactly the elements that this rank holds
        is_part = shard is not None and shard.unsharded_shape is not None
        return value if stop is None or is_part else value.reshape(-1)[start:stop]


def _matching(
    replica: Strategy, shards: Sequence[TensorShard], weights: Mapping[str, Tensor], path: Path, report: MessageCallback
) -> _PartialSource:
    model = replica.model
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    first_names = {name: by_id[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}  # of tied weights
    shapes = {shard.name: shard.full_shape for shard in shards}
    expected = {n: (shapes.get(f"model/{n}", p.shape), p.dtype, f"model/{n}") for n, p in model.named_parameters()}
    persistent = set(model.state_dict())
    expected |= {n: (b.shape, b.dtype, f"buffers/{n}") for n, b in model.named_buffers() if n in persistent}
    matching: dict[str, Tensor] = {}
    wrong_shape: list[str] = []
    for name, value in weights.items():
        target = expected.get(first_names.get(name, name))
        if target and value.shape == target[0]:
            matching[target[2]] = value.to(target[1])
        elif target:
            wrong_shape.append(f"{name} {tuple(target[0])} here, {tuple(value.shape)} there")
    if not any(name.startswith("model/") for name in matching):
        shapes = f"; shapes differ: {first_few(wrong_shape, MAX_NAMES)}" if wrong_shape else ""
        has, needed = first_few([*weights], MAX_NAMES), first_few([*expected], MAX_NAMES)
        raise UsageError(code="init-from-does-not-fit", path=path, has=has, needed=needed, shapes=shapes)
    owner = "the model's" if replica.pipeline is None else "the first stage's"
    report(f"loaded {len(matching)} of {owner} {len(expected)} tensors from {path}")
    not_loaded = [name for name, (*_, key) in expected.items() if key not in matching]
    missing = [name for name in not_loaded if not any(name in text for text in wrong_shape)]
    of_other_stages = replica.pipeline.called if replica.pipeline else ()
    unused = [name for name in weights if first_names.get(name, name) not in expected and name not in of_other_stages]
    for title, names in {
        "different shape, not loaded": wrong_shape,
        "missing in the file, not loaded": missing,
        "not part of the model": unused,
    }.items():
        if names:
            report(f"--init-from: {title}: {first_few(names, MAX_NAMES)}")
    return _PartialSource(matching, shards)
