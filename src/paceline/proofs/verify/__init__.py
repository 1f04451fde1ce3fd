"""Inside the ranks of `paceline verify`: a training of each strategy, beside one process or bit by bit."""
