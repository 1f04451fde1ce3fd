"""The program on each host: `python -P -m paceline.lab.doctor.host` answers requests until its stdin ends.

One JSON line in, one out. A request names no program and no code. Only a user who has logged in can write to stdin. A
connection from the network needs a token, and can then only exchange bytes that this program counts.
"""

import errno
import hmac
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.host.facts import NodeFacts, gather_facts

MAX_LINE_BYTES = 1 << 20
TOKEN_PATTERN = re.compile(r"[0-9a-f]{32}")
TOKEN_BYTES = 32
CHUNK_BYTES = 1 << 18
ROUND_TRIPS = 12
MEASURE_BYTES = 64 << 20  # the maximum through one link
TOKEN_SECONDS = 3.0  # to receive the token
IDLE_SECONDS = 20.0
PING, SEND, END = b"p", b"s", b"e"
MAX_CONNECTIONS = 64  # at a time, with a thread for each
WRONG_PROGRAM = "a different program answers"
NO_ANSWER = "no answer: a firewall drops the packets"
ERRORS = {
    errno.ECONNREFUSED: "refused although the port is open: a firewall rejects it",
    **dict.fromkeys((errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL), "no route"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "a firewall on the connecting node forbids it"),
    **dict.fromkeys((errno.ECONNRESET, errno.EPIPE), WRONG_PROGRAM),
}


