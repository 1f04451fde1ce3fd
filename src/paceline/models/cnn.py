"""The small convolutional network of the classic MNIST example: about 99 % after a few epochs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # the name everybody knows it by


class CNN(nn.Module):
    """Two convolutions, two linear layers, dropout between: 1,199,882 parameters for 1 channel and 10 classes.

    Source: pytorch/examples, mnist/main.py; but it returns logits, not log-probabilities, so that the loss is
    cross-entropy as for any other model here.

    Args:
        channels: of the input images, which are 28 x 28.
        num_classes: number of logits.
    """

    def __init__(self, channels: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, 28, 28) -> logits (B, num_classes); B may be 0."""
        x = F.relu(self.conv1(images))  # (B, 32, 26, 26)
        x = F.relu(self.conv2(x))  # (B, 64, 24, 24)
        x = self.dropout1(F.max_pool2d(x, 2))  # (B, 64, 12, 12)
        x = x.flatten(1)  # (B, 9216); not view(B, -1): torch cannot infer -1 for an empty batch
        x = self.dropout2(F.relu(self.fc1(x)))  # (B, 128)
        return self.fc2(x)  # (B, num_classes)
