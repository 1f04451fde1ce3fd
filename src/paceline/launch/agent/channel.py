"""The protocol between the agents of one job: short JSON messages over TCP, authenticated with the job's secret.

head.py and follower.py send them.

    meeting    head -> node   MAGIC, nonce
               node -> head   nonce, HMAC(secret, "node" + both nonces)
               head -> node   HMAC(secret, "head" + both nonces)
    message    length (4 bytes), HMAC(session key, direction + number of the message + JSON), JSON

Each side authenticates the other. No message can be repeated, reordered or taken from a different connection. Messages
are not encrypted, and hold no secret. There is no pickle, and sizes are bounded before a message is read.

Times are ages in seconds and not clock readings, since clocks of two hosts cannot be compared. Only the signs of life
carry readings, from which the head learns the difference of the clocks: see `ClockBounds`.
"""

import hmac
import math
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from paceline.errors import UsageError
from paceline.host.facts import Facts
from paceline.host.procfs import port_holder
from paceline.protocol.control import Readable
from paceline.protocol.evidence import Evidence, Sample
from paceline.protocol.job import NodeRanks
from paceline.runs.machine import ClockAhead

BEAT_SECONDS = 2.0  # between two signs of life, in both directions
SILENCE_SECONDS = 15.0  # then the other side is lost: a few lost packets are not, TCP sends them again well within it
PROOF = ".shared"  # the file in the attempt's folder that all nodes must see


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Node to head, first: its number, its workers, and an address at which other nodes can try to reach it."""

    node: int  # -1: whichever is free, of a run that is on its way
    nodes: int
    nproc: int
    probe_port: int
    facts: Facts
    ranks: tuple[int, ...] = ()  # where another launcher has given them out: see attach.py


class ToStore(msgspec.Struct, frozen=True, tag=True):
    """Node to head, first, on a separate link: after an `Alive` the link carries a worker's traffic to the store."""


class PeerAddress(msgspec.Struct, frozen=True):
    """The address of a socket of a node that only listens: other nodes try to connect to it."""

    host: str
    address: str
    port: int


class Reach(msgspec.Struct, frozen=True, tag=True):
    """Head to node: try to connect to all of these."""

    peers: tuple[PeerAddress, ...]


class Reached(msgspec.Struct, frozen=True, tag=True):
    """Node to head: the nodes that it cannot reach, each with the reason."""

    unreachable: tuple[str, ...]


class StartOrder(msgspec.Struct, frozen=True, tag=True):
    """Head to node: start these workers."""

    generation: int
    ranks: NodeRanks
    attempt_dir: str
    proof: str  # what the attempt folder's file `.shared` holds, if all nodes must see one folder; else empty


class Enter(msgspec.Struct, frozen=True, tag=True):
    """Head to a node that joins a running run: be the node of this number, from the next generation on.

    The node looks for the attempt's folder (see `StartOrder.proof`), and answers with a `StartReply` of generation -1.
    """

    node: int
    attempt_dir: str
    proof: str


class StartReply(msgspec.Struct, frozen=True, tag=True):
    """Node to head: the workers run, or the reason why they cannot."""

    generation: int
    refusal: str = ""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Node to head, a sign of life: the state of the workers, at each look of the guard and if a worker has ended."""

    generation: int
    workers: tuple[Sample, ...] = ()  # with ages in the place of times
    oom_kills: int = 0
    stopped: bool = False  # the generation is ended, and nothing of it runs any more
    left: tuple[int, ...] = ()  # but for these pids, which not even SIGKILL has ended
    unix_time: float | None = None  # when it was sent, by the node's clock
    alive_took_seconds: float | None = None  # of an `Alive` since the last beat: sent by head's, come by node's clock


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Head to node: report in detail what each worker does. Wait for their answers no longer than this."""

    question: int
    patience_seconds: float


class Shown(msgspec.Struct, frozen=True, tag=True):
    """Node to head: the details of one worker, or the end of the answer. One by one, since each can be large."""

    question: int
    evidence: Evidence | None


class Release(msgspec.Struct, frozen=True, tag=True):
    """Head to node: have these ranks leave the collective in which they wait, with this word (see `Diagnosis.word`)."""

    ranks: tuple[int, ...]
    word: str


