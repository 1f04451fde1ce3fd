"""Files of one start of a run, attempt-N: its end, its nodes, the findings of its agent, and the times of log lines (no
torch here).

rank-<r>.times has records of 16 bytes: the size of rank-<r>.log (little-endian, unsigned) and a time (Unix time,
double). The agent checks the log once a second, and writes a record if it has grown. The log has only the output of the
worker.
"""

import os
import struct
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from paceline.runs import writing
from paceline.runs.console import remove_control_characters
from paceline.runs.owners import open_file
from paceline.runs.reading import read_json_if_readable, read_lines

NODES, NOTICES = "nodes.json", "notices.jsonl"
MAX_NOTICES, MAX_NOTICE_CHARS, MAX_NODE_CHARS = 100, 500, 300
TIME_RECORD = struct.Struct("<Qd")
RECORD_INTERVAL_SECONDS = 1.0
RECORDS_PER_PAGE = 4096  # records of times that are read at a time


class AttemptEnd(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a start, from node 0's agent: its exit code, and one line about its failure."""

    exit: Annotated[int, msgspec.Meta(ge=-255, le=255)]
    words: str = ""


def write_attempt_end(attempt_dir: Path, ended: AttemptEnd) -> None:
    with suppress(OSError):
        writing.replace_file(attempt_dir / "ended.json", msgspec.json.encode(ended))


def read_attempt_end(attempt_dir: Path) -> AttemptEnd | None:
    return read_json_if_readable(attempt_dir / "ended.json", AttemptEnd)


NodeState = Literal["in", "waits", "lost", "left", "refused"]


class NodeStatus(msgspec.Struct, frozen=True):
    """The state of a node. `words`: the reason if it has left."""

    node: int
    host: str
    state: NodeState
    words: str = ""


class ElasticNodes(msgspec.Struct, frozen=True):
    """The nodes of a run that was started with --nodes LEAST:MOST."""

    least: int
    most: int
    all: tuple[NodeStatus, ...]

    @property
    def format_line(self) -> str:
        inside = [node.host for node in self.all if node.state == "in"]
        groups = [f"{len(inside)} in (--nodes {self.least}:{self.most}): {', '.join(inside)}"]
        for state in ("waits", "lost", "left", "refused"):
            nodes = [node for node in self.all if node.state == state]
            hosts = [node.host + (f" ({node.words[:MAX_NODE_CHARS]})" if node.words else "") for node in nodes]
            groups += [f"{state}: {', '.join(hosts)}"] if hosts else []
        return remove_control_characters("; ".join(groups))


def write_nodes_status(attempt_dir: Path, nodes: ElasticNodes) -> None:
    with suppress(OSError):
        writing.replace_file(attempt_dir / NODES, msgspec.json.encode(nodes))


def read_nodes(attempt_dir: Path) -> ElasticNodes | None:
    return read_json_if_readable(attempt_dir / NODES, ElasticNodes)


class ScriptNotice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finding of node 0's agent in a script: a line of notices.jsonl."""

    unix_time: float
    words: str
    step: int = 0
    kind: str = ""  # the type: "diverged", "swallowed", ...; empty if it is not about the script


def append_script_notice(attempt_dir: Path, noted: ScriptNotice) -> None:
    with suppress(OSError), os.fdopen(writing.open_or_create(attempt_dir / NOTICES, append=True), "ab", 0) as file:
        file.write(msgspec.json.encode(noted) + b"\n")


def read_notices(attempt_dir: Path) -> Iterator[ScriptNotice]:
    with suppress(OSError):
        for _, line in zip(range(MAX_NOTICES), read_lines(attempt_dir / NOTICES), strict=False):
            with suppress(msgspec.MsgspecError):
                notice = msgspec.json.decode(line, type=ScriptNotice)
                yield replace(notice, words=remove_control_characters(notice.words)[:MAX_NOTICE_CHARS])


def log_times_path(log: Path) -> Path:
    return log.with_suffix(".times")


class LogTimesWriter:
    def __init__(self, log: Path) -> None:
        self._log, self._size, self._due_seconds, self._descriptor = log, 0, 0.0, -1
        with suppress(OSError):
            self._descriptor = writing.open_or_create(log_times_path(log))

    def record_growth(self, *, last: bool = False) -> None:
        """Record the growth since the last call, at most once a second. `last`: also earlier."""
        now = time.monotonic()
        if self._descriptor < 0 or (now < self._due_seconds and not last):
            return
        self._due_seconds = now + RECORD_INTERVAL_SECONDS
        with suppress(OSError):
            size = self._log.stat().st_size
            if size > self._size:
                # overwrites an incomplete record
                end = os.fstat(self._descriptor).st_size // TIME_RECORD.size * TIME_RECORD.size
                os.pwrite(self._descriptor, TIME_RECORD.pack(size, time.time()), end)
                self._size = size

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class LogTimeIndex:
    """The time of each part of a log, to the second. FileNotFoundError: a log of an older paceline has no times."""

    def __init__(self, log: Path) -> None:
        self._path, self._first, self._page = log_times_path(log), -1, list[tuple[int, float]]()
        with open_file(self._path) as file:
            self._count = file.status.st_size // TIME_RECORD.size
        with open_file(log) as file:
            self._last_seconds = file.status.st_mtime  # for the lines after the last record

    def time_at(self, offset: int) -> float:
        """The time (Unix time) of the byte at `offset`, at most a second late."""
        page = self._page
        if not page or not page[0][0] <= offset < page[-1][0]:
            index = bisect_right(range(self._count), offset, key=lambda i: self._record(i)[0])
            return self._record(index)[1] if index < self._count else self._last_seconds
        return page[bisect_right(page, offset, key=lambda record: record[0])][1]

    def offset(self, since: float) -> int:
        """The offset of the first byte that was written at the time `since` or later."""
        if self._last_seconds < since:
            return 2**63 - 1
        index = bisect_left(range(self._count), since, key=lambda i: self._record(i)[1])
        return self._record(index - 1)[0] if index else 0

    def _record(self, index: int) -> tuple[int, float]:
        if not 0 <= index - self._first < len(self._page) or self._first < 0:
            self._first = index // RECORDS_PER_PAGE * RECORDS_PER_PAGE
            with open_file(self._path) as file:
                data = os.pread(file.descriptor, RECORDS_PER_PAGE * TIME_RECORD.size, self._first * TIME_RECORD.size)
            complete = data[: len(data) // TIME_RECORD.size * TIME_RECORD.size]
            # a time that is not finite, or after the year 2600, is damage
            self._page = [(size, t if 0 <= t < 2e10 else 0.0) for size, t in TIME_RECORD.iter_unpack(complete)]
        position = index - self._first
        in_page = position < len(self._page)  # False if the file has become shorter
        return self._page[position] if in_page else (2**63 - 1, self._last_seconds)
