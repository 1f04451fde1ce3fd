"""The agent: one process on each node, parent of its workers. `python -m paceline.launch.agent`."""
