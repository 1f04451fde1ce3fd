"""Adapters of peft: the tensors of a model that belong to them, their files, and a digest of the base weights.

An adapter is useless on other base weights, and peft does not notice them. Therefore its files contain a digest of the
base, and `load_adapter` compares it.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
from safetensors import safe_open
from torch import Tensor, nn

from paceline.checkpoint.shards import sha256_of
from paceline.errors import UsageError, first_few
from paceline.runs import writing
from paceline.train.weights import save

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # the names that peft reads
BASE = "paceline.base_sha256"
"""The metadata key of the digest of the base weights."""
MAX_NAMES = 5  # in a message


class AdapterFiles(msgspec.Struct, frozen=True):
    """The content of the files of one adapter."""

    config: dict[str, Any]
    tensors: dict[str, str]  # name in the file: name in the state_dict of the model


class Adapters(msgspec.Struct, frozen=True):
    """The adapters of a model before its training. A checkpoint contains it."""

    files: dict[str, AdapterFiles]  # by the name of the adapter, as in peft
    base_sha256: str
    outside: list[str]
    """Trained parameters that the files do not contain."""
    buffers: list[str]
    buffers_sha256: str  # of `buffers`, which no file contains: they must not change

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """The adapters of a model that is, or contains, a PeftModel; None for any other model."""
        peft = sys.modules.get("peft")  # a script that has not imported it has no such model
        found = [] if peft is None else [(n, m) for n, m in model.named_modules() if isinstance(m, peft.PeftModel)]
        if not found:
            return None
        name, peft_model = found[0]
        prefix, state = f"{name}." if name else "", peft_model.state_dict()
        files = {adapter: _files(peft_model, adapter, state, prefix) for adapter in peft_model.peft_config}
        saved = {full for file in files.values() for full in file.tensors.values()}
        # peft's names of tensors of an adapter contain its name. `original_module` is replaced by a trained copy
        replaced = {*files, "original_module"}
        base = {key: tensor for key, tensor in state.items() if prefix + key not in saved and isinstance(tensor, Tensor)}
        base = {key: tensor for key, tensor in base.items() if replaced.isdisjoint(key.split("."))}
        trained = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
        parameters = {key for key, _ in model.named_parameters(remove_duplicate=False)}
        buffers = {key: t for key, t in model.state_dict().items() if key not in parameters | saved}
        buffers = {key: t for key, t in buffers.items() if isinstance(t, Tensor)}
        outside = [key for key in trained if key not in saved]
        return cls(files, sha256_of(base), outside, [*buffers], sha256_of(buffers))

    @property
    def names(self) -> list[str]:
        """The tensors in the state_dict of the model that `write` needs."""
        return [name for file in self.files.values() for name in file.tensors.values()] + self.buffers

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write the files of the adapters into `folder`, as `PeftModel.save_pretrained` does.

        Args:
            folder: it may exist. Another adapter than "default" has a folder of its name inside.
            weights: the tensors with `names`; others are ignored.

        Returns:
            The written tensors.

        Raises:
            UsageError: if the files would not contain all that the training has changed.
            OSError: if a file cannot be written.
        """
        changed = sha256_of({name: weights[name] for name in self.buffers}) != self.buffers_sha256
        if missing := self.outside + self.buffers * changed:
            raise UsageError(code="adapter-incomplete", names=first_few(missing, MAX_NAMES))
        written: dict[str, Tensor] = {}
        for adapter, file in self.files.items():
            target = folder if adapter == "default" else folder / adapter
            tensors = {name: weights[full] for name, full in file.tensors.items()}
            writing.make_folder(target, exist_ok=True)
            writing.replace(target / CONFIG_FILE, json.dumps(file.config, indent=2, sort_keys=True).encode())
            # a copy, because safetensors has no tensors that share memory
            copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            save(copies, target / WEIGHTS_FILE, metadata={BASE: self.base_sha256})
            written |= {name if adapter == "default" else f"{adapter}/{name}": t for name, t in copies.items()}
        return written


def _files(model: Any, adapter: str, state: Mapping[str, Any], prefix: str) -> AdapterFiles:
    from peft import get_peft_model_state_dict

    full_names = {id(tensor): prefix + name for name, tensor in state.items()}
    # without embeddings of the base: their digest is compared, and peft would search the Hub for their original size
    selected = get_peft_model_state_dict(model, state, adapter_name=adapter, save_embedding_layers=False)
    tensors = {name: full_names[id(tensor)] for name, tensor in selected.items() if id(tensor) in full_names}
    config, base = model.peft_config[adapter], model.get_base_model()
    kind = None
    if config.task_type is None:  # as peft does, for AutoPeftModel
        kind = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=kind)
        written = json.loads(Path(folder, CONFIG_FILE).read_bytes())
    path = written.get("base_model_name_or_path") or getattr(base, "name_or_path", None) or None
    return AdapterFiles({**written, "inference_mode": True, "base_model_name_or_path": path}, tensors)


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
    with safe_open(Path(folder, WEIGHTS_FILE), "pt") as file:
        expected = (file.metadata() or {}).get(BASE)
    adapters = Adapters.of(loaded)
    assert adapters is not None
    if expected not in (None, adapters.base_sha256):
        raise UsageError(code="adapter-of-another-base", folder=folder, saved=expected, found=adapters.base_sha256)
    return loaded
