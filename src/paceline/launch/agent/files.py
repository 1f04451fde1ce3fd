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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Self, TypeVar

from paceline.errors import PacelineError, UsageError
from paceline.launch.agent import channel
from paceline.launch.agent.channel import FileAck, FilePart, FileRequest
from paceline.protocol.control import TransferReply, TransferRequest, peer_pid, poll_readable, receive, send
from paceline.protocol.job import NodePlan, NodeRanks
from paceline.runs import writing
from paceline.runs.checkpoint_format import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    DamagedCheckpoint,
    ShardFile,
    check_file,
    decode_manifest,
    step_of,
)
from paceline.runs.console import print_to_stderr
from paceline.runs.folder import CHECKPOINTS, CONFIG, attempt_number, check_usable_as_run_dir
from paceline.runs.owners import open_file
from paceline.runs.reading import list_folders, list_names, read_file

PART_BYTES = 256 << 10
SEND_SECONDS = 60.0  # for one part: at least 50 kbit/s
SILENCE_SECONDS = 300.0  # without an answer: node 0 may sync a large file
SYNC_SECONDS = 1.0  # between two looks for new lines of logs and events
TRIES = 3  # to send or fetch a file, each over a new connection
JOB_FILE = ".job"  # in the attempt's folder: it belongs to this host and job, which the host may join again
TICK_SECONDS = 1.0  # between two messages to a rank that waits, and two looks at a wait

T = TypeVar("T")
Tick = Callable[[], object]

_SENT = re.compile(
    r"(events|machine)-\d+\.jsonl|attempt-\d+/[\w-][\w.-]*|checkpoints/\.tmp-[\d-]+/shard-\d+-of-\d+\.safetensors"
)
_FETCHED = re.compile(
    r"config\.toml|submit-\d+/config\.toml|attempt-\d+/rank-\d+\.log|events-\d+\.jsonl|machine-\d+\.jsonl|\.probe-\d+-[0-9a-f]+"
    r"|checkpoints/step-\d+/(manifest\.json|shard-\d+-of-\d+\.safetensors)"
)
_OF_RANK = re.compile(r"/rank-\d+\.log")  # with another number of nodes, a log continues on a different node


def _ignore() -> None:
    pass


# ---- a connection for files ----


class BlockingLink:
    """A link whose methods wait. They raise ConnectionError when it has ended.

    They call `tick` for each message, and every second in which they wait for one.
    """

    def __init__(self, link: channel.Link, received: Sequence[channel.Message] = ()) -> None:
        self._link, self._received = link, deque(received)
        self.tick: Tick = _ignore
        link.send_seconds, link.silence_seconds = SEND_SECONDS, SILENCE_SECONDS

    def send(self, message: channel.Message) -> None:
        self.tick()
        self._link.send(message)
        if self._link.ended:
            raise ConnectionError(errno.ECONNRESET, self._link.ended)
        self._link.heard_seconds = time.monotonic()  # the other side is not silent while it only has to read

    def receive(self) -> channel.Message:
        while not self._received:
            if self._link.ended:
                raise ConnectionError(errno.ECONNRESET, self._link.ended)
            poll_readable([self._link], TICK_SECONDS)
            self._received.extend(self._link.receive())
            self.tick()
        return self._received.popleft()

    def close(self) -> None:
        self._link.end("the transfer is over")

    def request(self, message: channel.Message, kind: type[T]) -> T:
        """The answer to a message. Raises OSError if node 0 reports a failure."""
        self.send(message)
        return self.receive_reply(kind)

    def receive_reply(self, kind: type[T]) -> T:
        reply = self.receive()
        if isinstance(reply, FileAck) and reply.failure:
            raise OSError(reply.errno, reply.failure)
        if not isinstance(reply, kind):
            raise ConnectionError(errno.EPROTO, f"{type(reply).__name__} instead of {kind.__name__}")
        return reply

    def send_file(self, path: Path, name: str) -> tuple[int, int]:
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
                case FileAck(failure, number):
                    raise OSError(number, failure)
                case _:
                    raise ConnectionError(errno.EPROTO, f"{type(message).__name__} instead of a part of a file")
            first = None


# ---- node 0 ----


