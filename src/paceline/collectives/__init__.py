"""What ranks do together besides the forward and backward pass: sums, words, and the memory that they may share."""
