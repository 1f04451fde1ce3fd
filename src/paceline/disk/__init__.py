"""Files and folders of a run: whose they are, read without trust, written for their owner alone (no torch here)."""
