"""Files between a node with a separate run folder and node 0: complete or not at all, whatever happens on the way."""

from __future__ import annotations

import hashlib
import os
import secrets
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.agent import channel, files
from paceline.launch.agent.files import FileClient, FileLink, FileServer
from paceline.protocol.job import NodePlan

SHARD = "checkpoints/.tmp-5-1-0/shard-1-of-2.safetensors"
CONTENT = os.urandom(3 * files.PART_BYTES + 7)


class Node0:
    """The files and the port of node 0, and a node that is connected to it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "node0"
        (self.run_dir / "checkpoints" / ".tmp-5-1-0").mkdir(parents=True)
        for made in (self.run_dir, *self.run_dir.rglob("*")):
            made.chmod(0o700)
        secret, self._over = secrets.token_bytes(32), threading.Event()
        self._listener, self._server = channel.Listener([0], secret), FileServer(self.run_dir)
        self.plan = NodePlan(argv=(), nproc=1, node0_ports=(self._listener.port,), secret=secret.hex())
        self.client = Connected(self.plan)
        self._welcoming = threading.Thread(target=self._welcome)
        self._welcoming.start()

    def stored(self) -> list[str]:
        return sorted(str(path.relative_to(self.run_dir)) for path in self.run_dir.rglob("*") if path.is_file())

    def close(self) -> None:
        self.client.close()
        self._over.set()
        self._welcoming.join()
        self._listener.close()
        for thread in [thread for thread in threading.enumerate() if thread.name == "paceline-files"]:
            thread.join(5.0)

    def _welcome(self) -> None:
        while not self._over.is_set():
            select.select(self._listener.sockets(), [], [], 0.02)
            for link, messages in self._listener.take_new_links():
                self._server.serve(link, messages)


class Connected(FileClient):
    """Damages the bytes that its first connection sends after `damaged_from`."""

    connections, damaged_from = 0, -1

    def _connect(self) -> FileLink:
        made = super()._connect()
        self.connections += 1
        if self.connections == 1 and self.damaged_from >= 0:
            made._link._socket = Damaging(made._link._socket, self.damaged_from)  # type: ignore[assignment]
        return made


class Damaging:
    def __init__(self, connection: socket.socket, start: int) -> None:
        self._connection, self._rest = connection, start

    def send(self, data: memoryview) -> int:
        self._rest -= len(data)
        middle = len(data) // 2
        damaged = data[:middle].tobytes() + bytes([data[middle] ^ 1]) + data[middle + 1 :].tobytes()
        return self._connection.send(data if self._rest > 0 else damaged)

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


@pytest.fixture
def node0(tmp_path: Path) -> Iterator[Node0]:
    made = Node0(tmp_path)
    yield made
    made.close()


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(CONTENT)
    path.chmod(0o600)
    return path


def test_a_part_that_is_damaged_on_its_way_is_detected_and_the_file_is_sent_again(node0: Node0, shard: Path) -> None:
    node0.client.damaged_from = 2 * files.PART_BYTES
    node0.client.upload(shard, SHARD, lambda: None)
    assert (node0.run_dir / SHARD).read_bytes() == CONTENT
    assert node0.client.connections == 2


def test_a_file_with_a_wrong_hash_is_not_stored(node0: Node0) -> None:
    def send(link: FileLink) -> None:
        link.send(channel.FilePart(SHARD, b"ab"))
        link.store(channel.FilePart(SHARD, b"c", hashlib.sha256(b"abd").hexdigest()))

    with pytest.raises(OSError, match="damaged"):
        node0.client.run(send)
    assert node0.stored() == []


@pytest.mark.parametrize(
    "name", ["summary.json", "../run", "{folder}/x", "checkpoints/step-00000005/manifest.json", "attempt-1/../x"]
)
def test_a_node_can_store_only_the_files_of_its_ranks(node0: Node0, shard: Path, name: str) -> None:
    with pytest.raises(OSError, match="not possible"):
        node0.client.upload(shard, name.format(folder=node0.run_dir), lambda: None)
    assert node0.stored() == []


def test_a_shard_of_an_earlier_generation_is_not_stored(node0: Node0, shard: Path) -> None:
    with pytest.raises(FileNotFoundError):  # the newer one has removed the folder
        node0.client.upload(shard, SHARD.replace("-5-", "-4-"), lambda: None)


def test_a_file_that_grows_is_sent_once(node0: Node0, tmp_path: Path) -> None:
    attempt = tmp_path / "here" / "attempt-1"
    (node0.run_dir / "attempt-1").mkdir(mode=0o700)
    attempt.mkdir(parents=True, mode=0o700)
    attempt.parent.chmod(0o700)
    folder, sent, send = files.SeparateFolder(node0.plan, attempt), list[channel.Message](), FileLink.send
    folder._sender = node0.client
    log, stored = attempt / "rank-1.log", node0.run_dir / "attempt-1" / "rank-1.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileLink, "send", lambda link, part: (sent.append(part), send(link, part)))
        for text in ("one\n", "one\ntwo\n"):
            with log.open("a") as file:
                file.write(text[len(log.read_text()) :])
            log.chmod(0o600)
            folder.sync()
            assert stored.read_text() == text
        folder.sync()
    parts = [part for part in sent if isinstance(part, channel.FilePart) and part.path.endswith(".log")]
    assert [(part.data, part.appends_at) for part in parts] == [(b"one\n", -1), (b"two\n", 4)]
    stored.write_text("")  # node 0 has lost it: the whole file is sent
    with log.open("a") as file:
        file.write("three\n")
    with pytest.raises(OSError, match="missing"):
        folder.sync()
    folder.sync()
    assert stored.read_text() == log.read_text()
    folder.finish(copies=False)
