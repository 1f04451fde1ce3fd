"""The protocol between the agents of one job: short messages (msgpack) over TCP, authenticated with the job's secret.

coordinator.py and follower.py send these messages.

    handshake  coordinator -> node   MAGIC, nonce
               node -> coordinator   nonce, HMAC(secret, "node" + both nonces)
               coordinator -> node   HMAC(secret, "coordinator" + both nonces)
    message    length (4 bytes), HMAC(session key, direction + number of the message + msgpack), msgpack

Each side authenticates the other. No message can be replayed, reordered or taken from a different connection. Messages
are not encrypted and contain no secret. They contain no pickle, and their size is checked before they are read.

Times are ages in seconds and not clock readings, since the clocks of two hosts may differ. Only the heartbeats contain
clock readings, from which the coordinator determines the difference of the clocks: see `ClockBounds`.
"""

import hmac
import math
import os
import select
import selectors
import signal
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import cast

import msgspec

from paceline.errors import UsageError
from paceline.host.facts import NodeFacts
from paceline.host.procfs import describe_port_owner
from paceline.protocol.control import SupportsFileno
from paceline.protocol.evidence import Evidence, RankSample
from paceline.protocol.job import NodeRanks
from paceline.runs.machine import ClockOffset

BEAT_SECONDS = 2.0  # between two heartbeats, in both directions
SILENCE_SECONDS = 15.0  # without a message; then the other side is lost. TCP resends lost packets in a shorter time
PROOF_FILE = ".shared"  # the file in the attempt's folder that all nodes must see


# ---- node to coordinator ----


class Hello(msgspec.Struct, frozen=True, tag=True):
    node: int  # -1: any free node of a running run
    nodes: int
    nproc: int
    probe_port: int  # of a socket to which other nodes connect to test the network
    facts: NodeFacts
    ranks: tuple[int, ...] = ()  # if another launcher has assigned the ranks: see attach.py


class StoreConnectionRequest(msgspec.Struct, frozen=True, tag=True):
    """The first message on a separate link, which relays store traffic after a `CoordinatorHeartbeat`."""


class ReachabilityReply(msgspec.Struct, frozen=True, tag=True):
    unreachable: tuple[str, ...]  # the peers, each with the reason


class StartReply(msgspec.Struct, frozen=True, tag=True):
    """The workers run, or the reason why they cannot."""

    generation: int
    refusal: str = ""
    copies_files: bool = False  # the node has a separate run folder, whose files it sends to node 0: see files.py


class NodeHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """The state of the workers, at each sample and when a worker ends."""

    generation: int
    workers: tuple[RankSample, ...] = ()  # with ages instead of times
    oom_kills: int = 0
    stopped: bool = False  # the generation has been stopped, and all its processes except `left` have ended
    left: tuple[int, ...] = ()  # pids of processes that SIGKILL has not ended
    unix_time: float | None = None  # send time, by the node's clock
    # of the last `CoordinatorHeartbeat`: receive time (here) - send time (coordinator)
    alive_took_seconds: float | None = None

    @property
    def urgent_state(self) -> tuple[object, ...]:
        """What the coordinator must know immediately: ends of workers and of their generation, and stop requests."""
        states = ((worker.code, worker.failure is None, worker.stop_asked) for worker in self.workers)
        return self.generation, self.stopped, self.left, *states


class EvidenceReply(msgspec.Struct, frozen=True, tag=True):
    """The details of one worker, because they can be large."""

    question: int
    evidence: Evidence


class StopSignalNotice(msgspec.Struct, frozen=True, tag=True):
    signal: int  # the stop signal that the agent has received; 0: its launcher has ended


class FileRequest(msgspec.Struct, frozen=True, tag=True):
    """Send this file of the run folder. The answer is its parts, or a `FileAck`."""

    path: str


class CheckpointListRequest(msgspec.Struct, frozen=True, tag=True):
    """Send the names of the published checkpoints."""


# ---- in both directions, on a separate link for files: see files.py ----


