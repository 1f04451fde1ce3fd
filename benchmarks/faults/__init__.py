"""Faults on purpose: what they are, one script and one task in which they strike, and the score of who named whom."""
