"""Counts the steps and times the phases of an unmodified script, and finds the steps that all ranks take together.

The steps are those of the joint optimizer with most steps. The time between hooks is code of the script. With DDP a
rank waits for the others in backward, for rank 0 in the forward of a model with buffers, and in its collectives.

An optimizer is joint if some of its parameters belong to a `DistributedDataParallel` or are sharded (FSDP, DTensor). A
script may also average gradients itself: any other optimizer is joint if most of its steps follow a collective. If
there is a joint optimizer, all others are private to the rank: a probe, a temperature, an auxiliary model.

A joint optimizer may leave DDP: after steps through DDP it steps with gradients of forwards that bypass DDP. Such a
step `bypasses_ddp`. It may be intended on a rank that continues alone. A step without a new backward does not bypass
DDP: it is an additional step.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from paceline.protocol.evidence import Phase
from paceline.protocol.status_page import StatusPage
from paceline.rank.probes import ScriptListener, wrap_function

MIN_CLASSIFIED_STEPS = 4  # of an optimizer, before they classify it
PRIVATE, BY_HAND, KEPT_EQUAL = range(3)  # evidence that an optimizer is joint
SHARDED_MARKER_ATTRIBUTES = ("_fsdp_flattened", "_is_flat_param", "device_mesh")
USUAL_STEP_WINDOW = 15  # recent steps that define the usual step
UNUSUAL_FACTOR, UNUSUAL_NS = 3, 10_000_000
CORRECTED_PHASES: Sequence[Phase] = (Phase.USER, Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER)


@dataclass
class StepCounts:
    """Counts since the start of the process."""

    backwards: int = 0
    forwards: int = 0  # of the optimizer's replica
    synced_forwards: int = 0  # forwards after which gradients are reduced
    communications: int = 0  # collectives, and forwards of any replica with a reduction


@dataclass
class OptimizerHistory:
    has_shared_parameters: bool = False  # whether it has parameters of a replica, or sharded ones
    replica: weakref.ref[Any] | None = None
    model_id: int = 0  # id of the model in the replica; 0: no replica
    steps: int = 0
    communicated_steps: int = 0  # steps before which the rank communicated with others
    has_communicated: bool = False  # whether the last step was such a step
    counts_since_step: StepCounts | None = None  # counts between the last two steps; None: unknown
    bypasses_ddp: bool = False
    counts_at_last_step: StepCounts | None = None
    version: object = None

    @property
    def evidence_level(self) -> int:
        usually_met = self.steps >= MIN_CLASSIFIED_STEPS and 2 * self.communicated_steps > self.steps
        return KEPT_EQUAL if self.has_shared_parameters else BY_HAND if usually_met else PRIVATE


class SyncedOptimizerDetector(ScriptListener):
    """Finds the joint optimizers of this process. It must listen before the listeners that use it."""

    def __init__(self, calls: Callable[[], int]) -> None:
        """`calls` counts the collectives that the process has called."""
        self.num_calls = calls
        self._turns: WeakKeyDictionary[Any, OptimizerHistory] = WeakKeyDictionary()
        self.replicas: WeakSet[Any] = WeakSet()
        self._made = 0
        self._forwards: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        self._stepped: WeakKeyDictionary[Any, StepCounts] = WeakKeyDictionary()  # by replica: until its last step
        self._taken_by: dict[int, int] = {}  # backwards until the last step of an optimizer, by its model
        self._trained: WeakSet[Any] = WeakSet()  # models in replicas with a step after a forward of the replica
        self._backwards = self._synced = 0
        self.through = 0  # the number of backwards that followed a forward of a replica
        self._pending = False  # a forward of a replica without a backward yet
        self._own = False  # whether there was an optimizer of a replica

    @property
    def replicas_version(self) -> object:
        """A value that changes with the replicas."""
        return self._made, len(self.replicas)

    def history_of(self, optimizer: Any) -> OptimizerHistory:
        return (self._turns.get(optimizer) if self._turns else None) or OptimizerHistory()

    def is_last_step_local(self, optimizer: Any) -> bool:
        """Whether its last step is private to the rank: another optimizer is joint, or it has left its replica."""
        history = self.history_of(optimizer)
        return history.bypasses_ddp or history.evidence_level < self.highest_evidence_level

    @property
    def highest_evidence_level(self) -> int:
        if self._own:
            return KEPT_EQUAL
        return max((history.evidence_level for history in self._turns.values()), default=PRIVATE)

    def on_replica_created(self, ddp: Any) -> None:
        self.replicas.add(ddp)
        self._made += 1

    def on_forward_begin(self, ddp: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if sys.modules["torch"].is_grad_enabled():
            synced = bool(ddp.require_backward_grad_sync)
            forwards, synced_before = self._forwards.get(ddp, (0, 0))
            self._forwards[ddp] = forwards + 1, synced_before + synced
            self._synced += synced
            self._pending = True

    def on_backward_begin(self, losses: Any) -> None:
        self._backwards += 1
        self.through += self._pending
        self._pending = False

    def on_step_begin(self, optimizer: Any) -> None:
        history = self._turns.setdefault(optimizer, OptimizerHistory())
        self._find_replica(history, optimizer)
        now, before = self._current_counts(history), history.counts_at_last_step or StepCounts()
        # backwards until the last step of an optimizer of another model belong to that optimizer
        of_others = max((count for model, count in self._taken_by.items() if model != history.model_id), default=0)
        history.counts_since_step = new = StepCounts(
            now.backwards - max(before.backwards, of_others),
            max(0, now.forwards - before.forwards),  # a deleted replica has no count
            max(0, now.synced_forwards - before.synced_forwards),
        )
        replica = history.replica and history.replica()
        is_deleted = history.replica is not None and replica is None
        bypasses_ddp = new.backwards > 0 and not new.forwards
        is_trained = replica is not None and replica.module in self._trained
        history.bypasses_ddp = bypasses_ddp and (is_deleted or is_trained)
        if replica is not None and new.forwards:
            self._trained.add(replica.module)

    def on_step_end(self, optimizer: Any) -> None:
        history = self._turns.setdefault(optimizer, OptimizerHistory())
        now = self._current_counts(history)
        history.steps += 1
        history.has_communicated = now.communications > (history.counts_at_last_step or StepCounts()).communications
        history.communicated_steps += history.has_communicated
        history.counts_at_last_step = now
        self._taken_by[history.model_id] = now.backwards
        replica = history.replica and history.replica()
        if replica is not None:
            self._stepped[replica] = now
        self._own = self._own or history.has_shared_parameters

    def _current_counts(self, history: OptimizerHistory) -> StepCounts:
        replica = history.replica and history.replica()
        forwards, synced = (0, 0) if replica is None else self._forwards.get(replica, (0, 0))
        return StepCounts(self._backwards, forwards, synced, self.num_calls() + self._synced)

    def _find_replica(self, history: OptimizerHistory, optimizer: Any) -> None:
        version = self.replicas_version, [len(group["params"]) for group in optimizer.param_groups]
        if history.version == version:
            return
        history.version = version
        parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        owners = (ddp for ddp in self.replicas if any(id(p) in parameters for _, p in synced_parameters(ddp)))
        replica = next(owners, None)
        if replica is not None and (history.replica is None or history.replica() is not replica):
            history.replica, history.model_id = weakref.ref(replica), id(replica.module)
            backwards = history.counts_at_last_step.backwards if history.counts_at_last_step else 0
            history.counts_at_last_step = self._stepped.get(replica, StepCounts(backwards))
        history.has_shared_parameters |= replica is not None or any(map(is_sharded, parameters.values()))


def synced_parameters(ddp: Any) -> Iterator[tuple[str, Any]]:
    """The parameters that DDP keeps equal, with their names."""
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    return ((name, p) for name, p in ddp.module.named_parameters() if name not in ignored)


def is_sharded(parameter: Any) -> bool:
    """Whether each rank holds a different part: FSDP, or a DTensor."""
    return any(hasattr(parameter, name) for name in SHARDED_MARKER_ATTRIBUTES)


class StepCounter(ScriptListener):
    """Counts steps. With the guard off, it is the only probe."""

    def __init__(self, page: StatusPage, joint: SyncedOptimizerDetector | None = None) -> None:
        self._page, self.joint = page, joint or SyncedOptimizerDetector(lambda: 0)
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._level = self._alone = 0
        self.done = 0

    def on_step_end(self, optimizer: Any) -> None:
        history = self.joint.history_of(optimizer)
        if history.bypasses_ddp:
            return
        before = max(0, self.done - self._alone - 1)  # a later optimizer steps along with the others, or after them
        self._counts[optimizer] = count = self._counts.get(optimizer, before) + 1
        if self.joint.is_last_step_local(optimizer):
            return
        if self.joint.highest_evidence_level > self._level:  # the rank took the steps so far alone
            self._level, self._counts[optimizer] = self.joint.highest_evidence_level, (count := history.steps)
            self._alone = max(0, self.done + 1 - count)
            self._page.put("alone", self._alone)
        if count + self._alone > self.done:
            self.done = count + self._alone
            self._page.set_step(self.done)


class PhaseTracker(StepCounter):
    def __init__(self, page: StatusPage, joint: SyncedOptimizerDetector | None = None) -> None:
        super().__init__(page, joint)
        self._steps_ns = {phase: deque[int](maxlen=USUAL_STEP_WINDOW) for phase in CORRECTED_PHASES}
        self._seen_ns = dict.fromkeys(CORRECTED_PHASES, 0)

    @staticmethod
    def _enter(phase: Phase) -> Any:
        def enter(self: PhaseTracker, *_: Any) -> None:
            self._page.enter(phase)

        return enter

    on_batch_requested = _enter(Phase.DATA)
    on_batch_received = on_epoch_end = on_forward_end = on_backward_end = _enter(Phase.USER)
    on_forward_begin = on_buffers_received = _enter(Phase.FORWARD)
    on_buffers_broadcast = _enter(Phase.SYNC)
    on_backward_begin = _enter(Phase.BACKWARD)
    on_step_begin = _enter(Phase.OPTIMIZER)

    def on_exception(self, where: str, error: BaseException) -> None:
        if not self._page.get("released"):  # an error from the guard itself is not progress
            self._page.enter(Phase.USER)

    def on_step_end(self, optimizer: Any) -> None:
        self._page.enter(Phase.USER)
        before = self.done
        super().on_step_end(optimizer)
        if self.done > before:
            self._reassign_unusual_time()

    def _reassign_unusual_time(self) -> None:
        """Move the time of evaluations, checkpoints and other work between steps to phase EVALUATE."""
        for phase, steps_ns in self._steps_ns.items():
            spent_ns = self._page.spent_ns[phase] - self._seen_ns[phase]
            if len(steps_ns) >= MIN_CLASSIFIED_STEPS:
                usual_ns = UNUSUAL_FACTOR * int(median(steps_ns)) + UNUSUAL_NS
                if spent_ns > usual_ns:
                    self._page.move_time(phase, Phase.EVALUATE, spent_ns - usual_ns)
            steps_ns.append(spent_ns)
            self._seen_ns[phase] = self._page.spent_ns[phase]


class JoinContextDetector(ScriptListener):
    """Sets the counter `uneven` when a script enters torch's Join: ranks may then take different numbers of steps."""

    def __init__(self, page: StatusPage) -> None:
        self._page = page

    def on_torch_imported(self) -> None:
        join_class: Any = sys.modules["torch.distributed.algorithms.join"].Join
        wrap_function(join_class, "__enter__", before=lambda _: self._page.put("uneven", 1))
