"""Steps and phases of a script that nobody changed, into its box: what `watch` shows, and by what slow ranks are found.

A step is one of the optimizer that has stepped most, of those that are joint (joint.py). What lies between the hooks is
the script's own code. Under DDP a rank waits for the others in backward, for rank 0 in the forward of a model with
buffers, and where it calls a collective itself (see the ledger).
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from traceback import walk_tb
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from msgspec.structs import replace

from paceline.protocol.evidence import Phase, ScriptFinding, is_victim
from paceline.protocol.marks import put_finding
from paceline.protocol.status_page import StatusPage
from paceline.rank.probes.digests import leaf_digests
from paceline.rank.probes.hooks import Events
from paceline.rank.probes.joint import Joint
from paceline.rank.recorder import distributed
from paceline.rank.sites import Owner, frame_of, owner, site_words, user_site

USUAL_STEPS, LEAST_STEPS = 15, 4  # by which it is judged what a step takes
UNUSUAL_FACTOR, UNUSUAL_NS = 3, 10_000_000
ASIDE: Sequence[Phase] = (Phase.USER, Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER)
TRANSPORT = "gloo/transport/"  # the source file that gloo names in its errors
PAST_STEPS = 3  # in a row, before it is said that an optimizer has left DDP
MOST_SWALLOWED, MOST_CHARS, MOST_NAME = 3, 300, 40
PAIR_EVERY, PAIRS, FEW_ELEMENTS = 8, 2, 256  # inputs of so many pairs of steps must be equal


class Counted(Events):
    """Counts steps: all that is left where the guard is off."""

    def __init__(self, box: StatusPage, joint: Joint | None = None) -> None:
        self._box, self._joint = box, joint
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._level = self._alone = 0
        self.done = 0

    def step_ended(self, optimizer: Any) -> None:
        if self._joint is not None and self._joint.of(optimizer).past:
            return
        before = max(0, self.done - self._alone - 1)  # one that comes later steps beside those that are there, or after
        self._counts[optimizer] = count = self._counts.get(optimizer, before) + 1
        if self._joint is not None:
            if self._joint.private(optimizer):
                return
            if self._joint.level > self._level:  # what was counted until now was this rank's own
                self._level, count = self._joint.level, self._joint.of(optimizer).steps
                self._counts[optimizer] = count
                self._alone = max(0, self.done + 1 - count)
                self._box.put("alone", self._alone)
        if count + self._alone > self.done:
            self.done = count + self._alone
            self._box.set_step(self.done)


class ScriptPhases(Counted):
    """Says in the box, too, what the script does."""

    def __init__(self, box: StatusPage, joint: Joint | None = None) -> None:
        super().__init__(box, joint)
        self._steps_ns = {phase: deque[int](maxlen=USUAL_STEPS) for phase in ASIDE}
        self._seen_ns = dict.fromkeys(ASIDE, 0)

    def batch_asked(self, batches: Any) -> None:
        self._box.enter(Phase.DATA)

    def own_code(self, *_: Any, **__: Any) -> None:
        self._box.enter(Phase.USER)

    batch_given = epoch_ended = forward_ended = backward_ended = own_code

    def raised(self, where: str, error: BaseException) -> None:
        if not self._box.get("released"):  # else it is the guard's doing, and no progress, which is waited for
            self.own_code()

    def forward_begins(self, ddp: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._box.enter(Phase.FORWARD)

    def buffers_asked(self, ddp: Any) -> None:
        self._box.enter(Phase.SYNC)

    def buffers_given(self, ddp: Any) -> None:
        self._box.enter(Phase.FORWARD)

    def backward_begins(self, losses: Any) -> None:
        self._box.enter(Phase.BACKWARD)

    def step_begins(self, optimizer: Any) -> None:
        self._box.enter(Phase.OPTIMIZER)

    closure_ended = step_begins

    def step_ended(self, optimizer: Any) -> None:
        self._box.enter(Phase.USER)
        before = self.done
        super().step_ended(optimizer)
        if self.done > before:
            self._put_aside()

    def _put_aside(self) -> None:
        """What the script does beside its steps now and then, evaluations, checkpoints, is none of a step's work."""
        for phase, steps_ns in self._steps_ns.items():
            spent_ns = self._box.spent_ns[phase] - self._seen_ns[phase]
            if len(steps_ns) >= LEAST_STEPS:
                usual_ns = UNUSUAL_FACTOR * int(median(steps_ns)) + UNUSUAL_NS
                if spent_ns > usual_ns:
                    self._box.move_time(phase, Phase.EVALUATE, spent_ns - usual_ns)
            steps_ns.append(spent_ns)
            self._seen_ns[phase] = self._box.spent_ns[phase]


