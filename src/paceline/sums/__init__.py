"""What ranks do together besides the forward and backward pass: sums, words, and the memory that they may share."""

from paceline.sums.gather import labelled
from paceline.sums.pending import Pending, costs, read_at_once, sent
from paceline.sums.totals import Totals, start_totals, sum_over_ranks
from paceline.sums.words import check_equal, gather_words, new_group, together, told_once

__all__ = [
    "Pending", "Totals", "check_equal", "costs", "gather_words", "labelled", "new_group", "read_at_once", "sent",
    "start_totals", "sum_over_ranks", "together", "told_once",
]  # fmt: skip
