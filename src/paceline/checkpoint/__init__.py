"""Checkpoints on disk: what they hold, how they are published, which can be trusted (no torch here)."""