class FilePart(msgspec.Struct, frozen=True, tag=True):
    """A part of a file. All its parts follow each other."""

    path: str  # relative to the run folder
    data: bytes
    sha256: str = ""  # of the whole file, in its last part
    appends_at: int = -1  # the file has grown by this part, at this offset; -1: the parts replace the file


# ---- coordinator to node ----


class PeerAddress(msgspec.Struct, frozen=True):
    host: str
    address: str
    port: int  # `Hello.probe_port`


class ReachabilityRequest(msgspec.Struct, frozen=True, tag=True):
    peers: tuple[PeerAddress, ...]


class StartOrder(msgspec.Struct, frozen=True, tag=True):
    generation: int
    ranks: NodeRanks
    attempt_dir: str
    proof: str  # content of the file `.shared` in the attempt folder; empty if nodes need not share the folder


class JoinOrder(msgspec.Struct, frozen=True, tag=True):
    """To a node that joins a running run: take this node number, from the next generation on.

    The node checks that it sees the attempt's folder (see `StartOrder.proof`), and answers with a `StartReply` of
    generation -1.
    """

    node: int
    attempt_dir: str
    proof: str


class EvidenceRequest(msgspec.Struct, frozen=True, tag=True):
    """Report details of each worker's state. Wait for the workers' answers at most `patience_seconds`."""

    question: int
    patience_seconds: float


class UnblockOrder(msgspec.Struct, frozen=True, tag=True):
    """Abort the collective in which these ranks wait."""

    ranks: tuple[int, ...]
    word: str  # `StopReport.unblock_message`


class StopOrder(msgspec.Struct, frozen=True, tag=True):
    """Stop the generation. The workers get a signal and this time. Later orders can shorten it."""

    grace_seconds: float
    signal: int = signal.SIGTERM  # a worker gets each signal only once


class StopStepOrder(msgspec.Struct, frozen=True, tag=True):
    """Ranks of an unmodified script stop after this number of steps; 0: they wait for the number."""

    step: int = 0


Order = UnblockOrder | StopOrder | StopStepOrder  # to the workers of every node: see `Workers.execute`


class FileAck(msgspec.Struct, frozen=True, tag=True):
    """Why a file could not be stored or sent; empty if it has been stored."""

    failure: str = ""
    errno: int = 0


class CheckpointList(msgspec.Struct, frozen=True, tag=True):
    names: tuple[str, ...]


class CoordinatorHeartbeat(msgspec.Struct, frozen=True, tag=True):
    unix_time: float | None = None  # send time, by the coordinator's clock


class RunEndNotice(msgspec.Struct, frozen=True, tag=True):
    """The run is over for this node. Print `words`, if there are any, and exit with this code."""

    code: int
    words: str = ""


Message = (
    Hello | StoreConnectionRequest | JoinOrder | ReachabilityRequest | ReachabilityReply | StartOrder
    | StartReply | NodeHeartbeat | EvidenceRequest | EvidenceReply | UnblockOrder | StopSignalNotice | StopOrder
    | StopStepOrder | CoordinatorHeartbeat | RunEndNotice | FilePart | FileRequest | FileAck | CheckpointListRequest
    | CheckpointList
)  # fmt: skip


MAGIC = b"paceline agent 1"
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_MESSAGE_BYTES = 4 << 20  # enough for a node of 64 ranks that all end with a long traceback
HANDSHAKE_SECONDS = 5.0  # for the whole handshake, to limit the resources of unauthenticated peers
SEND_SECONDS = 5.0  # a peer whose buffers stay full for this time is lost
LENGTH_FORMAT = struct.Struct("!I")
MESSAGE_NUMBER_FORMAT = struct.Struct("!Q")

_decoder = msgspec.msgpack.Decoder(Message)