class Swallowed(Events):
    """Tells of exceptions after which the script steps on as if nothing had been, and of those that end a thread."""

    def __init__(self, box: StatusPage, steps: Counted) -> None:
        self._box, self._steps = box, steps
        self._raised: dict[str, tuple[str, Callable[[], Any] | None]] = {}
        """since the last step: what and where -> in words, and, if a collective failed, a reference to its world"""
        self._told: set[str] = set()
        self._collective = False  # that one failed has been told

    def raised(self, where: str, error: BaseException) -> None:
        if not isinstance(error, Exception):
            return
        failed_in = _world() if collective_failed(error) else None
        if where != "collective" or failed_in is not None:  # else it was not begun: this backend does not have it, say
            at, what = _line_of(error), type(error).__name__
            self._raised[f"{what} {at}"] = f"{what} in its {where}, at {at}: {str(error)[:MOST_CHARS]}", failed_in

    def thread_ended(self, name: str, error: BaseException) -> None:
        key, what = f"{type(error).__name__} at {_line_of(error)}", str(error)[:MOST_CHARS]
        if key not in self._told and len(self._told) < MOST_SWALLOWED:
            self._told.add(key)
            words = f"its thread {name[:MOST_NAME]} ended with {key}: {what}"
            put_finding(self._box, ScriptFinding("thread", self._steps.done, words))

    def step_ended(self, optimizer: Any) -> None:
        self._tell(self._steps.done)

    def script_ended(self) -> None:
        self._tell(self._steps.done, last=True)

    def _tell(self, step: int, *, last: bool = False) -> None:
        raised, self._raised = self._raised, {}
        for key, (words, failed_in) in raised.items():
            if failed_in is not None:
                world = _world()()
                # a script that has made a new group of all ranks since has not overlooked it
                if not self._collective and (world is None or world is failed_in()):
                    self._collective = True
                    put_finding(self._box, ScriptFinding("collective", step, words, last=last))
            elif key not in self._told and len(self._told) < MOST_SWALLOWED:
                self._told.add(key)
                put_finding(self._box, ScriptFinding("swallowed", step, words, last=last))


