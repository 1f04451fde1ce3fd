"""Tasks: a model, data and a loss, written for a single device. `registry` finds them by name."""
