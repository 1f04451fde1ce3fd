"""Which of many links have something to say: the kernel keeps the list, so a look costs the same for a thousand."""

import select
from collections.abc import Iterable

from paceline.agent.channel import Link


class Ears:
    """The links of one head. It can be waited for itself: it is readable when one of them is."""

    def __init__(self) -> None:
        self._kernel = select.epoll()
        self._links: dict[int, Link] = {}  # by descriptor

    def fileno(self) -> int:
        """For select."""
        return self._kernel.fileno()

    def attend(self, links: Iterable[Link]) -> None:
        """Listen to these, and to no others."""
        now = {link.fileno(): link for link in links if not link.ended}
        for number in self._links.keys() - now.keys():
            if self._links.pop(number).fileno() >= 0:  # a closed one has left the list by itself
                self._kernel.unregister(number)
        for number, link in now.items():
            if self._links.get(number) is not link:  # also one that has got a closed one's number
                self._kernel.register(number, select.EPOLLIN)
                self._links[number] = link

    def heard(self) -> list[Link]:
        """Those that can be read now; never waits."""
        return [self._links[number] for number, _ in self._kernel.poll(0, max(1, len(self._links)))]

    def close(self) -> None:
        """Listen to nobody any more."""
        self._kernel.close()
