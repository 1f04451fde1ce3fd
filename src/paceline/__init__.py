"""Train a PyTorch model on one device or on many, in lockstep: the same result at every world size."""

__version__ = "0.1.0"