class RunFolderServer:
    """Stores the files of nodes with a separate run folder, and sends them those that they lack."""

    def __init__(self, attempt_dir: Path) -> None:
        self._run_dir, self._attempt = attempt_dir.parent, attempt_dir.name
        self._unsynced: set[Path] = set()  # files that have grown

    def serve(self, link: channel.Link, messages: Sequence[channel.Message]) -> None:
        """Serve a link in a thread, until it ends."""
        served = BlockingLink(link, messages)
        threading.Thread(target=self._serve, args=(served,), daemon=True, name="paceline-files").start()

    def _serve(self, link: BlockingLink) -> None:
        with suppress(ConnectionError):
            while True:
                message = link.receive()
                try:
                    self._answer(link, message)
                except ConnectionError:
                    raise
                except (OSError, PacelineError) as error:
                    number = error.errno if isinstance(error, OSError) else None
                    link.send(FileAck(f"node 0 ({os.uname().nodename}): {_reason(error)}", number or errno.EREMOTEIO))
        link.close()

    def _answer(self, link: BlockingLink, message: channel.Message) -> None:
        match message:
            case FilePart(name, data, _, appends_at) if self._may_store(name):
                if appends_at >= 0:
                    _append(self._run_dir / name, data, appends_at)
                    self._unsynced.add(self._run_dir / name)
                else:
                    parts = link.receive_file(message)
                    try:
                        writing.replace_file(self._run_dir / name, parts, sync=True)
                    except OSError:
                        for _ in parts:  # the node sends all parts before it reads the answer
                            pass
                        raise
                    self._sync_events()
                link.send(FileAck())
            case FileRequest(name) if _FETCHED.fullmatch(name):
                link.send_file(self._run_dir / name, name)
            case channel.CheckpointListRequest():
                link.send(channel.CheckpointList(_checkpoint_names(self._run_dir)))
            case _:
                link.send(FileAck(f"{type(message).__name__} is not possible", errno.EINVAL))

    def _sync_events(self) -> None:
        """A checkpoint, of which a shard has arrived, must not be newer than the events on disk."""
        while self._unsynced:
            with suppress(KeyError, FileNotFoundError), open_file(self._unsynced.pop()) as file:
                os.fsync(file.descriptor)

    def _may_store(self, name: str) -> bool:
        is_of_other_attempt = name.startswith("attempt-") and not name.startswith(f"{self._attempt}/")
        return _SENT.fullmatch(name) is not None and not is_of_other_attempt


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
    names = list_folders(run_dir / CHECKPOINTS)
    return tuple(name for name in reversed(names) if step_of(name) is not None)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


# ---- a node with a separate run folder ----


class FileClient:
    """Sends requests to the `RunFolderServer`, over a new connection after a failure. A thread must hold its `lock`."""

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._link: BlockingLink | None = None
        self.lock = threading.Lock()

    def run_with_retries(self, action: Callable[[BlockingLink], T], tick: Tick = _ignore) -> T:
        """The result of `action`, which is repeated if the connection breaks or a message was damaged on its way."""
        for number in range(1, TRIES + 1):
            try:
                link = self._link = self._link or self._connect()
                link.tick = tick
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

    def _connect(self) -> BlockingLink:
        secret = bytes.fromhex(self._plan.secret)
        return BlockingLink(channel.connect_to_coordinator(self._plan.master_addr, self._plan.node0_ports[0], secret))

    def upload(self, path: Path, name: str, tick: Tick = _ignore) -> tuple[int, int]:
        def action(link: BlockingLink) -> tuple[int, int]:
            sent = link.send_file(path, name)
            link.receive_reply(FileAck)
            return sent

        return self.run_with_retries(action, tick)

    def download(self, name: str, path: Path, tick: Tick = _ignore) -> None:
        def action(link: BlockingLink) -> None:
            link.send(FileRequest(name))
            writing.replace_file(path, link.receive_file(), sync=True)

        self.run_with_retries(action, tick)

    def list_checkpoints(self) -> tuple[str, ...]:
        return self.run_with_retries(
            lambda link: link.request(channel.CheckpointListRequest(), channel.CheckpointList)
        ).names


class _TransferEndedError(Exception):
    """A new generation begins, or the rank that waited for the transfer has ended."""


