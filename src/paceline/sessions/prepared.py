"""A prepared model with its optimizer and scheduler.

A loop body runs once for each micro-batch of this rank in a global batch. The gradients of all but the last one are put
aside, so that no code can use them by mistake. `step` and the scheduler only act in the last one:

    micro-batch    backward                                          .grad afterwards         step()
    not the last   adds to the gradients that are put aside          as before, usually None  does nothing
    the last       adds, and sums over ranks: the mean of the batch  that sum                 updates

The model, optimizer and scheduler stay the objects of the user. Only methods that must wait are replaced, so
isinstance, param_groups, state_dict and earlier schedulers keep working.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from paceline.checkpoint.shards import checksum
from paceline.checkpoint.state import PrefixedSource, StateSource, TensorShard, read_matching_tensor
from paceline.collectives.buckets import is_present
from paceline.collectives.control import Deferred, all_gather_object, error_on_one_rank
from paceline.errors import UsageError
from paceline.sessions.session_step import SessionStep, is_mode_dependent
from paceline.sessions.sharded_tensors import ShardedGradientPlaceholder, distribute_like, local_shard
from paceline.stepping.trained_model import ModelInTraining
from paceline.strategies import optimizers
from paceline.strategies.base import Strategy
from paceline.strategies.validation import check_optimizer_parameters
from paceline.train.json_values import (
    as_json,
    from_json,
    hyperparameters_json,
    load_hyperparameters_json,
    param_group_settings,
    restore_type,
)

if TYPE_CHECKING:
    from paceline.train.adapters import InitialAdapters

NO_OTHER_BACKWARD = (
    ". Or it was torch.autograd.grad, for example for a gradient penalty: strategy 'fsdp' gathers the weights only "
    "for a moment, and cannot compute it. Use another strategy"
)
Grads = list[Tensor | None]
_grad, _tensor_version, _requires_grad = attrgetter("grad"), attrgetter("_version"), attrgetter("requires_grad")
_groups, _learning_rate = attrgetter("optimizer.param_groups"), itemgetter("lr")
"""for `map`, which is faster than a loop: they run in each step over all parameters"""
COMPARED_VALUE_NAMES = ("hooks", "trained", "gradients", "learning rates")


class PreparedOptimizer:
    """An optimizer of a prepared model, with its scheduler. They only act at the end of a step."""

    def __init__(self, part: "PreparedModel", optimizer: Any, scheduler: Any, number: int) -> None:
        """`number` counts all optimizers of the session from 0."""
        self.part, self.optimizer, self.scheduler, self.number = part, optimizer, scheduler, number
        self._update, self._clear, self._add_group = optimizer.step, optimizer.zero_grad, optimizer.add_param_group
        optimizer.step, optimizer.zero_grad, optimizer.add_param_group = self._step, self._zero_grad, self._add
        self._given = as_json(param_group_settings(optimizer))  # the settings of the script
        self.groups: list[dict[str, Any]] = []  # groups of the checkpoint that the script has not added yet
        self._extra: list[str] = [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
        if scheduler is not None:
            _held_back(scheduler, part.gate)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def json_state(self) -> dict[str, Any]:
        """Its state without tensors, as JSON: settings, additional entries, and the state of the scheduler."""
        state = self.optimizer.state_dict() if self._extra else {}
        extra = {key: as_json(state[key], "optimizer") for key in self._extra}
        settings = hyperparameters_json(self.optimizer, self.scheduler)
        classes = {"class": type(self.optimizer).__name__, "scheduler_class": type(self.scheduler).__name__}
        return {**settings, **classes, "given": self._given, "extra": extra}

    def load_json_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `json_state`, and print the settings that the script has changed since."""
        for key, value in (("class", self.optimizer), ("scheduler_class", self.scheduler)):
            name = type(value).__name__
            if (of_checkpoint := saved.get(key, name)) != name:
                code = "optimizer-class-differs" if key == "class" else "scheduler-class-differs"
                raise UsageError(code=code, number=self.number + 1, saved=of_checkpoint, found=name)
        saved_settings, groups = saved["given"], from_json(saved["groups"])
        num_groups = len(self.optimizer.param_groups)
        self.groups = groups[num_groups:]
        changed = [
            f"{f'group {number} ' if num_groups > 1 else ''}{name} {old.get(name)} -> {new.get(name)}"
            for number, (old, new) in enumerate(zip(from_json(saved_settings), from_json(self._given), strict=False), 1)
            for name in {**old, **new}
            if old.get(name) != new.get(name)
        ]
        if num_groups > len(groups):
            raise UsageError(code="parameter-groups-differ", saved=len(groups), number=self.number + 1, have=num_groups)
        load_hyperparameters_json(self.optimizer, self.scheduler, {**saved, "groups": as_json(groups[:num_groups])})
        if self._extra:
            extra = {key: from_json(value) for key, value in saved.get("extra", {}).items()}
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), **extra})
        if changed:
            note = f"optimizer {self.number + 1} keeps the checkpoint's settings, and ignores these of the script: "
            self.part.gate.notes.once(note + ", ".join(changed))

    def _add(self, group: dict[str, Any]) -> None:
        self._add_group(group)
        added_group = self.optimizer.param_groups[-1]
        try:
            self.part.check_added_group(added_group)
        except UsageError:
            self.optimizer.param_groups.pop()
            raise
        if self.groups:
            for name, value in self.groups.pop(0).items():
                added_group[name] = restore_type(added_group.get(name), value)
        self.part.on_groups_changed()
        self.part.load_pending_optimizer_state(self.optimizer, added_group["params"])

    def _step(self, closure: Any = None) -> Any:
        if closure is not None and not f"{type(self.optimizer).__module__}.".startswith("torch.optim."):
            raise UsageError(code="closure-called-several-times", optimizer=type(self.optimizer).__name__)
        loss = closure() if closure is not None else None
        self.optimizer._opt_called = True
        gate = self.part.gate
        if gate.begin_update(self.part, self.number):
            if gate.micro_step is not None:
                gate.micro_step.has_failed = True  # until the end: an error here leaves an incomplete step
            grads = self.part.check_before_update()
            if gate.observer is not None:
                gate.observer.on_update(self.part)
            self._update()
            self.part.after_update(grads)
            if gate.micro_step is not None:
                gate.micro_step.has_failed = False
        return loss

    _step._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess] - or torch's schedulers complain

    def _zero_grad(self, set_to_none: bool = True) -> None:
        # also before the last micro-batch, because it does not clear gradients that are put aside
        self._clear(set_to_none=set_to_none)
        self.part.after_zero_grad(self.optimizer, set_to_none=set_to_none)