class Ordered(msgspec.Struct, frozen=True, tag=True):
    """Node to head: an order to stop has come from outside, by this signal; 0: the launcher is gone."""

    signal: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Head to node: end the generation. The workers get a signal and have this time; a later order can shorten it."""

    grace_seconds: float
    signal: int = signal.SIGTERM  # by which they are asked; each reaches a worker once


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Head to node, first and then every two seconds."""

    unix_time: float | None = None  # when it was sent, by the head's clock


class RunOver(msgspec.Struct, frozen=True, tag=True):
    """Head to node: the run is over, at least for this node. Print the words, if any, and exit with this code."""

    code: int
    words: str = ""


Message = (
    Hello | ToStore | Enter | Reach | Reached | StartOrder | StartReply | Beat | Ask | Shown | Release | Ordered
    | Stop | Alive | RunOver
)  # fmt: skip


MAGIC = b"paceline agent 1"
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_MESSAGE_BYTES = 4 << 20  # a node of 64 ranks that all end with a long traceback
MEET_SECONDS = 5.0  # for the whole meeting; a silent stranger holds no place for longer
SEND_SECONDS = 5.0  # a peer whose buffers stay full for so long is taken for lost
LENGTH = struct.Struct("!I")
NUMBER = struct.Struct("!Q")

_decoder = msgspec.json.Decoder(Message)


class Link:
    """One end of the connection between the head and a node, after both have proved that they know the secret."""

    def __init__(self, connection: socket.socket, key: bytes, mine: bytes, theirs: bytes) -> None:
        self._socket, self._key, self._mine, self._theirs = connection, key, mine, theirs
        self._sent = self._received = 0
        self._buffer = bytearray()
        self.ended = ""  # why nothing more can come; empty while it may
        self.heard_seconds = time.monotonic()  # when the other side was last heard
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.own_address = plain(connection.getsockname()[0])
        self.peer_address = plain(connection.getpeername()[0])
        self.peer_port: int = connection.getpeername()[1]

    def fileno(self) -> int:
        """For select; -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message, or store in `ended` why that is no longer possible."""
        payload = msgspec.json.encode(message)
        mac = self._mac(self._mine, self._sent, payload)
        self._sent += 1
        data = memoryview(LENGTH.pack(len(payload)) + mac + payload)
        deadline = time.monotonic() + SEND_SECONDS
        while data and not self.ended:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                    self.end(f"it has read nothing for {SEND_SECONDS:.0f} s")
            except OSError as error:
                self.end(f"the connection broke: {error.strerror}")

    def receive(self) -> list[Message]:
        """All messages that have come, without waiting; a long silence ends the link."""
        while not self.ended:
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
        if silent > SILENCE_SECONDS:
            self.end(f"it has not been heard of for {silent:.0f} s: powered off, or cut off from the network?")
        return list(self._messages())

    def _messages(self) -> Iterator[Message]:
        head = LENGTH.size + MAC_BYTES
        while len(self._buffer) >= head:
            (size,) = LENGTH.unpack_from(self._buffer)
            if size > MAX_MESSAGE_BYTES:
                self._distrust("a message that is too long")
                return
            if len(self._buffer) < head + size:
                return
            mac, payload = bytes(self._buffer[LENGTH.size : head]), bytes(self._buffer[head : head + size])
            del self._buffer[: head + size]
            if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, payload)):
                self._distrust("a message that was not signed with the job's secret")
                return
            self._received += 1
            try:
                yield _decoder.decode(payload)
            except msgspec.MsgspecError as error:
                self._distrust(f"a message that cannot be understood ({error}): another version of paceline?")
                return

    def _distrust(self, what: str) -> None:
        self._buffer.clear()
        self.end(f"it sent {what}")

    def _mac(self, direction: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, direction + NUMBER.pack(number) + payload, "sha256")

    def detach(self) -> socket.socket:
        """Give up the connection for a different use. All messages that have come must have been received."""
        self.ended = "it has become something else"
        return socket.socket(fileno=self._socket.detach())

    def end(self, why: str) -> None:
        """Close it; the first reason stays."""
        self.ended = self.ended or why
        self._socket.close()