class Link:
    """One end of the connection between the coordinator and a node, after the handshake."""

    def __init__(self, connection: socket.socket, key: bytes, mine: bytes, theirs: bytes) -> None:
        self._socket, self._key, self._mine, self._theirs = connection, key, mine, theirs
        self._sent = self._received = 0
        self._buffer = bytearray()
        self.ended = ""  # why the link has ended; empty while it is open
        self.send_seconds, self.silence_seconds = SEND_SECONDS, SILENCE_SECONDS
        self.heard_seconds = time.monotonic()  # time of the last data from the other side
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.own_address = unmap_ipv4_address(connection.getsockname()[0])
        self.peer_address = unmap_ipv4_address(connection.getpeername()[0])
        self.peer_port: int = connection.getpeername()[1]

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message. On failure, end the link with the reason."""
        payload = msgspec.msgpack.encode(message)
        mac = self._mac(self._mine, self._sent, payload)
        self._sent += 1
        data = memoryview(LENGTH_FORMAT.pack(len(payload)) + mac + payload)
        deadline = time.monotonic() + self.send_seconds
        while data and not self.ended:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                    self.end(f"it has read nothing for {self.send_seconds:.0f} s")
            except OSError as error:
                self.end(f"the connection broke: {error.strerror}")

    def receive(self) -> list[Message]:
        """The received messages, without waiting. A long silence ends the link."""
        while not self.ended and len(self._buffer) < 2 * MAX_MESSAGE_BYTES:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                self.end(f"the connection broke: {error.strerror}")
                break
            if not data:
                self.end("it closed the connection")
                break
            self._buffer += data
            self.heard_seconds = time.monotonic()
            if len(data) < 1 << 16:
                break
        silent = time.monotonic() - self.heard_seconds
        if silent > self.silence_seconds:
            self.end(f"it has not been heard of for {silent:.0f} s: powered off, or cut off from the network?")
        return list(self._messages())

    def _messages(self) -> Iterator[Message]:
        header = LENGTH_FORMAT.size + MAC_BYTES
        while len(self._buffer) >= header:
            (size,) = LENGTH_FORMAT.unpack_from(self._buffer)
            if size > MAX_MESSAGE_BYTES:
                self._distrust("a message that is too long")
                return
            if len(self._buffer) < header + size:
                return
            mac, payload = bytes(self._buffer[LENGTH_FORMAT.size : header]), bytes(self._buffer[header : header + size])
            del self._buffer[: header + size]
            if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, payload)):
                self._distrust("a message that was not signed with the job's secret")
                return
            self._received += 1
            try:
                yield _decoder.decode(payload)
            except msgspec.MsgspecError as error:
                self._distrust(f"a message that cannot be decoded ({error}): a different version of paceline?")
                return

    def _distrust(self, description: str) -> None:
        self._buffer.clear()
        self.end(f"it sent {description}")

    def _mac(self, direction: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, direction + MESSAGE_NUMBER_FORMAT.pack(number) + payload, "sha256")

    def detach(self) -> socket.socket:
        """Return the connection for a different use, and end the link. The caller must have received all messages."""
        self.ended = "its connection relays the store"
        return socket.socket(fileno=self._socket.detach())

    def end(self, why: str) -> None:
        """Close the link. `ended` keeps the first reason."""
        self.ended = self.ended or why
        self._socket.close()


class CoordinatorHandshake:
    """The coordinator's side of a handshake with an unauthenticated peer. It never waits."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self._socket, self._secret = connection, secret
        self._nonce = os.urandom(NONCE_BYTES)
        self._buffer = b""
        self.since_seconds = time.monotonic()
        connection.setblocking(False)
        self._send(MAGIC + self._nonce)

    def fileno(self) -> int:
        return self._socket.fileno()

    def try_complete(self) -> Link | None:
        """The link, once the peer is authenticated. If authentication fails, the connection is `closed`."""
        missing = NONCE_BYTES + MAC_BYTES - len(self._buffer)
        try:
            data = self._socket.recv(missing)
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        if data == b"" or time.monotonic() > self.since_seconds + HANDSHAKE_SECONDS:
            self.refuse()
            return None
        self._buffer += data or b""
        if len(self._buffer) < NONCE_BYTES + MAC_BYTES:
            return None
        nonces = self._nonce + self._buffer[:NONCE_BYTES]
        if not hmac.compare_digest(self._buffer[NONCE_BYTES:], _proof(self._secret, b"node", nonces)):
            self.refuse()
            return None
        self._send(_proof(self._secret, b"coordinator", nonces))
        return Link(self._socket, _proof(self._secret, b"key", nonces), mine=b"coordinator", theirs=b"node")

    def refuse(self) -> None:
        self._socket.close()

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data)  # fits into any buffer
        except OSError:
            self._socket.close()


