"""A Slurm cluster, by its own commands."""
