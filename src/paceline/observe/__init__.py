"""What a run reports, on the screen and in its folder. No torch."""
