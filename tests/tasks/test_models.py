"""The models' sizes, names and shapes, against what is published of them."""

import pytest
import torch
from torch import nn

from paceline.tasks.mnist import CNN, ResNet18


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def torchvision_shapes() -> dict[str, tuple[int, ...]]:
    """The state_dict of torchvision.models.resnet18, written down from its definition."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)}

    def batch_norm(name: str, channels: int) -> None:
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.{leaf}"] = (channels,)
        shapes[f"{name}.num_batches_tracked"] = ()

    batch_norm("bn1", 64)
    before = 64
    for layer, channels in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            name = f"layer{layer}.{block}"
            shapes[f"{name}.conv1.weight"] = (channels, before, 3, 3)
            batch_norm(f"{name}.bn1", channels)
            shapes[f"{name}.conv2.weight"] = (channels, channels, 3, 3)
            batch_norm(f"{name}.bn2", channels)
            if before != channels:
                shapes[f"{name}.downsample.0.weight"] = (channels, before, 1, 1)
                batch_norm(f"{name}.downsample.1", channels)
            before = channels
    return shapes | {"fc.weight": (1000, 512), "fc.bias": (1000,)}


def test_resnet18_has_torchvisions_names_shapes_and_order() -> None:
    model = ResNet18()
    ours = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert list(ours.items()) == list(torchvision_shapes().items())
    assert size(model) == 11_689_512


def test_resnet18_starts_as_torchvisions() -> None:
    torch.manual_seed(0)
    model = ResNet18(channels=1, num_classes=10)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            fan_out = layer.out_channels * layer.kernel_size[0] * layer.kernel_size[1]
            expected = (2 / fan_out) ** 0.5
            assert layer.weight.std().item() == pytest.approx(expected, rel=0.06), name
        if isinstance(layer, nn.BatchNorm2d):
            assert bool((layer.weight == 1).all()) and bool((layer.bias == 0).all()), name


@pytest.mark.parametrize(("stem", "side"), [("imagenet", 8), ("small", 32)])
def test_resnet18_stems(stem: str, side: int) -> None:
    model = ResNet18(channels=1, stem=stem)  # type: ignore[arg-type]
    entered: list[tuple[int, ...]] = []
    model.layer1.register_forward_pre_hook(lambda _, inputs: entered.append(tuple(inputs[0].shape)))
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 1000)
    assert entered == [(2, 64, side, side)]


def test_resnet18_refuses_another_stem() -> None:
    with pytest.raises(ValueError, match=r"'tiny'.*imagenet, small"):
        ResNet18(stem="tiny")  # type: ignore[arg-type]


def test_the_cnn_has_the_classic_size_and_shapes() -> None:
    model = CNN()
    assert size(model) == 1_199_882
    assert [tuple(p.shape) for p in model.parameters()] == [
        (32, 1, 3, 3), (32,), (64, 32, 3, 3), (64,), (128, 9216), (128,), (10, 128), (10,),
    ]  # fmt: skip
    assert CNN(channels=3, num_classes=47)(torch.zeros(2, 3, 28, 28)).shape == (2, 47)


def test_the_cnn_drops_out_in_training_only_and_returns_logits() -> None:
    torch.manual_seed(0)
    model, images = CNN(), torch.randn(4, 1, 28, 28)
    dropped: list[tuple[float, tuple[int, ...]]] = []
    for dropout in (model.dropout1, model.dropout2):
        dropout.register_forward_hook(lambda layer, _, output: dropped.append((layer.p, tuple(output.shape))))
    assert not torch.equal(model(images), model(images))
    assert dropped[:2] == [(0.25, (4, 64, 12, 12)), (0.5, (4, 128))]
    model.eval()
    assert torch.equal(model(images), model(images))
    assert not torch.allclose(model(images).exp().sum(1), torch.ones(4))  # not log-probabilities


@pytest.mark.parametrize("model", [CNN(), ResNet18(channels=1, num_classes=10, stem="small").eval()])
def test_an_empty_batch_passes(model: nn.Module) -> None:
    logits = model(torch.zeros(0, 1, 28, 28))
    assert logits.shape == (0, 10)
    logits.sum().backward()
