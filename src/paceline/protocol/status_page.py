"""The status page: shared memory to which a rank writes its state. Its agent reads it, also after the rank has ended.

The agent makes one memory file per rank and generation. The worker inherits it and maps it. A write is a store to
memory, so a step can write many times. The data remains after the process is killed. `StatusPage` is the rank's side;
the functions for readers follow it. A reader must not trust the content, because a faulty worker may have written it.

There are no locks. A reader is another process or thread, and may read at any moment:

- A counter is one aligned 8-byte word. It is stored through a memoryview of format Q, which is a single store, so a
  reader sees the old value or the new one. `struct.pack_into` must not be used: it sets the bytes to 0 before it packs.
- A record has the same number in its first and its last word. `StatusPage.store_record` stores the last word, then the
  content, then the first word. A reader copies upwards: first word, content, last word. If both words are equal, the
  content is that record's. This needs the order of stores and of loads that x86 keeps.

    offset      what                 by whom
         0      counters             worker: steps done, phase, heartbeat, ... (`COUNTERS_AT`); agent: asked, ...
       256      phase times          worker: nanoseconds spent in each phase so far
       384      phase times of steps worker: the same at the end of the last step; 0: none has ended
       512      loader slots         loader processes: pid, item
      4096      ring                 worker: its last 256 collectives
     65536      message              agent: why it unblocks the worker, JSON
    131072      answer               worker: its stacks and collectives, JSON
    917504      marks                worker: fingerprints of values that must be equal on ranks, see marks.py
   1 MiB        native stacks        faulthandler, on SIGNAL: text, appended
"""

import itertools
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Self

from msgspec.structs import replace

from paceline.protocol.evidence import LoaderWorker, Op, Phase

NAME = "paceline-status-"
STACK_SIGNAL = signal.SIGRTMAX - 3  # requests stacks from faulthandler; SIGUSR1 and SIGUSR2 are left to the user
# To read a word. The native format is one load of 8 bytes. With "=" or "<" Python would read single bytes.
WORD = struct.Struct("@Q")


class Counters(NamedTuple):
    """The counters at one moment: the words at the beginning of the page, in this order. Times are CLOCK_MONOTONIC."""

    step: int  # steps done
    phase: Phase
    changes: int  # raised by any progress: steps, phases, items of an evaluation
    ops: int  # records written to the ring so far
    enqueued: int  # number of collectives of all groups so far, by torch's count
    beat_ns: int  # time of the last wake-up of the watcher
    ready: int  # 1: a watcher answers; 2: SIGNAL is safe to send
    answered: int  # the number of the last answered question
    asked: int  # by the agent: the number of the last question
    released: int  # by the agent: 1: leave the collective; the message has the reason
    loading: int  # 1: the main thread waits for a batch of its loader processes
    saves_asked: int  # by the agent: number of requested checkpoints
    waiting: int  # 1: a collective or a message was in flight at the last wake-up of the watcher
    script: int  # 1: an unmodified script, which hooks observe
    marks: int  # raised with each fingerprint
    findings: int  # number of findings so far
    uneven: int  # 1: ranks may take different numbers of steps
    regroups: int  # by the agent: 1: save after the next step, and end: hosts join or leave, or shares change
    notes_stops: int  # 1: a stop signal takes effect between steps
    alone: int  # number of steps that a script's rank took alone before it trained with others
    stops_by_step: int  # 1: the rank of an unmodified script stops after the step `stop_step` instead of at a signal
    steps_ended: int  # number of steps after which the rank could stop
    stop_signal: int  # number of the first stop signal that the rank received; 0: none
    stop_asked: int  # by the agent: 1: wait after the next of these steps until `stop_step` is set
    stop_step: int  # by the agent: stop after this number of steps; 0: not chosen yet
    virtual_ranks: int  # of the run, if it has a folder for checkpoints; 0: not known
    own_virtual_ranks: int  # of them, the number that this rank computes
    max_virtual_ranks: int  # that the memory of this rank allows, with `--balance auto`; 0: not known
    phase_seconds: tuple[float, ...] = ()
    """In each phase, up to the end of the last step, or the last change of phase. In another place of the page."""

    @property
    def has_called_collective(self) -> bool:
        return self.ops > 0 or self.enqueued > 0

    @property
    def progress_values(self) -> tuple[int, ...]:
        """These change with any progress of the worker."""
        return self.step, self.phase, self.changes, self.ops, self.enqueued


