"""The authenticated connection of the ranks of several hosts to the rendezvous store.

    worker -> 127.0.0.1, its agent -> port of node 0's agent (HMAC) -> 127.0.0.2, signed packets -> rank 0's store

Rank 0's store listens on the loopback of its host, and the kernel drops packets that are not signed with a key of the
agent. An agent accepts only connections of its user (the kernel reports the user of a connection). Node 0's agent also
accepts connections of authenticated agents. The data is not encrypted. It consists of rendezvous messages and contains
no gradients, so one thread of the agent can relay it.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from paceline.errors import UsageError
from paceline.host.procfs import tcp_connection_owner_uid
from paceline.host.tcp import set_tcp_md5_key
from paceline.launch.agent import channel
from paceline.protocol.control import poll_readable

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
        self._listener, self._connect, self._loop = listener, connect, asyncio.new_event_loop()
        self._closed = False
        for target in (self._accept, self._relay):
            threading.Thread(target=target, daemon=True, name=f"paceline{target.__name__}").start()

    def relay_connection(self, client: socket.socket) -> None:
        try:
            store = self._connect()
        except OSError:  # rank 0 has ended, so close this connection
            return client.close()
        try:
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(_copy_both_ways(client, store)))
        except RuntimeError:  # the proxy is closed
            client.close()
            store.close()
        return None

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        self._listener.close()
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, address = self._listener.accept()
            except OSError:  # the listener is closed, or the process has too many open files
                time.sleep(0.01)
                continue
            if tcp_connection_owner_uid(address, client.getsockname()) in (None, os.geteuid()):
                self.relay_connection(client)
            else:
                client.close()

    def _relay(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # at its end it cancels all tasks
            runner.get_loop().run_forever()


async def _copy_both_ways(client: socket.socket, store: socket.socket) -> None:
    with client, store:
        for end in (client, store):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        copies = [asyncio.create_task(_copy(*ends)) for ends in ((client, store), (store, client))]
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)  # if one end closes, close both
        for copy in copies:
            copy.cancel()
        await asyncio.wait(copies)


async def _copy(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(source, PIECE_BYTES):
            await loop.sock_sendall(sink, data)


def bind_store_and_proxy(port: int) -> tuple[socket.socket, StoreProxy]:
    """On node 0: the socket for rank 0's store, and the gate to it, at the same port of two loopback addresses."""
    for _ in range(PORT_TRIES):
        store, listener, key = socket.socket(), socket.socket(), os.urandom(KEY_BYTES)
        try:
            for server in (store, listener):
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite closing connections of a run
            store.bind((STORE_ADDRESS, port))
            store_port: int = store.getsockname()[1]
            listener.bind((LOOPBACK, store_port))
            is_signed = set_tcp_md5_key(store, key)
            store.listen(1024)
            listener.listen(1024)
        except OSError as error:
            store.close()
            listener.close()
            if port:
                raise channel.port_taken_error(f"port {port}", port, error) from error
            continue
        return store, StoreProxy(listener, partial(_to_rank_0, store_port, key if is_signed else b""))
    raise UsageError(code="no-free-port")


def _to_rank_0(port: int, key: bytes) -> socket.socket:
    connection = socket.socket()
    if key:
        set_tcp_md5_key(connection, key)
    connection.settimeout(channel.HANDSHAKE_SECONDS)
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
    link = channel.connect_to_coordinator(node0, port, secret)
    link.silence_seconds = channel.HANDSHAKE_SECONDS
    link.send(channel.StoreConnectionRequest())
    while not link.receive():  # node 0 answers with a heartbeat, or closes the connection
        if link.ended:
            raise ConnectionRefusedError(link.ended)
        poll_readable([link], channel.HANDSHAKE_SECONDS)
    return link.detach()
