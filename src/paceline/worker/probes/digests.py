"""Short hashes of tensors, batches and random generators, by which ranks are compared."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.contract.facts import MAX_DIGESTS

MOST = 1 << 16  # elements of a tensor that are looked at; what differs as a whole differs in these
MAX_DEPTH = 5


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def tensor_bytes(tensor: Any) -> bytes:
    """Those of some elements, evenly over the whole."""
    torch: Any = sys.modules["torch"]
    flat = tensor.detach().reshape(-1)
    flat = flat[:: -(-flat.numel() // MOST) or 1].cpu().contiguous()
    return bytes(flat.view(torch.uint8).numpy())


def digest_of(tensors: Iterable[Any]) -> str:
    """One digest of several; None is one, too."""
    return _hash(b"".join(b"-" if tensor is None else tensor_bytes(tensor) for tensor in tensors))


def leaf_digests(batch: Any, depth: int = 0) -> list[str]:
    """Of each tensor, array and number in a batch, in its order; "f:" before floating point, empty for a constant."""
    torch: Any = sys.modules["torch"]
    if isinstance(batch, torch.Tensor):
        if batch.numel() and bool((batch == batch.reshape(-1)[0]).all()) and batch.dim():
            return [""]
        return [("f:" if batch.is_floating_point() else "") + digest_of([batch])]
    if depth < MAX_DEPTH and isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaf_digests(value, depth + 1)][:MAX_DIGESTS]
    if depth < MAX_DEPTH and isinstance(batch, (list, tuple)):
        return [leaf for value in batch for leaf in leaf_digests(value, depth + 1)][:MAX_DIGESTS]
    if type(batch).__module__ == "numpy" and hasattr(batch, "tobytes"):
        return [_hash(batch.tobytes())]
    return [_hash(repr(batch).encode())] if isinstance(batch, (str, bytes, int, float)) else [""]


def leading(batch: Any, depth: int = 0) -> int:
    """How many samples there are in a batch: the first dimension of its first tensor; 0 where nobody can say."""
    if hasattr(batch, "shape") and len(batch.shape):
        return int(batch.shape[0])
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for value in inner if depth < MAX_DEPTH and (size := leading(value, depth + 1))), 0)


def torch_state() -> str:
    """The state of torch's generator."""
    torch: Any = sys.modules["torch"]
    return _hash(torch.get_rng_state().numpy().tobytes())


def random_states() -> dict[str, str]:
    """The states of the process's generators."""
    torch: Any = sys.modules["torch"]
    states = {
        "torch": _hash(torch.get_rng_state().numpy().tobytes()),
        "random": _hash(repr(random.getstate()).encode()),
    }
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        state = numpy.get_state()
        states["numpy"] = _hash(state[1].tobytes() + str(state[2]).encode())
    return states
