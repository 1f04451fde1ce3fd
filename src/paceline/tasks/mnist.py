"""Tasks for MNIST and datasets in the same format: a small CNN and ResNet18."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.arrays import ArrayDataset
from paceline.data.mnist import Split, read_labels, read_mnist
from paceline.tasks.models import CNN, ResNet18
from paceline.tasks.task import Task

MEAN, STD = 0.1307, 0.3081  # of the training pixels of MNIST, scaled to 0..1


def cnn(*, data_dir: Path | None = None) -> Task:
    """The classic MNIST example's CNN."""
    return _task(lambda classes: CNN(num_classes=classes), data_dir)


def resnet18(*, data_dir: Path | None = None, stem: Literal["imagenet", "small"] = "imagenet") -> Task:
    """ResNet18 on one channel."""
    return _task(lambda classes: ResNet18(channels=1, num_classes=classes, stem=stem), data_dir)


def _task(make_model: Callable[[int], nn.Module], data_dir: Path | None) -> Task:
    return Task(
        make_model=lambda: make_model(num_classes(data_dir)),
        make_dataset=partial(dataset, folder=data_dir),
        loss=cross_entropy,
        metrics={"accuracy": accuracy},
    )


def num_classes(folder: Path | None) -> int:
    """10 for MNIST and Fashion-MNIST; for EMNIST, the number of classes in the labels (up to 62)."""
    if folder is None:
        return 10
    return max(10, 1 + max(read_labels("train", folder).data))


def dataset(split: Split, folder: Path | None = None) -> ArrayDataset:
    """Images (N, 28, 28) uint8, converted to (n, 1, 28, 28) float32 for each batch; labels (N,) int64."""
    images, labels = read_mnist(split, folder)
    pixels = torch.frombuffer(bytearray(images.data), dtype=torch.uint8).reshape(images.shape)
    return ArrayDataset(pixels, torch.frombuffer(bytearray(labels.data), dtype=torch.uint8).long(), normalise)


def normalise(pixels: Tensor) -> Tensor:
    """(n, H, W) uint8 -> (n, 1, H, W) float32 with mean 0 and standard deviation 1 over MNIST."""
    return pixels.unsqueeze(1).float().mul_(1 / (255 * STD)).sub_(MEAN / STD)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, classes), (B,) -> (B,)."""
    return F.cross_entropy(logits, labels, reduction="none")


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, classes), (B,) -> (B,): 1 if the class with the largest logit is correct, otherwise 0."""
    return (logits.argmax(1) == labels).float()
