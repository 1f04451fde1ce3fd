"""Tasks whose models are cut into stages: each with something that is easily lost between two of them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import ArrayDataset, Task
from paceline.tasks.mnist import ResNet18


def _tokens(split: str) -> ArrayDataset:
    generator = torch.Generator().manual_seed(len(split))
    tokens = torch.randint(32, (160, 9), generator=generator)
    return ArrayDataset(tokens[:, :-1], tokens[:, 1:])


def _images(split: str) -> ArrayDataset:
    generator = torch.Generator().manual_seed(len(split))
    images = torch.randn(160, 1, 12, 12, generator=generator)
    return ArrayDataset(images, torch.randint(10, (160,), generator=generator))


def _next_token(outputs: object, targets: Tensor) -> Tensor:
    logits: Tensor = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def _gpt2() -> nn.Module:
    """Hugging Face's, as it is: dropout everywhere, and its embedding is its output layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=3, n_head=2))


class _Drawing(nn.Module):
    """Draws where it is no dropout; writes into what it is given; gives two tensors to one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(144, 144) for _ in range(3))
        self.act, self.join, self.head = nn.ReLU(inplace=True), _Join(), nn.Linear(144, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1)) + torch.rand(144)
        y = self.second(self.act(x.clone()))
        x = self.act(self.join(x, y) + torch.rand_like(x))
        return self.head(self.third(x) * torch.rand(()))


class _Join(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sin() * y


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


gpt2 = Task(_gpt2, _tokens, _next_token)
drawing = Task(_Drawing, _images, _cross_entropy)
resnet = Task(lambda: ResNet18(channels=1, stem="small"), _images, _cross_entropy)