_INDEX = {name: index for index, name in enumerate(Counters._fields[:-1])}  # in words
COUNTERS_AT = {name: index * WORD.size for name, index in _INDEX.items()}
WATCHED, SIGNAL_SAFE = 1, 2
PHASES_AT = 256
SLOTS_AT, SLOTS, SLOT = 512, 32, struct.Struct("@QQQQ")  # pid, epoch, item, busy
RING_AT, RECORDS, RECORD = 4096, 256, struct.Struct("@QIIIiQ200sQ")
CONTENT = struct.Struct("@IIIiQ200s")  # of a record, between its numbers
STATE_AT, BEGAN_AT = 12, 24  # in a record
TEXT_BYTES = 200
MESSAGE_AT, MESSAGE_MAX = 65536, 65536
PAGE_BYTES = 1 << 20  # unused pages take no memory
MARKS_AT = PAGE_BYTES - (1 << 17)
ANSWER_AT, ANSWER_MAX = 131072, MARKS_AT - 131072
NATIVE_MAX = 1 << 18
# In words: offsets in the page and in a record.
_PHASE, _CHANGES, _OPS = _INDEX["phase"], _INDEX["changes"], _INDEX["ops"]
_PHASES, _LAST = PHASES_AT // WORD.size, RECORD.size // WORD.size - 1
_STEP_PHASES = _PHASES + 16
PHASE_TIMES, PHASE_TIMES_OF_STEPS = (slice(first, first + len(Phase)) for first in (_PHASES, _STEP_PHASES))
STEP, RELEASED, SAVES_ASKED, REGROUPS = (_INDEX[name] for name in ("step", "released", "saves_asked", "regroups"))
SEPARATOR = "\x1f"
IN_FLIGHT = 0  # state of a record; the state of a completed one is 1 + its duration in microseconds
NO_PEER = -1


