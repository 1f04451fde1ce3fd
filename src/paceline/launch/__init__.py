"""Start the processes of a run: a job becomes a plan, and agents execute it. Does not import torch."""
