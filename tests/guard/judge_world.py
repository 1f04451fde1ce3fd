"""A small world in which the truth is known: ranks run programs of collectives as gloo does, one of them goes wrong.

Every rank runs the same program, as far as it is a member of each call's group; one mutation at one rank makes it
another. The world runs until nothing moves any more; what is then to be seen of each rank is the judge's evidence.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.protocol.evidence import Diagnosis, DiagnosisKind, Evidence, Frame, LoaderWorker, Op, Phase, Stack

Mutation = Literal[
    "drop", "duplicate", "swap", "alter", "hang", "hold", "stop", "load", "leave", "kill", "raise", "cut"
]
STRUCTURAL: tuple[Mutation, ...] = ("drop", "duplicate", "swap", "alter")
SUDDEN: tuple[Mutation, ...] = ("hang", "hold", "stop", "load", "leave", "kill", "raise")
KINDS = ("all_reduce", "broadcast", "all_gather", "barrier", "all_to_all_single")
HELD = '  File "/home/me/train.py", line 88 in load_batch'
Key = tuple[str, tuple[int, int] | None, int]  # group, (from, to) of a message, number


@dataclass(frozen=True)
class Call:
    """One program line: a collective, a message, or the wait for an asynchronous one (`wait_message`: its line)."""

    line: int
    kind: str
    group: str
    members: frozenset[int]
    shape: str = "[4]"
    dtype: str = "float32"
    name: str = ""
    message: tuple[int, int] | None = None
    asynchronous: bool = False
    waits_for: int | None = None


@dataclass
class Rank:
    program: list[Call]
    at: int = 0
    ops: list[Op] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    counts: dict[tuple[str, tuple[int, int] | None], int] = field(default_factory=dict)
    inside: int | None = None  # index in `ops` of what it is blocked in
    code: int | None = None
    words: str = ""
    freed: set[int] = field(default_factory=set)  # what got done for it though it did not fit


@dataclass(frozen=True)
class Case:
    """What went wrong, and what is to be seen."""

    seed: int
    mutation: Mutation
    rank: int
    evidence: tuple[Evidence, ...]
    finished: bool  # nothing is to be seen of the mutation
    forgotten: bool  # the dead have taken with them who was in their groups
    against: frozenset[int]  # ranks that each stand against the wrong one, by themselves


def make_case(seed: int) -> Case:
    draw = random.Random(seed)
    world = draw.randint(2, 6)
    groups = {"0": frozenset(range(world))}
    for name in range(1, draw.choice((1, 2, 3))):
        groups[str(name)] = frozenset(draw.sample(range(world), draw.randint(2, world)))
    program = list(_program(draw, groups))
    mutation: Mutation = draw.choice((*STRUCTURAL, *STRUCTURAL, *STRUCTURAL, *SUDDEN, "cut"))
    ranks = [Rank([call for call in program if n in call.members]) for n in range(world)]
    causes = draw.choice([n for n, rank in enumerate(ranks) if rank.program])
    own = [i for i, call in enumerate(ranks[causes].program) if call.waits_for is None]
    at = draw.choice(own)
    touched = ranks[causes].program[at]
    if mutation in STRUCTURAL:
        mutate(draw, ranks[causes].program, at, own, mutation)
    lost = touched.line if mutation == "cut" else None
    trap = (causes, touched.line, mutation) if mutation in SUDDEN else None
    run = _Run(draw, groups, ranks, trap, lost)
    run.until_nothing_moves()
    against = frozenset(run.against(causes))
    return Case(seed, mutation, causes, tuple(run.evidence()), run.finished, run.forgotten, against)


def _program(draw: random.Random, groups: Mapping[str, frozenset[int]]) -> Iterator[Call]:
    """Steps of the same few lines, as trainings have them; a barrier may stand at the end."""
    body = [_call(draw, groups, line) for line in range(draw.randint(1, 6))]
    for _ in range(draw.randint(1, 5)):
        open_calls: list[Call] = []
        for call in body:
            yield call
            if call.asynchronous:
                open_calls.append(call)
        for call in open_calls:
            yield replace(call, line=100 + call.line, asynchronous=False, waits_for=call.line)
    if draw.random() < 0.5:
        yield Call(90, "barrier", "0", groups["0"], shape="", dtype="")


def _call(draw: random.Random, groups: Mapping[str, frozenset[int]], line: int) -> Call:
    group = draw.choice(("0", *groups))
    members = groups[group]
    name = draw.choice(("", f"bucket {line}"))
    shape = draw.choice(("[4]", "[8]"))
    if draw.random() < 0.2:
        pair = draw.sample(sorted(members), 2)
        return Call(line, "message", group, frozenset(pair), shape, message=(pair[0], pair[1]))
    kind = draw.choice(KINDS)
    if kind == "barrier":
        return Call(line, kind, group, members, "", "")
    return Call(line, kind, group, members, shape, draw.choice(("float32", "float64")), name, None, draw.random() < 0.3)


def mutate(draw: random.Random, program: list[Call], at: int, own: list[int], mutation: Mutation) -> None:
    """Change one rank's program in place."""
    call = program[at]
    after = [i for i in own if i > at]
    if mutation == "drop":
        wait = next((i for i in range(at + 1, len(program)) if program[i].waits_for == call.line), None)
        if call.asynchronous and wait is not None:
            del program[wait]
        del program[at]
    elif mutation == "duplicate":
        program.insert(at, replace(call, asynchronous=False))
    elif mutation == "swap" and after:
        program[at], program[after[0]] = program[after[0]], program[at]
        _waits_last(program)
    elif mutation == "alter":
        changes: list[dict[str, str]] = [{"shape": "[5]"}, {"dtype": "int64"}] if call.kind != "barrier" else []
        if call.message is None:
            changes.append({"kind": draw.choice([kind for kind in KINDS if kind != call.kind])})
        program[at] = replace(call, **draw.choice(changes))  # type: ignore[arg-type]


