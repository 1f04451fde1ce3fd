"""The settings of a training, and what the commands and the ranks must know of them. No module here imports torch."""