class StatusPage:
    """The page in the worker, and in the processes that it forks to load data."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map(descriptor)
        self.steps = self._loaders = self.words  # stay in shared memory if `_map` replaces the rest
        self._phase, self._since_ns = Phase.USER, time.monotonic_ns()
        self.spent_ns = [0] * len(Phase)  # up to the last change of phase
        self.on_device: Callable[[Phase], Iterable[tuple[Phase, int]]] | None = None
        """Called with each phase if the host only launches work on a device; returns past phases and their times."""
        self.phase_starts: list[tuple[str, float]] | None = None
        """If it is a list, `enter` appends the name of the phase and its start, in seconds."""
        self._numbers = itertools.count(self.get("ops") + 1)  # next() is atomic, because several threads may write

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Self | None:
        """The page that this worker's agent made; None if the descriptor is not, or no longer, a status page."""
        # a program that a worker starts also sees the variable, but does not inherit the file: the number may be reused
        try:
            target = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        except OSError:
            return None
        return cls(descriptor) if target.startswith(f"/memfd:{NAME}") else None

    def put(self, name: str, value: int) -> None:
        self.words[_INDEX[name]] = value

    def get(self, name: str) -> int:
        return self.words[_INDEX[name]]

    def get_request(self, what: str) -> int:
        """A request of the agent for the end of this step, for example `saves_asked`. Works with the guard off."""
        return self.steps[_INDEX[what]]

    def tick(self) -> None:
        self.words[_CHANGES] += 1

    def set_stop_counter(self, name: str, value: int) -> None:
        """Set one of the counters that concern stops. Works with the guard off."""
        self.steps[_INDEX[name]] = value

    def set_step(self, done: int) -> None:
        self.steps[STEP] = done
        self.words[_CHANGES] += 1

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase; return the previous phase."""
        previous, now = self._phase, time.monotonic_ns()
        if self.phase_starts is not None:
            self.phase_starts.append((phase.word, now / 1e9))
        if self.on_device is None:
            self.spent_ns[previous] = spent_ns = self.spent_ns[previous] + now - self._since_ns
            self.words[_PHASES + previous] = spent_ns
        else:
            self._spend(previous, 0 if self.spent_ns[previous] else 1)  # nonzero now; the device reports the time later
            for past_phase, spent_ns in self.on_device(phase):
                self._spend(past_phase, spent_ns)
        self._phase, self._since_ns = phase, now
        self.words[_PHASE] = phase
        self.words[_CHANGES] += 1
        return previous

    def _spend(self, phase: Phase, spent_ns: int) -> None:
        self.spent_ns[phase] += spent_ns
        self.words[_PHASES + phase] = self.spent_ns[phase]

    def move_time(self, phase: Phase, other: Phase, spent_ns: int) -> None:
        self._spend(phase, -spent_ns)
        self._spend(other, spent_ns)

    def store(self, at: int, data: bytes) -> None:
        """Copy `data` to offset `at`. Readers may see a part of it."""
        self._memory[at : at + len(data)] = data

    def store_record(self, at: int, data: bytes) -> None:
        """Copy a record to offset `at` in the marks region. Readers can detect a partial write.

        The first and last word of the record are its number, which differs from that of the record before. Its size is
        a multiple of 8.
        """
        (number,) = WORD.unpack_from(data)
        first, last = at // WORD.size, (at + len(data)) // WORD.size - 1
        self.words[last] = number  # from here on, the two words differ
        self._memory[at + WORD.size : at + len(data) - WORD.size] = data[WORD.size : -WORD.size]
        self.words[first] = number

    def begin_op(self, op: Op) -> int:
        """Record the start of `op`; return the number of the record, for `end`."""
        return self.begin_encoded_op(op.seq, NO_PEER if op.peer is None else op.peer, encode_op(op))

    def begin_encoded_op(self, seq: int, peer: int, text: bytes) -> int:
        """As `begin`, with the `encode_op` of the operation, which callers may cache."""
        number = next(self._numbers)
        at = RING_AT + (number - 1) % RECORDS * RECORD.size
        words, first = self.words, at // WORD.size
        words[first + _LAST] = number  # the order of `store_record`
        began_ns = time.monotonic_ns()
        CONTENT.pack_into(self._memory, at + WORD.size, seq & 0xFFFFFFFF, IN_FLIGHT, len(text), peer, began_ns, text)
        words[first] = number
        words[_OPS] = number
        return number

    def end_op(self, number: int) -> None:
        at = RING_AT + (number - 1) % RECORDS * RECORD.size
        if WORD.unpack_from(self._memory, at)[0] == number:  # else a later record has replaced it
            took_ns = time.monotonic_ns() - WORD.unpack_from(self._memory, at + BEGAN_AT)[0]
            state = min(1 + max(0, took_ns) // 1000, 2**32 - 1)
            self._memory[at + STATE_AT : at + STATE_AT + 4] = state.to_bytes(4, sys.byteorder)

    def set_loader(self, worker: int, *, epoch: int, item: int, busy: bool) -> None:
        """Set the item that loader process number `worker` begins (`busy`) or has completed."""
        if 0 <= worker < SLOTS:
            words, first = self._loaders, (SLOTS_AT + worker * SLOT.size) // WORD.size
            words[first + 3] = False  # so that no reader sees a busy slot with parts of two items
            words[first], words[first + 1], words[first + 2] = os.getpid(), epoch, item
            words[first + 3] = busy

    def answer(self, question: int, text: bytes) -> None:
        """Answer the agent's question of this number. A text over the size limit is dropped."""
        self.store(ANSWER_AT, (text if len(text) < ANSWER_MAX else b"") + b"\0")
        self.put("answered", question)

    def agent_message(self) -> bytes:
        return self._memory[MESSAGE_AT : MESSAGE_AT + MESSAGE_MAX].partition(b"\0")[0]

    def recent_ops(self) -> list[tuple[int, Op]]:
        """The records of this process's ring: (start by CLOCK_MONOTONIC, operation)."""
        return decode_recent_ops(self._memory[RING_AT : RING_AT + RECORDS * RECORD.size])

    def calls_since(self, since_ns: int) -> list[tuple[int, float, Op]]:
        """The operations since `since_ns`, the oldest first: (start, seconds or -1 if it runs, operation)."""
        calls: list[tuple[int, float, Op]] = []
        newest = self.get("ops")
        for number in range(newest, max(0, newest - RECORDS), -1):
            at = RING_AT + (number - 1) % RECORDS * RECORD.size
            data = self._memory[at : at + RECORD.size]
            if WORD.unpack_from(data)[0] != number:
                continue  # another thread is writing this record
            if WORD.unpack_from(data, BEGAN_AT)[0] < since_ns:
                break
            (state,) = struct.unpack_from("@I", data, STATE_AT)
            calls += [(began_ns, (state - 1) / 1e6 if state else -1.0, op) for began_ns, op in decode_recent_ops(data)]
        return calls[::-1]

    def share_only_steps(self) -> None:
        """With the guard off: share only steps and the items of loader processes from now on."""
        self._map(-1)

    def share_only_loader_items(self) -> None:
        """In a forked process: share only the item that it loads, and nothing for its parent."""
        self._map(-1)
        self.steps = self.words

    def close(self) -> None:
        """Unmap the memory; the agent keeps the data."""
        for words in (self.words, self.steps, self._loaders):
            words.release()  # mmap.close() raises BufferError while there is a view
        self._memory.close()

    def _map(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, PAGE_BYTES)  # shared; mmap duplicates the descriptor
        self.words = memoryview(self._memory).cast("Q")