class Stale(Events):
    """Tells of a step that has no gradients of its own, of a step or batch left out, of a batch that comes again.

    It may be meant so: only what other ranks do not tell is passed on. And of an optimizer that leaves DDP.
    """

    def __init__(self, box: StatusPage, steps: Counted, joint: Joint | None = None) -> None:
        self._box, self._steps, self._joint = box, steps, joint
        self._backwards = self._before_step = 0  # the second: until the last step of any optimizer
        self._past = 0  # steps in a row
        self._stepped: WeakKeyDictionary[Any, tuple[int, int, int]] = WeakKeyDictionary()
        """by optimizer: backwards until its last step, how many of them were its own, how often so many in a row"""
        self._batches: weakref.ref[Any] | None = None  # the iterator of a loader that gave the last batch
        self._given = 0  # batches by it, since any optimizer's last step
        self._usual_given, self._times_given = 0, 0  # the same before the last step, and how often so many in a row
        self._begun: WeakSet[Any] = WeakSet()  # iterators that no step has followed yet
        self._most_at_first = 0  # batches before the first step of a pass: more, where a reader reads ahead
        self._inputs: WeakKeyDictionary[Any, tuple[int, list[str], int]] = WeakKeyDictionary()
        self._told: set[str] = set()

    def backward_begins(self, losses: Any) -> None:
        self._backwards += 1

    def epoch_begins(self, batches: Any) -> None:
        self._begun.add(batches)
        self._batches = None  # that of persistent workers is the same one again

    def batch_given(self, batches: Any, batch: Any) -> None:
        if self._batches is None or self._batches() is not batches:
            self._batches, self._given = weakref.ref(batches), 0
        self._given += 1

    def step_begins(self, optimizer: Any) -> None:
        if self._is_private(optimizer):
            self._backwards = self._before_step
            return
        self._before_step = self._backwards
        if self._given:
            self._compare_given()
        backwards, usual, times = self._stepped.get(optimizer, (-1, 0, 0))
        own = self._of(optimizer) - backwards
        if own == 0 < usual and times >= USUAL_STEPS:
            self._tell("made a step without backward(), as none before: a batch left out, or an error swallowed")
        elif own > usual and times >= USUAL_STEPS:
            self._tell("left out a step after backward(), as never before: an error swallowed, or a batch left out")
        self._stepped[optimizer] = self._of(optimizer), own, times + 1 if own == usual else 0

    def _compare_given(self) -> None:
        given, self._given = self._given, 0
        batches = self._batches and self._batches()
        usual, is_usual = self._usual_given, self._times_given >= USUAL_STEPS
        if batches in self._begun:
            self._begun.discard(batches)
            usual = self._most_at_first or given
            self._most_at_first = max(given, usual)
        else:
            self._times_given = self._times_given + 1 if given == usual else 0
            self._usual_given = given
        if given > usual and is_usual:
            self._tell("skipped a batch, as never before: an error swallowed, or a batch left out")

    def step_ended(self, optimizer: Any) -> None:
        """What its closure does after the first time (L-BFGS) belongs to this step: as often as it likes."""
        if optimizer in self._stepped:
            self._stepped[optimizer] = self._of(optimizer), *self._stepped[optimizer][1:]

    def _of(self, optimizer: Any) -> int:
        """Backwards that it may have gradients of, so far: with a replica, only what came through one."""
        through = self._joint is not None and self._joint.of(optimizer).replica is not None
        return self._joint.through if self._joint is not None and through else self._backwards

    def _is_private(self, optimizer: Any) -> bool:
        if self._joint is None:
            return False
        past = self._joint.of(optimizer).past
        if past or not self._joint.private(optimizer):
            self._past = self._past + 1 if past else 0
        if self._past == PAST_STEPS and past:
            put_finding(self._box, ScriptFinding("left", self._steps.done, "trains on past DDP"))
        return self._joint.private(optimizer)

    def forward_begins(self, ddp: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        step = self._steps.done
        if step % PAIR_EVERY > 1 or not ddp.training or not sys.modules["torch"].is_grad_enabled():
            return
        at, before, equal = self._inputs.get(ddp, (-1, [], 0))
        if at == step or any(getattr(one, "is_cuda", False) for one in (*inputs, *named.values())):
            return  # of several micro-batches the first counts; and a device is not waited for
        now = leaf_digests([inputs, named], most=FEW_ELEMENTS, constants=True)  # of zeros, say: a reader filled up
        if step % PAIR_EVERY == 1 and at == step - 1:
            equal = equal + 1 if now == before and any(now) else 0
            if equal == PAIRS:
                since = step - PAIR_EVERY * (PAIRS - 1)
                self._tell(f"trains on one batch again and again, from about step {since} on")
        self._inputs[ddp] = step, now, equal

    def _tell(self, words: str) -> None:
        if words[:8] not in self._told:
            self._told.add(words[:8])
            put_finding(self._box, ScriptFinding("stale", self._steps.done + 1, words))


def collective_failed(error: BaseException) -> bool:
    """Whether an error says that a collective was begun and has failed: a lost peer, a timeout, another size."""
    names = {base.__name__ for base in type(error).__mro__}
    return is_victim(error) or "DistBackendError" in names or ("RuntimeError" in names and TRANSPORT in str(error))


def _world() -> Callable[[], Any]:
    """A reference to the process group of all ranks that there is now; to None, where there is none."""
    module: Any = distributed()
    world = None if module is None else module._world.default_pg
    return (lambda: None) if world is None else weakref.ref(world)


def _line_of(error: BaseException) -> str:
    """The innermost line of the user's that an exception has come through; else the one that called."""
    for frame, line in reversed([*walk_tb(error.__traceback__)]):
        if owner(frame.f_code.co_filename) is Owner.USER:
            return site_words(replace(frame_of(frame), line=line))
    return user_site() or "a line unknown"
