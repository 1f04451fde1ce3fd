"""The agents' channel believes nobody who does not hold the job's secret, and nothing that was said before."""

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from benchmarks.faults.reading import said_by_paceline

from paceline.launch.agent import channel
from paceline.launch.agent.channel import (
    CoordinatorHandshake,
    CoordinatorHeartbeat,
    Link,
    Message,
    RunEndNotice,
    StartReply,
    StopOrder,
    StopSignalNotice,
    authenticate_to_coordinator,
)

SECRET = b"s" * 32


def met(head_secret: bytes = SECRET, node_secret: bytes = SECRET) -> tuple[Link | None, Link | str]:
    """Both ends after a meeting: the head's (None: a stranger) and the node's, or why it is refused."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        knock = CoordinatorHandshake(door.accept()[0], head_secret)
    with ThreadPoolExecutor(1) as pool:
        node = pool.submit(authenticate_to_coordinator, near, node_secret)
        link = None
        while not knock.closed and (link := knock.try_complete()) is None:
            time.sleep(0.001)
        refusal = node.exception()
        return link, str(refusal) if refusal else node.result()


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    head, node = met()
    assert isinstance(head, Link) and isinstance(node, Link)
    with closing(socket.socket()):
        yield head, node
    head.end("test")
    node.end("test")


def heard(link: Link, count: int = 1, seconds: float = 2.0) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and not link.ended and time.monotonic() < deadline:
        select.select([link], [], [], 0.1)
        found += link.receive()
    return found


def recorded(link: Link, message: Message) -> bytes:
    """The bytes that `link` would send."""
    sent: list[bytes] = []
    original = link._socket

    class Tap:
        def send(self, data: memoryview) -> int:
            sent.append(bytes(data))
            return len(data)

    link._socket = Tap()  # type: ignore[assignment]
    link.send(message)
    link._socket = original
    return b"".join(sent)


def test_messages_arrive_in_order_in_both_directions(pair: tuple[Link, Link]) -> None:
    head, node = pair
    for code in range(300):
        head.send(RunEndNotice(code))
    node.send(StopSignalNotice(15))
    assert heard(node, 300) == [RunEndNotice(code) for code in range(300)]
    assert heard(head) == [StopSignalNotice(15)]


def test_a_long_message_arrives_whole(pair: tuple[Link, Link]) -> None:
    head, node = pair
    words = "x" * (channel.MAX_MESSAGE_BYTES // 2)
    sender = threading.Thread(target=node.send, args=(StartReply(1, words),))
    sender.start()
    assert heard(head, seconds=10.0) == [StartReply(1, words)]
    sender.join()


@pytest.mark.parametrize(("head", "node"), [(SECRET, b"t" * 32), (b"", SECRET)])
def test_a_wrong_secret_opens_no_door_on_either_side(head: bytes, node: bytes) -> None:
    link, answer = met(head, node)
    assert link is None
    assert isinstance(answer, str) and "secret" in answer


@pytest.mark.parametrize(
    ("greets", "told"),
    [
        (
            channel.MAGIC + bytes(32) + bytes(channel.MAC_BYTES),
            "secret",
        ),  # as an agent does, but without the secret's proof
        (b"HTTP/1.1 400 Bad Request\r\nServer: something\r\nConnection: close\r\n\r\n", "program"),
    ],
    ids=["false head", "another program"],
)
def test_a_false_head_is_not_believed_and_a_program_of_another_kind_told_apart(greets: bytes, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        far = door.accept()[0]
    with closing(far):
        far.sendall(greets)
        with pytest.raises(ConnectionRefusedError, match=told):
            authenticate_to_coordinator(near, SECRET)
    assert near.fileno() < 0


def test_a_stranger_who_says_nothing_is_shown_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as door, closing(socket.create_connection(door.getsockname())):
        knock = CoordinatorHandshake(door.accept()[0], SECRET)
        assert knock.try_complete() is None and not knock.closed
        time.sleep(0.3)
        assert knock.try_complete() is None and knock.closed


@pytest.mark.parametrize("place", ["length", "mac", "payload"])
def test_a_changed_byte_ends_the_connection_and_nothing_of_it_is_believed(pair: tuple[Link, Link], place: str) -> None:
    head, node = pair
    frame = bytearray(recorded(head, StopOrder(3.0)))
    frame[{"length": 3, "mac": channel.LENGTH_FORMAT.size, "payload": -2}[place]] ^= 1
    head._socket.send(bytes(frame) + bytes(8))
    assert heard(node, seconds=0.5) == []
    assert "not signed" in node.ended


def swapped(head: Link) -> bytes:
    first, second = recorded(head, CoordinatorHeartbeat()), recorded(head, RunEndNotice(0))
    return second + first


def of_another_connection(_: Link) -> bytes:
    head, node = met()
    assert isinstance(head, Link) and isinstance(node, Link)
    data = recorded(head, RunEndNotice(0))
    head.end("test")
    node.end("test")
    return data


def of_another_version(head: Link) -> bytes:
    payload = b'{"type": "Unheard"}'
    return channel.LENGTH_FORMAT.pack(len(payload)) + head._mac(b"coordinator", 0, payload) + payload


TOO_LONG = channel.LENGTH_FORMAT.pack(channel.MAX_MESSAGE_BYTES + 1) + bytes(channel.MAC_BYTES)
# name -> (the bytes that the head sends, what the node believes of them, a part of the reason for which it ends)
ATTACKS: dict[str, tuple[Callable[[Link], bytes], list[Message], str]] = {
    "repeated": (lambda head: 2 * recorded(head, StopSignalNotice(15)), [StopSignalNotice(15)], "not signed"),
    "in another order": (swapped, [], "not signed"),
    "of another connection": (of_another_connection, [], "not signed"),
    "too long": (lambda _: TOO_LONG, [], "too long"),
    "of another version": (of_another_version, [], "version"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_the_head_did_not_say_once_and_in_this_order_is_not_believed(pair: tuple[Link, Link], name: str) -> None:
    head, node = pair
    data, believed, reason = ATTACKS[name]
    head._socket.send(data(head))
    assert heard(node, 2) == believed and reason in node.ended


def test_a_message_thrown_back_at_its_sender_is_not_believed(pair: tuple[Link, Link]) -> None:
    head, node = pair
    node._socket.send(recorded(head, RunEndNotice(0)))
    assert heard(head) == [] and "not signed" in head.ended


def test_the_end_of_the_other_side_is_seen(pair: tuple[Link, Link]) -> None:
    head, node = pair
    head.end("over")
    heard(node)
    assert "closed" in node.ended
    node.send(CoordinatorHeartbeat())  # no error: `ended` has the reason


def test_a_side_that_reads_nothing_is_taken_for_lost_in_words_that_the_score_of_faults_knows(
    pair: tuple[Link, Link],
) -> None:
    _, node = pair
    node.send_seconds = 0.2
    began = time.monotonic()
    while not node.ended:
        node.send(StartReply(1, "x" * (1 << 20)))
    assert time.monotonic() - began < 5
    line = f"node 1 (n3) has lost node 0 (n2): {node.ended}. It has stopped its workers"
    assert said_by_paceline([(1.0, line)], 1, None).named == (0,)
