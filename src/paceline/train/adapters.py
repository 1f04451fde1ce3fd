"""Adapters of peft: the tensors of a model that belong to them, their files, and a digest of the base weights.

An adapter gives wrong outputs on other base weights, and peft does not compare them. Therefore its files
contain a digest of the base, which `load_adapter` compares.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import msgspec
from safetensors import safe_open
from torch import Tensor, nn

from paceline.checkpoint.shards import hash_tensors
from paceline.errors import UsageError, first_few
from paceline.runs import writing
from paceline.runs.reading import is_file
from paceline.train.weights import read_weight_file, save

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # the names that peft reads
BASE = "paceline.base_sha256"
"""The metadata key of the digest of the base weights."""
MAX_NAMES = 5  # in a message


class AdapterFiles(msgspec.Struct, frozen=True):
    """The content of the files of one adapter, and the digest of its base weights before the training."""

    config: dict[str, Any]
    tensors: dict[str, str]  # name in the file: name in the state_dict of the model
    base_sha256: str


class InitialAdapters(msgspec.Struct, frozen=True):
    """The adapters of a model before its training. A checkpoint contains it."""

    files: dict[str, AdapterFiles]  # by the name of the adapter, as in peft
    outside: list[str]
    """Trained parameters that the files do not contain."""
    buffers: list[str]
    buffers_sha256: str  # of `buffers`, which no file contains: they must not change

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """The adapters of a model that is, or contains, a PeftModel; None for any other model."""
        peft = sys.modules.get("peft")  # a script that has not imported it has no such model
        modules: list[tuple[str, Any]] = [] if peft is None else [*model.named_modules()]
        peft_models = [(name, module) for name, module in modules if isinstance(module, peft.PeftModel)]  # pyright: ignore
        if not peft_models:
            return None
        name, peft_model = peft_models[0]
        prefix, base = f"{name}." if name else "", _base_digests(peft_model)
        files = {adapter: _files(peft_model, adapter, prefix, base) for adapter in peft_model.peft_config}
        saved = {full for file in files.values() for full in file.tensors.values()}
        parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied one has several names
        saved_ids = {id(parameter) for key, parameter in parameters.items() if key in saved}
        outside = [key for key, p in model.named_parameters() if p.requires_grad and id(p) not in saved_ids]
        known = saved | parameters.keys()
        buffers = {key: t for key, t in model.state_dict().items() if key not in known and isinstance(t, Tensor)}
        return cls(files, outside, [*buffers], hash_tensors(buffers))

    @property
    def kinds(self) -> set[str]:
        return {str(file.config["peft_type"]) for file in self.files.values()}

    @property
    def weight_names(self) -> list[str]:
        return [name for file in self.files.values() for name in file.tensors.values()] + self.buffers

    def with_saved_digests(self, saved: Self) -> tuple[Self, bool]:
        """(These adapters with the digests of a checkpoint, which restores the base; whether the digests are equal)."""
        old = {name: file.base_sha256 for name, file in saved.files.items()}
        files = {n: msgspec.structs.replace(f, base_sha256=old.get(n, f.base_sha256)) for n, f in self.files.items()}
        resumed = msgspec.structs.replace(self, files=files, buffers_sha256=saved.buffers_sha256)
        return resumed, resumed == self

    def unsaved_tensors(self, weights: Mapping[str, Tensor]) -> list[str]:
        """The tensors that the training has changed, and the files do not contain. `weights`: see `write`."""
        is_changed = hash_tensors({name: weights[name] for name in self.buffers}) != self.buffers_sha256
        return self.outside + self.buffers * is_changed

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write the files of the adapters into `folder`, as `PeftModel.save_pretrained` does. Return the written
        tensors.

        An adapter with a name other than "default" has a folder of its name inside. `weights`: the tensors with
        `names`.
        """
        if missing := self.unsaved_tensors(weights):
            raise UsageError(code="adapter-incomplete", names=first_few(missing, MAX_NAMES))
        written: dict[str, Tensor] = {}
        for adapter, file in self.files.items():
            target = _folder(folder, adapter)
            tensors = {name: weights[full] for name, full in file.tensors.items()}
            writing.make_folder(target, exist_ok=True)
            writing.replace_file(target / CONFIG_FILE, json.dumps(file.config, indent=2, sort_keys=True).encode())
            # a copy, because safetensors has no tensors that share memory
            copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            save(copies, target / WEIGHTS_FILE, metadata={BASE: file.base_sha256})
            written |= {name if adapter == "default" else f"{adapter}/{name}": t for name, t in copies.items()}
        return written

    def read(self, folder: Path, *, ours: bool) -> dict[str, Tensor]:
        """The tensors that `write` has written, by their names in the model. With `ours`, only files of this user."""
        weights: dict[str, Tensor] = {}
        for adapter, file in self.files.items():
            tensors = read_weight_file(_folder(folder, adapter) / WEIGHTS_FILE, require_trusted_owner=ours)
            weights |= {full: tensors[name] for name, full in file.tensors.items()}
        return weights


