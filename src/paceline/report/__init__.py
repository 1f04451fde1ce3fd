"""Reports of a run from its folder: an HTML page, the live view, logs and their analysis (no torch here)."""
