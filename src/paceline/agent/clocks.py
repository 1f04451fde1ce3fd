"""By how much a node's clock is ahead of node 0's, from the times that the agents put on their signs of life.

A message that is sent at s by one clock and comes at r by the other has taken r - s, plus or minus the clocks'
difference. No message comes before it was sent. So each one to the head says that the node is ahead by at least s - r,
and each one to the node that it is ahead by at most r - s: the quickest of both directions leave the narrowest bounds,
and the middle of them is wrong by half their width at most, however unlike the two ways are.
"""

import math
import time

from paceline.observe.machine import ClockAhead

DRIFT = 1e-4  # seconds a second by which two clocks may part: quartz is good for 5e-5
AGAIN_SECONDS = 60.0  # between two records that say nothing better


class ClockBounds:
    """What is known of one node's clock; kept by the head."""

    def __init__(self) -> None:
        self.least_seconds, self.most_seconds = -math.inf, math.inf  # the node is ahead by this
        self._at_seconds = 0.0  # monotonic, when that held
        self._written_seconds, self._written_error_seconds = -math.inf, math.inf

    @property
    def error_seconds(self) -> float:
        """How wrong `ahead_seconds` may be; infinite as long as nothing has come of one direction."""
        return (self.most_seconds - self.least_seconds) / 2

    @property
    def ahead_seconds(self) -> float:
        """The most likely difference."""
        return self.least_seconds + self.error_seconds

    def see(self, now_seconds: float, *, least_seconds: float = -math.inf, most_seconds: float = math.inf) -> None:
        """Take in what a message shows that has come at `now_seconds` (monotonic)."""
        drift = DRIFT * max(0.0, now_seconds - self._at_seconds)  # what was known has become less certain
        least, most = max(self.least_seconds - drift, least_seconds), min(self.most_seconds + drift, most_seconds)
        if least > most:  # a clock has been set: nothing that was known holds any more
            least, most = least_seconds, most_seconds
            self._written_error_seconds = math.inf
        self.least_seconds, self.most_seconds, self._at_seconds = least, most, now_seconds

    def due(self, node: int, now_seconds: float) -> ClockAhead | None:
        """The record to write now: the first, one that is twice as good as the last, and else one a minute."""
        error = self.error_seconds
        late = now_seconds >= self._written_seconds + AGAIN_SECONDS
        if math.isinf(error) or not (error <= self._written_error_seconds / 2 or late):
            return None
        self._written_seconds, self._written_error_seconds = now_seconds, error
        return ClockAhead(round(time.time(), 3), node, round(self.ahead_seconds, 6), round(error, 6))