class SeparateRunFolder:
    """The run folder of this node, and the transfers between it and that of node 0.

    `transfers` is the name of the socket on which the ranks of this node request transfers.
    """

    def __init__(self, plan: NodePlan, attempt_dir: Path) -> None:
        self._plan, self._run_dir, self._attempt_dir = plan, attempt_dir.parent, attempt_dir
        self._checkpoints = self._run_dir / CHECKPOINTS
        self._sender, self._shard_sender, self._fetcher = FileClient(plan), FileClient(plan), FileClient(plan)
        self._sent: dict[str, tuple[int, int]] = {}  # name of a log or of events -> its inode, and the bytes at node 0
        self._logs: list[str] = []  # of this node, in the run folder
        self._stop, self._pause = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self.keeps_copy = self._warned = False
        self.transfers = f"paceline-files-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(b"\0" + self.transfers.encode())
        self._listener.listen(256)
        self._listener.settimeout(SYNC_SECONDS)

    @classmethod
    def create_if_needed(cls, plan: NodePlan, attempt_dir: Path) -> Self | None:
        """The folder of this node, which is created; None if node 0 sees the same folder."""
        run_dir = attempt_dir.parent
        check_usable_as_run_dir(run_dir)
        writing.make_folder(run_dir, exist_ok=True)
        probe = run_dir / f".probe-{plan.node}-{secrets.token_hex(8)}"
        writing.replace_file(probe, b"probe", sync=True)
        try:
            with closing(FileClient(plan)) as client:
                client.download(probe.name, probe)
        except FileNotFoundError:
            attempt = attempt_number(attempt_dir)
            others = {attempt_number(Path(name)) for name in list_names(run_dir)}
            if _read_or_empty(attempt_dir / JOB_FILE) == _job_mark(plan):
                others.remove(attempt)
            if (newest := max(others, default=0)) >= attempt:
                raise UsageError(code="run-dir-of-other-run", run_dir=run_dir, attempt=f"attempt-{newest}") from None
            writing.make_folder(attempt_dir, exist_ok=True)
            writing.replace_file(attempt_dir / JOB_FILE, _job_mark(plan))
            return cls(plan, attempt_dir)
        finally:
            writing.remove(probe)
        return None

    def begin_generation(self, ranks: NodeRanks, tick: Tick) -> None:
        """Prepare a generation: get the settings and the events of its ranks from node 0, and start the threads.

        Transfers for the last generation end with an error. A copy of a checkpoint begins again.
        """
        writing.make_folder(self._checkpoints, exist_ok=True)
        self._pause.set()
        with ExitStack() as stack:
            for client in (self._sender, self._shard_sender, self._fetcher):
                stack.enter_context(_locked(client, tick))
            self._get_settings_and_logs(range(ranks.first, ranks.first + self._plan.nproc), tick)
            self._remove_partial(math.inf)
            self._pause.clear()
        targets = [] if self._threads else [self._serve_ranks, self._sync_each_second]
        if ranks.group_rank == 1 and not self.keeps_copy:  # the first one, or the node that did so before is lost
            self.keeps_copy = True
            targets.append(self._copy_checkpoints)
        for target in targets:
            self._threads.append(threading.Thread(target=target, daemon=True))
            self._threads[-1].start()

    def _get_settings_and_logs(self, ranks: Sequence[int], tick: Tick) -> None:
        self.sync(tick)
        attempt = self._attempt_dir.name
        self._logs = [f"machine-{self._plan.node}.jsonl"]
        self._logs += [name for rank in ranks for name in (f"events-{rank}.jsonl", f"{attempt}/rank-{rank}.log")]
        is_ours = {*self._logs, *self._other_files()}
        self._sent = {name: sent for name, sent in self._sent.items() if name in is_ours}
        submitted = Path(self._plan.submit_dir)
        if submitted.name:
            writing.make_folder(self._run_dir / submitted.name, exist_ok=True)
            self._replace(f"{submitted.name}/{CONFIG}", tick)
        self._replace(CONFIG, tick)
        for name in self._logs:
            if name not in self._sent:
                self._replace(name, tick)
                with suppress(FileNotFoundError):
                    status = (self._run_dir / name).stat()
                    self._sent[name] = status.st_ino, status.st_size

    def finish(self, wait: Callable[[], bool]) -> None:
        """Complete the copy of the last checkpoint, until `wait` returns False. Send the last lines of all files."""
        self._stop.set()
        while any(thread.is_alive() for thread in self._threads) and wait():
            pass
        self._pause.set()
        self._sync_or_warn()
        self._listener.close()

    # ---- logs and events: to node 0 ----

    def _sync_each_second(self) -> None:
        while not self._stop.wait(SYNC_SECONDS):
            self._sync_or_warn()

    def _sync_or_warn(self) -> None:
        try:
            with self._sender.lock:
                self.sync()
        except (OSError, PacelineError) as error:
            if not self._warned:
                print_to_stderr(f"warning: logs and events of this node do not reach node 0: {_reason(error)}")
            self._warned = True

    def sync(self, tick: Tick = _ignore) -> None:
        for name in (*self._logs, *self._other_files()):
            with suppress(FileNotFoundError):
                self._send_growth(name, tick)

    def _other_files(self) -> list[str]:
        names = [f"{self._attempt_dir.name}/{name}" for name in list_names(self._attempt_dir)]
        return [name for name in names if _SENT.fullmatch(name) and not _OF_RANK.search(name)]

    def _send_growth(self, name: str, tick: Tick) -> None:
        path = self._run_dir / name
        status, (inode, offset) = path.stat(), self._sent.get(name, (0, 0))
        if status.st_ino != inode or status.st_size < offset:
            self._sent[name] = self._sender.upload(path, name, tick)
            return
        with open_file(path, must_be_ours=True) as file:
            while data := os.pread(file.descriptor, PART_BYTES, offset):
                part = FilePart(name, data, appends_at=offset)
                self._sent.pop(name, None)  # after a failure the next try sends the whole file
                self._sender.run_with_retries(lambda link, part=part: link.request(part, FileAck), tick)
                offset += len(data)
                self._sent[name] = inode, offset

    def _replace(self, name: str, tick: Tick) -> None:
        """Replace a file by that of node 0. If node 0 has none, remove it."""
        try:
            self._fetcher.download(name, self._run_dir / name, tick)
        except FileNotFoundError:
            with suppress(FileNotFoundError):
                writing.remove(self._run_dir / name)

    # ---- requests of ranks ----

    def _serve_ranks(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(target=self._serve_rank, args=(connection,), daemon=True).start()

    def _serve_rank(self, connection: socket.socket) -> None:
        told_seconds = time.monotonic()

        def tick() -> None:
            nonlocal told_seconds
            if self._pause.is_set():
                raise _TransferEndedError("the ranks start again")
            if time.monotonic() > told_seconds + TICK_SECONDS:
                try:
                    send(connection, TransferReply())
                except OSError:
                    raise _TransferEndedError("the rank has ended") from None
                told_seconds = time.monotonic()

        with connection, suppress(OSError):  # the rank has ended
            request, _ = receive(connection) if peer_pid(connection) else (None, [])
            if not isinstance(request, TransferRequest):
                return
            failure = ""
            try:
                self._transfer(request, tick)
            except (OSError, PacelineError, ValueError, _TransferEndedError) as error:
                failure = f"{os.uname().nodename}: {_reason(error)}"
            send(connection, TransferReply(failure))

    def _transfer(self, request: TransferRequest, tick: Tick) -> None:
        path = Path(request.path).resolve()  # node 0's path may contain a link here
        if request.kind == "fetch":
            with _locked(self._fetcher, tick):
                self._fetch_checkpoint(path.name, tick)
            return
        with _locked(self._sender, tick):
            self.sync(tick)  # the events on node 0 must contain every step that the checkpoint contains
        with _locked(self._shard_sender, tick):
            self._shard_sender.upload(path, str(path.relative_to(self._run_dir)), tick)
            if not self.keeps_copy:
                writing.remove(path)
                self._remove_partial(_partial_step(path.parent.name) - 1)

    # ---- checkpoints: from node 0 ----

    def _copy_checkpoints(self) -> None:
        copied, tried, reported = set[str](), set[str](), ""

        def tick() -> None:
            if self._pause.is_set():
                raise _TransferEndedError

        while True:
            is_last, name = self._stop.is_set(), ""
            try:
                with _locked(self._fetcher, tick):
                    for name in self._fetcher.list_checkpoints():
                        if name not in copied and (name not in tried or is_last):
                            self._fetch_checkpoint(name, tick, is_size_enough=True)
                            copied.add(name)
            except _TransferEndedError:
                name = ""
            except FileNotFoundError:  # node 0 has deleted it meanwhile
                pass
            except (OSError, PacelineError, ValueError) as error:
                text = f"warning: this node has no copy of {name or 'new checkpoints'}: {_reason(error)}"
                if text != reported:
                    print_to_stderr(text)
                reported = text
                with self._fetcher.lock:
                    self._remove_partial(-1 if (step := step_of(name)) is None else step)
            tried.add(name)
            if is_last:
                return
            self._stop.wait(SYNC_SECONDS)

    def _fetch_checkpoint(self, name: str, tick: Tick, *, is_size_enough: bool = False) -> None:
        """Get the files of a checkpoint that this node lacks. The checkpoint appears here when it is complete.

        `is_size_enough`: do not hash a checkpoint that this node already has.
        """
        folder, partial = self._checkpoints / name, self._checkpoints / f".tmp-copy-{name}"
        if (step := step_of(name)) is None:
            raise ValueError(f"{name!r} is not the name of a checkpoint")
        writing.make_folder(partial, exist_ok=True)
        self._fetcher.download(f"{CHECKPOINTS}/{name}/{MANIFEST_NAME}", partial / MANIFEST_NAME, tick)
        data = read_file(partial / MANIFEST_NAME, limit_bytes=MANIFEST_LIMIT_BYTES, ours=True)
        files = decode_manifest(data).files
        hashed_tick = None if is_size_enough else tick
        is_same = _read_or_empty(folder / MANIFEST_NAME) == data
        if not (is_same and all(_is_intact(folder, file, hashed_tick) for file in files)):
            for file in files:
                sent = (f for f in list_folders(self._checkpoints) if f.startswith(f".tmp-{step}-"))  # by a rank
                places = (folder, *(self._checkpoints / own for own in sent))
                held = next((place for place in places if _is_intact(place, file, tick)), None)
                if held is not None:
                    writing.rename(held / file.name, partial / file.name)
                    continue
                self._fetcher.download(f"{CHECKPOINTS}/{name}/{file.name}", partial / file.name, tick)
                if not _is_intact(partial, file, tick):
                    raise OSError(errno.EIO, f"{file.name} is damaged on node 0")
            if folder.exists():
                writing.remove(folder)
            writing.sync_folder(partial)
            writing.rename(partial, folder)
            writing.sync_folder(self._checkpoints)
        kept = self._fetcher.list_checkpoints()
        for old in _checkpoint_names(self._run_dir):
            if old not in kept:
                writing.remove(self._checkpoints / old)
        self._remove_partial(step)

    def _remove_partial(self, step: float) -> None:
        """Remove shards of checkpoints up to `step`, which are published or have failed, and incomplete copies."""
        for name in list_names(self._checkpoints):
            if 0 <= _partial_step(name) <= step:
                writing.remove(self._checkpoints / name)


@contextmanager
def _locked(client: FileClient, tick: Tick) -> Generator[None]:
    """Wait for the transfer of another thread. That thread never waits without a limit."""
    while not client.lock.acquire(timeout=TICK_SECONDS):
        tick()
    try:
        tick()
        yield
    finally:
        client.lock.release()


def _read_or_empty(path: Path) -> bytes:
    with suppress(OSError):
        return read_file(path, limit_bytes=MANIFEST_LIMIT_BYTES, ours=True)
    return b""


def _job_mark(plan: NodePlan) -> bytes:
    return hashlib.sha256(f"{plan.secret} {os.uname().nodename}".encode()).hexdigest().encode()


def _partial_step(name: str) -> int:
    """The step of an incomplete checkpoint; -1 for other names."""
    match = re.fullmatch(r"\.tmp-(?:copy-step-)?(\d+)(?:-[\d-]+)?", name)
    return int(match[1]) if match else -1


def _is_intact(folder: Path, file: ShardFile, tick: Tick | None) -> bool:
    """Whether a file is as the manifest describes it; without `tick`, only its size is compared."""
    with suppress(DamagedCheckpoint):
        check_file(folder, file, hashed=tick is not None, tick=tick or _ignore)
        return True
    return False
