"""Models whose state_dict is not just their parameters and buffers: tied, merged, not persistent, wrapped."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline import Task


class Odd(nn.Module):
    """(B, 4) int64 -> (B, 9): tied weights, batch norm, and a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm((self.embedding(x) * self.table.reshape(1, 4, 1)).mean(1)))


class Wrapped(nn.Module):
    """A GPT-2 of Hugging Face with tied weights as an attribute, and something beside it."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(vocab_size=9, n_positions=4, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0)
        self.lm = GPT2LMHeadModel(config)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.lm(x).logits[:, -1] * self.scale


def data(split: str) -> Dataset[tuple[Tensor, ...]]:
    numbers = torch.arange(24 * 4).reshape(24, 4) * 7 % 9
    return TensorDataset(numbers, numbers.sum(1) % 9)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


odd = Task(make_model=Odd, make_dataset=data, loss=loss)
wrapped = Task(make_model=Wrapped, make_dataset=data, loss=loss)
