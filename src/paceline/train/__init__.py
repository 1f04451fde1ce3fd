"""One optimizer step, and everything around it that makes a training."""
