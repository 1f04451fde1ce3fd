"""Fingerprints of datasets, from all data or from a few samples. The ranks compare them before the first step."""

import hashlib
import re
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.arrays import Rows, dataset_arrays
from paceline.data.loader import LoadingOptions, fetch_batches
from paceline.seeding import preserve_generator_states

MAX_CHECKSUM_BYTES = 1 << 30  # tensors up to this size are compared completely, which takes 1 s
NUM_PROBE_SAMPLES = 8  # samples that are compared of other data
ADDRESS_PATTERN = re.compile(r" at 0x[0-9a-f]+")  # in the default repr of an object
UNSTABLE_DATASET_TEXT = "changes from draw to draw"


def data_fingerprint(dataset: Dataset[Any], loading: LoadingOptions) -> dict[str, Any]:
    """Compute numbers that are equal for equal datasets, by name.

    Random augmentation with the global random streams of torch, Python or numpy is seeded by the sample, so it is
    equal. A dataset whose samples still differ in each reading is accepted, but it cannot be compared.
    """
    length = len(dataset)  # pyright: ignore[reportArgumentType]
    arrays = dataset_arrays(dataset)
    if arrays is not None and sum(t.nbytes for t in arrays) <= MAX_CHECKSUM_BYTES:
        return {"samples": length, "checksum of all of them": [zlib.crc32(_bytes(t)) for t in arrays]}
    first, again = (hash_probe_samples(dataset, loading) for _ in range(2))
    return {
        "samples": length,
        f"hash of {NUM_PROBE_SAMPLES} of them": first if first == again else UNSTABLE_DATASET_TEXT,
    }


def probe_indices(length: int) -> list[int]:
    return sorted({i * (length - 1) // (NUM_PROBE_SAMPLES - 1) for i in range(NUM_PROBE_SAMPLES)})


def hash_probe_samples(dataset: Dataset[Any], loading: LoadingOptions) -> str:
    length = len(dataset)  # pyright: ignore[reportArgumentType]
    # the task's collate function could fail with a single sample, or drop it
    collate = loading.collate and list
    cpu_loading = replace(loading, device=torch.device("cpu"), collate=collate, page=None, kept_loaders=None)
    if loading.worker_init_fn is None:  # otherwise the dataset may need what this function creates
        cpu_loading = replace(cpu_loading, num_workers=0)
    with preserve_generator_states():
        requests = ((0, torch.tensor([i])) for i in probe_indices(length))
        return hash_samples(fetch_batches(dataset, requests, 0, cpu_loading))


def hash_samples(samples: Iterable[Any]) -> str:
    """The hash of these samples. Objects of unknown types are hashed by their repr without addresses."""
    sha = hashlib.sha256()
    for sample in samples:
        _hash(sha, sample)
    return sha.hexdigest()[:12]


def _hash(sha: Any, batch: Any) -> None:
    if isinstance(batch, Tensor) or (isinstance(batch, np.ndarray) and not batch.dtype.hasobject):
        sha.update(f"{batch.dtype}{tuple(batch.shape)}".encode())
        sha.update(_bytes(batch))
    elif isinstance(batch, dict):
        for key in sorted(batch, key=str):  # pyright: ignore[reportUnknownArgumentType]
            sha.update(str(key).encode())
            _hash(sha, batch[key])
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            _hash(sha, part)
    else:
        sha.update(ADDRESS_PATTERN.sub("", repr(batch)).encode())


def _bytes(rows: Rows) -> memoryview:
    if not isinstance(rows, Tensor):
        return memoryview(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]
    flat = rows.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
