"""The agent: one process on each node, the parent of its workers. Run by `python -m paceline.launch.agent`."""
