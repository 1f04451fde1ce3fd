"""How do the peers get the same samples as paceline? One by one, as tutorials load them, dealt in paceline's order.

torchvision is not used: its wheels need CUDA's torch. `Images` does to a sample what its MNIST, `ToTensor` and
`Normalize` do, but without the way through a PIL image, so the peers are a little faster here than in a tutorial.

Every framework shuffles in its own way. So that all compute the same, `Dealt` gives the n-th sample that is asked
for, whichever it is: the samplers do their work, and their answer is not looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from paceline.data.mnist import Split, read_mnist
from paceline.data.plan import BatchPlan
from paceline.tasks.mnist import MEAN, STD
from race.works import SEED, Work, texts


class Images(Dataset[tuple[Tensor, int]]):
    """Sample i as a tutorial has it: to a tensor, scaled to 0..1, normalised; its label as a number."""

    def __init__(self, split: Split = "train", folder: Any = None) -> None:
        images, labels = read_mnist(split, folder)
        self._images = torch.from_numpy(np.frombuffer(bytearray(images.data), np.uint8).reshape(images.shape))
        self._labels = torch.tensor(list(labels.data))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels, label = self._images[index].numpy(), int(self._labels[index])
        # to a tensor: (H, W) bytes -> (1, H, W) in 0..1
        image = torch.from_numpy(np.array(pixels[:, :, None], copy=True)).permute(2, 0, 1).contiguous()
        image = image.to(torch.float32).div(255)
        # normalise, for any number of channels
        mean = torch.as_tensor((MEAN,), dtype=image.dtype).view(-1, 1, 1)
        deviation = torch.as_tensor((STD,), dtype=image.dtype).view(-1, 1, 1)
        return image.clone().sub_(mean).div_(deviation), label


class Dealt(Dataset[Any]):
    """`dataset` for one rank: the n-th sample asked for is the n-th that paceline's plan gives this rank."""

    def __init__(self, dataset: Any, batch: int, rank: int, world_size: int) -> None:
        self._dataset, self._batch, self._rank = dataset, batch, rank
        self._plan = BatchPlan(len(dataset), batch * world_size, world_size, seed=SEED)
        self._asked = 0
        self._epoch, self._order = -1, list[int]()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        number = self._asked
        if worker is not None:  # batches go round the worker processes
            batch, place = divmod(number, self._batch)
            number = (batch * worker.num_workers + worker.id) * self._batch + place
        self._asked += 1
        return self._dataset[self._index(number)]

    def _index(self, number: int) -> int:
        plan = self._plan
        share = len(self._order) or -(-len(self._dataset) // plan.virtual_ranks)
        epoch, place = divmod(number, share)
        if epoch != self._epoch:
            steps = range(plan.steps_per_epoch)
            self._order = torch.cat([plan.indices(epoch, step, self._rank) for step in steps]).tolist()
            self._epoch = epoch
        return self._order[place % len(self._order)]


def for_peers(work: Work, rank: int, world_size: int) -> Dealt:
    """A rank's samples of `work`, one by one."""
    return Dealt(TensorDataset(*texts()) if work.kind == "text" else Images(), work.batch, rank, world_size)
