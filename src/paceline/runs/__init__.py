"""The run folder, its files and who may change them, trackers, and the console (no torch here)."""
