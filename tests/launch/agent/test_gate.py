"""The store of several hosts is reached through agents alone: whoever does not know the secret finds no way to it."""

import secrets
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.errors import raises

from paceline.launch.agent.cluster import RemoteNodes
from paceline.launch.agent.store_proxy import (
    LOOPBACK,
    STORE_ADDRESS,
    StoreProxy,
    bind_store_and_proxy,
    remote_store_proxy,
)
from paceline.protocol.control import StopSignals, signal_wakeup
from paceline.protocol.job import NodePlan

SECRET = "5e" * 32


def serve(store: socket.socket) -> None:
    """In the store's place: gives back what it gets, to each who comes."""

    def answer(one: socket.socket) -> None:
        with one:
            while data := one.recv(1 << 16):
                one.sendall(data)

    def let_in() -> None:
        while True:
            try:
                one = store.accept()[0]
            except OSError:
                return
            threading.Thread(target=answer, args=(one,), daemon=True).start()

    threading.Thread(target=let_in, daemon=True).start()


def answered(port: int, data: bytes) -> bytes:
    """What comes back from `port` of the loopback; empty when the connection ends."""
    with socket.create_connection((LOOPBACK, port), timeout=60.0) as one:
        sender = threading.Thread(target=one.sendall, args=(data,), daemon=True)
        sender.start()
        found = b""
        try:
            while len(found) < len(data) and (more := one.recv(1 << 16)):
                found += more
        except ConnectionResetError:
            return b""
        sender.join(5.0)
        return found


@pytest.fixture
def head() -> Iterator[tuple[int, StoreProxy]]:
    """Node 0's agent with its gate: the port of its door, and the gate."""
    plan = NodePlan(("true",), nproc=1, nodes=2, node0_ports=(0,), secret=SECRET)
    store, gate = bind_store_and_proxy(0)
    serve(store)
    with signal_wakeup(()) as wakeup:
        cluster, over = RemoteNodes(plan, StopSignals(wakeup, lifeline=False)), threading.Event()
        cluster.gate = gate

        def wait() -> None:
            while not over.is_set():
                cluster.wait_for_events(0.05)

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield cluster.port, gate
        finally:
            over.set()
            thread.join()
            cluster.end(0)
            gate.close()
            store.shutdown(socket.SHUT_RDWR)
            store.close()


def test_workers_of_both_nodes_reach_the_store_and_no_byte_is_lost(head: tuple[int, StoreProxy]) -> None:
    door, gate = head
    far = remote_store_proxy(LOOPBACK, door, bytes.fromhex(SECRET))
    try:
        for size in (1, 5000, 3 << 20):  # more than buffers hold: it has to wait, and go on
            data = secrets.token_bytes(size)
            assert answered(gate.port, data) == data
            assert answered(far.port, data) == data
    finally:
        far.close()


def test_an_agent_without_the_secret_is_given_no_way_to_the_store(head: tuple[int, StoreProxy]) -> None:
    far = remote_store_proxy(LOOPBACK, head[0], b"x" * 32)
    try:
        assert answered(far.port, b"anybody there?") == b""
    finally:
        far.close()


def test_the_stores_own_port_answers_nobody_who_has_not_the_key(head: tuple[int, StoreProxy]) -> None:
    with socket.socket() as one:
        one.settimeout(1.5)
        with pytest.raises(OSError, match="timed out"):
            one.connect((STORE_ADDRESS, head[1].port))


def test_another_users_process_is_shut_out_at_the_loopback(
    head: tuple[int, StoreProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.launch.agent.store_proxy.tcp_connection_owner_uid", lambda *_: 12345)
    assert answered(head[1].port, b"anybody there?") == b""


def test_when_a_generation_ends_its_gate_lets_nobody_through(head: tuple[int, StoreProxy]) -> None:
    door, gate = head
    far = remote_store_proxy(LOOPBACK, door, bytes.fromhex(SECRET))
    with socket.create_connection((LOOPBACK, far.port), timeout=60.0) as held:
        held.sendall(b"here")
        assert held.recv(10) == b"here"
        gate.close()
        assert held.recv(10) == b""
    far.close()
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        try:
            socket.create_connection((LOOPBACK, gate.port), timeout=1.0).close()
        except OSError:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it still listens")


def test_a_port_that_is_taken_is_named() -> None:
    store, gate = bind_store_and_proxy(0)
    with raises("port-taken", port=f"port {gate.port}"):
        bind_store_and_proxy(gate.port)
    gate.close()
    store.close()
