"""The agents of one job talk in short JSON messages over TCP, sent and believed only by holders of its secret.

    meeting    head -> node   MAGIC, nonce
               node -> head   nonce, HMAC(secret, "node" + both nonces)
               head -> node   HMAC(secret, "head" + both nonces)
    message    length (4 bytes), HMAC(session key, direction + number of the message + JSON), JSON

Neither side believes a stranger, and no message can be repeated, reordered or taken from another connection. Nothing
is hidden: there is nothing secret in the messages. No pickle; sizes are bounded before anything is read.
"""

import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Iterator

import msgspec

from paceline.agent.messages import SILENCE_SECONDS, Message

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
        """Send, or note in `ended` why that is no longer possible."""
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
        """Its connection, to be used for something else; nothing more may have come than what was received."""
        self.ended = "it has become something else"
        return socket.socket(fileno=self._socket.detach())

    def end(self, why: str) -> None:
        """Close it; the first reason stays."""
        self.ended = self.ended or why
        self._socket.close()


class Knock:
    """The head's side of a meeting that may still turn out to be a stranger's; never waits."""

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
        """The link, once the other side has proved itself; a stranger finds the door closed (`closed`)."""
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
        """Close the door."""
        self._socket.close()

    @property
    def closed(self) -> bool:
        """Whether it was a stranger, or is gone."""
        return self._socket.fileno() < 0

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data)  # less than any buffer holds
        except OSError:
            self._socket.close()


def introduce(connection: socket.socket, secret: bytes) -> Link | str:
    """A node's side of the meeting, on a connection that has just been made; why it is not this job's head, else."""
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
    if not hmac.compare_digest(proof, _proof(secret, b"head", nonces)):  # b"" if it closed the door
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
