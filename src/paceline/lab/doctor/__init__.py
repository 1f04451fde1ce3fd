"""Checks whether machines can train together. Doctor reaches each host in the same way as a run."""