def _files(model: Any, adapter: str, prefix: str, base: Mapping[str, str]) -> AdapterFiles:
    from peft import get_peft_model_state_dict

    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    full_names = {id(tensor): prefix + name for name, tensor in state.items()}
    # without embeddings of the base: their digest is compared, and peft would search the Hub for their original size
    selected = get_peft_model_state_dict(model, state, adapter_name=adapter, save_embedding_layers=False)
    tensors = {name: full_names[id(tensor)] for name, tensor in selected.items() if id(tensor) in full_names}
    replaced = {*map(_plain, tensors)}
    kept = "".join(digest for name, digest in sorted(base.items()) if name not in replaced)
    config, base_model = model.peft_config[adapter], model.get_base_model()
    values = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    base_name = config.base_model_name_or_path or getattr(base_model, "name_or_path", "") or None
    values |= {"inference_mode": True, "base_model_name_or_path": base_name}
    if config.task_type is None:  # as peft does, for AutoPeftModel
        kind = type(base_model)
        values["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return AdapterFiles(json.loads(json.dumps(values)), tensors, hashlib.sha256(kept.encode()).hexdigest())


def _base_digests(model: Any) -> dict[str, str]:
    """The SHA-256 of each tensor of the base, by name. Several threads compute it: one needs minutes for 100 GB."""
    of_adapters: set[str] = set()  # a layer of peft has dictionaries of tensors, by the names of the adapters
    for path, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            for name, child in module.named_children():
                if hasattr(type(child), "keys"):  # of torch or of peft
                    of_adapters |= child.state_dict(prefix=f"{path}.{name}.".lstrip(".")).keys()
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    base = {_plain(name): tensor for name, tensor in state.items() if name not in of_adapters}
    with ThreadPoolExecutor() as pool:
        return dict(zip(base, pool.map(lambda item: hash_tensors(dict([item])), base.items()), strict=True))


def _folder(folder: Path, adapter: str) -> Path:
    """The folder of one adapter, as peft chooses it. The name may be that of a foreign run, and stays inside."""
    return folder if adapter == "default" else folder / quote(adapter, safe="").replace(".", "%2E")


def _plain(name: str) -> str:
    """The name of a tensor of the base, whether or not an adapter wraps its module."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))


def load_adapter(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> nn.Module:
    """Load an adapter as `PeftModel.from_pretrained(model, folder, **options)`, and compare the base weights.

    Args:
        model: the base model, with the weights that it had when the adapter was trained.
        folder: as `Session.save(..., adapter=True)`, `paceline export --format peft` or peft has written it.
        **options: of `PeftModel.from_pretrained`, for example `is_trainable=True`.

    Returns:
        The PeftModel. Pass it to `Session.prepare` to train the adapter further.

    Raises:
        UsageError: if the adapter was trained on other base weights, or on the same ones in another dtype. An adapter
            that peft has written has no digest of its base: it is loaded without a comparison.
    """
    from peft import PeftModel

    loaded: Any = PeftModel.from_pretrained(model, os.fspath(folder), **options)
    expected = None
    if is_file(path := Path(folder, WEIGHTS_FILE)):  # else it is a name on the Hub
        with safe_open(path, "pt") as file:
            expected = (file.metadata() or {}).get(BASE)
    adapter, adapters = loaded.active_adapter, InitialAdapters.of(loaded)
    assert adapters is not None
    if expected not in (None, found := adapters.files[adapter].base_sha256):
        raise UsageError(code="adapter-of-another-base", folder=folder, saved=expected, found=found)
    return loaded
