"""No training: each step copies as many bytes as the gradients have, once. No exchange of them can be faster.

python copying.py WORK
"""

from __future__ import annotations

import sys

import torch

from race.gate import Gate
from race.works import WORKS


def main() -> None:
    torch.set_num_threads(1)
    gate, count = Gate(), WORKS[sys.argv[1]].parameter_bytes() // 4
    source, target = torch.ones(count), torch.zeros(count)
    while True:
        gate.step()
        target.copy_(source)


if __name__ == "__main__":
    main()
