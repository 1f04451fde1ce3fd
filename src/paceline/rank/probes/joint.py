"""Tells which optimizers train what all ranks train together, and which steps are a rank's own business.

An optimizer is joint if some of its parameters belong to a `DistributedDataParallel`, or are sharded (FSDP, DTensor).
Gradients may also be averaged by hand: outside of these, it is joint if most of its steps come after a collective. All
else is private to the rank where there is a joint one: a probe, a temperature, an auxiliary model.

A joint optimizer may leave DDP: after steps through DDP it goes on with gradients of forwards past it. Such a step is
`past`: a rank that continues alone may do so. One that has no backward of its own is not: it is a step too many.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from paceline.rank.probes.hooks import Events

LEAST_STEPS = 4  # before most of them say anything
PRIVATE, BY_HAND, KEPT_EQUAL = range(3)  # how surely an optimizer is joint
SHARDED = ("_fsdp_flattened", "_is_flat_param", "device_mesh")


@dataclass
class Seen:
    """Counts since the process began."""

    backwards: int = 0
    forwards: int = 0  # of the optimizer's own replica
    synced: int = 0  # those after which gradients are reduced
    met: int = 0  # collectives, and forwards of any replica that are to be reduced


@dataclass
class Turn:
    """An optimizer, and what has happened since its last step."""

    own: bool = False  # parameters of a replica, or sharded ones
    replica: weakref.ref[Any] | None = None
    model: int = 0  # within the replica: its identity; 0: of no replica
    steps: int = 0
    met: int = 0  # steps since whose last one the rank has met others
    has_met: bool = False  # before the last step
    since: Seen | None = None  # what is new when a step begins; None: nothing is known
    past: bool = False
    before: Seen | None = None
    version: object = None

    @property
    def level(self) -> int:
        """How surely it is joint."""
        most = self.steps >= LEAST_STEPS and 2 * self.met > self.steps
        return KEPT_EQUAL if self.own else BY_HAND if most else PRIVATE


class Joint(Events):
    """Of this process's optimizers. It listens before those that ask it."""

    def __init__(self, calls: Callable[[], int]) -> None:
        """`calls` counts the collectives that the process has called."""
        self._calls = calls
        self._turns: WeakKeyDictionary[Any, Turn] = WeakKeyDictionary()
        self._replicas: WeakSet[Any] = WeakSet()
        self._made = 0
        self._forwards: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        self._stepped: WeakKeyDictionary[Any, Seen] = WeakKeyDictionary()  # by replica: until its last step
        self._taken_by: dict[int, int] = {}  # backwards until the last step of an optimizer, by its model
        self._trained: WeakSet[Any] = WeakSet()  # models within replicas that were stepped after a forward of theirs
        self._backwards = self._synced = 0
        self.through = 0
        """backwards that a forward of a replica came before"""
        self._pending = False  # such a forward
        self._own = False  # there was an optimizer of a replica

    @property
    def replicas(self) -> Iterator[Any]:
        """Those that there are."""
        return iter(self._replicas)

    @property
    def called(self) -> bool:
        """Whether a collective has been called yet."""
        return self._calls() > 0

    @property
    def version(self) -> object:
        """Another one when there are other replicas."""
        return self._made, len(self._replicas)

    def of(self, optimizer: Any) -> Turn:
        """What is known of it."""
        return (self._turns.get(optimizer) if self._turns else None) or Turn()

    def private(self, optimizer: Any) -> bool:
        """Whether its last step is the rank's own: another optimizer is joint, or it has left its replica."""
        turn = self.of(optimizer)
        return turn.past or turn.level < self.level

    @property
    def level(self) -> int:
        """That of the optimizer which is most surely joint."""
        return KEPT_EQUAL if self._own else max((turn.level for turn in self._turns.values()), default=PRIVATE)

    def replica_made(self, ddp: Any) -> None:
        self._replicas.add(ddp)
        self._made += 1

    def forward_begins(self, ddp: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if grad_enabled():
            synced = bool(ddp.require_backward_grad_sync)
            forwards, before = self._forwards.get(ddp, (0, 0))
            self._forwards[ddp] = forwards + 1, before + synced
            self._synced += synced
            self._pending = True

    def backward_begins(self, losses: Any) -> None:
        self._backwards += 1
        self.through += self._pending
        self._pending = False

    def step_begins(self, optimizer: Any) -> None:
        turn = self._turns.setdefault(optimizer, Turn())
        self._look_whose(turn, optimizer)
        now, before = self._seen(turn), turn.before or Seen()
        turn.since = new = Seen(
            now.backwards - max(before.backwards, self._taken(turn)),
            max(0, now.forwards - before.forwards),  # of a replica that is gone there are none
            max(0, now.synced - before.synced),
        )
        replica = turn.replica and turn.replica()
        gone = turn.replica is not None and replica is None
        left = new.backwards > 0 and not new.forwards
        turn.past = left and (gone or (replica is not None and replica.module in self._trained))
        if replica is not None and new.forwards:
            self._trained.add(replica.module)

    def step_ended(self, optimizer: Any) -> None:
        turn = self._turns.setdefault(optimizer, Turn())
        now = self._seen(turn)
        turn.steps += 1
        turn.has_met = now.met > (turn.before or Seen()).met
        turn.met += turn.has_met
        turn.before = now
        self._taken_by[turn.model] = now.backwards
        replica = turn.replica and turn.replica()
        if replica is not None:
            self._stepped[replica] = now
        self._own = self._own or turn.own

    def _taken(self, turn: Turn) -> int:
        """Backwards until the last step of an optimizer of another model: these were that one's."""
        return max((count for model, count in self._taken_by.items() if model != turn.model), default=0)

    def _seen(self, turn: Turn) -> Seen:
        replica = turn.replica and turn.replica()
        forwards, synced = (0, 0) if replica is None else self._forwards.get(replica, (0, 0))
        return Seen(self._backwards, forwards, synced, self._calls() + self._synced)

    def _look_whose(self, turn: Turn, optimizer: Any) -> None:
        version = self.version, [len(group["params"]) for group in optimizer.param_groups]
        if turn.version == version:
            return
        turn.version = version
        parameters = {id(one): one for group in optimizer.param_groups for one in group["params"]}
        replica = next(
            (ddp for ddp in self._replicas if any(id(one) in parameters for _, one in kept_equal(ddp))), None
        )
        if replica is not None and (turn.replica is None or turn.replica() is not replica):
            turn.replica, turn.model = weakref.ref(replica), id(replica.module)
            turn.before = self._stepped.get(replica, Seen(turn.before.backwards if turn.before else 0))
        turn.own = turn.own or replica is not None or any(map(is_sharded, parameters.values()))


def grad_enabled() -> bool:
    """Whether what goes forward now may go backward."""
    return bool(sys.modules["torch"].is_grad_enabled())


def kept_equal(ddp: Any) -> Iterator[tuple[str, Any]]:
    """The parameters that DDP keeps equal, with their names."""
    left_out: set[str] = getattr(ddp, "parameters_to_ignore", set())
    return ((name, one) for name, one in ddp.module.named_parameters() if name not in left_out)


def is_sharded(parameter: Any) -> bool:
    """Whether each rank holds a part of its own: of FSDP, or a DTensor."""
    return any(hasattr(parameter, name) for name in SHARDED)
