"""The hang guard: collects the state of each rank, and finds the cause when a run hangs or fails. Without torch."""
