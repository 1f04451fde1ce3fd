"""Your own transformer: `paceline train examples/own_transformer.py:task --nproc 2`. No line of it deals with ranks.

It reads sequences in which each token follows from the one before by one of four rules, with some noise, and has to
find out which rule it is. Sequences differ in length, so the loss also returns weights: 1 for each real token.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import Task

LENGTH, VOCABULARY, PADDING = 16, 32, 0
RULES = torch.tensor([(2, 1), (3, 5), (5, 0), (1, 7)])  # next = (factor * token + offset) mod 31
NOISE = 0.03  # the part of the tokens that follow no rule


def sequences(split: str) -> TensorDataset:
    """(tokens, next tokens), each (2000, LENGTH) int64, for the test 500; padded with 0 from a random length on."""
    count, seed = {"train": (2000, 1), "test": (500, 2)}[split]
    random = torch.Generator().manual_seed(seed)
    factor, offset = RULES[torch.randint(len(RULES), (count,), generator=random)].unbind(1)
    columns = [torch.randint(VOCABULARY - 1, (count,), generator=random)]
    for _ in range(LENGTH):
        ruled = (factor * columns[-1] + offset) % (VOCABULARY - 1)
        noise = torch.randint(VOCABULARY - 1, (count,), generator=random)
        columns.append(torch.where(torch.rand(count, generator=random) < NOISE, noise, ruled))
    tokens = torch.stack(columns, 1) + 1  # (count, LENGTH + 1), none of them PADDING
    length = torch.randint(LENGTH // 2, LENGTH + 2, (count, 1), generator=random)
    tokens[torch.arange(LENGTH + 1) >= length] = PADDING
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


class Transformer(nn.Module):
    """(B, T) tokens -> (B, T, VOCABULARY) logits of the next one."""

    def __init__(self, width: int = 32, heads: int = 2, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.1)  # it is the output layer as well

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[1]
        future = torch.ones(count, count, dtype=torch.bool, device=tokens.device).triu(1)  # not to be looked at
        hidden = self.embedding(tokens) + self.positions[:count]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=future)
        return F.linear(self.norm(hidden), self.embedding.weight)


def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One loss per token (B, T), and its weight: 0 where there is only padding."""
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return losses, (targets != PADDING).to(losses.dtype)


task = Task(make_model=Transformer, make_dataset=sequences, loss=loss)

# The model of the tutorial: 4.8 million parameters. Without dropout, each number of processes computes the same losses.
large = Task(partial(Transformer, width=256, heads=4, layers=6, dropout=0.0), make_dataset=sequences, loss=loss)