class Handshake:
    """The head's side of a handshake with a peer that is not authenticated yet. It never waits."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self._socket, self._secret = connection, secret
        self._nonce = os.urandom(NONCE_BYTES)
        self._buffer = b""
        self.since_seconds = time.monotonic()
        connection.setblocking(False)
        self._send(MAGIC + self._nonce)

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def answer(self) -> Link | None:
        """The link, once the peer has proved that it knows the secret. If it cannot, the connection is `closed`."""
        wanted = NONCE_BYTES + MAC_BYTES - len(self._buffer)
        try:
            data = self._socket.recv(wanted)
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        if data == b"" or time.monotonic() > self.since_seconds + MEET_SECONDS:
            self.refuse()
            return None
        self._buffer += data or b""
        if len(self._buffer) < NONCE_BYTES + MAC_BYTES:
            return None
        nonces = self._nonce + self._buffer[:NONCE_BYTES]
        if not hmac.compare_digest(self._buffer[NONCE_BYTES:], _proof(self._secret, b"node", nonces)):
            self.refuse()
            return None
        self._send(_proof(self._secret, b"head", nonces))
        return Link(self._socket, _proof(self._secret, b"key", nonces), mine=b"head", theirs=b"node")

    def refuse(self) -> None:
        """Close the connection."""
        self._socket.close()

    @property
    def closed(self) -> bool:
        """Whether the peer was refused, or is gone."""
        return self._socket.fileno() < 0

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data)  # less than any buffer holds
        except OSError:
            self._socket.close()


def introduce(connection: socket.socket, secret: bytes) -> Link | str:
    """A node's side of the handshake on a new connection: the link, or why the peer is not the head of this job."""
    connection.settimeout(MEET_SECONDS)
    try:
        greeting = _exactly(connection, len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            connection.close()
            return "another program listens there"
        nonce = os.urandom(NONCE_BYTES)
        nonces = greeting[len(MAGIC) :] + nonce
        connection.sendall(nonce + _proof(secret, b"node", nonces))
        proof = _exactly(connection, MAC_BYTES)
    except OSError:
        connection.close()
        return "who listens there did not answer as an agent of paceline does"
    if not hmac.compare_digest(proof, _proof(secret, b"head", nonces)):  # b"" if it closed the connection
        connection.close()
        return "another job of paceline listens there: it does not know this job's secret"
    return Link(connection, _proof(secret, b"key", nonces), mine=b"node", theirs=b"head")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def _proof(secret: bytes, word: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, word + nonces, "sha256")


def plain(address: str) -> str:
    """An address without IPv6's prefix for IPv4."""
    return address.removeprefix("::ffff:") if "." in address else address


class Poller:
    """Finds which of many links can be read. The kernel keeps the list, so a look costs the same for a thousand.

    The poller can be polled itself: it is readable if a link is.
    """

    def __init__(self) -> None:
        self._kernel = select.epoll()
        self._links: dict[int, Link] = {}  # by descriptor

    def fileno(self) -> int:
        """For select."""
        return self._kernel.fileno()

    def attend(self, links: Iterable[Link]) -> None:
        """Poll these links, and no others."""
        now = {link.fileno(): link for link in links if not link.ended}
        for number in self._links.keys() - now.keys():
            if self._links.pop(number).fileno() >= 0:  # a closed one has left the list by itself
                self._kernel.unregister(number)
        for number, link in now.items():
            if self._links.get(number) is not link:  # also one that has got a closed one's number
                self._kernel.register(number, select.EPOLLIN)
                self._links[number] = link

    def heard(self) -> list[Link]:
        """The links that can be read now; never waits."""
        return [self._links[number] for number, _ in self._kernel.poll(0, max(1, len(self._links)))]

    def close(self) -> None:
        """Poll no link any more."""
        self._kernel.close()


MAX_HANDSHAKES = 256  # at the same time: the oldest is closed, since a peer with the secret proves it at once


class Listener:
    """Accepts the connections of the other agents. It never waits.

    Raises:
        UsageError: when all `ports` are taken.
    """

    def __init__(self, ports: Sequence[int], secret: bytes) -> None:
        self._socket, self._secret = _listen(ports), secret
        self._handshakes: list[Handshake] = []
        self._authenticated: list[Link] = []  # have proved that they know the secret, and sent no message
        self.port: int = self._socket.getsockname()[1]

    def sockets(self) -> list[Readable]:
        """The sockets to wait for."""
        return [self._socket, *self._handshakes, *self._authenticated]

    def arrived(self) -> list[tuple[Link, list[Message]]]:
        """The links that were authenticated since the last call, each with at least one message."""
        with suppress(BlockingIOError):
            for _ in range(MAX_HANDSHAKES):
                self._handshakes.append(Handshake(self._socket.accept()[0], self._secret))
        for handshake in list(self._handshakes):
            link = None if handshake.closed else handshake.answer()
            if link is not None:
                self._authenticated.append(link)
            if link is not None or handshake.closed:
                self._handshakes.remove(handshake)
        for handshake in self._handshakes[:-MAX_HANDSHAKES]:
            handshake.refuse()
        del self._handshakes[:-MAX_HANDSHAKES]
        found: list[tuple[Link, list[Message]]] = []
        for link in list(self._authenticated):
            messages = link.receive()
            if messages:
                found.append((link, messages))
            if messages or link.ended:
                self._authenticated.remove(link)
        return found

    def close(self) -> None:
        """Accept no connection any more, and close those that have not sent a message yet."""
        for link in self._authenticated:
            link.end("the run is over")
        for handshake in self._handshakes:
            handshake.refuse()
        self._socket.close()


def _listen(ports: Sequence[int]) -> socket.socket:
    """Listen on the first of these ports that is free, at every address: it is not known which one others will use."""
    for port in ports:
        for family in (socket.AF_INET6, socket.AF_INET):
            with suppress(OSError):
                both = family == socket.AF_INET6
                listener = socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=both)
                listener.setblocking(False)
                return listener
    holders = {port: port_holder(port) for port in ports}
    taken = ", ".join(f"{port} (by {holder})" if holder else str(port) for port, holder in holders.items())
    taken = f"port {taken} is" if len(holders) == 1 else f"ports {taken} are"
    raise UsageError(code="ports-in-use", host=socket.gethostname(), ports=taken)


