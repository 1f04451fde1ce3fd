"""Open ports and the speed of a link: one half listens, the other connects with a token."""

import errno
import hmac
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from paceline.lab.doctor.messages import Connected, Link, Target

TOKEN_BYTES = 32  # hex digits
CHUNK_BYTES = 1 << 18
ROUND_TRIPS = 12
MEASURE_BYTES = 64 << 20  # no more than that goes through one link
KNOCK_SECONDS = 3.0  # for the token
IDLE_SECONDS = 20.0
PING, SEND, END = b"p", b"s", b"e"
MAX_VISITORS = 64  # at a time; each has a thread
STRANGER = "another program answers"
NO_ANSWER = "no answer, so a firewall drops the packets"
ERRORS = {
    errno.ECONNREFUSED: "refused although the port is open, so a firewall rejects it",
    **dict.fromkeys((errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL), "no route"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "a firewall of the host that connects forbids it"),
    **dict.fromkeys((errno.ECONNRESET, errno.EPIPE), STRANGER),
}


def listen_for_peers(token: str) -> int:
    """Answer on a free port at all addresses until this process ends; return the port."""
    server = _server()
    for _ in range(MAX_VISITORS):
        threading.Thread(target=_serve, args=(server, token.encode()), daemon=True).start()
    return int(server.getsockname()[1])


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 switched off
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("0.0.0.0", 0), backlog=1024)


def _serve(server: socket.socket, token: bytes) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # gone before it was accepted, or no descriptor is free
            time.sleep(0.01)
            continue
        with connection, suppress(OSError):
            _answer(connection, token)


def _answer(connection: socket.socket, token: bytes) -> None:
    """One visitor: the token is sent back, then each `p` is answered, and what follows an `s` is thrown away."""
    connection.settimeout(KNOCK_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not hmac.compare_digest(_read(connection, TOKEN_BYTES), token):
        return
    connection.settimeout(IDLE_SECONDS)
    connection.sendall(token)
    while (kind := connection.recv(1)) == PING:
        connection.sendall(PING)
    buffer, total = bytearray(CHUNK_BYTES), 0
    while kind == SEND and total < 2 * MEASURE_BYTES and (count := connection.recv_into(buffer)):
        total += count
        if buffer[count - 1] == END[0]:  # the rest are zeros
            connection.sendall(END)
            return


def try_targets(targets: tuple[Target, ...], seconds: float, measure_seconds: float = 0.0) -> Connected:
    """Try all targets in parallel, each for `seconds` at most."""
    with ThreadPoolExecutor(max(1, min(64, len(targets)))) as pool:
        return Connected(tuple(pool.map(lambda target: _try(target, seconds, measure_seconds), targets)))


def _try(target: Target, seconds: float, measure_seconds: float) -> Link:
    try:
        with socket.create_connection((target.address, target.port), timeout=seconds) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(target.token.encode())
            if _read(connection, TOKEN_BYTES) != target.token.encode():
                return Link(STRANGER)
            connection.settimeout(seconds + measure_seconds + 5.0)
            round_trip = min(_round_trip(connection) for _ in range(ROUND_TRIPS))
            return Link("", round_trip, _throughput(connection, measure_seconds) if measure_seconds else 0.0)
    except TimeoutError:
        return Link(NO_ANSWER)
    except OSError as error:
        return Link(ERRORS.get(error.errno or 0, str(error)))


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


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, f"ended after {len(data)} of {count} bytes")
        data += more
    return data
