"""The rendezvous store of the ranks of a generation, and the authenticated connection to it.

On several hosts, the agents relay the connection:

    worker -> 127.0.0.1, its agent -> port of node 0's agent (HMAC) -> 127.0.0.2, signed packets -> rank 0's store

Rank 0's store listens on the loopback of its host, and the kernel drops packets that are not signed with a key of the
agent. An agent accepts only connections of its user (the kernel reports the user of a connection). Node 0's agent also
accepts connections of authenticated agents. The data is not encrypted. It consists of rendezvous messages and contains
no gradients, so one thread of the agent can relay it.
"""

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

from paceline.errors import UsageError
from paceline.host.procfs import port_holder, tcp_owner
from paceline.host.reach import sign_tcp_packets
from paceline.launch.agent.channel import (
    HANDSHAKE_SECONDS,
    CoordinatorHeartbeat,
    Link,
    StoreConnectionRequest,
    authenticate_to_coordinator,
)
from paceline.protocol.job import NodePlan

LOOPBACK, STORE_ADDRESS = "127.0.0.1", "127.0.0.2"
KEY_BYTES = 16
PIECE_BYTES = 1 << 16
PORT_TRIES = 20  # to find a port that is free on both addresses

Connect = Callable[[], socket.socket]


class StoreProxy:
    """The relay of one node. Its workers reach the store at `port` of the loopback.

    `connect` opens a connection to the store, or raises OSError. One thread accepts connections, and may wait for a
    different agent. One thread relays data, and never waits.
    """

    def __init__(self, listener: socket.socket, connect: Connect) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener, self._connect = listener, connect
        self._wake, self._woken = socket.socketpair()
        self._new: list[tuple[socket.socket, socket.socket]] = []
        self._closed = False
        for target in (self._accept, self._relay):
            threading.Thread(target=target, daemon=True, name=f"paceline{target.__name__}").start()

    def relay_connection(self, client: socket.socket) -> None:
        try:
            self._new.append((client, self._connect()))
        except OSError:  # rank 0 has ended, so close this connection
            return client.close()
        with suppress(OSError):
            self._wake.send(b"+")
        return None

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        self._listener.close()
        self._wake.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, address = self._listener.accept()
            except OSError:  # the listener is closed, or the process has too many open files
                time.sleep(0.01)
                continue
            if tcp_owner(address, client.getsockname()) not in (None, os.geteuid()):
                client.close()
                continue
            self.relay_connection(client)

    def _relay(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, events in selector.select():
                    if isinstance(key.data, _Pipe):
                        key.data.move(selector, events)
                    elif not self._woken.recv(4096):
                        for pipe in {id(k.data): k.data for k in selector.get_map().values() if k.data}.values():
                            pipe.close(selector)
                        self._woken.close()
                        return
                while self._new:
                    client, store = self._new.pop()
                    to_store, to_client = _Pipe(client, store), _Pipe(store, client)
                    to_store.reverse, to_client.reverse = to_client, to_store
                    selector.register(client, selectors.EVENT_READ, to_store)
                    selector.register(store, selectors.EVENT_READ, to_client)


@dataclass(eq=False)
class _Pipe:
    """One direction of a connection: reads data from `source` and writes it to `sink`."""

    source: socket.socket
    sink: socket.socket
    reverse: "_Pipe | None" = None  # the other direction
    waiting: bytes = b""

    def __post_init__(self) -> None:
        self.source.setblocking(False)
        self.source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def move(self, selector: selectors.BaseSelector, events: int) -> None:
        """Read data, and write waiting data. If one end closes, close both."""
        assert self.reverse is not None
        try:
            if events & selectors.EVENT_WRITE:  # this source is the sink of the other direction
                self.reverse.flush()
            if events & selectors.EVENT_READ and not self.waiting:
                self.waiting = self.source.recv(PIECE_BYTES)
                if not self.waiting:
                    return self.close(selector)
                self.flush()
        except BlockingIOError:
            pass
        except OSError:
            return self.close(selector)
        for pipe, other in ((self, self.reverse), (self.reverse, self)):
            mask = (0 if pipe.waiting else selectors.EVENT_READ) | (selectors.EVENT_WRITE if other.waiting else 0)
            if not mask:
                with suppress(KeyError):
                    selector.unregister(pipe.source)
            elif pipe.source in selector.get_map():
                selector.modify(pipe.source, mask, pipe)
            else:
                selector.register(pipe.source, mask, pipe)
        return None

    def flush(self) -> None:
        """Write the waiting data. Raises BlockingIOError if some of it could not be written."""
        while self.waiting:
            self.waiting = self.waiting[self.sink.send(self.waiting) :]

    def close(self, selector: selectors.BaseSelector) -> None:
        for end in (self.source, self.sink):
            if end.fileno() >= 0:
                with suppress(KeyError):
                    selector.unregister(end)
                end.close()


def open_node0_store(port: int) -> tuple[socket.socket, StoreProxy]:
    """On node 0: the socket for rank 0's store, and the gate to it, at the same port of two loopback addresses."""
    for _ in range(PORT_TRIES):
        store, listener, key = socket.socket(), socket.socket(), os.urandom(KEY_BYTES)
        try:
            for server in (store, listener):
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite closing connections of a run
            store.bind((STORE_ADDRESS, port))
            store_port: int = store.getsockname()[1]
            listener.bind((LOOPBACK, store_port))
            is_signed = sign_tcp_packets(store, key)
            store.listen(1024)
            listener.listen(1024)
        except OSError as error:
            store.close()
            listener.close()
            if port:
                raise port_taken_error(f"port {port}", port, error) from error
            continue
        return store, StoreProxy(listener, partial(_to_rank_0, store_port, key if is_signed else b""))
    raise UsageError(code="no-free-port")


def port_taken_error(name: str, port: int, error: OSError) -> UsageError:
    holder = port_holder(port)
    holder_text = f" by {holder}" if holder else ""
    return UsageError(code="port-taken", port=name, by=holder_text, strerror=error.strerror)


def _to_rank_0(port: int, key: bytes) -> socket.socket:
    connection = socket.socket()
    if key:
        sign_tcp_packets(connection, key)
    connection.settimeout(HANDSHAKE_SECONDS)
    try:
        connection.connect((STORE_ADDRESS, port))
    except OSError:
        connection.close()
        raise
    return connection


def remote_store_proxy(node0: str, port: int, secret: bytes) -> StoreProxy:
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    return StoreProxy(listener, partial(_to_node0, node0, port, secret))


def _to_node0(node0: str, port: int, secret: bytes) -> socket.socket:
    link = authenticate_to_coordinator(socket.create_connection((node0, port), timeout=HANDSHAKE_SECONDS), secret)
    if not isinstance(link, Link):
        raise ConnectionRefusedError(link)
    link.send(StoreConnectionRequest())
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    while not (answer := link.receive()) and not link.ended:
        if time.monotonic() > deadline:
            link.end("it did not answer")
        time.sleep(0.001)
    if link.ended or not answer or not isinstance(answer[0], CoordinatorHeartbeat):
        link.end("it has no store")
        raise ConnectionRefusedError(link.ended)
    return link.detach()


@dataclass(frozen=True)
class Store:
    """The rendezvous store of a generation.

    On one host, the store is in `memory_fd`: an anonymous file that the ranks inherit, and that no other user can
    open. On several hosts, it is at a port, and the ranks reach it through a `proxy`. Rank 0 inherits the socket bound
    and listening, since another process could take a port that is closed in between.

    A script opens its store itself, at a port that is open to all. The agent only binds this port. So the kernel does
    not assign it to another process that asks for any free port, and the script can still bind it with SO_REUSEADDR.
    """

    listening_socket: socket.socket | None
    memory_fd: int = -1
    proxy: StoreProxy | None = None

    @classmethod
    def make(cls, plan: NodePlan) -> Self:
        if plan.nodes > 1 and not plan.plain_store:
            if plan.node:
                port, secret = plan.node0_ports[0], bytes.fromhex(plan.secret)
                return cls(None, proxy=remote_store_proxy(plan.master_addr, port, secret))
            store, gate = open_node0_store(plan.ranks.master_port)
            return cls(store, proxy=gate)
        return cls(_bound(plan), os.memfd_create("paceline-store") if plan.nodes == 1 else -1)

    def inherited_fd(self, rank: int, *, plain: bool) -> int:
        """The descriptor of the store that this rank inherits; -1 if the rank connects instead."""
        if self.memory_fd >= 0:
            return self.memory_fd
        return self.listening_socket.fileno() if rank == 0 and self.listening_socket is not None and not plain else -1

    def port_number(self, plan: NodePlan) -> int:
        if self.proxy is not None:
            return self.proxy.port
        return self.listening_socket.getsockname()[1] if self.listening_socket is not None else plan.ranks.master_port

    def address(self, plan: NodePlan) -> str:
        return plan.master_addr if self.proxy is None else LOOPBACK

    def close(self) -> None:
        """Close the agent's descriptors. With its socket open, connections to an ended rank 0 would not be refused."""
        if self.listening_socket is not None:
            self.listening_socket.close()
        if self.memory_fd >= 0:
            os.close(self.memory_fd)


def _bound(plan: NodePlan) -> socket.socket | None:
    if plan.node != 0:
        return None
    port = plan.ranks.master_port
    store = socket.socket(socket.AF_INET6 if ":" in plan.master_addr else socket.AF_INET)
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite closing connections of the last run
    try:
        store.bind(("" if plan.plain_store else plan.master_addr, port))
    except OSError as error:
        store.close()
        raise port_taken_error(f"port {port} on {plan.master_addr}", port, error) from error
    return store
