"""The status page: memory in which a rank shows what it does, and which its agent reads, also after the rank's death.

The agent makes one memory file per rank and generation; the worker inherits it and maps it. Writing
is a store to memory, so a step may do it many times; what a killed process has written stays. The functions of
readers are at the end of this module.

There are no locks. A reader is another process, or another thread, and may read at any moment:

- A counter is one aligned 8-byte word. It is stored through a memoryview of format Q, which is a single store, so a
  reader sees the old value or the new one. `struct.pack_into` must not be used: it sets the bytes to 0 before it packs.
- A record has the same number in its first and its last word. `StatusPage.store_record` stores the last word, then the
  content, then the first word. A reader copies upwards: first word, content, last word. If both words are equal, the
  content is that record's. This needs the order of stores and of loads that x86 keeps.

    offset      what                 by whom
         0      counters             worker: steps done, phase, heartbeat, ... (`COUNTERS_AT`); agent: asked, ...
       256      phase times          worker: nanoseconds spent in each phase so far
       512      loader slots         loader processes: pid, item
      4096      ring                 worker: its last 256 collectives
     65536      word to the worker   agent: why it is released, JSON
    131072      answer               worker: its stacks and collectives, JSON
    917504      marks                worker: what ranks must have in common at a step, see marks.py
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
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from paceline.protocol.evidence import LoaderWorker, Op, Phase

NAME = "paceline-box-"
SIGNAL = signal.SIGRTMAX - 3  # asks faulthandler for stacks; SIGUSR1 and SIGUSR2 are the users' own
# To read a word. Native format: one load of 8 bytes. With "=" or "<" Python would read byte after byte.
WORD = struct.Struct("@Q")
_NAMES = (
    "step",  # steps done
    "phase",
    "phase_since_ns",  # CLOCK_MONOTONIC, as all times here
    "changes",  # raised by whatever is progress: steps, phases, items of an evaluation
    "ops",  # records written into the ring so far
    "enqueued",  # collectives of all groups so far, as torch counts them
    "beat_ns",  # when the watcher last woke
    "ready",  # 1: a watcher answers; 2: SIGNAL is safe to send
    "answered",  # the number of the last question answered
    "answer_bytes",
    "asked",  # by the agent: the number of the last question
    "released",  # by the agent: 1: leave your collective, the word to the worker says why
    "word_bytes",
    "loading",  # 1: the main thread waits for a batch of its loader processes
    "saves_asked",  # by the agent: how many checkpoints somebody has asked for
    "waiting",  # 1: when the watcher last woke, a collective or a message was on its way
    "script",  # 1: a script that nobody changed: what is known of it is seen from outside
    "marks",  # raised with each mark
    "findings",  # told so far
    "uneven",  # 1: ranks may rightly take different numbers of steps
    "regroups",  # by the agent: 1: hosts come or go: save after the next step, and end
    "notes_stops",  # 1: a signal that asks to stop is noted, and acted on between two steps
    "alone",  # of the steps: those that a script's rank has taken for itself, before it trained with others
)
_INDEX = {name: index for index, name in enumerate(_NAMES)}  # in words
COUNTERS_AT = {name: index * WORD.size for name, index in _INDEX.items()}
WATCHED, SIGNAL_SAFE = 1, 2
PHASES_AT = 256
SLOTS_AT, SLOTS, SLOT = 512, 32, struct.Struct("@QQQQ")  # pid, epoch, item, busy
RING_AT, RECORDS, RECORD = 4096, 256, struct.Struct("@QIIIiQ200sQ")
CONTENT = struct.Struct("@IIIiQ200s")  # of a record, between its numbers
STATE_AT, BEGAN_AT = 12, 24  # in a record
TEXT_BYTES = 200
WORD_AT, WORD_MAX = 65536, 65536
BOX_BYTES = 1 << 20  # what nobody touches takes no memory
MARKS_AT = BOX_BYTES - (1 << 17)
ANSWER_AT, ANSWER_MAX = 131072, MARKS_AT - 131072
NATIVE_MAX = 1 << 18
# In words: of the box, and of a record.
_SINCE, _PHASE, _CHANGES = _INDEX["phase_since_ns"], _INDEX["phase"], _INDEX["changes"]
_STEP, _OPS, _PHASES, _LAST = _INDEX["step"], _INDEX["ops"], PHASES_AT // WORD.size, RECORD.size // WORD.size - 1
SEPARATOR = "\x1f"
IN_FLIGHT = 0  # as a record's state; else it is over: 1 + the microseconds that it took
NO_PEER = -1


class StatusPage:
    """The worker's side; also that of the processes that it forks to load data."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map(descriptor)
        self._steps = self._loaders = self._words  # stay in the box when `_map` replaces the rest
        self._phase, self._since_ns = Phase.USER, time.monotonic_ns()
        self.spent_ns = [0] * len(Phase)  # up to the last change
        self.on_device: Callable[[Phase], Iterable[tuple[Phase, int]]] | None = None
        """told of each phase, where the host only launches what is done; gives those that have passed, and their ns"""
        self._numbers = itertools.count(self.get("ops") + 1)  # threads may write at once: next() is one step for Python

    @classmethod
    def inherited(cls, descriptor: int) -> Self | None:
        """The box that this worker's agent has made; None where the descriptor is not, or no longer, a box."""
        return cls(descriptor) if _is_box(descriptor) else None

    def put(self, name: str, value: int) -> None:
        """Set one counter, at least 0."""
        self._words[_INDEX[name]] = value

    def get(self, name: str) -> int:
        """One counter; the agent sets some."""
        return self._words[_INDEX[name]]

    def asked(self, what: str) -> int:
        """What the agent wants between two steps, `saves_asked` or `regroups`; also where the guard is off."""
        return self._steps[_INDEX[what]]

    def tick(self) -> None:
        """Say that something has moved."""
        self._words[_CHANGES] += 1

    def note_stops(self, noted: bool) -> None:
        """Say whether signals that ask to stop wait for the next step's end; also where the guard is off."""
        self._steps[_INDEX["notes_stops"]] = noted

    def set_step(self, done: int) -> None:
        """Say how many steps are done, at least 0."""
        self._steps[_STEP] = done
        self.tick()

    def enter(self, phase: Phase) -> Phase:
        """Say what begins now; returns what was going on until now."""
        before, now = self._phase, time.monotonic_ns()
        if self.on_device is None:
            self._spend(before, now - self._since_ns)
        else:
            self._spend(before, 0 if self.spent_ns[before] else 1)  # it has been there; how long is known later
            for passed, spent_ns in self.on_device(phase):
                self._spend(passed, spent_ns)
        self._phase, self._since_ns = phase, now
        self._words[_SINCE] = now
        self._words[_PHASE] = phase
        self._words[_CHANGES] += 1
        return before

    def _spend(self, phase: Phase, spent_ns: int) -> None:
        self.spent_ns[phase] += spent_ns
        self._words[_PHASES + phase] = self.spent_ns[phase]

    def move_time(self, phase: Phase, other: Phase, spent_ns: int) -> None:
        """Of what was said to be spent in `phase`, this was spent in the other one."""
        self._spend(phase, -spent_ns)
        self._spend(other, spent_ns)

    def store(self, at: int, data: bytes) -> None:
        """Copy `data` to offset `at`, in the region of the marks. Readers may see a part of it."""
        self._memory[at : at + len(data)] = data

    def store_record(self, at: int, data: bytes) -> None:
        """Copy a record to offset `at`, in the region of the marks. Its first and last word are the same number, not
        that of the record that it replaces. Its size is a multiple of 8. Readers can tell if they have read a part.
        """
        (number,) = WORD.unpack_from(data)
        first, last = at // WORD.size, (at + len(data)) // WORD.size - 1
        self._words[last] = number  # from here on, the two words differ
        self._memory[at + WORD.size : at + len(data) - WORD.size] = data[WORD.size : -WORD.size]
        self._words[first] = number

    def begin(self, op: Op) -> int:
        """Write down that `op` begins; the number of its record, for `end`."""
        return self.begin_text(op.seq, NO_PEER if op.peer is None else op.peer, ring_text(op))

    def begin_text(self, seq: int, peer: int, text: bytes) -> int:
        """`begin` with the `ring_text` of an operation that comes again and again."""
        number = next(self._numbers)
        at = RING_AT + (number - 1) % RECORDS * RECORD.size
        words, first = self._words, at // WORD.size
        words[first + _LAST] = number  # the order of `store_record`
        began_ns = time.monotonic_ns()
        CONTENT.pack_into(self._memory, at + WORD.size, seq & 0xFFFFFFFF, IN_FLIGHT, len(text), peer, began_ns, text)
        words[first] = number
        words[_OPS] = number
        return number

    def end(self, number: int) -> None:
        """Write down that the operation with this record is over for this rank."""
        at = RING_AT + (number - 1) % RECORDS * RECORD.size
        if WORD.unpack_from(self._memory, at)[0] == number:  # else its record has been taken by a later one
            took_ns = time.monotonic_ns() - WORD.unpack_from(self._memory, at + BEGAN_AT)[0]
            state = min(1 + max(0, took_ns) // 1000, 2**32 - 1)
            self._memory[at + STATE_AT : at + STATE_AT + 4] = state.to_bytes(4, sys.byteorder)

    def set_loader(self, worker: int, *, epoch: int, item: int, busy: bool) -> None:
        """Say, in loader process number `worker`, which item it begins (or has ended)."""
        if 0 <= worker < SLOTS:
            words, first = self._loaders, (SLOTS_AT + worker * SLOT.size) // WORD.size
            words[first + 3] = False  # a reader must not see it busy with a mix of two items
            words[first], words[first + 1], words[first + 2] = os.getpid(), epoch, item
            words[first + 3] = busy

    def answer(self, question: int, text: bytes) -> None:
        """Answer the agent's question of this number; a text that has no room is left out whole."""
        text = text if len(text) <= ANSWER_MAX else b""
        self._memory[ANSWER_AT : ANSWER_AT + len(text)] = text
        self.put("answer_bytes", len(text))
        self.put("answered", question)

    def word(self) -> bytes:
        """What the agent has to say to this worker; empty while it has not said anything."""
        return self._memory[WORD_AT : WORD_AT + min(self.get("word_bytes"), WORD_MAX)]

    def ring(self) -> list[tuple[int, Op]]:
        """What this process has written into the ring: when each began, by CLOCK_MONOTONIC, and what."""
        return records(self._memory[RING_AT : RING_AT + RECORDS * RECORD.size])

    def calls_since(self, since_ns: int) -> list[tuple[int, float, Op]]:
        """What began after `since_ns`, the oldest first: when, for how many seconds (-1: not over yet), and what."""
        found: list[tuple[int, float, Op]] = []
        newest = self.get("ops")
        for number in range(newest, max(0, newest - RECORDS), -1):
            at = RING_AT + (number - 1) % RECORDS * RECORD.size
            data = self._memory[at : at + RECORD.size]
            if WORD.unpack_from(data)[0] != number:
                continue  # another thread is writing this record
            if WORD.unpack_from(data, BEGAN_AT)[0] < since_ns:
                break
            (state,) = struct.unpack_from("@I", data, STATE_AT)
            found += [(began_ns, (state - 1) / 1e6 if state else -1.0, op) for began_ns, op in records(data)]
        return found[::-1]

    def keep_for_steps(self) -> None:
        """The guard is off: from now on only steps and the items of loader processes are seen."""
        self._map(-1)

    def keep_for_loaders(self) -> None:
        """In a process that this one has forked: it may say what it loads, and nothing in its parent's name."""
        self._map(-1)
        self._steps = self._words

    def close(self) -> None:
        """Give the mapping back; what was written stays for the agent."""
        for words in (self._words, self._steps, self._loaders):
            words.release()  # mmap.close() raises BufferError while there is a view
        self._memory.close()

    def _map(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, BOX_BYTES)  # shared; holds a descriptor of its own
        self._words = memoryview(self._memory).cast("Q")


def ring_text(op: Op) -> bytes:
    """The words of an operation as the ring has them; long ones are cut, each for itself."""
    cut = (op.group[:24], op.kind, op.shape[:48], op.dtype[:24], op.name[:40], op.site[:72])
    return SEPARATOR.join(word.replace(SEPARATOR, " ") for word in cut).encode(errors="replace")[:TEXT_BYTES]


def op_of(text: bytes) -> Op:
    """The operation that a `ring_text` tells of, without its number."""
    words = text.decode(errors="replace").split(SEPARATOR)  # a long one has lost its end
    group, kind, shape, dtype, name, site = [*words, *[""] * 6][:6]
    return Op(group, 0, kind, name, shape, dtype, site)


def _is_box(descriptor: int) -> bool:
    # a program that a worker starts sees the variable too, but not the file: its number may be any other file's
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(f"/memfd:{NAME}")
    except OSError:
        return False


def records(data: bytes) -> list[tuple[int, Op]]:
    """What is in a ring, the oldest first: when each operation began, in ns, and what it is."""
    found: list[tuple[int, int, Op]] = []
    for at in range(0, len(data) - RECORD.size + 1, RECORD.size):
        first, seq, state, length, peer, began_ns, raw, last = RECORD.unpack_from(data, at)
        if first == 0 or first != last or length > len(raw):
            continue
        op = op_of(raw[:length])
        op = replace(op, seq=seq, peer=None if peer < 0 else peer, done=state != IN_FLIGHT)
        found.append((first, began_ns, op))
    return [(began_ns, op) for _, began_ns, op in sorted(found, key=lambda record: record[0])]


def make_status_page(rank: int) -> int:
    """A descriptor of an empty box, not yet inherited by anybody."""
    descriptor = os.memfd_create(f"{NAME}{rank}")
    os.ftruncate(descriptor, BOX_BYTES)
    return descriptor


@dataclass(frozen=True)
class Counters:
    """What a box shows at one moment. `moved` changes whenever the worker has made any progress."""

    step: int
    phase: Phase
    ready: int
    answered: int
    beat_ns: int
    met: bool  # it has called a collective
    moved: tuple[int, ...]
    phase_seconds: tuple[float, ...]  # spent in each phase, up to its last change
    waiting: bool  # for other ranks, in a collective or message, when its watcher last woke
    script: bool = False  # seen from outside
    notes_stops: bool = False  # it acts on signals that ask to stop between two steps
    uneven: bool = False  # ranks may rightly take different numbers of steps
    alone: int = 0  # of the steps: the rank's own
    marks: int = 0
    findings: int = 0


def read_counters(descriptor: int) -> Counters:
    """Read a box's counters. Never fails for what a worker has written there."""
    data = os.pread(descriptor, SLOTS_AT, 0).ljust(SLOTS_AT, b"\0")
    value = {name: WORD.unpack_from(data, at)[0] for name, at in COUNTERS_AT.items()}
    phase = Phase(value["phase"]) if value["phase"] in {*Phase} else Phase.USER
    spent = tuple(WORD.unpack_from(data, PHASES_AT + p * WORD.size)[0] / 1e9 for p in Phase)
    moved = tuple(value[name] for name in ("step", "phase", "changes", "ops", "enqueued"))
    met, flags = value["ops"] > 0 or value["enqueued"] > 0, ("waiting", "script", "notes_stops", "uneven")
    plain = {name: value[name] for name in ("step", "ready", "answered", "beat_ns", "alone", "marks", "findings")}
    flagged = {name: bool(value[name]) for name in flags}
    return Counters(phase=phase, met=met, moved=moved, phase_seconds=spent, **flagged, **plain)


def put_question(descriptor: int, question: int) -> None:
    """Ask the worker for its stacks and collectives; its watcher answers within a fraction of a second, if it can."""
    os.pwrite(descriptor, WORD.pack(question), COUNTERS_AT["asked"])


def ask_to_save(descriptor: int, times: int) -> None:
    """Say how many times this worker has been asked for a checkpoint."""
    os.pwrite(descriptor, WORD.pack(times), COUNTERS_AT["saves_asked"])


def ask_to_regroup(descriptor: int) -> None:
    """Have this worker vote for the end after its next step: the next generation has other hosts."""
    os.pwrite(descriptor, WORD.pack(1), COUNTERS_AT["regroups"])


def release(descriptor: int, why: bytes) -> None:
    """Have the worker leave the collective that it is in, with `why` (JSON) as the reason."""
    why = why[:WORD_MAX]
    os.pwrite(descriptor, why, WORD_AT)
    os.pwrite(descriptor, WORD.pack(len(why)), COUNTERS_AT["word_bytes"])
    os.pwrite(descriptor, WORD.pack(1), COUNTERS_AT["released"])


def read_answer(descriptor: int) -> bytes:
    """The worker's last answer, as it wrote it."""
    size = os.pread(descriptor, WORD.size, COUNTERS_AT["answer_bytes"]).ljust(WORD.size, b"\0")
    return os.pread(descriptor, min(WORD.unpack(size)[0], ANSWER_MAX), ANSWER_AT)


def has_box(pid: int) -> bool:
    """Whether the process still has its box; not so when it has become another program (`os.execv`)."""
    try:
        if f"/memfd:{NAME}" in Path(f"/proc/{pid}/maps").read_text():
            return True
        links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())  # noqa: PTH115 - no file behind it
        return any(link.startswith(f"/memfd:{NAME}") for link in links)
    except OSError:
        return True  # it is just ending, or closes files: nobody can say


