"""Files between a node with a separate run folder and node 0: complete or not at all, whatever happens on the way."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.checkpoint.checkpoint_harness import header, manifest_of

from paceline.errors import UsageError
from paceline.launch.agent import channel, files
from paceline.launch.agent.files import BlockingLink, FileClient, RunFolderServer, SeparateRunFolder
from paceline.launch.agent.follower import COORDINATOR_STOP_SECONDS, Follower
from paceline.launch.agent.workers import InheritedResources
from paceline.protocol.control import StopSignals, TransferRequest, WorkerSpec, request_transfer, send, signal_wakeup
from paceline.protocol.job import NodePlan, NodeRanks
from paceline.runs import writing
from paceline.runs.checkpoint_format import encode_manifest

SHARD = "checkpoints/.tmp-5-1-0/shard-1-of-2.safetensors"
CONTENT = header(3 * files.PART_BYTES + 7) + os.urandom(3 * files.PART_BYTES + 7)


class Node0:
    """The files and the port of node 0, and a node that is connected to it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "node0"
        (self.run_dir / "checkpoints" / ".tmp-5-1-0").mkdir(parents=True)
        for made in (self.run_dir, *self.run_dir.rglob("*")):
            made.chmod(0o700)
        secret, self._over = secrets.token_bytes(32), threading.Event()
        self._listener, self._server = channel.Listener([0], secret), RunFolderServer(self.run_dir / "attempt-1")
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

    def _connect(self) -> BlockingLink:
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
    node0.client.upload(shard, SHARD)
    assert (node0.run_dir / SHARD).read_bytes() == CONTENT
    assert node0.client.connections == 2


def test_a_file_with_a_wrong_hash_is_not_stored(node0: Node0) -> None:
    def send(link: BlockingLink) -> None:
        link.send(channel.FilePart(SHARD, b"ab"))
        link.request(channel.FilePart(SHARD, b"c", hashlib.sha256(b"abd").hexdigest()), channel.FileAck)

    with pytest.raises(OSError, match="damaged"):
        node0.client.run_with_retries(send)
    assert node0.stored() == []


@pytest.mark.parametrize(
    "name",
    [
        "summary.json",
        "../run",
        "{folder}/x",
        "checkpoints/step-00000005/manifest.json",
        "attempt-1/../x",
        "attempt-2/rank-1.log",
    ],
)
def test_a_node_can_store_only_the_files_of_its_ranks(node0: Node0, shard: Path, name: str) -> None:
    with pytest.raises(OSError, match="not possible"):
        node0.client.upload(shard, name.format(folder=node0.run_dir))
    assert node0.stored() == []


def test_events_are_on_the_disk_of_node_0_before_a_shard_counts(
    node0: Node0, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = set[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (synced.add(os.fstat(number).st_ino), sync(number)))
    part = channel.FilePart("events-1.jsonl", b"{}", appends_at=0)
    node0.client.run_with_retries(lambda link: link.request(part, channel.FileAck))
    node0.client.upload(shard, SHARD)
    assert (node0.run_dir / "events-1.jsonl").stat().st_ino in synced


def test_a_shard_of_an_earlier_generation_is_not_stored(node0: Node0, shard: Path) -> None:
    with pytest.raises(FileNotFoundError):  # the newer one has removed the folder
        node0.client.upload(shard, SHARD.replace("-5-", "-4-"))


def test_node_0_may_take_its_time_after_a_long_upload(
    node0: Node0, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aged = iter([2 * files.SILENCE_SECONDS] * 4)  # the parts take longer than the longest silence

    def age() -> None:
        assert node0.client._link is not None
        node0.client._link._link.heard_seconds -= next(aged, 0.0)

    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (time.sleep(1.5 * files.TICK_SECONDS), sync(number)))
    node0.client.upload(shard, SHARD, age)
    assert node0.client.connections == 1


@pytest.fixture
def folder(node0: Node0, tmp_path: Path) -> Iterator[SeparateRunFolder]:
    attempt = tmp_path / "here" / "attempt-1"
    (node0.run_dir / "attempt-1").mkdir(mode=0o700)
    write(node0.run_dir / "config.toml", b"")
    for made in (attempt.parent, attempt, attempt.parent / "checkpoints"):
        made.mkdir(mode=0o700)
    separate = SeparateRunFolder(node0.plan, attempt)
    yield separate
    separate.finish(lambda: False)
    for thread in separate._threads:
        thread.join(10)
    for client in (separate._sender, separate._shard_sender, separate._fetcher):
        client.close()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o600)


