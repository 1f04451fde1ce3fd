"""Run jobs on a Slurm cluster with Slurm's commands."""
