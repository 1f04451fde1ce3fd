"""Inside the ranks of `paceline compare` and `paceline scale`: a training of each candidate, timed and weighed."""
