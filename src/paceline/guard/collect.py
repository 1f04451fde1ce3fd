"""Collects the evidence of this node: from the status page of each worker, and from its process.

A worker that does not answer may hold the interpreter lock in native code. The agent then sends it a signal, and the
worker writes its stacks without the interpreter. No function here waits: the agent calls `advance` ten times a second
until it returns True. A status page with arbitrary content cannot make a function fail or use unlimited memory.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from paceline.host.node_utilization import query_gpu_problems
from paceline.host.procfs import main_thread_sleep_id, queued_seconds, read_process, waits_for_terminal_input
from paceline.protocol import marks, status_page
from paceline.protocol.evidence import Evidence, Frame, LoaderWorker, Op, RankSample, Stack, WorkerAnswer
from paceline.protocol.job import SUSPENSION_GAP_SECONDS

ANSWER_SECONDS = 2.0  # for an interpreter to answer; its watcher wakes four times a second
UNRESPONSIVE_SECONDS = 4.0  # a watcher that has not woken for this long gets only UNRESPONSIVE_ANSWER_SECONDS
UNRESPONSIVE_ANSWER_SECONDS = 1.0
NATIVE_STACK_SECONDS = 1.0  # for the stacks that a worker writes on the signal
MIN_CPU_INTERVAL_SECONDS = 0.5  # the shortest time over which CPU use is meaningful
ADVANCE_INTERVAL_SECONDS = 0.1  # between two calls of `advance`
INPUT_SECONDS = 1.0  # without progress, before a look at whether the rank reads standard input

MAX_EVIDENCE_BYTES = 200_000
MAX_OPS, MAX_THREADS, MAX_FRAMES, MAX_GROUPS, MAX_LOADERS = 64, 32, 96, 64, 32
MAX_JSON_INTEGER = 1 << 53
MAX_TEXT, MAX_WORDS, MAX_NATIVE = 200, 8_000, 32_000

_decoder = msgspec.json.Decoder(WorkerAnswer)


@dataclass
class _Query:
    pid: int
    page_fd: int
    states: list[str]  # of its process, at each call of `advance`
    cpu_seconds: float  # used before the question
    native_bytes: int = -1  # size of the native stacks at the last call of `advance`; -1: no signal sent
    done: bool = False


class EvidenceCollection:
    """One question to all workers of a node, and the answers so far.

    Workers that have ended are not asked. `boxes` are the descriptors of the status pages, by rank. The number
    `question` is larger than that of the previous question. If `patience_seconds` is below ANSWER_SECONDS, the agent
    sends no signals.
    """

    def __init__(
        self, workers: Sequence[RankSample], boxes: Mapping[int, int], question: int, *,
        patience_seconds: float = ANSWER_SECONDS,
    ) -> None:  # fmt: skip
        self.question, self._boxes = question, boxes
        self._patience_seconds = patience_seconds
        self._began_seconds = time.monotonic()
        self._signalled_seconds = 0.0
        self._queries: dict[int, _Query] = {}
        for worker in workers:
            if worker.code is None:
                fd = boxes[worker.rank]
                status_page.set_counter(fd, "asked", question)
                process = read_process(worker.pid)
                cpu_seconds = process.cpu_seconds if process else 0.0
                self._queries[worker.rank] = _Query(worker.pid, fd, [process.state if process else ""], cpu_seconds)
        self._gpus = query_gpu_problems([query.pid for query in self._queries.values()])

    def advance(self) -> bool:
        now = time.monotonic()
        waited_seconds = now - self._began_seconds
        for query in self._queries.values():
            process = read_process(query.pid)
            query.states.append(process.state if process and process.runs else "")
            query.done = query.done or self._is_done(query, waited_seconds)
        is_long_enough = self._patience_seconds < ANSWER_SECONDS or waited_seconds >= MIN_CPU_INTERVAL_SECONDS
        return is_long_enough and all(query.done for query in self._queries.values())

    def _is_done(self, query: _Query, waited_seconds: float) -> bool:
        counters = status_page.read_counters(query.page_fd)
        if counters.answered == self.question or query.states[-1] in ("", "T", "t"):
            return True  # a stopped process never answers
        if query.native_bytes >= 0:
            previous_bytes, query.native_bytes = (
                query.native_bytes,
                len(status_page.read_faulthandler_text(query.page_fd)),
            )
            is_complete = 0 < query.native_bytes == previous_bytes
            return is_complete or time.monotonic() - self._signalled_seconds > NATIVE_STACK_SECONDS
        is_deaf = time.monotonic() - counters.beat_ns / 1e9 > UNRESPONSIVE_SECONDS
        if waited_seconds < min(self._patience_seconds, UNRESPONSIVE_ANSWER_SECONDS if is_deaf else math.inf):
            return False
        return self._patience_seconds < ANSWER_SECONDS or not self._signal(query)

    def _signal(self, query: _Query) -> bool:
        """Ask for native stacks; return whether that is possible without the risk of killing the worker."""
        is_safe = status_page.read_counters(query.page_fd).ready & status_page.SIGNAL_SAFE
        if not is_safe or not status_page.handles_signal(query.pid):
            return False
        os.ftruncate(query.page_fd, status_page.PAGE_BYTES)  # discard faulthandler's text
        query.native_bytes = 0
        self._signalled_seconds = time.monotonic()
        with suppress(ProcessLookupError, PermissionError):
            os.kill(query.pid, status_page.STACK_SIGNAL)
        return True

    def evidence(self, workers: Sequence[RankSample]) -> list[Evidence]:
        return [limit_evidence_size(self._evidence(worker, self._queries.get(worker.rank))) for worker in workers]

    def _evidence(self, worker: RankSample, query: _Query | None) -> Evidence:
        page_fd, process = self._boxes[worker.rank], read_process(worker.pid) if worker.code is None else None
        answered = query is not None and status_page.read_counters(page_fd).answered == self.question
        known: dict[str, Any] = {"ops": tuple(status_page.read_recent_ops(page_fd))}
        with suppress(OSError, msgspec.MsgspecError, RecursionError):
            known = asdict(_decoder.decode(status_page.read_answer(page_fd))) if answered else known
        has_native = not answered and query is not None and query.native_bytes > 0
        cpu_seconds = 0.0
        if process is not None and query is not None:
            elapsed_seconds = max(time.monotonic() - self._began_seconds, 1e-3)
            cpu_seconds = (process.cpu_seconds - query.cpu_seconds) / elapsed_seconds  # per second
        return replace(
            Evidence.from_sample(worker),
            state=_state(query),
            cpu_seconds=cpu_seconds,
            sleep=-1 if process is None else main_thread_sleep_id(worker.pid),
            watched=process is None or answered or status_page.maps_status_page(worker.pid),
            answered=answered,
            native=status_page.read_faulthandler_text(page_fd) if has_native else "",
            loaders=tuple(_loader(loader, worker.pid) for loader in status_page.read_loader_workers(page_fd)),
            gpu=self._gpus.get(worker.pid, ""),
            calls=marks.read_calls(page_fd) if worker.orders else {},
            **known,  # ops, groups, titles, stacks
        )


def _state(query: _Query | None) -> str:
    if query is None:
        return ""
    first, last = query.states[0], query.states[-1]
    return "S" if last == "D" and first != "D" else last  # a short D is normal: the process reads a file


def _loader(loader: LoaderWorker, worker_pid: int) -> LoaderWorker:
    process = read_process(loader.pid) if 0 < loader.pid < 1 << 31 else None
    # the kernel may have reused the pid: a loader process is in the session of its worker
    worker = read_process(worker_pid)
    is_ours = process is not None and process.runs and worker is not None and process.session == worker.session
    return replace(loader, state=process.state if is_ours and process else "")


def limit_evidence_size(evidence: Evidence) -> Evidence:
    """`evidence` with each part limited in size, and at most MAX_EVIDENCE_BYTES as JSON."""
    stacks = [Stack(s.thread[:MAX_TEXT], tuple(map(_frame, s.frames[:MAX_FRAMES]))) for s in evidence.stacks]
    failure = evidence.failure
    if failure is not None:
        failure = replace(failure, message=failure.message[-MAX_WORDS:], traceback=failure.traceback[-MAX_WORDS:])
    bounded = replace(
        evidence, failure=failure, ops=tuple(map(_op, evidence.ops[-MAX_OPS:])),
        groups={k[:MAX_TEXT]: tuple(map(_number, v)) for k, v in list(evidence.groups.items())[-MAX_GROUPS:]},
        titles={k[:MAX_TEXT]: title[:MAX_TEXT] for k, title in list(evidence.titles.items())[-MAX_GROUPS:]},
        stacks=tuple(stacks[:MAX_THREADS]), native=evidence.native[-MAX_NATIVE:],
        loaders=evidence.loaders[:MAX_LOADERS], error_text=evidence.error_text[-MAX_WORDS:],
        gpu=evidence.gpu[:MAX_TEXT],
        calls={k[:MAX_TEXT]: _op(op) for k, op in list(evidence.calls.items())[:MAX_OPS]},
    )  # fmt: skip
    last_ops = bounded.ops[-8:]
    groups = {op.group: bounded.groups[op.group] for op in last_ops if op.group in bounded.groups}
    small = replace(bounded, stacks=bounded.stacks[:1], groups=groups, titles={}, ops=last_ops)
    for candidate in (bounded, replace(bounded, stacks=bounded.stacks[:4]), small):
        if len(msgspec.json.encode(candidate)) <= MAX_EVIDENCE_BYTES:
            return candidate
    return replace(bounded, ops=(), groups={}, titles={}, stacks=(), calls={}, native="", failure=None, error_text="")


def _op(op: Op) -> Op:
    texts = {name: getattr(op, name)[:MAX_TEXT] for name in ("group", "kind", "name", "shape", "dtype", "site")}
    return replace(op, seq=_number(op.seq), peer=None if op.peer is None else _number(op.peer), **texts)


def _frame(frame: Frame) -> Frame:
    return Frame(frame.file[-MAX_TEXT:], _number(frame.line), frame.function[:MAX_TEXT], frame.library)


def _number(number: int) -> int:
    return number if 0 <= number <= MAX_JSON_INTEGER else 0


class IdleTimer:
    """Measures how long each worker has made no progress: its counters have not changed, by the agent's clock."""

    def __init__(self) -> None:
        # rank -> its counters, the time of their last change, and the time of the last read
        self._seen: dict[int, tuple[tuple[int, ...], float, float]] = {}

    def read_status_page(self, worker: RankSample, page: int, now_seconds: float) -> RankSample:
        """`worker` with the content of its status page. Call it at least every two seconds."""
        counters = status_page.read_counters(page)
        moved, since_seconds, read_seconds = self._seen.get(worker.rank, ((), now_seconds, now_seconds))
        is_idle = moved == counters.progress_values and now_seconds - read_seconds <= SUSPENSION_GAP_SECONDS
        # a rank that waits for its user, for example in a debugger, is not idle
        if not is_idle or (now_seconds - since_seconds >= INPUT_SECONDS and waits_for_terminal_input(worker.pid)):
            since_seconds = now_seconds
        self._seen[worker.rank] = counters.progress_values, since_seconds, now_seconds
        return replace(
            worker, step=counters.step, phase=counters.phase, phase_seconds=counters.phase_seconds,
            queued_seconds=queued_seconds(worker.pid),
            still_seconds=now_seconds - since_seconds if worker.is_running else 0.0, waiting=bool(counters.waiting),
            met=counters.has_called_collective, script=bool(counters.script), uneven=bool(counters.uneven),
            alone=counters.alone, virtual_ranks=counters.virtual_ranks, own_virtual_ranks=counters.own_virtual_ranks,
            max_virtual_ranks=counters.max_virtual_ranks, stop_signal=counters.stop_signal,
            stop_asked=bool(counters.stop_asked), steps_ended=counters.steps_ended,
            fingerprints=marks.read_fingerprint_bytes(page) if counters.marks else b"",
            orders=marks.read_call_table_bytes(page) if counters.marks else b"",
            findings=tuple(marks.read_findings(page)) if counters.findings else (),
        )  # fmt: skip
