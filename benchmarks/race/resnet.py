"""ResNet-50 (He et al. 2015), with the stride in the 3x3 convolution as torchvision has it."""

from __future__ import annotations

from torch import Tensor, nn

EXPANSION = 4


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.convolutions = nn.Sequential(
            convolution(inputs, width, 1), nn.ReLU(inplace=True),
            convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            convolution(width, outputs, 1),
        )  # fmt: skip
        is_equal = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_equal else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return (self.convolutions(x) + self.shortcut(x)).relu()


def resnet50(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """25.6 M parameters in 161 tensors."""
    layers: list[nn.Module] = [convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if block == 0 and stage > 0 else 1))
            inputs = (width << stage) * EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
