"""Puts ranks, collectives and places into words, for the judge's sentences and for what is told around them."""

import re
import signal
from collections.abc import Iterable

from paceline.contract.evidence import Evidence, LoaderWorker, Op, Phase
from paceline.contract.places import by, frames, line_of, shown
from paceline.guard.waits import FROZEN

NUMBERED = re.compile(r"(.*?)([0-9]+)")
FROM = ("recv", "irecv", "broadcast", "scatter")
GONE = ("", "Z", "X")  # states of a process that is no more
BUSY_CPU_SECONDS = 0.2  # of the last second or so
STATES = {
    "D": "D (in the kernel: a disk or file system that does not answer?)",
    "T": "T (stopped by a signal)",
    "t": "t (stopped by a debugger)",
}


def in_runs(names: Iterable[str], separator: str = ", ") -> str:
    """A list in which three or more names that count up are one: "0, 1, 3-7", "n1,n3-n5"."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return separator.join(f"{run[0]}-{run[-1]}" if len(run) > 2 else separator.join(run) for run in runs)


def _follows(name: str, following: str) -> bool:
    first, second = NUMBERED.fullmatch(name), NUMBERED.fullmatch(following)
    if first is None or second is None or first[1] != second[1]:
        return False
    return second[2] == str(int(first[2]) + 1).zfill(len(first[2]))


def named(ranks: Iterable[int]) -> str:
    """ "rank 2" or "ranks 0, 1, 3-7"."""
    ranks = set(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {in_runs(map(str, sorted(ranks)))}"


def signal_name(number: int) -> str:
    """ "SIGSEGV"; "signal 40" for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def printable(text: str) -> str:
    """`text` without what does not print, and what turns the direction of writing."""
    return "".join(char if char.isprintable() else " " for char in text)


def verb(ranks: Iterable[int], one: str, many: str) -> str:
    """The form that fits as many ranks."""
    return one if len(set(ranks)) == 1 else many


def op_words(op: Op) -> str:
    """An operation in words: "all_reduce #9876 'bucket 3' [1732] float32"; a message with its peer."""
    peer = "" if op.peer is None else f" {'from' if op.kind in FROM else 'to'} rank {op.peer}"
    words = (f"{op.kind}{peer}", f"#{op.seq}" if op.seq else "", f"'{op.name}'" if op.name else "", op.shape, op.dtype)
    return " ".join(word for word in words if word)


def called_from(op: Op) -> str:
    """Where an operation was called, as the end of a sentence; empty where that is unknown."""
    return f", called from {op.site}" if op.site else ""


def where(one: Evidence) -> str:
    """Where a rank stands, as the end of "it is ...": "in load_batch at train.py:88, phase data, state S"."""
    words = [_place(one)]
    if one.phase is not Phase.USER:
        words.append(f"phase {one.phase.word}" if words[0] else f"in {one.phase.word}")
    if one.state:
        busy = ", computing" if one.state == "R" and one.cpu_seconds > BUSY_CPU_SECONDS else ""
        words.append(f"state {STATES.get(one.state, one.state)}{busy}")
    if not one.answered and one.code is None and one.state not in ("T", "t", ""):
        held = "holds the interpreter lock (native code?)" if one.native else "frozen, or held in native code?"
        words.append(f"does not answer: {held}")
    return ", ".join(word for word in words if word) or "at a place unknown"


def _place(one: Evidence) -> str:
    frame, library = shown(frames(one))
    if frame is None:
        return ""
    at = f"at {line_of(frame)}{by(library)}"
    return at if frame.function in ("", "<module>") else f"in {frame.function} {at}"


def loader_words(loader: LoaderWorker) -> str:
    """What a process that loads data does."""
    who = f"loader process {loader.number} (pid {loader.pid})"
    item = f"sample {loader.item} of epoch {loader.epoch}"
    if loader.state in GONE:
        return f"{who} is gone; it was at {item}"
    stopped = f", state {loader.state}: stopped" if loader.state in FROZEN else f", state {loader.state}"
    return f"{who} {'works on' if loader.busy else 'is done with'} {item}{stopped}"