def encode_op(op: Op) -> bytes:
    fields = (op.group[:24], op.kind, op.shape[:48], op.dtype[:24], op.name[:40], op.site[:72])
    return SEPARATOR.join(field.replace(SEPARATOR, " ") for field in fields).encode(errors="replace")[:TEXT_BYTES]


def decode_op(text: bytes) -> Op:
    fields = text.decode(errors="replace").split(SEPARATOR)  # a long text may lack fields at its end
    group, kind, shape, dtype, name, site = [*fields, *[""] * 6][:6]
    return Op(group, 0, kind, name, shape, dtype, site)


def decode_recent_ops(data: bytes) -> list[tuple[int, Op]]:
    numbered: list[tuple[int, int, Op]] = []
    for at in range(0, len(data) - RECORD.size + 1, RECORD.size):
        first, seq, state, length, peer, began_ns, raw, last = RECORD.unpack_from(data, at)
        if first == 0 or first != last or length > len(raw):
            continue
        op = decode_op(raw[:length])
        op = replace(op, seq=seq, peer=None if peer < 0 else peer, done=state != IN_FLIGHT)
        numbered.append((first, began_ns, op))
    return [(began_ns, op) for _, began_ns, op in sorted(numbered, key=lambda record: record[0])]


def make_status_page(rank: int) -> int:
    descriptor = os.memfd_create(f"{NAME}{rank}")
    os.ftruncate(descriptor, PAGE_BYTES)
    return descriptor


