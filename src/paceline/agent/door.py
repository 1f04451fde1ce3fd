"""Where does the head wait for the other agents? Its listening socket, and who sits on the port where it cannot be."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from paceline.errors import UsageError
from paceline.host.procfs import port_holder


def listen(ports: Sequence[int]) -> socket.socket:
    """Listen on the first of these ports that is free, at every address: nobody can say yet by which one others come.

    Raises:
        UsageError: when none is.
    """
    for port in ports:
        for family in (socket.AF_INET6, socket.AF_INET):
            with suppress(OSError):
                both = family == socket.AF_INET6
                door = socket.create_server(("", port), family=family, backlog=128, dualstack_ipv6=both)
                door.setblocking(False)
                return door
    holders = {port: port_holder(port) for port in ports}
    taken = ", ".join(f"{port} by {holder}" if holder else str(port) for port, holder in holders.items())
    raise UsageError(
        f"the agents of this run cannot meet on this machine ({socket.gethostname()}): taken is {taken}. "
        "Ask for another port (--port), or for none."
    )
