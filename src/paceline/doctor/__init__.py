"""Is this set of machines fit to train on? Each host is asked over the path that a run takes, and judged. No torch."""
