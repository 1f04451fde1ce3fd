"""Random numbers for a whole batch, where each sample's depend on the sample alone.

A generator gives numbers in the order of the draws, so a sample's would depend on its neighbours. Here each is a hash
of (seed, epoch, sample, how many were drawn before), made for the whole batch at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.data.consumed import mixed
from paceline.seeding import derive

Draw = Callable[[int], Tensor]
"""(k) -> (n, k) float32 in [0, 1): k new random numbers for each of n samples"""


@dataclass(frozen=True)
class SampleDraws:
    """The random numbers of an epoch's samples."""

    seed: int
    epoch: int

    def of(self, indices: Tensor, device: torch.device) -> Draw:
        """Those of samples `indices` (n,), on `device`; the same bits on every device."""
        key = np.uint64(derive(self.seed, "draws", self.epoch))
        samples = mixed(indices.cpu().numpy().astype(np.uint64) ^ mixed(key.reshape(1)))[:, None]  # (n, 1)
        drawn = 0

        def draw(k: int) -> Tensor:
            nonlocal drawn
            numbers = mixed(samples + mixed(np.arange(drawn, drawn + k, dtype=np.uint64)))  # (n, k)
            drawn += k
            # 24 bits: what a float32 below 1 holds exactly
            return torch.from_numpy((numbers >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)).to(device)

        return draw
