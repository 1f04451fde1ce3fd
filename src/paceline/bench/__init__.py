"""Measurements of a training: what `paceline compare` and `paceline scale` ask for, and the pages made of it."""
