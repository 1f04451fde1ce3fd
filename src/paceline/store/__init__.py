"""Checkpoints on disk: manifest, fence, what is whole and what is published. No torch."""