def _waits_last(program: list[Call]) -> None:
    """A swap may have put a wait before what it waits for: such a wait finds nothing, which is no fault of its own."""
    begun: set[int] = set()
    for i, call in enumerate(list(program)):
        if call.waits_for is not None and call.waits_for not in begun:
            program[i] = replace(call, waits_for=-1)
        begun.add(call.line)


class _Run:
    def __init__(
        self,
        draw: random.Random,
        groups: Mapping[str, frozenset[int]],
        ranks: list[Rank],
        trap: tuple[int, int, Mutation] | None,
        lost: int | None,
    ) -> None:
        self.draw, self.groups, self.ranks, self.trap, self.lost = draw, groups, ranks, trap, lost
        self.caught = False
        self.stopped_inside = False
        self.entered: dict[Key, dict[int, Op]] = {}
        self.broken: set[Key] = set()
        self.way = draw.choice(("block", "block", "break", "pass"))  # what becomes of calls that do not fit
        self.passes = draw.randint(0, 2)
        self.forgotten = draw.random() < 0.1

    @property
    def finished(self) -> bool:
        return all(rank.code == 0 for rank in self.ranks) and not self.caught

    def until_nothing_moves(self) -> None:
        while movable := [n for n in range(len(self.ranks)) if self._can_move(n)]:
            self._move(self.draw.choice(movable))
        self._lose()

    def _can_move(self, n: int) -> bool:
        rank = self.ranks[n]
        if rank.code is not None or (self.caught and self.trap is not None and n == self.trap[0]):
            return False
        return rank.inside is None or self._done(n, rank.inside)

    def _done(self, n: int, index: int) -> bool:
        rank = self.ranks[n]
        key = rank.keys[index]
        if index in rank.freed:
            return True
        if key in self.broken or rank.lines[index] == self.lost:
            return False
        entered = self.entered[key]
        members = {*key[1]} if key[1] is not None else self.groups[key[0]]
        if set(entered) != set(members) or not fits(entered.values()):
            return False
        stopped = self.trap[0] if self.stopped_inside and self.trap else None
        return stopped not in entered or key != self.ranks[stopped].keys[-1]

    def _move(self, n: int) -> None:
        rank = self.ranks[n]
        rank.inside = None
        if rank.at == len(rank.program):
            rank.code = 0
            return
        call = rank.program[rank.at]
        if self.trap is not None and (n, call.line) == self.trap[:2] and call.waits_for is None:
            self._spring(n, call)
            return
        rank.at += 1
        if call.waits_for is not None:
            indices = [i for i, line in enumerate(rank.lines) if line == call.waits_for]
            rank.inside = indices[-1] if indices else None
            return
        self._enter(n, call)

    def _spring(self, n: int, call: Call) -> None:
        """What happens to this rank happens here, if not in an earlier step."""
        assert self.trap is not None
        if self.draw.random() < 0.5 and self.ranks[n].at + 1 < len(self.ranks[n].program):
            rank = self.ranks[n]  # not yet: at the same line of a later step, or never
            rank.at += 1
            self._enter(n, call)
            return
        self.caught = True
        match self.trap[2]:
            case "leave":
                self.ranks[n].code = 0
            case "kill":
                self.ranks[n].code = -9
            case "raise":
                self.ranks[n].code, self.ranks[n].words = 1, "ValueError: bad sample 4711"
            case "stop" if self.draw.random() < 0.5:
                self.stopped_inside = True
                self._enter(n, replace(call, asynchronous=False))
            case _:
                pass

    def _enter(self, n: int, call: Call) -> None:
        rank = self.ranks[n]
        numbered = (call.group, call.message)
        seq = rank.counts[numbered] = rank.counts.get(numbered, 0) + 1
        kind, peer = call.kind, None
        if call.message is not None:
            kind, peer = ("send", call.message[1]) if call.message[0] == n else ("recv", call.message[0])
        op = Op(call.group, seq, kind, call.name, call.shape, call.dtype, f"train.py:{call.line} in step", peer)
        key = (call.group, call.message, seq)
        rank.ops.append(op)
        rank.keys.append(key)
        rank.lines.append(call.line)
        if not call.asynchronous:
            rank.inside = len(rank.ops) - 1
        entered = self.entered.setdefault(key, {})
        entered[n] = op
        if not fits(entered.values()) and key not in self.broken:
            self._at_odds(key)

    def _at_odds(self, key: Key) -> None:
        self.broken.add(key)
        entered = self.entered[key]
        one = self.draw.choice(sorted(entered))
        if self.way == "break":
            self.ranks[one].code = -6
            self.ranks[one].words = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
        elif self.way == "pass" and self.passes:
            self.passes -= 1
            self.ranks[one].freed.add(self.ranks[one].keys.index(key))

    def against(self, causes: int) -> Iterator[int]:
        """The ranks that cannot be right if `causes` is: by the whole truth, of which the judge sees a part."""
        for n in range(len(self.ranks)):
            if n != causes and (self._collide(n, causes) or self._crossed(n, causes) or self._crossed(causes, n)):
                yield n

    def _collide(self, n: int, other: int) -> bool:
        shared = set(self._waited(n) + self._waited(other)) & set(self.ranks[n].keys) & set(self.ranks[other].keys)
        pairs = [(self.entered[key][n], self.entered[key][other]) for key in shared]
        return any(not fits(pair) or (all(op.name for op in pair) and pair[0].name != pair[1].name) for pair in pairs)

    def _crossed(self, n: int, other: int) -> bool:
        """Whether `n` waits for `other`, which waits for `n` or has left."""
        return self._needs(n, other) and (self._needs(other, n) or self.ranks[other].code == 0)

    def _needs(self, n: int, other: int) -> bool:
        keys = [key for key in self._waited(n) if other in (key[1] or self.groups[key[0]])]
        return any(key not in self.ranks[other].keys for key in keys)

    def _waited(self, n: int) -> list[Key]:
        rank = self.ranks[n]
        return [] if rank.code == 0 else [key for i, key in enumerate(rank.keys) if not self._done(n, i)]

    def _lose(self) -> None:
        """Ranks that wait for one that is gone may notice it: they end as its victims."""
        gone = {
            n for n, rank in enumerate(self.ranks) if rank.code is not None and not (rank.code == 0 and not self.caught)
        }
        for rank in self.ranks:
            if rank.code is None and rank.inside is not None and self.draw.random() < 0.5:
                key = rank.keys[rank.inside]
                if gone & set(key[1] or self.groups[key[0]]):
                    rank.code = self.draw.choice((1, -6, None))
                    rank.words = "RuntimeError: [../third_party/gloo] Connection closed by peer [127.0.0.1]:4711"

    def evidence(self) -> Iterator[Evidence]:
        """What is to be seen of each rank, with as much of its past as its memory holds."""
        memory = self.draw.choice((24, 64))
        for n, rank in enumerate(self.ranks):
            ops = [replace_done(op, self._done(n, i)) for i, op in enumerate(rank.ops)][-memory:]
            yield Evidence(
                n,
                f"node{n % 2}",
                4700 + n,
                code=rank.code,
                step=rank.at,
                ops=tuple(ops),
                groups={} if self.forgotten and rank.code is not None else self._groups_of(n),
                error_text=rank.words,
                **self._stands(n),  # type: ignore[arg-type]
            )

    def _groups_of(self, n: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(sorted(ranks)) for name, ranks in self.groups.items() if n in ranks}

    def _stands(self, n: int) -> dict[str, object]:
        rank = self.ranks[n]
        if rank.code is not None:
            return {}
        own = Frame("train.py", 88, "load_batch")
        if self.caught and self.trap is not None and n == self.trap[0]:
            match self.trap[2]:
                case "stop":
                    return {"state": "T"}
                case "hold":
                    text = f"Stack (most recent call first):\n{HELD}\n"
                    return {"state": "R", "native": text, "cpu_seconds": 1.0}
                case "load":
                    loader = LoaderWorker(0, 4800, 4711, 2, "S", True)
                    frames = (
                        Frame("python3.11/queue.py", 1, "get"),
                        Frame("torch/utils/data/dataloader.py", 1, "_next"),
                        own,
                    )
                    stacks = (Stack("main", frames),)
                    return {"state": "S", "answered": True, "phase": Phase.DATA, "loaders": (loader,), "stacks": stacks}
                case _:
                    return {"state": "S", "answered": True, "stacks": (Stack("main", (own,)),)}
        assert rank.inside is not None
        waits = rank.program[rank.at - 1].waits_for is not None
        line = rank.program[rank.at - 1].line
        frames = (Frame("train.py", line, "step"),)
        if not waits:
            frames = (Frame("torch/distributed/distributed_c10d.py", 3000, "call"), *frames)
        return {"state": "S", "answered": True, "stacks": (Stack("main", frames),)}


