"""What is trained by everybody: four models with their data, batch and optimizer, and a tiny one to try the scripts.

    W1   MNIST CNN, batch 128 a rank         compute, some data
    W2   ResNet18 (7x7 stem), batch 128      compute, an optimizer with many tensors
    W3   MLP of 25.8 M parameters, batch 16  little to compute, 103 MB of gradients to exchange
    W3g  GPT of 10.8 M parameters, 4 x 128 bytes of text
    W3g1 the same GPT, 1 x 128 bytes: as on a machine that computes four times as fast, for cables of 100 Mbit/s
    W3s, W3gs   W3 and W3g with a tenth and a quarter of the parameters, for cables of 10 Mbit/s

Weights are drawn from one seed here, so that all who train a work begin at the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.arrays import ArrayDataset
from paceline.tasks.mnist import CNN, ResNet18
from paceline.tasks.mnist import dataset as mnist
from race.gpt import GPT, made_up_text

SEED = 0
TEXT_LENGTH = 128  # bytes of a sample


@dataclass(frozen=True)
class Work:
    """A single-device training. `batch` is of each rank; `train_flags` say the same optimizer to `paceline train`."""

    title: str
    build: Callable[[], nn.Module]
    kind: str  # of data: images or text
    batch: int
    optimizer: str
    lr: float

    def make_model(self) -> nn.Module:
        """The same weights in every process, whatever was drawn before."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.build()

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """As a tutorial writes it: torch's defaults."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr)
        return torch.optim.AdamW(parameters, lr=self.lr)

    @property
    def train_flags(self) -> list[str]:
        """The same for `paceline train`."""
        flags = ["--batch-size", str(self.batch), "--optimizer", self.optimizer, "--lr", str(self.lr)]
        plain = ["--momentum", "0", "--weight-decay", "0"] if self.optimizer == "sgd" else []
        return [*flags, *plain, "--schedule", "constant", "--seed", str(SEED)]

    def make_dataset(self) -> ArrayDataset:
        """Held as tensors: what `paceline train` is given. Peers get samples one by one (race.samples)."""
        return ArrayDataset(*texts()) if self.kind == "text" else mnist("train")

    def parameter_bytes(self) -> int:
        """Of all gradients of a rank, too."""
        return sum(p.nbytes for p in self.make_model().parameters())


def texts() -> tuple[Tensor, Tensor]:
    """Windows of text: inputs (N, 128) and the bytes that follow (N, 128), int64."""
    text = made_up_text(4096 * TEXT_LENGTH + 1)
    return text[:-1].view(-1, TEXT_LENGTH), text[1:].view(-1, TEXT_LENGTH)


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """One for each sample or byte: (B, classes), (B,) -> (B,); (B, T, classes), (B, T) -> (B, T)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """What the loops of tutorials minimise."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def mlp(width: int) -> nn.Module:
    """784 -> width -> width -> width -> 10."""
    first, second, third = nn.Linear(784, width), nn.Linear(width, width), nn.Linear(width, width)
    return nn.Sequential(
        nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), third, nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip


WORKS = {
    "W1": Work("MNIST CNN, 1.2 M parameters", CNN, "images", 128, "adamw", 1e-3),
    "W2": Work(
        "ResNet18, 7x7 stem, 11.2 M", partial(ResNet18, channels=1, num_classes=10), "images", 128, "adamw", 1e-4
    ),
    "W3": Work("MLP, 25.8 M", partial(mlp, 3400), "images", 16, "sgd", 0.05),
    "W3g": Work("GPT, 10.8 M", partial(GPT, layers=6, width=384, heads=6), "text", 4, "adamw", 3e-4),
    "W3g1": Work("GPT, 10.8 M, 1 text", partial(GPT, layers=6, width=384, heads=6), "text", 1, "adamw", 3e-4),
    "W3s": Work("MLP, 2.8 M", partial(mlp, 1000), "images", 16, "sgd", 0.05),
    "W3gs": Work("GPT, 2.7 M", partial(GPT, layers=6, width=192, heads=6), "text", 4, "adamw", 3e-4),
    "tiny": Work("MLP, 13 k, to see whether the script works", partial(mlp, 16), "images", 4, "adamw", 1e-3),
}
SMALL = ("W3s", "W3gs", "W3g1", "tiny")
