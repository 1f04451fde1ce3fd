"""Communication of ranks: gradient sums, messages, and the memory that the ranks of a host share."""