def read_counters(descriptor: int) -> Counters:
    """Read the counters. Never fails for any content."""
    words = struct.unpack(f"@{SLOTS_AT // WORD.size}Q", os.pread(descriptor, SLOTS_AT, 0).ljust(SLOTS_AT, b"\0"))
    counters = Counters(*words[: len(_INDEX)])
    phase = Phase(counters.phase) if counters.phase in {*Phase} else Phase.USER
    of_steps = words[PHASE_TIMES_OF_STEPS]  # else the times of some ranks would include a part of the next step
    seconds = tuple(nanoseconds / 1e9 for nanoseconds in (of_steps if any(of_steps) else words[PHASE_TIMES]))
    return counters._replace(phase=phase, phase_seconds=seconds)


def set_counter(descriptor: int, name: str, value: int) -> None:
    os.pwrite(descriptor, WORD.pack(value), COUNTERS_AT[name])


def release_from_collective(descriptor: int, why: bytes) -> None:
    """Make the worker leave its collective, with `why` (JSON) as the reason. A reason over the limit is dropped."""
    os.pwrite(descriptor, (why if len(why) < MESSAGE_MAX else b"") + b"\0", MESSAGE_AT)
    set_counter(descriptor, "released", 1)


def read_c_string(descriptor: int, at: int, most: int) -> bytes:
    """A text that ends with a zero byte, unchecked."""
    return os.pread(descriptor, most, at).partition(b"\0")[0]


def read_answer(descriptor: int) -> bytes:
    return read_c_string(descriptor, ANSWER_AT, ANSWER_MAX)


def maps_status_page(pid: int) -> bool:
    """Whether the process still has its page. A process that has become a different program (`os.execv`) has none."""
    try:
        if f"/memfd:{NAME}" in Path(f"/proc/{pid}/maps").read_text():
            return True
        links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())  # noqa: PTH115 - no file behind it
        return any(link.startswith(f"/memfd:{NAME}") for link in links)
    except OSError:
        return True  # unknown: it is ending or closing files


def handles_signal(pid: int, number: int = STACK_SIGNAL, *, ignoring: bool = False) -> bool:
    """Whether the process now catches this signal (or ignores it, with `ignoring`); otherwise the signal may kill it.

    A process that has become a different program does not catch SIGNAL.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        names = ("SigCgt:", "SigIgn:") if ignoring else ("SigCgt:",)
        masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(names)]
        return any(mask >> (number - 1) & 1 for mask in masks)
    except (OSError, ValueError, IndexError):
        return False


def read_faulthandler_text(descriptor: int) -> str:
    """The text of faulthandler since SIGNAL; of a long text the end, which has the main thread."""
    size = os.fstat(descriptor).st_size
    start = max(PAGE_BYTES, size - NATIVE_MAX)
    return os.pread(descriptor, NATIVE_MAX, start).decode(errors="replace") if size > start else ""


def read_recent_ops(descriptor: int) -> list[Op]:
    """The worker's last collectives, the oldest first, without partial records."""
    ops = decode_recent_ops(os.pread(descriptor, RECORDS * RECORD.size, RING_AT))
    return [op for _, op in drop_calls_of_earlier_groups(ops)]


def drop_calls_of_earlier_groups(operations: Iterable[tuple[int, Op]]) -> list[tuple[int, Op]]:
    """Remove the calls of an earlier group of the same name. Numbers restart with a new group."""
    kept: list[tuple[int, Op]] = []
    last_seqs: dict[str, int] = {}
    for began_ns, op in operations:
        if not op.is_message and op.seq < last_seqs.get(op.group, 0):
            kept = [entry for entry in kept if entry[1].group != op.group]
        if not op.is_message:
            last_seqs[op.group] = op.seq
        kept.append((began_ns, op))
    return kept


def read_loader_workers(descriptor: int) -> list[LoaderWorker]:
    data = os.pread(descriptor, SLOTS * SLOT.size, SLOTS_AT)
    slots = enumerate(SLOT.iter_unpack(data[: len(data) // SLOT.size * SLOT.size]))
    return [LoaderWorker(n, pid, item, epoch, busy=bool(busy)) for n, (pid, epoch, item, busy) in slots if pid]
