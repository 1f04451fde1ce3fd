"""The other nodes as the head sees them, over real connections."""

import math
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread

from paceline.host.facts import gather_facts
from paceline.launch.agent.channel import (
    CoordinatorHeartbeat,
    Hello,
    Link,
    NodeHeartbeat,
    StopSignalNotice,
    authenticate_to_coordinator,
)
from paceline.launch.agent.cluster import NODE_END_SECONDS, RemoteNodes
from paceline.protocol.control import StopSignals, signal_wakeup
from paceline.protocol.job import NodePlan

SECRET = "5e" * 32


def test_an_order_that_comes_together_with_a_node_is_heard() -> None:
    with node_of_a_crew() as (node, cluster):
        node.send(Hello(1, 2, 1, 0, gather_facts()))
        node.send(StopSignalNotice(int(signal.SIGTERM)))
        wait_until(cluster, lambda: 1 in cluster.members)
        assert cluster.is_stop_ordered and list(cluster.signals) == [signal.SIGTERM]


def test_the_head_learns_by_how_much_a_nodes_clock_is_ahead() -> None:
    with node_of_a_crew() as (node, cluster):
        node.send(Hello(1, 2, 1, 0, gather_facts()))
        node.send(NodeHeartbeat(0))  # of an agent that says no times: no harm
        wait_until(cluster, lambda: 1 in cluster.members and cluster.members[1].beat.generation == 0)
        clock = cluster.members[1].clock
        assert math.isinf(clock.error_seconds)
        select.select([node], [], [], 5.0)
        first = node.receive()[0]  # at once, before two seconds are over
        assert isinstance(first, CoordinatorHeartbeat) and first.unix_time is not None
        node_now = time.time() + 60.0
        node.send(
            NodeHeartbeat(-1, unix_time=node_now, alive_took_seconds=node_now - first.unix_time)
        )  # also one that is late
        wait_until(cluster, lambda: not math.isinf(clock.error_seconds))
        assert abs(clock.ahead_seconds - 60.0) <= clock.error_seconds < 10.0
        assert cluster.members[1].beat.generation == 0


def test_the_end_waits_for_a_node_that_still_copies_files() -> None:
    with node_of_a_crew() as (node, cluster):
        node.send(Hello(1, 2, 1, 0, gather_facts()))
        wait_until(cluster, lambda: 1 in cluster.members)
        reasons = list[str]()

        def copy() -> None:
            for _ in range(9):  # longer than a node may be silent at the end
                time.sleep(NODE_END_SECONDS / 6)
                node.send(NodeHeartbeat(0, stopped=True))
            reasons.append(node.ended)
            node.end("the copy is complete")

        copying = Thread(target=copy)
        copying.start()
        cluster.end(0)
        copying.join()
        assert reasons == [""]


@contextmanager
def node_of_a_crew() -> Iterator[tuple[Link, RemoteNodes]]:
    """A node's link to a head, and that head's cluster."""
    plan = NodePlan(("true",), nproc=1, nodes=2, node0_ports=(0,), secret=SECRET)
    with signal_wakeup(()) as wakeup:
        cluster = RemoteNodes(plan, StopSignals(wakeup, lifeline=False))
        connection = socket.create_connection(("127.0.0.1", cluster.port))
        cluster.wait_for_events(1.0)  # greets whoever has connected
        connection.settimeout(5.0)
        node = met(connection, cluster)
        yield node, cluster
        node.end("the test is over")
        cluster.end(0)


def wait_until(cluster: RemoteNodes, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not happened() and time.monotonic() < deadline:
        cluster.wait_for_events(0.1)


def met(connection: socket.socket, cluster: RemoteNodes) -> Link:
    """The node's end of a link to `cluster`, which has to answer meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        node = pool.submit(authenticate_to_coordinator, connection, bytes.fromhex(SECRET))
        while not node.done():
            cluster.wait_for_events(0.05)
        return node.result()
