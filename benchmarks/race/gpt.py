"""A small GPT and text for it, both made here: what everybody's first language model looks like."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes
LONGEST = 128


class Block(nn.Module):
    """Attention to what came before, then a layer for each place by itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mixing = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wider, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> the same shape."""
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # each (B, heads, T, C / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.back(F.gelu(self.wider(self.before_mixing(x))))


class GPT(nn.Module):
    """10.8 M parameters in 76 tensors with 6 layers of width 384; the first layer's weights are the last one's, too."""

    def __init__(
        self, layers: int, width: int, heads: int, vocabulary: int = VOCABULARY, longest: int = LONGEST
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """(B, T) int64 -> logits (B, T, vocabulary)."""
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def made_up_text(length: int) -> Tensor:
    """(length,) int64: sentences of made-up words, which a model can learn something about."""
    generator = torch.Generator().manual_seed(1)
    letters = torch.randint(97, 123, (200, 7), generator=generator)  # 200 words of up to 7 letters
    sizes = torch.randint(2, 8, (200,), generator=generator)
    words = [torch.cat([word[:size], torch.tensor([32])]) for word, size in zip(letters, sizes.tolist(), strict=True)]
    order = torch.randint(0, 200, (length // 3 + 1,), generator=generator).tolist()  # a word has 3 bytes at least
    return torch.cat([words[index] for index in order])[:length]
