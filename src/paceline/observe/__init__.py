"""What a run tells while it goes, on the screen and in its folder (no torch here)."""