class ForwardHook:
    """A hook on the forward of a model. In a copy of the model, also a pickled one, it does nothing."""

    def __init__(self, check: Callable[[nn.Module], None] | None = None) -> None:
        self._check = check

    def __call__(self, module: nn.Module, _: Any) -> None:
        if self._check is not None:
            self._check(module)

    def __reduce__(self) -> Any:
        return ForwardHook, ()


class PreparedModel(ModelInTraining):
    """A model that was passed to `Session.prepare`, and the replica that the strategy made."""

    def __init__(
        self, replica: Strategy, schedulers: Sequence[Any], number: int, gate: SessionStep,
        adapters: "InitialAdapters | None" = None,
    ) -> None:  # fmt: skip
        """`number` counts the models from 0; `gate` is the step of the session; `schedulers`: of each optimizer."""
        super().__init__(replica, number, gate.loss_scale)
        self.gate, self.adapters = gate, adapters
        self._carried: Grads | None = None  # sums of earlier backwards, of this step or an older batch
        self._at_begin: Grads | None = None  # at the start of a step that adds to the gradients of older batches
        self._used: list[tuple[weakref.ref[Tensor], int]] = []  # at the last update: a gradient of each optimizer
        self._adds_to_used = self._waiting = self._has_added = False
        """whether this step adds to used gradients; whether a checkpoint needs .grad; whether any step has added"""
        self._before: list[tuple[Tensor | None, int]] | None = None  # gradients and versions before a watched backward
        self._waiting_state: dict[str, dict[str, Any]] = {}  # of the checkpoint, for parameters without an optimizer
        self._summed: Grads | None = None  # gradients after the sum over ranks; None before it
        # gradients of the session: weak references and versions
        self._left: list[Any] = [None] * len(self._parameters)
        self._versions: list[int] = []
        self._versions_at_begin, self._weights_at_begin = list[int](), list[int]()  # of a micro-batch
        self._have_versions_effect = False  # whether a new version of a parameter has other values
        self._untrained, self._trained = list[nn.Parameter](), list[list[int]]()
        self._updates, self._changed, self._digests, self._digest = 0, list[int](), dict[int, int](), 0
        self._hooks_seen, self._is_single_rank_step = -1, False
        """hooks on leaves at the last backward; whether gradients equal those of a plain loop, also if torch makes them
        """
        self.optimizers: list[PreparedOptimizer] = []
        self._num_saved_optimizers = 0
        if len(replica.optimizers) > 1 and replica.local_step_node is not None:
            raise UsageError(code="one-optimizer-only")
        for optimizer, scheduler in zip(replica.optimizers, schedulers, strict=True):
            self._prepare_optimizer(optimizer, scheduler)
        if not replica.in_lockstep:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self.last_gradient.append)
        self.must_check = False  # whether a module or parameter was added since the last check
        self._modules = {id(module) for module in replica.model.modules()}
        self._known = {id(parameter) for parameter in self._parameters}
        replica.on_gradient(self._on_gradient)

        def on_forward(module: nn.Module) -> None:
            if replica.in_lockstep:
                gate.check_forward_allowed()
            if module is replica.model and module.training and gate.merged and depends_on_mode:
                text = "a model is evaluated in training mode, with dropout or batch statistics. Call model.eval()"
                gate.notes.once(text)
            elif module is replica.model and not module.training and has_rank_buffers:
                gate.check_evaluation()

        depends_on_mode = is_mode_dependent(replica.model)
        has_float_buffers = any(buffer.is_floating_point() for buffer in replica.model.buffers())
        has_rank_buffers = replica.virtual_ranks > 1 and has_float_buffers
        if depends_on_mode or has_rank_buffers or replica.in_lockstep:
            replica.model.register_forward_pre_hook(ForwardHook(on_forward))
        gate.parts.append(self)

    @property
    def optimizer(self) -> Any:
        return self.optimizers[0].optimizer

    def add_optimizer(self, optimizer: Any, scheduler: Any) -> None:
        """Add an optimizer of some of its parameters after `s.prepare` of the model.

        Raises:
            UsageError: the strategy does not support it, or two optimizers train the same parameter.
        """
        if self.replica.sharded or self.replica.local_step_node is not None:
            raise UsageError(code="optimizer-added-later" if self.replica.sharded else "one-optimizer-only")
        check_optimizer_parameters(self.replica.model, optimizer)
        optimizers.OptimizerSequence([*(opt.optimizer for opt in self.optimizers), optimizer])  # checks the parameters
        self._prepare_optimizer(optimizer, scheduler)

    def _prepare_optimizer(self, optimizer: Any, scheduler: Any) -> None:
        prepared = PreparedOptimizer(self, optimizer, scheduler, len(self.gate.optimizer_ids))
        self.gate.optimizer_ids += (id(optimizer),)
        self.optimizers.append(prepared)
        self.on_groups_changed()

    def on_groups_changed(self) -> None:
        trained = [{id(p) for p in opt.parameters} for opt in self.optimizers]
        self._untrained = [p for p in self._parameters if not any(id(p) in own for own in trained)]
        self._trained = [[i for i, p in enumerate(self._parameters) if id(p) in own] for own in trained]

    def has_optimizer_among(self, numbers: Sequence[int]) -> bool:
        return any(opt.number in numbers for opt in self.optimizers)

    def learning_rates(self) -> list[float]:
        return [*map(_learning_rate, chain.from_iterable(map(_groups, self.optimizers)))]

    def check_state_after_first_step(self) -> None:
        """Check that the state can be saved, and that all groups of the checkpoint exist."""
        if self.gate.saves:
            self.state()
        if self._waiting_state or any(opt.groups for opt in self.optimizers):
            raise UsageError(code="parameter-groups-missing")

    def begin_step(self) -> None:
        self._is_single_rank_step = self.replica.world.size == 1 and self.gate.has_one_body
        self._at_begin, self._summed = self.current_gradients() if self._waiting else None, None
        self.replica.save_buffers()

    def before_backward(self, wanted: bool, watched: bool) -> None:
        """Before a backward: its gradients are added to those that are put aside, or dropped if not `wanted`."""
        grads: Grads = [*map(_grad, self._parameters)]
        first = next(filter(is_present, grads), None)
        hooks = self.gate.tensor_hooks
        assert hooks is not None
        self.may_have_hooks = self._own_hooks < 0 or self._hooks_seen != hooks.on_leaves
        self._hooks_seen = hooks.on_leaves
        if self.last_gradient:
            raise self._foreign_backward_error()
        if first is not None:
            self._check_assigned(grads)
        if self.must_check:
            self.check_parameters()
        if first is not None:
            if any(isinstance(grad, ShardedGradientPlaceholder) for grad in grads):
                raise UsageError(code="gradients-not-cleared")
            used = {id(grad): version for ref, version in self._used if (grad := ref()) is not None}
            is_used = any(used.get(id(grad)) == _version(grad) for grad in grads if id(grad) in used)
            self._adds_to_used = is_used or (self._adds_to_used and bool(local_shard(first).any()))
            self._carried = grads
            self._put(None)
        elif self._carried is None:
            self._adds_to_used = False
        if wanted and self.aside is not None:
            self._put(self.aside)
        self._before = [(p.grad, _version(p.grad)) for p in self._parameters] if watched else None

    @property
    def has_received_gradients(self) -> bool:
        """After a backward: whether any parameter got a gradient; True if the backward was not watched."""
        if self._before is None:
            return True
        current = [(p.grad, _version(p.grad)) for p in self._parameters]
        pairs = zip(current, self._before, strict=True)
        return any(
            grad is not None and (grad is not before or version != then) for (grad, version), (before, then) in pairs
        )

    def set_gradients_aside(self, reached: bool) -> None:
        """After a backward, except the last of the step. If it has not `reached` the model, .grad does not change."""
        grads = self.current_gradients()
        self.aside = grads if any(map(is_present, grads)) else None
        self._put(None)
        if not reached:
            self.discard_backward()

    def discard_backward(self) -> None:
        """After a backward without gradients for this model: restore the gradients before it."""
        self._put(self._carried)
        self._carried = None

    def sync_gradients(self, divisor: float | Tensor, *, agreed: bool) -> bool | Deferred[bool] | None:
        self.aside = None
        result = super().sync_gradients(divisor, agreed=agreed)
        self._waiting = True
        if self._carried is not None:
            self._has_added |= self._adds_to_used  # not earlier: only some ranks may take a backward that is dropped
            for parameter, carried in zip(self._parameters, self._carried, strict=True):
                if carried is not None:
                    parameter.grad = carried if parameter.grad is None else parameter.grad.add_(carried)
            self._carried = result = self._found = None
        if self.replica.hides_gradients:
            for parameter in self._parameters:
                parameter.grad = ShardedGradientPlaceholder.of(parameter)
        return result

    def run_hooks(self, *, after_accumulation: bool) -> None:
        if self._hooked:
            super().run_hooks(after_accumulation=after_accumulation)
        # the last that happens to gradients before the loop sees them
        if after_accumulation and not self._is_single_rank_step:
            grads: Grads = [*map(_grad, self._parameters)]
            self._note_left(grads)
            if self.replica.world.size > 1 and not (self.replica.sharded or self.replica.local_step_node is not None):
                self._summed = grads

    def record_grad_versions(self, shown: Grads | None = None) -> None:
        if not self._is_single_rank_step:
            self._note_left(self.current_gradients() if shown is None else shown)

    def abort_step(self) -> None:
        self.aside = self._carried = None
        self._put(self._at_begin)
        self._waiting = self._at_begin is not None
        super().abort_step()

    def state(self) -> list[TensorShard]:
        """All tensors of its state, under names with `prefix`."""
        # gradients that the loop adds up over several batches
        gradients = self.replica.gradients() if self._waiting else ()
        added = self.optimizers[len(self.replica.optimizers) :]
        others = [
            shard for opt in added for shard in optimizers.full_optimizer_state(self.replica.model, opt.optimizer)
        ]
        gradient_shards = [replace(shard, name=f"{self.prefix}gradient/{shard.name}") for shard in gradients]
        return super().state() + [replace(shard, name=self.prefix + shard.name) for shard in others] + gradient_shards

    def load(self, source: StateSource) -> None:
        source = PrefixedSource(source, self.prefix) if self.prefix else source
        self.replica.load(source)
        for name, parameter in self.replica.model.named_parameters():
            if f"gradient/{name}" in source.names(f"gradient/{name}"):
                saved = read_matching_tensor(source, f"gradient/{name}", parameter)
                parameter.grad = distribute_like(saved, like=parameter)
                self._waiting = True
        self._note_left(self.current_gradients())
        if not self.replica.sharded:
            trained = {id(p) for opt in self.optimizers for p in opt.parameters}
            for name, parameter in self.replica.model.named_parameters():
                if id(parameter) not in trained and (state := optimizers.read_saved_parameter_state(source, name)):
                    self._waiting_state[name] = state

    def load_pending_optimizer_state(self, optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
        """Restore the state of a checkpoint for parameters that an optimizer trains from now on."""
        parameter_ids = {id(parameter) for parameter in parameters}
        named = {name: p for name, p in self.replica.model.named_parameters() if id(p) in parameter_ids}
        optimizers.set_parameter_states(named, optimizer, {name: self._waiting_state.pop(name, {}) for name in named})

    def json_state(self) -> dict[str, Any]:
        """The rest of its state, as JSON: the state of its optimizers and schedulers without tensors."""
        first, *others = (opt.json_state() for opt in self.optimizers)
        frozen = [name for name, p in zip(self._names(), self._parameters, strict=True) if not p.requires_grad]
        numbers = {**first, **({"others": others} if others else {}), **({"frozen": frozen} if frozen else {})}
        adapters = {"adapters": msgspec.to_builtins(self.adapters)} if self.adapters else {}
        return numbers | adapters | (self.scale.json_state() if self.scale else {})

    def load_json_state(self, state: Mapping[str, Any], number: int = 0) -> None:
        """Restore the result of `json_state` for one of its optimizers."""
        if self.scale is not None:
            self.scale.load_json_state(state)
        frozen = {*state.get("frozen", ())}
        for name, parameter in zip(self._names(), self._parameters, strict=True):
            if name in frozen:  # the script froze it in a part that does not run again
                parameter.requires_grad_(False)
        if self.adapters is not None and "adapters" in state and number == 0:
            self.adapters, is_same = self.adapters.with_saved_digests(
                msgspec.convert(state["adapters"], type(self.adapters))
            )
            if not is_same:
                self.gate.notes.once(
                    "the base weights of the adapter differ from those of the saved run, which the checkpoint restores"
                )
        all_numbers = [state, *state.get("others", ())]
        self._num_saved_optimizers = len(all_numbers)
        if number >= len(all_numbers):
            raise UsageError(code="optimizer-too-many", saved=len(all_numbers))
        self.optimizers[number].load_json_state(all_numbers[number])

    def check_all_optimizers_prepared(self) -> None:
        """Raise UsageError if the checkpoint has more optimizers of the model than the script has prepared."""
        if (saved := self._num_saved_optimizers) > len(self.optimizers):
            raise UsageError(code="optimizer-missing", saved=saved, prepared=len(self.optimizers))

    # called by its optimizers

    def check_before_update(self) -> Grads:
        """Before an update: check that `s.backward` made the gradients, and that ranks agree. Returns the gradients."""
        gradients: Grads = [*map(_grad, self._parameters)]
        if self.last_gradient:
            raise self._foreign_backward_error()
        self._updates += 1
        if self._updates <= 2 and self.gate.micro_step is not None:
            self._check_same_parameters()
        if self._summed is None or self.gate.micro_step is None:
            return gradients
        changed: list[int] = []
        if not all(map(is_, gradients, self._summed)) or _versions(gradients) != self._versions:
            changed = self._changed_since()
        is_early = self._updates <= 2
        if is_early:  # also finds changes of p.grad.data, which do not change the version
            indices = range(len(self._parameters))
        elif changed and changed == self._changed and self._updates & (self._updates - 1):
            indices = [changed[self._updates % len(changed)]]  # a different one in each step
        else:
            indices = changed
        self._changed = changed
        if indices or self._digests:
            self._digests = {i: _digest(self._parameters[i].grad) for i in indices}
            self._digest = hash(tuple(self._digests.items()))
        if is_early and (differing := self.first_differing_gradient()):
            raise error_on_one_rank(UsageError(code="gradients-differ", what=differing), self.replica.world)
        return gradients

    def _check_same_parameters(self) -> None:
        """Raise UsageError if a forward has written values of its samples into a parameter (a collective)."""
        replica = self.replica
        has_shards = replica.sharded and not replica.hides_gradients  # of the parameters
        if replica.world.size == 1 or has_shards or replica.local_step_node is not None:
            return
        by_rank: list[list[int]] = all_gather_object([*map(_digest, self._parameters)], replica.world)
        for name, *digests in zip(self._names(), *by_rank, strict=True):
            if len({*digests}) > 1:
                raise error_on_one_rank(UsageError(code="parameter-written", name=name), replica.world)

    def _changed_since(self) -> list[int]:
        """The numbers of the parameters whose gradients the loop has changed since the sum over ranks."""
        assert self._summed is not None
        grads = self.current_gradients()
        pairs = enumerate(zip(grads, _versions(grads), self._summed, self._versions, strict=True))
        return [i for i, (grad, version, before, then) in pairs if grad is not before or version != then]

    def values_to_compare(self) -> tuple[int, ...]:
        """Numbers that must be equal on all ranks in each step. `COMPARED_VALUE_NAMES` has their names.

        Hooks, trained parameters, gradients that the loop has changed; learning rates and the number of updates.
        """
        trained = hash(tuple(map(_requires_grad, self._parameters)))
        return self.hooks, trained, self._digest, hash((self._updates, *map(float, self.learning_rates())))

    def first_differing_gradient(self) -> str:
        """The first parameter whose changed gradient differs between ranks; empty if there is none (a collective)."""
        by_rank: list[dict[str, int]] = all_gather_object(
            {str(i): digest for i, digest in self._digests.items()}, self.replica.world
        )
        differing = (i for digests in by_rank for i in digests if any(other.get(i) != digests[i] for other in by_rank))
        return next((self._names()[int(i)] for i in differing), "")

    def current_gradients(self) -> Grads:
        return [*map(_grad, self._parameters)]

    def after_update(self, gradients: Grads) -> None:
        """After an update. `shown`: the gradients before it, because a strategy may have released them."""
        if self._adds_to_used:
            self.gate.notes.once(
                "optimizer.step() was called twice without zero_grad(): the gradients of older batches are added"
            )
        if self.replica.sharded or self.replica.local_step_node is not None or self._changed:
            self._put(gradients)
        # If later steps add to the gradients, a checkpoint contains them. After the first step this is not known yet.
        is_first = self._updates <= len(self.optimizers)
        may_add = self._has_added or is_first or any(map(is_present, map(_grad, self._untrained)))
        self._waiting = may_add and not self.replica.hides_gradients
        of_each: Iterable[Iterable[Tensor | None]] = (gradients,)
        if len(self.optimizers) > 1 and not self.replica.sharded:
            of_each = (map(gradients.__getitem__, own) for own in self._trained)
        used: list[tuple[weakref.ref[Tensor], int]] = []
        for own in of_each:
            if (first := next(filter(is_present, own), None)) is not None:
                used.append((weakref.ref(first), _version(first)))
        self._used = used or self._used

    def after_zero_grad(self, optimizer: Any, *, set_to_none: bool) -> None:
        """After an optimizer has cleared the gradients of its parameters, as torch does."""
        if self.replica.sharded:  # the optimizer has pieces of the parameters
            self.replica.clear_gradients(optimizer, set_to_none=set_to_none)
        clears_all = self.replica.sharded or (len(self.optimizers) == 1 and not self._untrained)
        self._waiting = not clears_all and any(p.grad is not None for p in self._parameters)
        # the optimizer may be one of several, and the gradients of others be put aside
        self._adds_to_used = self._adds_to_used and not clears_all and (self._waiting or self._carried is not None)

    # checks

    def on_module_changed(self, module: nn.Module) -> None:
        """A module or parameter was added to `module`."""
        self.must_check = self.must_check or id(module) in self._modules

    def check_added_group(self, group: Mapping[str, Any]) -> None:
        """Raise UsageError if a group contains parameters of other models."""
        names = {id(parameter): name for name, parameter in self.replica.model.named_parameters()}
        if self.replica.sharded:
            raise unprepared_parameters_error(
                "a group of parameters was added, and the strategy divides the optimizer's state"
            )
        for parameter in group["params"]:
            if id(parameter) in names and id(parameter) not in self._known:
                raise unprepared_parameters_error(
                    f"optimizer.add_param_group was given {names[id(parameter)]}, which was frozen in s.prepare. Let "
                    "it require a gradient there, and freeze it after that"
                )
            if id(parameter) not in names:
                shape = tuple(parameter.shape)
                raise unprepared_parameters_error(
                    f"optimizer.add_param_group was given a parameter of shape {shape} that is new"
                )

    def check_parameters(self) -> None:
        """Raise UsageError if the model or its optimizers have other parameters than in `s.prepare`."""
        self.must_check = False
        model = self.replica.model
        self._modules = {id(module) for module in model.modules()}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise unprepared_parameters_error(f"{name} is new, or was frozen then")
        if self.replica.sharded:
            return
        parameter_ids = {id(parameter) for parameter in model.parameters()}
        for opt in self.optimizers:
            for parameter in opt.parameters:
                if id(parameter) not in parameter_ids:
                    shape = tuple(parameter.shape)
                    raise unprepared_parameters_error(f"optimizer {opt.number + 1} trains one of shape {shape}")

    def _foreign_backward_error(self) -> UsageError:
        parameter = self.last_gradient.pop()
        named = self.replica.model.named_parameters()
        name = next((name for name, p in named if p is parameter), "of a model")
        what = f"loss.backward() or torch.autograd.backward() has reached parameter {name}"
        return UsageError(code="gradient-not-from-backward", what=what)

    def begin_micro_batch(self) -> None:
        self._versions_at_begin = [*map(_tensor_version, self._parameters)]
        if self.gate.checks_losses:
            self._weights_at_begin = self._weight_checksums()

    def check_between_micro_batches(self) -> None:
        if self.last_gradient:
            raise self._foreign_backward_error()
        self._check_assigned(self.current_gradients())
        self._check_weights()

    def _check_weights(self) -> None:
        before, after = self._versions_at_begin, [*map(_tensor_version, self._parameters)]
        if self.gate.checks_losses:  # also finds changes of p.data
            # a loop that changes weights without effect, for example restores them, may do so in later steps as well
            self._have_versions_effect = before == after
            before, after = self._weights_at_begin, self._weight_checksums()
        elif not self._have_versions_effect:
            return
        changed = [number for number, pair in enumerate(zip(before, after, strict=True)) if len({*pair}) > 1]
        if changed:
            raise UsageError(code="weights-changed-in-step", name=self._names()[changed[0]])

    def _weight_checksums(self) -> list[int]:
        checksums = [checksum(local_shard(parameter.detach())) for parameter in self._parameters]
        return torch.stack(checksums).tolist() if checksums else []  # one read of a GPU

    def _check_assigned(self, grads: Grads) -> None:
        """Raise UsageError for a gradient that does not come from a backward or a step of this session."""
        if self._is_single_rank_step:
            return
        for number, (grad, session_ref) in enumerate(zip(grads, self._left, strict=True)):
            if grad is not None and (session_ref is None or session_ref() is not grad):
                raise UsageError(
                    code="gradient-not-from-backward",
                    what=f"parameter {self._names()[number]} was given one by the loop",
                )

    def _names(self) -> list[str]:
        names_by_id = {id(p): name for name, p in self.replica.model.named_parameters()}
        return [names_by_id.get(id(p), "?") for p in self._parameters]

    def _put(self, grads: Grads | None) -> None:
        for parameter, grad in zip(self._parameters, grads or [None] * len(self._parameters), strict=True):
            parameter.grad = grad
        if grads is not None and not self._is_single_rank_step:
            self._note_left(grads)

    def _note_left(self, grads: Grads) -> None:
        try:
            self._left, self._versions = [*map(weakref.ref, grads)], [*map(_tensor_version, grads)]
        except TypeError:  # None
            self._left = [None if grad is None else weakref.ref(grad) for grad in grads]
            self._versions = _versions(grads)

    def _on_gradient(self, _: Tensor) -> None:
        if not self.gate.in_backward:
            raise UsageError(code="torch-backward", more=self.replica.in_lockstep * NO_OTHER_BACKWARD)


def unprepared_parameters_error(what: str) -> UsageError:
    return UsageError(code="parameters-differ", what=what)


def _held_back(scheduler: Any, gate: SessionStep) -> None:
    """Let `scheduler.step` only act at the end of a step. It replaces the class: attributes are part of the state."""
    cls: Any = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.step(self, *args, **kwargs) if gate.is_final_micro_batch else None

    scheduler.__class__ = type(cls.__name__, (cls,), {"step": step, "__module__": cls.__module__})


def _versions(grads: Grads) -> list[int]:
    try:
        return [*map(_tensor_version, grads)]
    except AttributeError:  # of None
        return [-1 if grad is None else _tensor_version(grad) for grad in grads]


def _version(grad: Tensor | None) -> int:
    if type(grad) is Tensor:
        return grad._version  # pyright: ignore[reportPrivateUsage]
    if grad is None:
        return -1
    # a change of a DTensor counts in one of the two: in its own if the loop makes it, in its shard's in a backward
    return grad._version + local_shard(grad)._version  # pyright: ignore[reportPrivateUsage]


def _digest(grad: Tensor | None) -> int:
    if grad is None:
        return 0
    return int(checksum(grad.coalesce().values() if grad.is_sparse else grad))