class _Request(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class FactsRequest(_Request, frozen=True):
    """Gather the facts, and listen for peers with `token`. Answer: FactsAnswer."""

    token: str
    folder: str


class TimeRequest(_Request, frozen=True):
    """Answer: TimeAnswer."""


class ConnectTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    address: str
    port: int
    token: str


class ConnectRequest(_Request, frozen=True):
    """Connect to all targets in parallel, each for `seconds` at most. Answer: ConnectAnswer.

    Then send to each for `measure_seconds`, to measure its throughput.
    """

    targets: tuple[ConnectTarget, ...]
    seconds: float
    measure_seconds: float = 0.0


class FolderProbeRequest(_Request, frozen=True):
    """Write, read or remove a file named after the token, in the folder or its nearest parent."""

    act: Literal["write", "read", "remove"]
    folder: str
    token: str


Request = FactsRequest | TimeRequest | ConnectRequest | FolderProbeRequest


class FactsAnswer(msgspec.Struct, frozen=True):
    facts: NodeFacts
    port: int  # at which the host listens
    disk_path: str  # the run folder, or its nearest parent
    disk_free: int  # bytes
    disk_size: int  # bytes


class TimeAnswer(msgspec.Struct, frozen=True):
    wall_seconds: float


class LinkMeasurement(msgspec.Struct, frozen=True):
    error: str = ""  # the reason why the connection failed
    round_trip_seconds: float = 0.0  # the shortest
    bytes_per_second: float = 0.0


class ConnectAnswer(msgspec.Struct, frozen=True):
    links: tuple[LinkMeasurement, ...]  # one for each target, in their order


class FolderProbeAnswer(msgspec.Struct, frozen=True):
    error: str = ""  # empty if there was none


def _examine(request: FactsRequest) -> FactsAnswer:
    folder = _nearest_existing_folder(request.folder)
    usage = shutil.disk_usage(folder)
    return FactsAnswer(gather_facts(), _listen(request.token.encode()), str(folder), usage.free, usage.total)


def _probe(request: FolderProbeRequest) -> FolderProbeAnswer:
    if not TOKEN_PATTERN.fullmatch(request.token):  # it becomes a part of a file name
        raise ValueError(f"a token is 32 hex digits, got {request.token[:40]!r}")
    folder = _nearest_existing_folder(request.folder)
    path, token = folder / f".paceline-doctor-{request.token}", request.token.encode()
    if request.act == "write":
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(token)
                file.flush()
                os.fsync(file.fileno())  # a full disk may only fail now
        except OSError as error:
            if not isinstance(error, FileExistsError):
                path.unlink(missing_ok=True)
            return FolderProbeAnswer(f"{folder} is not writable: {error.strerror}")
    elif request.act == "read":
        try:
            os.scandir(folder).close()  # refreshes the cache of NFS
            if path.read_bytes()[:64] != token:
                return FolderProbeAnswer("the file has different content here")
        except OSError as error:
            return FolderProbeAnswer(error.strerror or str(error))
    else:
        with suppress(OSError):
            path.unlink()
    return FolderProbeAnswer()


def _nearest_existing_folder(folder: str) -> Path:
    path = Path(folder).absolute()
    return next(existing for existing in (path, *path.parents) if existing.is_dir())


def _listen(token: bytes) -> int:
    """Answer on a free port at all addresses until this process ends. Returns the port."""
    server = None
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 switched off
            server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    server = server or socket.create_server(("0.0.0.0", 0), backlog=1024)
    for _ in range(MAX_CONNECTIONS):
        threading.Thread(target=_serve, args=(server, token), daemon=True).start()
    return int(server.getsockname()[1])


def _serve(server: socket.socket, token: bytes) -> None:
    while True:
        with suppress(OSError), server.accept()[0] as connection:
            _answer(connection, token)


def _answer(connection: socket.socket, token: bytes) -> None:
    """Serve one connection: echo the token, then each `p`; discard the bytes that follow an `s`."""
    connection.settimeout(TOKEN_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not hmac.compare_digest(_read(connection, TOKEN_BYTES), token):
        return
    connection.settimeout(IDLE_SECONDS)
    connection.sendall(token)
    while (command := connection.recv(1)) == PING:
        connection.sendall(PING)
    buffer, total = bytearray(CHUNK_BYTES), 0
    while command == SEND and total < 2 * MEASURE_BYTES and (count := connection.recv_into(buffer)):
        total += count
        if buffer[count - 1] == END[0]:  # the rest are zeros
            connection.sendall(END)
            return


def measure_links(targets: tuple[ConnectTarget, ...], seconds: float, measure_seconds: float = 0.0) -> ConnectAnswer:
    """Connect to all targets in parallel, each for `seconds` at most, and measure their links."""
    with ThreadPoolExecutor(max(1, min(64, len(targets)))) as pool:
        return ConnectAnswer(tuple(pool.map(lambda target: _measure_link(target, seconds, measure_seconds), targets)))


def _measure_link(target: ConnectTarget, seconds: float, measure_seconds: float) -> LinkMeasurement:
    try:
        with socket.create_connection((target.address, target.port), timeout=seconds) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(target.token.encode())
            if _read(connection, TOKEN_BYTES) != target.token.encode():
                return LinkMeasurement(WRONG_PROGRAM)
            connection.settimeout(seconds + measure_seconds + 5.0)
            round_trip = min(_round_trip(connection, PING) for _ in range(ROUND_TRIPS))
            return LinkMeasurement("", round_trip, _throughput(connection, measure_seconds) if measure_seconds else 0.0)
    except TimeoutError:
        return LinkMeasurement(NO_ANSWER)
    except OSError as error:
        return LinkMeasurement(ERRORS.get(error.errno or 0, str(error)))


def _round_trip(connection: socket.socket, message: bytes) -> float:
    start = time.perf_counter()
    connection.sendall(message)
    _read(connection, 1)
    return time.perf_counter() - start


def _throughput(connection: socket.socket, seconds: float) -> float:
    """Received bytes per second: the other side confirms the last byte."""
    connection.sendall(SEND)
    zeros, sent_bytes = bytes(CHUNK_BYTES), 0
    start = time.perf_counter()
    while sent_bytes < MEASURE_BYTES and time.perf_counter() - start < seconds:
        connection.sendall(zeros)
        sent_bytes += len(zeros)
    _round_trip(connection, END)
    return sent_bytes / (time.perf_counter() - start)


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError(errno.ECONNRESET, f"ended after {len(data)} of {count} bytes")
        data += chunk
    return data


REQUEST_HANDLERS: Mapping[type[Request], Callable[[Any], object]] = {
    FactsRequest: _examine,
    TimeRequest: lambda _: TimeAnswer(time.time()),
    ConnectRequest: lambda request: measure_links(request.targets, request.seconds, request.measure_seconds),
    FolderProbeRequest: _probe,
}


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the launcher, which closes this stdin
    decoder = msgspec.json.Decoder(Request)
    while line := sys.stdin.buffer.readline(MAX_LINE_BYTES + 1):
        try:
            if len(line) > MAX_LINE_BYTES or not line.endswith(b"\n"):
                raise ValueError(f"line longer than {MAX_LINE_BYTES} bytes, or incomplete: {line[:60]!r}")
            request = decoder.decode(line)
            reply = REQUEST_HANDLERS[type(request)](request)
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            reply = {"refused": str(error)[:1000]}  # no answer type has this field
        try:
            sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            break
    os._exit(0)  # the threads are waiting for connections


if __name__ == "__main__":
    main()