def write_checkpoint(run_dir: Path, content: bytes = CONTENT, step: int = 5) -> Path:
    made, name = run_dir / "checkpoints" / f"step-{step:08d}", "shard-0-of-1.safetensors"
    write(made / name, content)
    manifest = manifest_of(step, [(name, len(content), hashlib.sha256(content).hexdigest())])
    write(made / "manifest.json", encode_manifest(manifest))
    return made


def copy_once(folder: SeparateRunFolder) -> None:
    folder._stop.set()
    folder._copy_checkpoints()


class Stuck:
    """Node 0 sends no shard, and stores none, until the test is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
        self.reached, self._free, replace = threading.Event(), threading.Event(), writing.replace_file

        def wait(path: Path, data: bytes | Iterator[bytes], *, sync: bool = False) -> None:
            if path.name.startswith("shard-") and path.is_relative_to(run_dir):
                self.reached.set()
                self._free.wait(60)
            replace(path, data, sync=sync)

        monkeypatch.setattr(writing, "replace_file", wait)
        send = BlockingLink.send_file

        def send_file(link: BlockingLink, path: Path, name: str) -> tuple[int, int]:
            if "/step-" in name and "/shard-" in name:
                self.reached.set()
                self._free.wait(60)
            return send(link, path, name)

        monkeypatch.setattr(BlockingLink, "send_file", send_file)

    def end(self) -> None:
        self._free.set()


@pytest.fixture
def worker(folder: SeparateRunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        WorkerSpec,
        "_here",
        WorkerSpec(os.getpid(), transfers=folder.transfers, attempt_dir=str(folder._checkpoints.parent / "attempt-1")),
    )
    threading.Thread(target=folder._serve_ranks, daemon=True).start()


def test_a_new_generation_does_not_wait_for_the_copy_of_a_checkpoint(
    node0: Node0, folder: SeparateRunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(node0.run_dir)
    stuck, begun = Stuck(monkeypatch, node0.run_dir), threading.Event()
    copying = threading.Thread(target=folder._copy_checkpoints, daemon=True)
    copying.start()
    assert stuck.reached.wait(30)
    folder._threads, folder.keeps_copy = [copying], True
    beginning = threading.Thread(
        target=lambda: (
            folder.begin_generation(NodeRanks(first=1, world_size=3, group_rank=1), lambda: None),
            begun.set(),
        ),
        daemon=True,
    )
    beginning.start()
    assert begun.wait(30)
    stuck.end()
    folder._stop.set()
    copying.join()
    assert (folder._checkpoints / "step-00000005" / "shard-0-of-1.safetensors").read_bytes() == CONTENT


@pytest.mark.usefixtures("worker")
def test_a_rank_that_waits_for_the_transfer_of_another_one_makes_progress(
    node0: Node0, folder: SeparateRunFolder
) -> None:
    write_checkpoint(node0.run_dir)
    progress, failures = threading.Event(), list[str]()
    path = folder._checkpoints / "step-00000005"
    fetching = threading.Thread(
        target=lambda: failures.append(request_transfer("fetch", path, progress.set)), daemon=True
    )
    with folder._fetcher.lock:
        fetching.start()
        assert progress.wait(30)
    fetching.join()
    assert failures == [""] and names_in(path) == ["manifest.json", "shard-0-of-1.safetensors"]


@pytest.mark.usefixtures("worker")
def test_a_rank_may_know_the_folder_by_another_path(node0: Node0, folder: SeparateRunFolder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder._run_dir)
    write(folder._run_dir / SHARD, CONTENT)
    assert request_transfer("send", tmp_path / "link" / SHARD) == ""
    assert (node0.run_dir / SHARD).read_bytes() == CONTENT


@pytest.mark.usefixtures("worker")
def test_the_transfer_of_a_rank_that_has_ended_ends(
    node0: Node0, folder: SeparateRunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(monkeypatch, node0.run_dir)
    connections, connect = list[BlockingLink](), FileClient._connect
    monkeypatch.setattr(FileClient, "_connect", lambda client: connections.append(connect(client)) or connections[-1])
    write(folder._checkpoints / ".tmp-5-1-0" / "shard-1-of-2.safetensors", CONTENT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect(b"\0" + folder.transfers.encode())
        send(rank, TransferRequest("send", str(folder._checkpoints / ".tmp-5-1-0" / "shard-1-of-2.safetensors")))
        assert stuck.reached.wait(30)
    is_over = folder._shard_sender.lock.acquire(timeout=30)
    stuck.end()
    assert is_over and len(connections) == 1  # no second try


def test_the_copy_of_a_checkpoint_of_an_earlier_run_is_replaced(node0: Node0, folder: SeparateRunFolder) -> None:
    new, old = write_checkpoint(node0.run_dir), write_checkpoint(folder._run_dir, header(7) + b"earlier")
    copy_once(folder)
    for name in ("manifest.json", "shard-0-of-1.safetensors"):
        assert (old / name).read_bytes() == (new / name).read_bytes()


def test_an_intact_checkpoint_stays_in_place_while_it_is_compared(
    node0: Node0, folder: SeparateRunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(node0.run_dir)
    held = write_checkpoint(folder._run_dir)
    monkeypatch.setattr(writing, "rename", None)
    folder._fetch_checkpoint(held.name, lambda: None)
    assert names_in(held) == ["manifest.json", "shard-0-of-1.safetensors"]
    assert names_in(folder._checkpoints) == [held.name]


def test_the_node_that_becomes_node_1_keeps_the_copy(node0: Node0, folder: SeparateRunFolder) -> None:
    write_checkpoint(node0.run_dir)
    for group_rank in (2, 1):
        folder.begin_generation(NodeRanks(first=group_rank, world_size=3, group_rank=group_rank), lambda: None)
    folder.finish(lambda: time.sleep(0.1) is None)
    assert names_in(folder._checkpoints) == ["step-00000005"] and folder.keeps_copy


def test_a_damaged_manifest_ends_no_copying(
    node0: Node0, folder: SeparateRunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    write(write_checkpoint(node0.run_dir) / "manifest.json", b"{")
    copy_once(folder)
    assert "step-00000005" in capfd.readouterr().err
    assert names_in(folder._checkpoints) == []


def test_copies_stay_if_node_0_cannot_list_its_checkpoints(node0: Node0, folder: SeparateRunFolder) -> None:
    held = write_checkpoint(folder._run_dir)
    shutil.rmtree(node0.run_dir / "checkpoints")
    (node0.run_dir / "checkpoints").symlink_to(folder._checkpoints)  # not followed
    with pytest.raises(OSError):
        node0.client.list_checkpoints()
    assert held.exists()


@pytest.mark.parametrize(
    ("grace_left", "signals", "waits"), [(math.inf, 0, True), (60.0, 1, True), (-1.0, 1, False), (60.0, 2, False)]
)
def test_the_last_copy_takes_no_longer_than_the_grace_of_a_stop(
    node0: Node0, grace_left: float, signals: int, waits: bool
) -> None:
    with signal_wakeup(()) as wakeup:
        orders = StopSignals(wakeup, lifeline=False)
        orders.signals += [signal.SIGTERM] * signals
        node = Follower(node0.plan, orders, InheritedResources(), lambda: None)
        node._deadline_seconds = time.monotonic() + grace_left + COORDINATOR_STOP_SECONDS
        with closing(node0.client._connect()) as link:
            assert node._wait_for_copies(link._link, min(signals, 1)) == waits


def test_a_host_may_join_its_run_again(node0: Node0, folder: SeparateRunFolder) -> None:
    attempt = folder._run_dir / "attempt-2"
    for _ in range(2):
        found = SeparateRunFolder.create_if_needed(node0.plan, attempt)
        assert found is not None
        found.finish(lambda: False)
    write(attempt / files.JOB_FILE, b"of a different run, or of a host that shares this folder")
    with pytest.raises(UsageError) as caught:
        SeparateRunFolder.create_if_needed(node0.plan, attempt)
    assert caught.value.code.endswith("other-run")


def test_the_log_of_a_rank_continues_on_another_node(node0: Node0, folder: SeparateRunFolder) -> None:
    for rank, of_others in ((2, "one"), (1, "two"), (2, "three")):
        with (node0.run_dir / "attempt-1" / f"rank-{rank}.log").open("a") as stored:
            stored.write(f"{of_others} ")
        folder.begin_generation(NodeRanks(first=rank, world_size=3, group_rank=2), lambda: None)
        with (folder._attempt_dir / f"rank-{rank}.log").open("a") as log:
            log.write(f"{rank} ")
        with folder._sender.lock:
            folder.sync()
    logs = [(node0.run_dir / "attempt-1" / f"rank-{rank}.log").read_text() for rank in (1, 2)]
    assert logs == ["two 1 ", "one 2 three 2 "]


def test_a_file_that_grows_is_sent_once(node0: Node0, folder: SeparateRunFolder) -> None:
    sent, send_message = list[channel.Message](), BlockingLink.send
    log, stored = (path / "attempt-1" / "trace.log" for path in (folder._run_dir, node0.run_dir))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockingLink, "send", lambda link, part: (sent.append(part), send_message(link, part)))
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
