"""The head's listening socket: who connects there and, where the port is taken, which process holds it."""

import socket
from collections.abc import Sequence
from contextlib import suppress

from paceline.agent.channel import Knock, Link
from paceline.agent.messages import Message
from paceline.contract.orders import Readable
from paceline.errors import UsageError
from paceline.host.procfs import port_holder

MAX_KNOCKS = 256  # at the same time: the oldest makes way, for who knows the secret proves it at once


class Door:
    """Where the other agents come in. It never waits.

    Raises:
        UsageError: when all `ports` are taken.
    """

    def __init__(self, ports: Sequence[int], secret: bytes) -> None:
        self._socket, self._secret = _listen(ports), secret
        self._knocks: list[Knock] = []
        self._strangers: list[Link] = []  # have proved themselves, but not said who they are
        self.port: int = self._socket.getsockname()[1]

    def sockets(self) -> list[Readable]:
        """What to wait for."""
        return [self._socket, *self._knocks, *self._strangers]

    def arrived(self) -> list[tuple[Link, list[Message]]]:
        """Who has come in since the last call, and what they have said: one message at least."""
        with suppress(BlockingIOError):
            for _ in range(MAX_KNOCKS):
                self._knocks.append(Knock(self._socket.accept()[0], self._secret))
        for knock in list(self._knocks):
            link = None if knock.closed else knock.answer()
            if link is not None:
                self._strangers.append(link)
            if link is not None or knock.closed:
                self._knocks.remove(knock)
        for knock in self._knocks[:-MAX_KNOCKS]:
            knock.refuse()
        del self._knocks[:-MAX_KNOCKS]
        found: list[tuple[Link, list[Message]]] = []
        for link in list(self._strangers):
            messages = link.receive()
            if messages:
                found.append((link, messages))
            if messages or link.ended:
                self._strangers.remove(link)
        return found

    def close(self) -> None:
        """Let nobody in any more, and turn away whoever has not said yet who it is."""
        for link in self._strangers:
            link.end("the run is over")
        for knock in self._knocks:
            knock.refuse()
        self._socket.close()


def _listen(ports: Sequence[int]) -> socket.socket:
    """Listen on the first of these ports that is free, at every address: nobody knows yet by which one others come."""
    for port in ports:
        for family in (socket.AF_INET6, socket.AF_INET):
            with suppress(OSError):
                both = family == socket.AF_INET6
                door = socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=both)
                door.setblocking(False)
                return door
    holders = {port: port_holder(port) for port in ports}
    taken = ", ".join(f"{port} (by {holder})" if holder else str(port) for port, holder in holders.items())
    taken = f"port {taken} is" if len(holders) == 1 else f"ports {taken} are"
    raise UsageError(
        f"Cannot listen on {socket.gethostname()}: {taken} in use. Pass another --port, or omit it to use a free one."
    )
