"""The run folder of a node that does not see the one of node 0. Both have the same path.

Node 0 stores the run. The agent of the node opens links to the port of node 0's agent, which serves them in threads.
Large files therefore do not delay the messages of the first link.

    rank -> agent     "send" a shard that it has written. The answer comes when node 0 has it on disk. Only then does
                      the rank vote for the checkpoint, so a published checkpoint is complete on node 0
    agent -> node 0   the shard, after the growth of all logs and events, which follow it every second
    node 0 -> agent   before the workers start: the settings, and the events of the ranks of this node
                      at a resume: the files of the checkpoint that this node lacks ("fetch")
                      on one node, in the background: a copy of each published checkpoint

Every message is authenticated, and every file has a SHA-256. A file gets its name when all of it has arrived. A sender
waits while the buffers of its connection are full, so it holds only one part in memory.
"""

import errno
import hashlib
import math
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from paceline.errors import PacelineError, UsageError
from paceline.launch.agent import channel
from paceline.launch.agent.channel import FilePart, FileReply, FileRequest
from paceline.protocol.control import TransferReply, TransferRequest, peer_pid, receive, send, wait_readable
from paceline.protocol.job import NodePlan, NodeRanks
from paceline.runs import writing
from paceline.runs.console import print_to_stderr
from paceline.runs.folder import CHECKPOINTS, CONFIG, attempt_number, check_usable_as_run_dir
from paceline.runs.owners import open_file
from paceline.runs.reading import list_folders, list_names, read_file

PART_BYTES = 256 << 10
SEND_SECONDS = 60.0  # for one part: at least 50 kbit/s
SILENCE_SECONDS = 300.0  # without an answer: node 0 may sync a large file
SYNC_SECONDS = 1.0  # between two looks for new lines of logs and events
TRIES = 3  # to send or fetch a file, each over a new connection
MANIFEST, MAX_MANIFEST_BYTES = "manifest.json", 1 << 24
PROGRESS_SECONDS = 1.0  # between two messages to a rank that waits

T = TypeVar("T")

_SENT = re.compile(
    r"(events|machine)-\d+\.jsonl|attempt-\d+/[\w-][\w.-]*|checkpoints/\.tmp-[\d-]+/shard-\d+-of-\d+\.safetensors"
)
_FETCHED = re.compile(
    r"config\.toml|submit-\d+/config\.toml|events-\d+\.jsonl|machine-\d+\.jsonl|\.probe-\d+-[0-9a-f]+"
    r"|checkpoints/step-\d+/(manifest\.json|shard-\d+-of-\d+\.safetensors)"
)
_CHECKPOINT = re.compile(r"step-\d{8,15}")


