"""The parts of `lab` that import torch: the ranks of verify, compare and scale, and the ledger."""
