"""Finds out who can reach whom, and how fast: one half listens, the other connects with a token."""

import errno
import hmac
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from paceline.doctor.messages import Connected, LinkSpeed, Reason, Target

TOKEN_BYTES = 32  # hex digits
CHUNK_BYTES = 1 << 18
ROUND_TRIPS = 12
MEASURE_BYTES = 64 << 20  # no more than that goes through one link
KNOCK_SECONDS = 3.0  # for the token
IDLE_SECONDS = 20.0
PING, SEND, END = b"p", b"s", b"e"
MAX_VISITORS = 256  # at a time; each is a thread


def listen_for_peers(token: str) -> int:
    """Answer on a free port at all addresses until this process ends; return the port."""
    server = _server()
    threading.Thread(target=_accept, args=(server, token.encode()), daemon=True).start()
    return int(server.getsockname()[1])


def free_port() -> int:
    """A port that nobody listens on now."""
    with _server() as server:
        return int(server.getsockname()[1])


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 switched off
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", 0))


def _accept(server: socket.socket, token: bytes) -> None:
    places = threading.BoundedSemaphore(MAX_VISITORS)
    while True:
        places.acquire()
        try:
            connection, _ = server.accept()
        except OSError:  # gone before it was accepted, or no descriptor is free
            places.release()
            time.sleep(0.01)
            continue
        threading.Thread(target=_answer, args=(connection, token, places), daemon=True).start()


def _answer(connection: socket.socket, token: bytes, places: threading.BoundedSemaphore) -> None:
    """One visitor: the token is given back, then each `p` is answered, and what follows an `s` is thrown away."""
    try:
        with connection, suppress(OSError):
            connection.settimeout(KNOCK_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_read(connection, TOKEN_BYTES), token):
                return
            connection.settimeout(IDLE_SECONDS)
            connection.sendall(token)
            while (kind := connection.recv(1)) == PING:
                connection.sendall(PING)
            if kind == SEND:
                _sink(connection)
    finally:
        places.release()


def _sink(connection: socket.socket) -> None:
    buffer, total = bytearray(CHUNK_BYTES), 0
    while total < 2 * MEASURE_BYTES and (count := connection.recv_into(buffer)):
        total += count
        if buffer[count - 1] == END[0]:  # the rest are zeros
            connection.sendall(END)
            return


def try_targets(targets: tuple[Target, ...], seconds: float) -> Connected:
    """Try all targets at once, each for `seconds` at most."""
    with ThreadPoolExecutor(max(1, min(64, len(targets)))) as pool:
        return Connected(tuple(pool.map(lambda target: _meet(target, seconds, lambda _: None), targets)))


def measure_link(target: Target, seconds: float) -> LinkSpeed:
    """Round trip time and throughput to a target, from here to there."""
    found: list[float] = []

    def both(connection: socket.socket) -> None:
        connection.settimeout(seconds + 5.0)
        found.append(min(_round_trip(connection) for _ in range(ROUND_TRIPS)))
        found.append(_throughput(connection, seconds))

    reason = _meet(target, 2.0, both)
    return LinkSpeed(reason, *found) if len(found) == 2 else LinkSpeed(reason)


def _round_trip(connection: socket.socket) -> float:
    start = time.perf_counter()
    connection.sendall(PING)
    _read(connection, 1)
    return time.perf_counter() - start


def _throughput(connection: socket.socket, seconds: float) -> float:
    """Bytes a second that have arrived: the other side says when it has the last one."""
    connection.sendall(SEND)
    zeros, sent = bytes(CHUNK_BYTES), 0
    start = time.perf_counter()
    while sent < MEASURE_BYTES and time.perf_counter() - start < seconds:
        connection.sendall(zeros)
        sent += len(zeros)
    connection.sendall(END)
    _read(connection, 1)
    return sent / (time.perf_counter() - start)


def _meet(target: Target, seconds: float, talk: Callable[[socket.socket], None]) -> Reason:
    try:
        with socket.create_connection((target.address, target.port), timeout=seconds) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(target.token.encode())
            if _read(connection, TOKEN_BYTES) != target.token.encode():
                return "stranger"
            talk(connection)
            return "ok"
    except (OSError, UnicodeError) as error:
        return _reason_of(error)


def _reason_of(error: Exception) -> Reason:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return "name unknown"
    if isinstance(error, TimeoutError):  # ETIMEDOUT of the kernel as well
        return "filtered"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL):
        return "no route"
    if number in (errno.EACCES, errno.EPERM):  # a firewall of its own
        return "filtered"
    return "stranger" if isinstance(error, (ConnectionResetError, BrokenPipeError)) else "failed"


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError(f"ended after {len(data)} of {count} bytes")
        data += more
    return data
