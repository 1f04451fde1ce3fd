"""Tensor, context and pipeline parallelism: several ranks compute one model."""
