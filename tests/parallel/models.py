"""Models as people write them, small: their own code knows nothing of ranks. As tasks, too, for `paceline train`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import Task

WORDS, LENGTH, WIDTH = 32, 12, 16


class Attention(nn.Module):
    """Queries, keys and values in one layer, taken apart as `style` says; a mask kept in a buffer, noise in some."""

    def __init__(self, style: str, heads: int = 4) -> None:
        super().__init__()
        self.n_head, self.style = heads, style
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("seen", torch.ones(LENGTH, LENGTH).tril().view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        if self.style == "view":
            q, k, v = self.c_attn(x).view(batch, length, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        else:
            apart = self.c_attn(x).split(width, dim=2) if self.style == "split" else self.c_attn(x).chunk(3, -1)
            q, k, v = (t.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for t in apart)
        scores = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
        scores = scores.masked_fill(self.seen[:, :, :length, :length] == 0, float("-inf"))
        if self.training and self.style == "view":
            scores = scores + torch.rand_like(scores)
        if self.training and self.style == "chunk":
            scores = scores + torch.zeros_like(scores).uniform_(0, 0.1)
        mixed = (self.drop(F.softmax(scores, -1)) @ v).transpose(1, 2).contiguous().view(batch, length, width)
        return self.c_proj(mixed)


class GPT(nn.Module):
    """The layer that gives scores shares its weight with the embedding."""

    def __init__(self, style: str = "split", heads: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attn, self.norm = nn.ModuleList(Attention(style, heads) for _ in range(2)), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1]))
        for attn in self.attn:
            x = x + attn(self.norm(x))
        return self.head(self.norm(x + self.mlp(x)))


class Encoder(nn.Module):
    """nn.MultiheadAttention in torch's own layer, with masks; the embedding's weight is used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True)
        self.looks = nn.MultiheadAttention(WIDTH, 2, dropout=0.1)

    def forward(self, words: Tensor) -> Tensor:
        future = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).triu(1)
        x = self.layer(self.embedding(words), src_mask=future, src_key_padding_mask=words == 31)
        x = x.transpose(0, 1)
        y, weights = self.looks(x, x, x)
        return F.linear((x + y).transpose(0, 1), self.embedding.weight) + weights.sum()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    return BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=LENGTH))


OWN = {"split": GPT, "view": lambda: GPT("view"), "chunk": lambda: GPT("chunk"), "encoder": Encoder}
HUGGING_FACE = {"gpt2": gpt2, "llama": llama, "bert": bert}


def sentences(split: str) -> TensorDataset:
    """(words, next words), (48, LENGTH) each."""
    random = torch.Generator().manual_seed(1 if split == "train" else 2)
    words = torch.randint(1, WORDS - 1, (48, LENGTH + 1), generator=random)
    return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def loss(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One for each word, of which the first few do not count."""
    losses = F.cross_entropy(getattr(outputs, "logits", outputs).transpose(1, 2), targets, reduction="none")
    return losses, (targets > 3).to(losses.dtype)


task = Task(GPT, sentences, loss)
hugging_face = Task(gpt2, sentences, loss)
encoder = Task(Encoder, sentences, loss)