class _File(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    files: tuple[_File, ...]


class _Envelope(msgspec.Struct, frozen=True):
    manifest: _Manifest


# ---- a connection for files ----


class FileLink:
    """A link whose methods wait. They raise ConnectionError when it has ended."""

    def __init__(self, link: channel.Link, received: Sequence[channel.Message] = ()) -> None:
        self._link, self._received = link, deque(received)
        link.send_seconds, link.silence_seconds = SEND_SECONDS, SILENCE_SECONDS

    def send(self, message: channel.Message) -> None:
        self._link.send(message)
        if self._link.ended:
            raise ConnectionError(errno.ECONNRESET, self._link.ended)

    def receive(self) -> channel.Message:
        while not self._received:
            if self._link.ended:
                raise ConnectionError(errno.ECONNRESET, self._link.ended)
            wait_readable([self._link], 1.0)
            self._received.extend(self._link.receive())
        return self._received.popleft()

    def close(self) -> None:
        self._link.end("the transfer is over")

    def store(self, part: FilePart) -> None:
        """Send a part that a file has grown by. Raises OSError if it cannot be stored."""
        self.send(part)
        self.check_stored()

    def check_stored(self) -> None:
        reply = self.receive()
        if not isinstance(reply, FileReply):
            raise ConnectionError(errno.EPROTO, f"{type(reply).__name__} instead of a reply")
        if reply.failure:
            raise OSError(reply.errno, reply.failure)

    def send_file(self, path: Path, name: str, on_part: Callable[[], object]) -> tuple[int, int]:
        """Send the present content of a file, as `name`. Returns its inode and the number of bytes."""
        with open_file(path, must_be_ours=True) as file:
            digest, rest, inode = hashlib.sha256(), file.status.st_size, file.status.st_ino
            while True:
                data = os.read(file.descriptor, min(PART_BYTES, rest))
                rest -= len(data)
                digest.update(data)
                is_last = not rest or not data
                self.send(FilePart(name, data, digest.hexdigest() if is_last else ""))
                if is_last:
                    return inode, file.status.st_size - rest
                on_part()

    def receive_file(self, first: channel.Message | None = None) -> Iterator[bytes]:
        """The parts of a file. Raises OSError if it cannot be sent, or if it was damaged on its way."""
        digest = hashlib.sha256()
        while True:
            match message := first or self.receive():
                case FilePart(_, data, sha256):
                    digest.update(data)
                    yield data
                    if sha256 and sha256 != digest.hexdigest():
                        raise OSError(errno.EIO, "the file was damaged on its way")
                    if sha256:
                        return
                case FileReply(failure, number):
                    raise OSError(number, failure)
                case _:
                    raise ConnectionError(errno.EPROTO, f"{type(message).__name__} instead of a part of a file")
            first = None


# ---- node 0 ----


class FileServer:
    """Stores the files of nodes with a separate run folder, and sends them those that they lack."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.active_seconds = 0.0  # the time of the last message

    def serve(self, link: channel.Link, messages: Sequence[channel.Message]) -> None:
        """Serve a link in a thread, until it ends."""
        threading.Thread(
            target=self._serve, args=(FileLink(link, messages),), daemon=True, name="paceline-files"
        ).start()

    def _serve(self, link: FileLink) -> None:
        with suppress(ConnectionError):
            while True:
                message = link.receive()
                self._note_activity()
                try:
                    self._answer(link, message)
                except ConnectionError:
                    raise
                except (OSError, PacelineError) as error:
                    number = error.errno if isinstance(error, OSError) else None
                    link.send(FileReply(f"node 0 ({os.uname().nodename}): {_reason(error)}", number or errno.EREMOTEIO))
        link.close()

    def _answer(self, link: FileLink, message: channel.Message) -> None:
        match message:
            case FilePart(name, data, _, appends_at) if _SENT.fullmatch(name):
                if appends_at >= 0:
                    _append(self._run_dir / name, data, appends_at)
                else:
                    parts = link.receive_file(message)
                    try:
                        writing.replace_file(self._run_dir / name, _counted(parts, self._note_activity), sync=True)
                    except OSError:
                        for _ in parts:  # the node sends all parts before it reads the answer
                            pass
                        raise
                link.send(FileReply())
            case FileRequest(name) if _FETCHED.fullmatch(name):
                link.send_file(self._run_dir / name, name, self._note_activity)
            case channel.CheckpointListRequest():
                link.send(channel.CheckpointList(_checkpoint_names(self._run_dir)))
            case _:
                link.send(FileReply(f"{type(message).__name__} is not possible", errno.EINVAL))

    def _note_activity(self) -> None:
        self.active_seconds = time.monotonic()


def _append(path: Path, data: bytes, offset: int) -> None:
    descriptor = writing.open_or_create(path)
    try:
        if os.fstat(descriptor).st_size < offset:
            raise OSError(errno.EINVAL, "an earlier part of the file is missing")
        if os.pwrite(descriptor, data, offset) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def _checkpoint_names(run_dir: Path) -> tuple[str, ...]:
    """The newest one first."""
    return tuple(name for name in reversed(list_folders(run_dir / CHECKPOINTS)) if _CHECKPOINT.fullmatch(name))


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


# ---- a node with a separate run folder ----


class FileClient:
    """Sends requests to the `FileServer`, over a new connection after each failure."""

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._link: FileLink | None = None
        self._lock = threading.Lock()

    def run(self, action: Callable[[FileLink], T]) -> T:
        """The result of `action`, which is repeated if the connection breaks or a message was damaged on its way."""
        with self._lock:
            for number in range(1, TRIES + 1):
                try:
                    link = self._link = self._link or self._connect()
                    return action(link)
                except (ConnectionError, TimeoutError):
                    self.close()
                    if number == TRIES:
                        raise
                except BaseException:  # unread parts may follow
                    self.close()
                    raise
                time.sleep(number)
            raise AssertionError

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None

    def _connect(self) -> FileLink:
        address = self._plan.master_addr, self._plan.node0_ports[0]
        connection = socket.create_connection(address, timeout=channel.HANDSHAKE_SECONDS)
        answer = channel.authenticate_to_coordinator(connection, bytes.fromhex(self._plan.secret))
        if isinstance(answer, str):
            raise ConnectionError(errno.ECONNREFUSED, answer)
        return FileLink(answer)

    def upload(self, path: Path, name: str, on_part: Callable[[], object]) -> tuple[int, int]:
        def action(link: FileLink) -> tuple[int, int]:
            sent = link.send_file(path, name, on_part)
            link.check_stored()
            return sent

        return self.run(action)

    def download(self, name: str, path: Path, on_part: Callable[[], object] = lambda: None) -> None:
        def action(link: FileLink) -> None:
            link.send(FileRequest(name))
            writing.replace_file(path, _counted(link.receive_file(), on_part), sync=True)

        self.run(action)

    def list_checkpoints(self) -> tuple[str, ...]:
        def action(link: FileLink) -> tuple[str, ...]:
            link.send(channel.CheckpointListRequest())
            answer = link.receive()
            return answer.names if isinstance(answer, channel.CheckpointList) else ()

        return self.run(action)


class SeparateFolder:
    """The run folder of this node, and the transfers between it and that of node 0.

    `transfers` is the name of the socket on which the ranks of this node request transfers.
    """

    def __init__(self, plan: NodePlan, attempt_dir: Path) -> None:
        self._plan, self._run_dir, self._attempt_dir = plan, attempt_dir.parent, attempt_dir
        self._checkpoints = self._run_dir / CHECKPOINTS
        self._sender, self._fetcher = FileClient(plan), FileClient(plan)
        self._sync_lock, self._fetch_lock = threading.Lock(), threading.Lock()
        self._sent: dict[str, tuple[int, int]] = {}  # name of a log or of events -> its inode, and the bytes at node 0
        self._logs: list[str] = []  # of this node, in the run folder
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.keeps_copy = self._warned = False
        self.transfers = f"paceline-files-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(b"\0" + self.transfers.encode())
        self._listener.listen(256)
        self._listener.settimeout(SYNC_SECONDS)

    @classmethod
    def find(cls, plan: NodePlan, attempt_dir: Path) -> Self | None:
        """The folder of this node, which is created; None if node 0 sees the same folder."""
        run_dir = attempt_dir.parent
        check_usable_as_run_dir(run_dir)
        writing.make_folder(run_dir, exist_ok=True)
        probe = run_dir / f".probe-{plan.node}-{secrets.token_hex(8)}"
        writing.replace_file(probe, b"probe", sync=True)
        try:
            FileClient(plan).download(probe.name, probe)
        except FileNotFoundError:
            newest = max((attempt_number(Path(name)) for name in list_names(run_dir)), default=0)
            if newest >= attempt_number(attempt_dir):
                raise UsageError(code="run-dir-of-other-run", run_dir=run_dir, attempt=f"attempt-{newest}") from None
            return cls(plan, attempt_dir)
        finally:
            writing.remove(probe)
        return None

    def begin(self, ranks: NodeRanks, on_part: Callable[[], object]) -> None:
        """Prepare a generation: get the settings and the events of its ranks from node 0, and start the threads."""
        for folder in (self._attempt_dir, self._checkpoints):
            writing.make_folder(folder, exist_ok=True)
        events = [f"events-{ranks.first + rank}.jsonl" for rank in range(self._plan.nproc)]
        with self._sync_lock:
            self.sync()
            self._logs = [*events, f"machine-{self._plan.node}.jsonl"]
            self._sent = {name: sent for name, sent in self._sent.items() if "/" in name or name in self._logs}
            submitted = Path(self._plan.submit_dir)
            if submitted.name:
                writing.make_folder(self._run_dir / submitted.name, exist_ok=True)
                self._replace(f"{submitted.name}/{CONFIG}", on_part)
            self._replace(CONFIG, on_part)
            for name in self._logs:
                if name not in self._sent:
                    self._replace(name, on_part)
                    with suppress(FileNotFoundError):
                        status = (self._run_dir / name).stat()
                        self._sent[name] = status.st_ino, status.st_size
        with self._fetch_lock:
            self._remove_partial(math.inf)
        if not self._threads:
            self.keeps_copy = ranks.group_rank == 1
            targets = [self._serve_ranks, self._copy_checkpoints] if self.keeps_copy else [self._serve_ranks]
            self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
            for thread in self._threads:
                thread.start()

    def finish(self, *, copies: bool) -> None:
        """Send the last lines of all files. With `copies`, also complete the copy of the last checkpoint."""
        self._stop.set()
        for thread in self._threads if copies else ():
            thread.join()
        self._sync_or_warn()
        self._listener.close()

    # ---- logs and events: to node 0 ----

    def _sync_or_warn(self) -> None:
        try:
            with self._sync_lock:
                self.sync()
        except (OSError, PacelineError) as error:
            if not self._warned:
                print_to_stderr(f"warning: logs and events of this node do not reach node 0: {_reason(error)}")
            self._warned = True

    def sync(self) -> None:
        attempt = self._attempt_dir.name
        for name in (*self._logs, *(f"{attempt}/{name}" for name in list_names(self._attempt_dir))):
            if _SENT.fullmatch(name):
                with suppress(FileNotFoundError):
                    self._send_growth(name)

    def _send_growth(self, name: str) -> None:
        path = self._run_dir / name
        status, (inode, offset) = path.stat(), self._sent.get(name, (0, 0))
        if status.st_ino != inode or status.st_size < offset:
            self._sent[name] = self._sender.upload(path, name, lambda: None)
            return
        with open_file(path, must_be_ours=True) as file:
            while data := os.pread(file.descriptor, PART_BYTES, offset):
                part = FilePart(name, data, appends_at=offset)
                self._sent.pop(name, None)  # after a failure the next try sends the whole file
                self._sender.run(lambda link, part=part: link.store(part))
                offset += len(data)
                self._sent[name] = inode, offset

    def _replace(self, name: str, on_part: Callable[[], object]) -> None:
        """Replace a file by that of node 0. If node 0 has none, remove it."""
        try:
            self._fetcher.download(name, self._run_dir / name, on_part)
        except FileNotFoundError:
            with suppress(FileNotFoundError):
                writing.remove(self._run_dir / name)

    # ---- requests of ranks ----

    def _serve_ranks(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._sync_or_warn()
                continue
            except OSError:
                return
            with connection, suppress(OSError):  # the rank has ended
                if peer_pid(connection):
                    self._serve_rank(connection)

    def _serve_rank(self, connection: socket.socket) -> None:
        request, _ = receive(connection)
        if not isinstance(request, TransferRequest):
            return
        told_seconds = time.monotonic()

        def on_part() -> None:
            nonlocal told_seconds
            if time.monotonic() > told_seconds + PROGRESS_SECONDS:
                send(connection, TransferReply())
                told_seconds = time.monotonic()

        failure = ""
        try:
            self._transfer(request, on_part)
        except (OSError, PacelineError, ValueError) as error:
            failure = f"{os.uname().nodename}: {_reason(error)}"
        send(connection, TransferReply(failure))

    def _transfer(self, request: TransferRequest, on_part: Callable[[], object]) -> None:
        path = Path(request.path)
        if request.kind == "fetch":
            self._fetch_checkpoint(path.name, on_part)
            return
        with self._sync_lock:
            self.sync()  # the events on node 0 must contain every step that the checkpoint contains
        self._sender.upload(path, str(path.relative_to(self._run_dir)), on_part)
        if not self.keeps_copy:
            writing.remove(path)
            self._remove_partial(_partial_step(path.parent.name) - 1)

    # ---- checkpoints: from node 0 ----

    def _copy_checkpoints(self) -> None:
        tried, reported = set[str](), ""
        while True:
            is_last, name = self._stop.is_set(), ""
            try:
                for name in self._fetcher.list_checkpoints():
                    if (name not in tried or is_last) and not (self._checkpoints / name / MANIFEST).exists():
                        tried.add(name)
                        self._fetch_checkpoint(name, lambda: None)
            except FileNotFoundError:  # node 0 has deleted it meanwhile
                pass
            except (OSError, PacelineError) as error:
                text = f"warning: this node has no copy of {name or 'new checkpoints'}: {_reason(error)}"
                if text != reported:
                    print_to_stderr(text)
                reported = text
                with self._fetch_lock:
                    self._remove_partial(_step(name) if name else -1)
            if is_last:
                return
            self._stop.wait(SYNC_SECONDS)

    def _fetch_checkpoint(self, name: str, on_part: Callable[[], object]) -> None:
        """Get the files of a checkpoint that this node lacks. The checkpoint appears here when it is complete."""
        folder, partial = self._checkpoints / name, self._checkpoints / f".tmp-copy-{name}"
        if not _CHECKPOINT.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a checkpoint")
        with self._fetch_lock:
            writing.make_folder(partial, exist_ok=True)
            manifest = partial / MANIFEST
            self._fetcher.download(f"{CHECKPOINTS}/{name}/{MANIFEST}", manifest)
            data = read_file(manifest, limit_bytes=MAX_MANIFEST_BYTES, ours=True)
            files = msgspec.json.decode(data, type=_Envelope).manifest.files
            for file in files:
                target = partial / Path(file.name).name
                own = self._checkpoints.glob(f".tmp-{_step(name)}-*/{target.name}")  # sent to node 0 by a rank
                held = next((path for path in (folder / target.name, *own) if _is_intact(path, file)), None)
                if held is not None:
                    writing.rename(held, target)
                    continue
                self._fetcher.download(f"{CHECKPOINTS}/{name}/{target.name}", target, on_part)
                if not _is_intact(target, file):
                    raise OSError(errno.EIO, f"{target.name} is damaged on node 0")
            if folder.exists():
                writing.remove(folder)
            writing.sync_folder(partial)
            writing.rename(partial, folder)
            writing.sync_folder(self._checkpoints)
            kept = self._fetcher.list_checkpoints()
            for old in _checkpoint_names(self._run_dir):
                if old not in kept:
                    writing.remove(self._checkpoints / old)
            self._remove_partial(_step(name))

    def _remove_partial(self, step: float) -> None:
        """Remove shards of checkpoints up to `step`, which are published or have failed, and incomplete copies."""
        for name in list_names(self._checkpoints):
            if 0 <= _partial_step(name) <= step:
                writing.remove(self._checkpoints / name)


def _counted(parts: Iterator[bytes], on_part: Callable[[], object]) -> Iterator[bytes]:
    for part in parts:
        on_part()
        yield part


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _partial_step(name: str) -> int:
    """The step of an incomplete checkpoint; -1 for other names."""
    match = re.fullmatch(r"\.tmp-(?:copy-step-)?(\d+)(?:-[\d-]+)?", name)
    return int(match[1]) if match else -1


def _is_intact(path: Path, expected: _File) -> bool:
    with suppress(FileNotFoundError), open_file(path, must_be_ours=True) as file:
        if file.status.st_size == expected.bytes:
            with os.fdopen(os.dup(file.descriptor), "rb") as content:
                return hashlib.file_digest(content, "sha256").hexdigest() == expected.sha256
    return False
