"""Says whether a set of machines is fit to train on: each host is asked over the path that a run takes."""
