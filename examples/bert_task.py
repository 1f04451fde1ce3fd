"""A Hugging Face classifier as a task: `paceline train examples/bert_task.py:task --nproc 2`. Needs `.[hf]`.

A small BERT (random weights, bytes for tokens) tells code from prose. Its samples are dicts, as Hugging Face's datasets
give them: the model gets by name what its forward takes, loss and metrics get its outputs and the whole batch.
"""

import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

from paceline import Task

LENGTH = 24
CODE = Path(os.__file__).read_bytes()
PROSE = "".join(topics.values()).encode()  # of Python's own documentation


class Snippets(Dataset[dict[str, Tensor]]):
    """Bytes of code and of prose, in turn: {"input_ids": (LENGTH,), "attention_mask": (LENGTH,), "labels": ()}."""

    def __init__(self, split: str) -> None:
        self.numbers = [i for i in range(500) if (i % 5 == 0) == (split == "test")]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number = self.numbers[index]
        text = (CODE, PROSE)[number % 2][number * 7 :][: LENGTH - number % 8]
        mask = (torch.arange(LENGTH) < len(text)).long()
        tokens = torch.tensor([*text, *[0] * (LENGTH - len(text))])
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor(number % 2)}


def make_model() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def loss(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.logits, batch["labels"], reduction="none")  # outputs.loss would be a mean


def accuracy(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return (outputs.logits.argmax(1) == batch["labels"]).float()


task = Task(make_model, Snippets, loss, metrics={"accuracy": accuracy})
