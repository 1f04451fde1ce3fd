"""The rendezvous store of the ranks of a generation, and the authenticated connection to it.

On several hosts the connection leads through their agents:

    worker -> 127.0.0.1, its own agent -> port of node 0's agent (HMAC) -> 127.0.0.2, signed packets -> rank 0's store

Rank 0's store listens on the loopback of its host, and the kernel drops packets that are not signed with a key of the
agent. An agent accepts only connections of its user (the kernel reports the user of a connection). Node 0's agent also
accepts those of an agent that has proved that it knows the secret. The data is not encrypted. A thread of the agent
relays it: it is used for the rendezvous, and carries no gradients.
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
from paceline.host.reach import sign
from paceline.launch.agent.channel import MEET_SECONDS, Alive, Link, ToStore, introduce
from paceline.protocol.job import NodePlan

LOOPBACK, STORE_ADDRESS = "127.0.0.1", "127.0.0.2"
KEY_BYTES = 16
PIECE_BYTES = 1 << 16
TRIES = 20  # for a port that is free on both addresses

Connect = Callable[[], socket.socket]


class StoreGate:
    """The relay of one node: its workers reach the store at `port` of the loopback.

    `connect` makes the connection from here to the store, or raises OSError. There are two threads: one accepts, and
    may wait for a different agent; one relays, and never waits.
    """

    def __init__(self, listener: socket.socket, connect: Connect) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener, self._connect = listener, connect
        self._wake, self._woken = socket.socketpair()
        self._new: list[tuple[socket.socket, socket.socket]] = []
        self._closed = False
        for work in (self._let_in, self._pass_on):
            threading.Thread(target=work, daemon=True, name=f"paceline{work.__name__}").start()

    def adopt(self, far: socket.socket) -> None:
        """Relay a connection to the store."""
        try:
            self._new.append((far, self._connect()))
        except OSError:  # rank 0 is gone: so says the end of this connection
            return far.close()
        with suppress(OSError):
            self._wake.send(b"+")
        return None

    def close(self) -> None:
        """Accept no connection any more, and close all that are open."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in accept
        self._listener.close()
        self._wake.close()

    def _let_in(self) -> None:
        while not self._closed:
            try:
                near, its = self._listener.accept()
            except OSError:  # closed; or there are too many open files just now
                time.sleep(0.01)
                continue
            if tcp_owner(its, near.getsockname()) not in (None, os.geteuid()):
                near.close()
                continue
            self.adopt(near)

    def _pass_on(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, events in selector.select():
                    if isinstance(key.data, _Way):
                        key.data.move(selector, events)
                    elif not self._woken.recv(4096):
                        for way in {id(k.data): k.data for k in selector.get_map().values() if k.data}.values():
                            way.close(selector)
                        self._woken.close()
                        return
                while self._new:
                    one, other = self._new.pop()
                    there, back = _Way(one, other), _Way(other, one)
                    there.back, back.back = back, there
                    selector.register(one, selectors.EVENT_READ, there)
                    selector.register(other, selectors.EVENT_READ, back)


@dataclass(eq=False)
class _Way:
    """One direction of a connection: data is read from `source` and written to `sink`."""

    source: socket.socket
    sink: socket.socket
    back: "_Way | None" = None
    waiting: bytes = b""

    def __post_init__(self) -> None:
        self.source.setblocking(False)
        self.source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def move(self, selector: selectors.BaseSelector, events: int) -> None:
        """Read, or write data that waits; if one end closes, both are closed."""
        assert self.back is not None
        try:
            if events & selectors.EVENT_WRITE:  # our source is the other way's sink
                self.back.flush()
            if events & selectors.EVENT_READ and not self.waiting:
                self.waiting = self.source.recv(PIECE_BYTES)
                if not self.waiting:
                    return self.close(selector)
                self.flush()
        except BlockingIOError:
            pass
        except OSError:
            return self.close(selector)
        for one, other in ((self, self.back), (self.back, self)):
            wanted = (0 if one.waiting else selectors.EVENT_READ) | (selectors.EVENT_WRITE if other.waiting else 0)
            if not wanted:
                with suppress(KeyError):
                    selector.unregister(one.source)
            elif one.source in selector.get_map():
                selector.modify(one.source, wanted, one)
            else:
                selector.register(one.source, wanted, one)
        return None

    def flush(self) -> None:
        """Write the data that waits; raises BlockingIOError if some of it could not be written."""
        while self.waiting:
            self.waiting = self.waiting[self.sink.send(self.waiting) :]

    def close(self, selector: selectors.BaseSelector) -> None:
        """Close both ends."""
        for one in (self.source, self.sink):
            if one.fileno() >= 0:
                with suppress(KeyError):
                    selector.unregister(one)
                one.close()


def own_store(port: int) -> tuple[socket.socket, StoreGate]:
    """On node 0: the socket for rank 0's store, and the gate to it, at one port of two addresses of the loopback.

    Raises:
        UsageError: when that port (0: any) is taken.
    """
    for _ in range(TRIES):
        store, listener, key = socket.socket(), socket.socket(), os.urandom(KEY_BYTES)
        try:
            for one in (store, listener):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last run's closing connections
            store.bind((STORE_ADDRESS, port))
            found: int = store.getsockname()[1]
            listener.bind((LOOPBACK, found))
            signed = sign(store, key)
            store.listen(1024)
            listener.listen(1024)
        except OSError as error:
            store.close()
            listener.close()
            if port:
                raise port_taken(f"port {port}", port, error) from error
            continue
        return store, StoreGate(listener, partial(_to_rank_0, found, key if signed else b""))
    raise UsageError(code="no-free-port")


def port_taken(what: str, port: int, error: OSError) -> UsageError:
    """The error for a port that is in use, with the process that listens there."""
    holder = port_holder(port)
    by = f" by {holder}" if holder else ""
    return UsageError(code="port-taken", port=what, by=by, strerror=error.strerror)


def _to_rank_0(port: int, key: bytes) -> socket.socket:
    one = socket.socket()
    if key:
        sign(one, key)
    one.settimeout(MEET_SECONDS)
    try:
        one.connect((STORE_ADDRESS, port))
    except OSError:
        one.close()
        raise
    return one


def far_store(head: str, port: int, secret: bytes) -> StoreGate:
    """On the other nodes: the gate to node 0's store, through its agent."""
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    return StoreGate(listener, partial(_to_head, head, port, secret))


def _to_head(head: str, port: int, secret: bytes) -> socket.socket:
    met = introduce(socket.create_connection((head, port), timeout=MEET_SECONDS), secret)
    if not isinstance(met, Link):
        raise ConnectionRefusedError(met)
    met.send(ToStore())
    deadline = time.monotonic() + MEET_SECONDS
    while not (answer := met.receive()) and not met.ended:
        if time.monotonic() > deadline:
            met.end("it did not answer")
        time.sleep(0.001)
    if met.ended or not answer or not isinstance(answer[0], Alive):
        met.end("it has no store")
        raise ConnectionRefusedError(met.ended)
    return met.detach()


@dataclass(frozen=True)
class Store:
    """The rendezvous store of a generation.

    On one host it is in `memory`: a file without a name that the ranks inherit, and that no other user can open. On
    several hosts it is at a port, and the ranks reach it through a `gate`. Rank 0 inherits the socket bound and
    listening, since a port that is closed again can be lost. A script opens its store itself, at a port that is open to
    all. On one host the port is for the code of the workers (a script that torchrun could start opens one): it is only
    bound. So a process that asks for any free port does not get it; one that asks for it with SO_REUSEADDR does.
    """

    port: socket.socket | None
    memory: int = -1
    gate: StoreGate | None = None

    @classmethod
    def make(cls, plan: NodePlan) -> Self:
        """Make the store of a node.

        Raises:
            UsageError: if the port is in use.
        """
        if plan.nodes > 1 and not plan.plain_store:
            if plan.node:
                port, secret = plan.head_ports[0], bytes.fromhex(plan.secret)
                return cls(None, gate=far_store(plan.master_addr, port, secret))
            store, gate = own_store(plan.ranks.master_port)
            return cls(store, gate=gate)
        return cls(_bound(plan), os.memfd_create("paceline-store") if plan.nodes == 1 else -1)

    def inherited(self, rank: int, *, plain: bool) -> int:
        """The descriptor of the store that this rank inherits; -1 if it connects instead."""
        if self.memory >= 0:
            return self.memory
        return self.port.fileno() if rank == 0 and self.port is not None and not plain else -1

    def port_number(self, plan: NodePlan) -> int:
        """The ranks' MASTER_PORT."""
        if self.gate is not None:
            return self.gate.port
        return self.port.getsockname()[1] if self.port is not None else plan.ranks.master_port

    def address(self, plan: NodePlan) -> str:
        """The ranks' MASTER_ADDR."""
        return plan.master_addr if self.gate is None else LOOPBACK

    def close(self) -> None:
        """Close our descriptors: with our socket open, a connection to a dead rank 0 would not be refused."""
        if self.port is not None:
            self.port.close()
        if self.memory >= 0:
            os.close(self.memory)


def _bound(plan: NodePlan) -> socket.socket | None:
    if plan.node != 0:
        return None
    port = plan.ranks.master_port
    store = socket.socket(socket.AF_INET6 if ":" in plan.master_addr else socket.AF_INET)
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last run's closing connections do no harm
    try:
        store.bind(("" if plan.plain_store else plan.master_addr, port))
    except OSError as error:
        store.close()
        raise port_taken(f"port {port} on {plan.master_addr}", port, error) from error
    return store
