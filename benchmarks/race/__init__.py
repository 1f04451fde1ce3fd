"""Trainings side by side: each is held between its steps and let go in turn, so that a busy machine slows all alike."""
