"""The norm of a gradient, to the same *bits* whether one rank holds it or each of N ranks holds a share of it.

The norm is the root of a sum of squares, and a sum depends on its order. So the order is fixed before anybody asks who
holds what: the gradient is cut into blocks of 64 elements, and the sums of blocks are added up pairwise until one is
left (an odd one out goes up alone). Shares begin at a block, so each holder adds up its own blocks.

    6 blocks a..f:  ((a+b) + (c+d)) + (e+f), whether 1 rank holds a..f, or 2 hold a..c and d..f

Run me: `python examples/textbook/norm.py`. In
`paceline.collectives.norm` a holder hands on few sums, those of whole subtrees.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

ELEMENTS = 64  # of a block


def squares(share: Tensor) -> Tensor:
    """(n,) -> (ceil(n / 64),) float64: the sum of squares of each block."""
    blocks = pad(share, (0, -len(share) % ELEMENTS)).view(-1, ELEMENTS)
    sums = blocks * blocks
    # Halves are added by hand: how a library sums a row may depend on how many rows there are.
    while (width := sums.shape[1] // 2) > 0:
        sums = sums[:, :width] + sums[:, width:]
    return sums[:, 0].double()


def pairwise_sum(sums: Tensor) -> float:
    """(blocks,): neighbours are added up until one sum is left."""
    while len(sums) > 1:
        even = len(sums) // 2 * 2
        sums = torch.cat([sums[0:even:2] + sums[1:even:2], sums[even:]])
    return float(sums[0])


def _main() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.linspace(1, 1e4, 1000)
    for cuts in ([0, 1000], [0, 448, 1000], [0, 64, 704, 1000]):
        of_holders = [squares(values[start:stop]) for start, stop in pairwise(cuts)]
        counts = ", ".join(str(len(sums)) for sums in of_holders)
        print(f"{len(of_holders)} holders of {counts} blocks find {math.sqrt(pairwise_sum(torch.cat(of_holders)))!r}")


if __name__ == "__main__":
    _main()