# ---- the clocks of two nodes ----

DRIFT = 1e-4  # seconds a second by which two clocks may part: quartz is good for 5e-5
AGAIN_SECONDS = 60.0  # between two records that say nothing better


class ClockBounds:
    """Bounds of how far a node's clock is ahead of node 0's, from the times in the agents' signs of life.

    A message that is sent at s by one clock and comes at r by the other has taken r - s, plus or minus the clocks'
    difference. No message comes before it was sent. So each one to the head says that the node is ahead by at least
    s - r, and each one to the node that it is ahead by at most r - s: the quickest of both directions leave the
    narrowest bounds, and the middle of them is wrong by half their width at most, however unlike the two ways are.
    """

    def __init__(self) -> None:
        self.least_seconds, self.most_seconds = -math.inf, math.inf  # the node is ahead by this
        self._at_seconds = 0.0  # monotonic, when that held
        self._written_seconds, self._written_error_seconds = -math.inf, math.inf

    @property
    def error_seconds(self) -> float:
        """The largest error of `ahead_seconds`; infinite until messages of both directions have come."""
        return (self.most_seconds - self.least_seconds) / 2

    @property
    def ahead_seconds(self) -> float:
        """The most likely difference."""
        return self.least_seconds + self.error_seconds

    def see(self, now_seconds: float, *, least_seconds: float = -math.inf, most_seconds: float = math.inf) -> None:
        """Narrow the bounds by a message that has come at `now_seconds` (monotonic)."""
        drift = DRIFT * max(0.0, now_seconds - self._at_seconds)  # what was known has become less certain
        least, most = max(self.least_seconds - drift, least_seconds), min(self.most_seconds + drift, most_seconds)
        if least > most:  # a clock has been set: nothing that was known holds any more
            least, most = least_seconds, most_seconds
            self._written_error_seconds = math.inf
        self.least_seconds, self.most_seconds, self._at_seconds = least, most, now_seconds

    def due(self, node: int, now_seconds: float) -> ClockAhead | None:
        """The record to write now, if any: the first, one with half the error of the last, or one a minute."""
        error = self.error_seconds
        late = now_seconds >= self._written_seconds + AGAIN_SECONDS
        if math.isinf(error) or not (error <= self._written_error_seconds / 2 or late):
            return None
        self._written_seconds, self._written_error_seconds = now_seconds, error
        return ClockAhead(round(time.time(), 3), node, round(self.ahead_seconds, 6), round(error, 6))
