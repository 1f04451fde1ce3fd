"""What runs inside a worker, before and around the training."""
