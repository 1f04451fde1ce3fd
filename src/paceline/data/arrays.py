"""Data held as tensors or arrays: a whole micro-batch is gathered at once, without Python per sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import methodcaller
from typing import Any, TypeVar, cast

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from paceline.data.plan import splitmix64
from paceline.seeding import derive_seed

Rows = Tensor | NDArray[Any]
"""One row per sample. A numpy array can be memory-mapped: only the rows of a batch are read from the file."""
DrawFunction = Callable[[int], Tensor]  # (k) -> (n, k) float32 in [0, 1): k new random numbers for each of n samples
GatherFunction = Callable[[Tensor, "SampleRandomNumbers"], Sequence[Tensor]]
"""(indices (n,), random numbers of the samples) -> the batch."""
DatasetT = TypeVar("DatasetT", bound=Dataset[Any])


class SampleRandomNumbers(Struct, frozen=True):
    """The random numbers of the samples in an epoch. They do not depend on the batch.

    With a generator, the numbers of a sample would depend on the samples before it. Here each number is a hash of
    (seed, epoch, sample, count of earlier draws), computed for the whole batch at once.
    """

    seed: int
    epoch: int

    def make_draw_function(self, indices: Tensor, device: torch.device) -> DrawFunction:
        """The random numbers of samples `indices` (n,), on `device`. All devices give the same bits."""
        key = np.uint64(derive_seed(self.seed, "draws", self.epoch))
        samples = splitmix64(indices.cpu().numpy().astype(np.uint64) ^ splitmix64(key.reshape(1)))[:, None]  # (n, 1)
        drawn = 0

        def draw(k: int) -> Tensor:
            nonlocal drawn
            numbers = splitmix64(samples + splitmix64(np.arange(drawn, drawn + k, dtype=np.uint64)))  # (n, k)
            drawn += k
            # 24 bits, because a float32 below 1 represents them exactly
            return torch.from_numpy((numbers >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)).to(device)

        return draw


@dataclass(frozen=True)
class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is (inputs[i], targets[i]), after `transform` and `augment`, which work on whole batches of inputs.

    `transform` must treat all samples equally and draw no random numbers, e.g. normalise: a sample must not depend on
    its batch. `augment` comes after it, and also gets `draw`: draw(k) is (n, k) float32 in [0, 1), and row j depends on
    the run's seed, the epoch and sample j only. For example, a random flip:

        def augment(images, draw):                                    # images (n, C, H, W)
            flip = draw(1).view(-1, 1, 1, 1) < 0.5
            return torch.where(flip, images.flip(3), images)

    Raises:
        ValueError: if the numbers of inputs and targets differ, or torch does not support their dtype.
    """

    inputs: Rows  # (N, ...)
    targets: Rows  # (N, ...)
    transform: Callable[[Tensor], Tensor] | None = None
    augment: Callable[[Tensor, DrawFunction], Tensor] | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.targets)} targets")
        for rows in (self.inputs, self.targets):
            try:
                if not isinstance(rows, Tensor):
                    torch.from_numpy(np.empty(0, rows.dtype))
            except (TypeError, ValueError):  # unsupported dtype or byte order
                raise ValueError(
                    f"torch does not support numpy's dtype {rows.dtype}. Convert the array first: "
                    "array.astype('float32'), or 'int64' for labels"
                ) from None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.gather(torch.tensor([index]))
        return inputs[0], targets[0]

    def gather(self, indices: Tensor, draws: SampleRandomNumbers | None = None) -> tuple[Tensor, Tensor]:
        """The batch of samples `indices`: inputs (n, ...) and targets (n, ...).

        Args:
            indices: (n,) int64.
            draws: the random numbers for `augment`. None: those of seed 0 and epoch 0.
        """
        inputs = _rows(self.inputs, indices)
        if self.transform is not None:
            inputs = self.transform(inputs)
        if self.augment is not None:
            draws = draws or SampleRandomNumbers(0, 0)
            inputs = self.augment(inputs, draws.make_draw_function(indices, inputs.device))
        return inputs, _rows(self.targets, indices)


def _rows(rows: Rows, indices: Tensor) -> Tensor:
    if isinstance(rows, Tensor):
        return rows.index_select(0, indices if rows.is_cpu else _copy_of(indices, rows.device))
    # np.take copies only these rows; torch would warn about a file that is mapped read-only
    return torch.from_numpy(np.ascontiguousarray(np.take(rows, indices.numpy(), axis=0)).view(np.ndarray))