def fits(ops: Sequence[Op] | object) -> bool:
    """Whether these can be one collective, or one message. Names are nobody's business on the wire."""
    seen = {(_kind(op), *_size(op)) for op in ops}  # type: ignore[attr-defined]
    return len(seen) <= 1


def _kind(op: Op) -> str:
    return "message" if op.is_message else op.kind


def _size(op: Op) -> tuple[str, str]:
    return ("", "") if op.kind in ("all_gather", "all_to_all_single") else (op.shape, op.dtype)


def replace_done(op: Op, done: bool) -> Op:
    return Op(op.group, op.seq, op.kind, op.name, op.shape, op.dtype, op.site, op.peer, done)


KIND = DiagnosisKind
RIGHT: Mapping[Mutation, tuple[DiagnosisKind, ...]] = {
    "hang": (KIND.BEHIND,), "hold": (KIND.BEHIND,), "stop": (KIND.STOPPED,), "load": (KIND.LOADER,),
    "leave": (KIND.LEFT,), "kill": (KIND.DIED,), "raise": (KIND.DIED,), "cut": (KIND.NETWORK,),
}  # fmt: skip
DISPUTES = (KIND.MISMATCH, KIND.DEADLOCK, KIND.LEFT)


def outcome(case: Case, diagnosis: Diagnosis) -> str:
    """How right the diagnosis is: "named", "pair" or "circle" (a fair tie), "unsaid" (fairly), or the error.

    A tie is fair only if the wrong rank is in it, and not two others stand each against it: that were a majority.
    """
    said = f"{diagnosis.kind.name} {diagnosis.causes or diagnosis.tie}"
    if case.mutation == "cut":
        return "named" if diagnosis.kind is KIND.NETWORK and not diagnosis.causes and not diagnosis.tie else said
    if diagnosis.kind is KIND.UNKNOWN and case.forgotten and not diagnosis.causes:
        return "unsaid"
    if diagnosis.kind not in RIGHT.get(case.mutation, DISPUTES):
        return said
    if diagnosis.causes:
        return "named" if diagnosis.causes == (case.rank,) and not diagnosis.tie else said
    if case.mutation not in (*STRUCTURAL, "leave") or not any(case.rank in party for party in diagnosis.tie):
        return said
    if len(case.against) > 1 and not case.forgotten:
        return f"unfair tie {said}"
    return "pair" if sum(map(len, diagnosis.tie)) == 2 else "circle"


FAIR = ("named", "pair", "circle", "unsaid")