def takes_signal(pid: int, number: int = SIGNAL, *, ignoring: bool = False) -> bool:
    """Whether the process catches this signal at this moment, or is `ignoring` it: else it may be its end.

    One that has become another program does not catch SIGNAL.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        names = ("SigCgt:", "SigIgn:") if ignoring else ("SigCgt:",)
        masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(names)]
        return any(mask >> (number - 1) & 1 for mask in masks)
    except (OSError, ValueError, IndexError):
        return False


def forget_native(descriptor: int) -> None:
    """Throw away what faulthandler has written so far, before SIGNAL is sent again."""
    os.ftruncate(descriptor, BOX_BYTES)


def read_native(descriptor: int) -> str:
    """What faulthandler has written on SIGNAL so far; of much, the end, where the main thread is."""
    size = os.fstat(descriptor).st_size
    start = max(BOX_BYTES, size - NATIVE_MAX)
    return os.pread(descriptor, NATIVE_MAX, start).decode(errors="replace") if size > start else ""


def read_ring(descriptor: int) -> list[Op]:
    """The worker's last collectives, the oldest first, as far as they are whole."""
    return [op for _, op in of_this_life(records(os.pread(descriptor, RECORDS * RECORD.size, RING_AT)))]


def of_this_life(operations: Iterable[tuple[int, Op]]) -> list[tuple[int, Op]]:
    """Without what an earlier group of the same name has called: numbers that restart make the old ones void."""
    kept: list[tuple[int, Op]] = []
    last: dict[str, int] = {}
    for at, op in operations:
        if not op.is_message and op.seq < last.get(op.group, 0):
            kept = [one for one in kept if one[1].group != op.group]
        if not op.is_message:
            last[op.group] = op.seq
        kept.append((at, op))
    return kept


def read_loaders(descriptor: int) -> list[LoaderWorker]:
    """The processes that load data for this worker, as far as they have said what they do."""
    data = os.pread(descriptor, SLOTS * SLOT.size, SLOTS_AT)
    slots = [SLOT.unpack_from(data, at) for at in range(0, len(data) - SLOT.size + 1, SLOT.size)]
    return [
        LoaderWorker(number, pid, item, epoch, busy=bool(busy))
        for number, (pid, epoch, item, busy) in enumerate(slots)
        if pid
    ]
