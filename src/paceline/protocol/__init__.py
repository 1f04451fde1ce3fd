"""The data that a rank, its agent and its launcher exchange. Without torch."""