def connect_to_coordinator(host: str, port: int, secret: bytes) -> Link:
    """A further connection to the coordinator. Raises OSError."""
    return authenticate_to_coordinator(socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS), secret)


def authenticate_to_coordinator(connection: socket.socket, secret: bytes) -> Link:
    """A node's side of the handshake. Raises ConnectionRefusedError if the peer is not the coordinator of this job."""
    reason = "the program that listens there is not an agent of paceline"
    connection.settimeout(HANDSHAKE_SECONDS)
    with suppress(OSError):
        greeting, nonce = _exactly(connection, len(MAGIC) + NONCE_BYTES), os.urandom(NONCE_BYTES)
        if greeting.startswith(MAGIC):
            nonces = greeting[len(MAGIC) :] + nonce
            connection.sendall(nonce + _proof(secret, b"node", nonces))
            proof = _exactly(connection, MAC_BYTES)  # b"" if it closed the connection
            if hmac.compare_digest(proof, _proof(secret, b"coordinator", nonces)):
                return Link(connection, _proof(secret, b"key", nonces), mine=b"node", theirs=b"coordinator")
            reason = "a different job of paceline listens there: it does not know this job's secret"
    connection.close()
    raise ConnectionRefusedError(reason)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (chunk := connection.recv(size - len(data))):
        data += chunk
    return data


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + nonces, "sha256")


def unmap_ipv4_address(address: str) -> str:
    return address.removeprefix("::ffff:") if "." in address else address


class Poller(selectors.EpollSelector):
    """Finds the readable links. The cost does not grow with their number.

    The poller can be polled itself: it is readable if a link is readable.
    """

    def set_links(self, links: Iterable[Link]) -> None:
        open_links = {link.fileno(): link for link in links if not link.ended}
        for key in [*self.get_map().values()]:
            if open_links.get(key.fd) is not key.fileobj:  # ended, or a new link has reused its number
                self.unregister(key.fileobj)
        for number in open_links.keys() - self.get_map():
            self.register(open_links[number], selectors.EVENT_READ)

    def readable_links(self) -> list[Link]:
        """The links that can be read now. Never waits."""
        return [cast(Link, key.fileobj) for key, _ in self.select(0)]


MAX_HANDSHAKES = 256  # limit of concurrent handshakes. The oldest is closed: a peer with the secret is quick


class Listener:
    """Accepts the connections of the other agents. It never waits."""

    def __init__(self, ports: Sequence[int], secret: bytes) -> None:
        self._socket, self._secret = _listen(ports), secret
        self._handshakes: list[CoordinatorHandshake] = []
        self._authenticated: list[Link] = []  # have sent no message yet
        self.port: int = self._socket.getsockname()[1]

    def sockets(self) -> list[SupportsFileno]:
        return [self._socket, *self._handshakes, *self._authenticated]

    def take_new_links(self) -> list[tuple[Link, list[Message]]]:
        """The new authenticated links since the last call, each with at least one message."""
        with suppress(BlockingIOError):
            for _ in range(MAX_HANDSHAKES):
                self._handshakes.append(CoordinatorHandshake(self._socket.accept()[0], self._secret))
        for handshake in list(self._handshakes):
            link = None if handshake.closed else handshake.try_complete()
            if link is not None:
                self._authenticated.append(link)
            if link is not None or handshake.closed:
                self._handshakes.remove(handshake)
        for handshake in self._handshakes[:-MAX_HANDSHAKES]:
            handshake.refuse()
        del self._handshakes[:-MAX_HANDSHAKES]
        arrivals: list[tuple[Link, list[Message]]] = []
        for link in list(self._authenticated):
            messages = link.receive()
            if messages:
                arrivals.append((link, messages))
            if messages or link.ended:
                self._authenticated.remove(link)
        return arrivals

    def close(self) -> None:
        for link in self._authenticated:
            link.end("the run is over")
        for handshake in self._handshakes:
            handshake.refuse()
        self._socket.close()


