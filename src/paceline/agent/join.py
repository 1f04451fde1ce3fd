"""A node's agent finds the head: it tries every address and port where the head may be, and says why that fails."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from contextlib import suppress

from paceline.agent.channel import Link, introduce
from paceline.agent.gather import FIRST_WORD_SECONDS, NEXT_WORD_SECONDS, NotTogether
from paceline.contract.node_plan import NodePlan
from paceline.contract.orders import Orders
from paceline.host.reach import candidates, why_unreachable
from paceline.observe.terminal import say

CONNECT_SECONDS = 2.0
PAUSE_SECONDS = 0.5


def join(plan: NodePlan, orders: Orders) -> Link | None:
    """Connect to the head; None when ordered to stop while it is not to be found.

    Raises:
        NotTogether: when it was not found in time; says why.
    """
    begun = time.monotonic()
    next_word = begun + FIRST_WORD_SECONDS
    strangers: dict[int, str] = {}  # by port, of all rounds: the head may be gone when the time is over
    while not orders.given:
        link = _try_all(plan, strangers)
        if link is not None:
            return link
        waited = time.monotonic() - begun
        if waited >= plan.join_seconds or time.monotonic() >= next_word:
            words = f"node {plan.node} ({os.uname().nodename}) waits for node 0: {_why(plan, strangers)}"
            if waited >= plan.join_seconds:
                raise NotTogether(f"{words}. Given up after {waited:.0f} s (--join-timeout)")
            next_word += NEXT_WORD_SECONDS
            say(f"{words} (after {waited:.0f} s)")
        orders.wait(PAUSE_SECONDS)
    return None


def _try_all(plan: NodePlan, strangers: dict[int, str]) -> Link | None:
    """One round: all at the same time, for a firewall that drops would cost seconds each."""
    secret = bytes.fromhex(plan.secret)
    trying: dict[socket.socket, int] = {}
    try:
        for family, address in candidates(plan.head):
            for port in plan.head_ports:
                connection = socket.socket(family, socket.SOCK_STREAM)
                connection.setblocking(False)
                code = connection.connect_ex((address, port))
                if code in (0, errno.EINPROGRESS):
                    trying[connection] = port
                else:
                    connection.close()
        deadline = time.monotonic() + CONNECT_SECONDS
        while trying and (left := deadline - time.monotonic()) > 0:
            for connection in select.select([], list(trying), [], left)[1]:
                port = trying.pop(connection)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _is_itself(connection):
                    connection.close()
                    continue
                met = introduce(connection, secret)
                if isinstance(met, Link):
                    return met
                strangers[port] = met.words
        return None
    finally:
        for connection in trying:
            connection.close()


def _is_itself(connection: socket.socket) -> bool:
    # a loopback socket can connect to itself, when the port it is given happens to be the one it asks for
    with suppress(OSError):
        return connection.getsockname()[:2] == connection.getpeername()[:2]
    return True


def _why(plan: NodePlan, strangers: dict[int, str]) -> str:
    ports = ", ".join(map(str, plan.head_ports))
    if strangers:
        return "; ".join(f"port {port} of {plan.head[0]}: {words}" for port, words in strangers.items())
    why = [words for name in plan.head if (words := why_unreachable(name, plan.head_ports[0]))]
    tried = f" (tried ports {ports})" if len(plan.head_ports) > 1 else ""
    return "; ".join(why) + tried if why else f"no agent answers at {' or '.join(plan.head)}, ports {ports}"
