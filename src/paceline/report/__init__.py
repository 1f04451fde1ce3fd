"""What a run's folder tells: a page, a live view, logs, a trace, a machine's use (no torch here)."""