def _listen(ports: Sequence[int]) -> socket.socket:
    """Listen on the first free port of `ports`, at all addresses, since the other nodes may use any of them."""
    for port in ports:
        for family in (socket.AF_INET6, socket.AF_INET):
            with suppress(OSError):
                dualstack = family == socket.AF_INET6
                listener = socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=dualstack)
                listener.setblocking(False)
                return listener
    holders = {port: describe_port_owner(port) for port in ports}
    taken = ", ".join(f"{port} (by {holder})" if holder else str(port) for port, holder in holders.items())
    taken = f"port {taken} is" if len(holders) == 1 else f"ports {taken} are"
    raise UsageError(code="ports-in-use", host=socket.gethostname(), ports=taken)


def port_taken_error(name: str, port: int, error: OSError) -> UsageError:
    holder = describe_port_owner(port)
    holder_text = f" by {holder}" if holder else ""
    return UsageError(code="port-taken", port=name, by=holder_text, strerror=error.strerror)


# ---- the clocks of two nodes ----

DRIFT = 1e-4  # largest drift between two clocks, in seconds per second; the tolerance of a quartz is 5e-5
CLOCK_RECORD_SECONDS = 60.0  # between two records without an improvement


class ClockBounds:
    """Bounds of the time by which a node's clock is ahead of node 0's, from the times in the agents' heartbeats.

    A message is sent at time s of one clock, and received at time r of the other clock. Since it cannot arrive before
    it is sent, each message to the coordinator shows that the node is ahead by at least s - r. Each message to the node
    shows that it is ahead by at most r - s. The fastest messages of both directions give the narrowest bounds. Their
    middle is wrong by at most half their distance, even if the latencies of the two directions differ.
    """

    def __init__(self) -> None:
        self.least_seconds, self.most_seconds = -math.inf, math.inf  # the node is ahead by a time between these
        self._at_seconds = 0.0  # monotonic time of the last update
        self._written_seconds, self._written_error_seconds = -math.inf, math.inf

    @property
    def error_seconds(self) -> float:
        """The largest error of `ahead_seconds`; infinite until messages of both directions have arrived."""
        return (self.most_seconds - self.least_seconds) / 2

    @property
    def ahead_seconds(self) -> float:
        return self.least_seconds + self.error_seconds

    def narrow(self, now_seconds: float, *, least_seconds: float = -math.inf, most_seconds: float = math.inf) -> None:
        """Narrow the bounds by a message that was received at `now_seconds` (monotonic)."""
        drift = DRIFT * max(0.0, now_seconds - self._at_seconds)  # the uncertainty of the bounds grows with time
        lower, upper = max(self.least_seconds - drift, least_seconds), min(self.most_seconds + drift, most_seconds)
        if lower > upper:  # a clock was set: the earlier bounds are void
            lower, upper = least_seconds, most_seconds
            self._written_error_seconds = math.inf
        self.least_seconds, self.most_seconds, self._at_seconds = lower, upper, now_seconds

    def due_record(self, node: int, now_seconds: float) -> ClockOffset | None:
        """The record to write now: the first one, one with half the error of the last one, or one per minute."""
        error = self.error_seconds
        late = now_seconds >= self._written_seconds + CLOCK_RECORD_SECONDS
        if math.isinf(error) or not (error <= self._written_error_seconds / 2 or late):
            return None
        self._written_seconds, self._written_error_seconds = now_seconds, error
        return ClockOffset(round(time.time(), 3), node, round(self.ahead_seconds, 6), round(error, 6))
