"""Tasks for MNIST and datasets in the same format: a small CNN and ResNet18.

The models are those of a single device, without any code for parallelism.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.arrays import ArrayDataset
from paceline.data.mnist import Split, read_labels, read_mnist
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


class CNN(nn.Module):
    """Two convolutions, two linear layers, dropout between: 1,199,882 parameters for 1 channel and 10 classes.

    It reaches about 99 % on MNIST after a few epochs. Source: pytorch/examples, mnist/main.py. Unlike the source, it
    returns logits, so that the loss is cross-entropy.
    """

    def __init__(self, channels: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, 28, 28) -> logits (B, num_classes); B may be 0."""
        x = F.relu(self.conv1(images))  # (B, 32, 26, 26)
        x = F.relu(self.conv2(x))  # (B, 64, 24, 24)
        x = self.dropout1(F.max_pool2d(x, 2))  # (B, 64, 12, 12)
        x = x.flatten(1)  # (B, 9216); not view(B, -1): torch cannot infer -1 for an empty batch
        x = self.dropout2(F.relu(self.fc1(x)))  # (B, 128)
        return self.fc2(x)  # (B, num_classes)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut: the layers learn the difference from their input.

    If the shape changes, the shortcut is a strided 1x1 convolution (option B of the paper), otherwise the input.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        # no bias, because the batch norm would subtract it again
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels_in, H, W) -> (B, channels_out, H / stride, W / stride), rounded up."""
        shortcut = x if self.downsample is None else self.downsample(x)  # (B, channels_out, H / stride, W / stride)
        x = F.relu(self.bn1(self.conv1(x)))  # (B, channels_out, H / stride, W / stride)
        x = self.bn2(self.conv2(x))  # the same
        return F.relu(x + shortcut)


class ResNet18(nn.Module):
    """Eighteen layers with weights: the stem, four stages of two blocks, one linear layer.

    The names of layers are those of torchvision, so that `load_state_dict` accepts its weights. It has 11,689,512
    parameters for 3 channels, 1000 classes and the stem "imagenet".

    Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015; names, shapes and initial
    weights (from the same seed) are those of torchvision.models.resnet18. The stem "imagenet" is 7x7, stride 2 and
    max-pool: a 224 x 224 image enters the stages as 56 x 56. The stem "small" is 3x3, stride 1 without a pool: for
    images of about 32 x 32, which the other stem would reduce to 8 x 8.
    """

    def __init__(
        self, channels: int = 3, num_classes: int = 1000, stem: Literal["imagenet", "small"] = "imagenet"
    ) -> None:
        super().__init__()
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        elif stem == "small":
            self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            raise ValueError(f"unknown stem {stem!r}. Choose from: imagenet, small")
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.fc = nn.Linear(512, num_classes)
        # Keep the variance of *gradients* through a convolution and its relu (He et al., 2015, "fan out"). Batch norms
        # (weight 1, bias 0) and the linear layer keep the initialization of torch.
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) -> logits (B, num_classes). Comments: the shapes for stem "imagenet" and H = W = 224."""
        x = F.relu(self.bn1(self.conv1(images)))  # (B, 64, 112, 112)
        x = self.maxpool(x)  # (B, 64, 56, 56)
        x = self.layer1(x)  # (B, 64, 56, 56)
        x = self.layer2(x)  # (B, 128, 28, 28)
        x = self.layer3(x)  # (B, 256, 14, 14)
        x = self.layer4(x)  # (B, 512, 7, 7)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)  # (B, 512); not view(B, -1), which fails for an empty batch
        return self.fc(x)  # (B, num_classes)