class IndicesOnDevice:
    """Copies of sample indices on a device. Batches are slices of the order of an epoch, which is copied once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._order, self._copy, self._version = device, torch.empty(0), torch.empty(0), 0

    def copy_of(self, indices: Tensor) -> Tensor:
        order = indices._base
        if order is None or indices.device == self._device or not order.is_contiguous() or order.storage_offset():
            return indices.to(self._device, non_blocking=True)
        if order is not self._order or order._version != self._version:  # a caller may have changed it in place
            self._version, self._order, self._copy = order._version, order, order.to(self._device, non_blocking=True)
        return self._copy.as_strided(indices.shape, indices.stride(), indices.storage_offset())


@cache
def _indices_on(device: torch.device, stream: int) -> IndicesOnDevice:
    return IndicesOnDevice(device)


def _copy_of(indices: Tensor, device: torch.device) -> Tensor:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _indices_on(device, stream).copy_of(indices)


def batch_gatherer(dataset: object) -> GatherFunction | None:
    """A function that gathers a whole batch of `dataset` at once; None if the dataset only has single samples."""
    if isinstance(dataset, ArrayDataset):
        return dataset.gather
    if type(dataset) is TensorDataset:  # a subclass may override __getitem__
        tensors, device = dataset.tensors, dataset.tensors[0].device
        if any(tensor.device != device for tensor in tensors):
            return lambda indices, _: [_rows(tensor, indices) for tensor in tensors]
        gathered_by = partial(methodcaller, "index_select", 0)
        if device.type == "cpu":
            return lambda indices, _: [*map(gathered_by(indices), tensors)]
        return lambda indices, _: [*map(gathered_by(_copy_of(indices, device)), tensors)]
    if type(dataset) is Subset:
        inner = batch_gatherer(cast("Subset[Any]", dataset).dataset)
        if inner is not None:
            subset_indices = torch.as_tensor(cast("Subset[Any]", dataset).indices, dtype=torch.int64)
            return lambda indices, draws: inner(subset_indices[indices], draws)
    return None


def dataset_arrays(dataset: object) -> Sequence[Rows] | None:
    if isinstance(dataset, ArrayDataset):
        return (dataset.inputs, dataset.targets)
    return dataset.tensors if type(dataset) is TensorDataset else None


def on_device(
    dataset: DatasetT, device: torch.device, *, reserved: int = 0, free_bytes: int | None = None,
    collate: Callable[..., Any] | None = None,
) -> DatasetT:  # fmt: skip
    """Move a dataset of tensors or arrays to `device`, if it fits there. Otherwise return it unchanged.

    A GPU then gathers its batches without copies from the host. A dataset with a `collate` function is not moved,
    because the function makes batches on the CPU.

    Args:
        dataset: an ArrayDataset or a TensorDataset. Others are returned unchanged.
        device: the GPU. For the CPU, the dataset is returned unchanged.
        reserved: bytes of the free memory that the data must not use, e.g. for activations. It has no effect with
            `free_bytes`.
        free_bytes: maximum size of the data in bytes. None: a quarter of the free memory after `reserved`.
        collate: the function that makes a batch of samples, if there is one.

    Returns:
        A dataset of the same kind with its data on `device`; or `dataset` itself if the data do not fit, or if
        `transform` or `augment` fail on them there.
    """
    arrays = dataset_arrays(dataset)
    if device.type == "cpu" or arrays is None or collate is not None:
        return dataset
    if free_bytes is None:
        free_bytes = (int(torch.get_device_module(device).mem_get_info(device)[0]) - reserved) // 4
    if sum(rows.nbytes for rows in arrays) > free_bytes:
        return dataset
    moved = [(r if isinstance(r, Tensor) else torch.from_numpy(np.array(r))).to(device) for r in arrays]
    if not isinstance(dataset, ArrayDataset):
        return cast("DatasetT", TensorDataset(*moved))
    moved_dataset = replace(dataset, inputs=moved[0], targets=moved[1])
    try:
        moved_dataset.gather(torch.zeros(1, dtype=torch.int64))
    except Exception:  # e.g. a transform that works on numpy arrays only
        return dataset
    return cast("DatasetT", moved_dataset)
