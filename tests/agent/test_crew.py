"""The other nodes as the head sees them, over real connections."""

from __future__ import annotations

import signal
import socket
import time
from threading import Thread

from paceline.agent.channel import Link, introduce
from paceline.agent.crew import Crew
from paceline.agent.messages import Hello, Ordered
from paceline.contract.node_plan import NodePlan
from paceline.contract.orders import Orders, signal_inbox
from paceline.host.facts import gather

SECRET = "5e" * 32


def test_an_order_that_comes_together_with_a_node_is_heard() -> None:
    plan = NodePlan(("true",), nproc=1, nodes=2, head_ports=(0,), secret=SECRET)
    with signal_inbox(()) as inbox:
        crew = Crew(plan, Orders(inbox, lifeline=False))
        connection = socket.create_connection(("127.0.0.1", crew.port))
        crew.wait(1.0)  # greets whoever has connected
        connection.settimeout(5.0)
        node = met(connection, crew)
        node.send(Hello(1, 2, 1, 0, gather()))
        node.send(Ordered(int(signal.SIGTERM)))
        deadline = time.monotonic() + 5.0
        while 1 not in crew.members and time.monotonic() < deadline:
            crew.wait(0.1)
        assert crew.ordered and list(crew.signals) == [signal.SIGTERM]
        node.end("the test is over")
        crew.end(0)


def met(connection: socket.socket, crew: Crew) -> Link:
    """The node's end of a link to `crew`, which has to answer meanwhile."""
    found: list[object] = []
    thread = Thread(target=lambda: found.append(introduce(connection, bytes.fromhex(SECRET))))
    thread.start()
    while thread.is_alive():
        crew.wait(0.05)
    thread.join()
    (link,) = found
    assert isinstance(link, Link)
    return link
