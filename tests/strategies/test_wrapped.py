"""Models inside other modules, as peft wraps them, under fsdp: equal to bucketed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.errors import raises
from tests.run_ranks import run_ranks
from tests.worlds import world as world
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from paceline import ArrayDataset, BatchPlan, LoadingOptions, World, load_steps, train_step
from paceline.data.plan import virtual_ranks_of
from paceline.strategies import STRATEGIES

CPU = torch.device("cpu")


class Lora(nn.Module):
    """A frozen layer and a trained one of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_a = nn.Linear(layer.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.attn(self.norm(x)).tanh())


class Language(nn.Module):
    """Its head is its embedding, and a matrix of its own is used in its forward."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wte, self.position = nn.Embedding(9, width), nn.Embedding(4, width)
        self.h = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 9, bias=False)
        self.head.weight = self.wte.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.wte(x) + self.position.weight[: x.shape[1]]
        for block in self.h:
            x = block(x)
        return self.head(x)


class Two(nn.Module):
    """An encoder and a decoder, one of them in an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wte, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.encoder = nn.Sequential(*(Block(8) for _ in range(2)))
        self.decoder = nn.ModuleList(Block(8) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.wte(x))
        for block in self.decoder:
            x = block(x)
        return self.head(x)


class Flat(nn.Module):
    """No layer is repeated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wte, self.middle, self.head = nn.Embedding(9, 8), nn.Linear(8, 12), nn.Linear(12, 9)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.wte(x)).tanh())


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Wrapped(nn.Module):
    """The path to the model is two modules long, and the forward of `base_model` is not called, as by peft."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = Wrapper(model)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_model.model(x)


def with_lora() -> nn.Module:
    """All is frozen but LoRA's layers in the blocks."""
    model = Language().requires_grad_(False)
    torch.manual_seed(4)
    for block in model.h:
        block.attn = Lora(block.attn)  # pyright: ignore
    return Wrapped(model.double())


def with_trained_head() -> nn.Module:
    """As modules_to_save: the head, and so the embedding, is trained too."""
    model: Any = with_lora()
    model.base_model.model.head.weight.requires_grad_(True)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lora": with_lora,
    "trained head": with_trained_head,
    "all trained": lambda: Wrapped(Language()),
    "two lists": lambda: Wrapped(Two()),
    "no list": lambda: Wrapped(Flat()),
}


def tokens() -> ArrayDataset:
    inputs = torch.randint(9, (22, 4), generator=torch.Generator().manual_seed(0))
    return ArrayDataset(inputs, inputs.roll(1, 1))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def trained(name: str, model: nn.Module, world: World) -> dict[str, Tensor]:
    replica = STRATEGIES[name](model, partial(AdamW, lr=0.01), world)
    share = virtual_ranks_of(world.size, world.rank, world.size)
    for step in load_steps(tokens(), BatchPlan(22, 8, world.size), share, LoadingOptions(CPU), start=0, stop=4):
        train_step(replica, step, loss)
    return {key: tensor.detach().clone() for key, tensor in replica.weights().items()}


def equal_to_bucketed(rank: int, size: int) -> dict[str, float]:
    world = World(rank, size, rank, size, CPU, "gloo")
    found: dict[str, float] = {}
    for what, make in MODELS.items():
        wanted, got = (trained(name, make(), world) for name in ("bucketed", "fsdp"))
        assert [*wanted] == [*got]
        assert any(not torch.equal(got[key], start) for key, start in make().state_dict().items()), what
        found[what] = max(float((got[key] - tensor).abs().max()) for key, tensor in wanted.items())
    return found


@pytest.mark.ranks
def test_a_wrapped_model_under_fsdp_equals_bucketed(tmp_path: Path) -> None:
    for found in run_ranks(equal_to_bucketed, 2, tmp_path):
        assert [*found] == [*MODELS]
        assert max(found.values()) < 1e-12, found


class Logits(nn.Module):
    """What a transformers model gives, as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


class OfTransformers(Lora):
    """Around a layer of GPT-2, whose weight is transposed."""

    def __init__(self, layer: Any) -> None:
        super().__init__(nn.Linear(layer.nx, layer.nf))
        self.base_layer = layer


def gpt2(rank: int, size: int) -> float:
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    def make() -> nn.Module:
        torch.manual_seed(0)
        shape = {"vocab_size": 9, "n_positions": 4, "n_embd": 8, "n_layer": 3, "n_head": 2}
        model: Any = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).requires_grad_(
            False
        )
        for block in model.transformer.h:
            block.attn.c_attn = OfTransformers(block.attn.c_attn)
        return Logits(Wrapped(model)).double()

    world = World(rank, size, rank, size, CPU, "gloo")
    wanted, got = (trained(name, make(), world) for name in ("bucketed", "fsdp"))
    return max(float((got[key] - tensor).abs().max()) for key, tensor in wanted.items())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("transformers")
def test_gpt2_of_transformers_with_lora_under_fsdp_equals_bucketed(tmp_path: Path) -> None:
    assert max(run_ranks(gpt2, 2, tmp_path)) < 1e-12


# ---- refused -----------------------------------------------------------------------------------------------------


class ReadsWeights(Flat):
    """Calls no forward of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(F.embedding(x, self.wte.weight), self.middle.weight), self.head.weight)


def calls_around(model: nn.Module) -> nn.Module:
    """A wrapper that is not called, beside another module with parameters."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = Wrapper(model), nn.Linear(9, 9).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(self.inner.model(x))

    return Beside()


@pytest.mark.parametrize("make", [ReadsWeights, lambda: Wrapped(ReadsWeights()), lambda: calls_around(Flat())])
def test_a_parameter_used_outside_of_its_block_is_a_usage_error(world: World, make: Callable[[], nn.Module]) -> None:
    replica = STRATEGIES["fsdp"](make(), partial(SGD, lr=0.1), world)
    with raises("block-parameter-outside", setting="fsdp_wrap"):
        replica.model(tokens().inputs[:2])
