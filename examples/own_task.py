"""Your own model, data and loss: `paceline train examples/own_task.py:task --nproc 2`. No line of it deals with ranks.

A small language model that learns to spell: its lines differ in length, so the loss also returns weights, one for
each real character. The mean over all characters of the global batch is right at every world size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import Task

WORDS = ["rank", "world", "node", "agent", "worker", "step", "batch", "bucket", "gradient", "replica", "sample"]
LENGTH, LETTERS, PADDING = 24, 128, 0


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Two words a line, as (characters, next characters), each (LENGTH,) int64, padded with 0."""

    def __init__(self, split: str) -> None:
        lines = [f"{a} {b}" for a in WORDS for b in WORDS]
        self.lines = [line for i, line in enumerate(lines) if (i % 5 == 0) == (split == "test")]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        codes = torch.tensor([ord(c) for c in self.lines[index]] + [PADDING] * LENGTH)[: LENGTH + 1]
        return codes[:-1], codes[1:]


class Speller(nn.Module):
    """(B, T) characters -> (B, T, LETTERS) logits of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, LETTERS)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(characters))[0])


def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One loss per character (B, T), and its weight: 0 where there is only padding."""
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return losses, (targets != PADDING).to(losses.dtype)


task = Task(make_model=Speller, make_dataset=Lines, loss=loss)
