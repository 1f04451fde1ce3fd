"""The checks of a training loop: that ranks agree, and that the loop trains only prepared models."""

import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.collectives.control import all_gather_object, error_on_one_rank, raise_on_all_ranks
from paceline.data.fingerprint import UNSTABLE_DATASET_TEXT
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.seeding import preserve_generator_states
from paceline.sessions.containers import find_live_instances
from paceline.sessions.loader import Loader
from paceline.sessions.prepared import COMPARED_VALUE_NAMES, unprepared_parameters_error
from paceline.sessions.session_step import LoopPosition, SessionStep
from paceline.sessions.state import SessionState
from paceline.stepping.hooks import TensorHookTracker
from paceline.stepping.order import CollectiveOrderCheck

SLOW_READ_SECONDS = 1.0  # if reading a few samples takes longer, they are read only once
WEIGHT_RATIO_TOLERANCE = 1e-6  # counts are sums in float32


class LoopChecks:
    def __init__(
        self, world: World, state: SessionState, step: SessionStep, position: LoopPosition, order: CollectiveOrderCheck
    ) -> None:
        """Install hooks of torch, until `close`. `order` sends numbers of each step to the other ranks."""
        self._world, self._state, self._step, self._position, self._order = world, state, step, position, order
        self._fingerprints: dict[int, tuple[Any, dict[str, Any], int | None]] = {}
        """(dataset, fingerprint, probe) by id of the dataset, after the comparison over ranks"""
        self._foreign_tensors = UnpreparedTensorTracker()
        order.explain, order.names = self._explain, self._compared_names
        step.tensor_hooks = tensor_hooks = TensorHookTracker()
        self._hooks = [
            tensor_hooks,
            register_module_module_registration_hook(self._note_added),
            register_module_parameter_registration_hook(self._note_added),
            register_optimizer_step_pre_hook(self._check_optimizer),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def fingerprint_data(self, loader: Loader) -> dict[str, Any]:
        """The fingerprint of its data. The first call compares it over ranks (a collective)."""
        data = loader.dataset
        if (record := self._fingerprints.get(id(data))) is not None:
            if record[2] is None:
                return record[1]
            with preserve_generator_states():
                if (probe := loader.data_checksum()) != record[2]:  # the loop has changed it
                    self._fingerprints[id(data)] = record = (data, loader.fingerprint(), probe)
            return record[1]
        began = time.perf_counter()
        with preserve_generator_states(), raise_on_all_ranks(self._world):
            fingerprint = loader.fingerprint()
        is_slow = time.perf_counter() - began > SLOW_READ_SECONDS and "checksum of all of them" not in fingerprint
        by_rank: list[tuple[dict[str, Any], bool]] = all_gather_object((fingerprint, is_slow), self._world)
        texts = [str(rank_fingerprint) for rank_fingerprint, _ in by_rank]
        if len({*texts}) > 1:
            differences = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts))
            raise error_on_one_rank(UsageError(code="data-differ", what=differences), self._world)
        # a stream has no number of samples
        can_probe = "samples" in fingerprint and UNSTABLE_DATASET_TEXT not in fingerprint.values()
        can_probe = can_probe and not any(is_slow for _, is_slow in by_rank)
        with preserve_generator_states():
            self._fingerprints[id(data)] = (data, fingerprint, loader.data_checksum() if can_probe else None)
        return fingerprint

    def set_compared_values(self, loader: Loader) -> None:
        """Compare values that must be equal on all ranks in this step. `_compared_names` has their names."""
        position = self._position
        data = self._fingerprints[id(loader.dataset)][2] or 0
        order = loader.order.hash_at(position.batch) if loader.order else loader.plan.num_samples
        numbers = (position.epoch, position.loop_in_run, position.batch, data, order)
        for part in self._state.models:
            numbers += part.values_to_compare()
        self._order.compared = numbers

    def _compared_names(self) -> list[str]:
        part_names = [f"{name} {part.number}" for part in self._state.models for name in COMPARED_VALUE_NAMES]
        return ["epoch", "loop", "batch", "data", "order", *part_names]

    def _explain(self, differing: dict[str, list[int]]) -> UsageError:
        place = str(self._position)
        places = [name for name in ("epoch", "loop", "batch") if name in differing]
        gradients = [part for part in self._state.models if f"gradients {part.number}" in differing]
        if places:
            positions = "; ".join(f"{name} {', '.join(map(str, differing[name]))}" for name in places)
            return UsageError(code="places-differ", what=f"{positions} on ranks 0 to {self._world.size - 1}")
        if "order" in differing:
            return UsageError(code="order-differs", what=f"at {place} of a loop over the data")
        if gradients:
            self._state.is_damaged = True
            return UsageError(code="gradients-differ", what=gradients[0].first_differing_gradient())
        if "data" in differing:
            return UsageError(code="data-differ", what=f"at {place}: the loop changed it differently on each rank")
        if any(name.startswith("trained") for name in differing):
            self._state.is_damaged = True
            return unprepared_parameters_error(f"some ranks have frozen parameters that others train, at {place}")
        if any(name.startswith("learning rates") for name in differing):
            self._state.is_damaged = True
            return UsageError(code="learning-rates-differ", place=place)
        return UsageError(code="hooks-differ", place=place, counts=next(iter(differing.values())))

    def _note_added(self, module: Any, *_: Any) -> None:
        for part in self._state.models:
            part.on_module_changed(module)

    def _check_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook of torch before each optimizer step: raise UsageError for an optimizer that was not prepared.

        This holds if losses of s.backward depend on a tensor that it trains outside of prepared models.
        """
        micro_step = self._step.micro_step
        is_plain = micro_step is None or not micro_step.weights or (self._world.size == 1 and self._step.has_one_body)
        if is_plain or id(optimizer) in self._step.optimizer_ids:
            return
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        if trained & {id(leaf) for leaf in self._step.foreign_leaves()}:
            raise unprepared_parameters_error(
                f"a {type(optimizer).__name__} that was not prepared trains a tensor that the loss depends on"
            )

    @contextmanager
    def forbid_unprepared_batch_norm(self) -> Generator[None]:
        """Inside, a model that was not prepared must not collect batch norm statistics, which would be per rank."""
        prepared = {id(module) for part in self._state.models for module in part.replica.model.modules()}

        def watch(module: nn.Module, _: Any) -> None:
            collects = isinstance(module, _NormBase) and module.training and module.track_running_stats
            if collects and module.momentum is None and id(module) in prepared:
                raise UsageError(code="update-bn-of-prepared")
            if self._world.size > 1 and collects and id(module) not in prepared:
                raise UsageError(code="update-bn-of-share")

        hook = register_module_forward_pre_hook(watch)
        try:
            yield
        finally:
            hook.remove()

    def check_loss_inputs(self, *, begins: bool, follows: bool) -> None:
        """In steps 1, 2, 4, 8, ... (`begins`) and the step after each: check foreign tensors and weights of losses."""
        if self._world.size == 1 and self._step.has_one_body:
            return
        leaves = self._step.foreign_leaves()
        try:
            self._foreign_tensors.check_unchanged(leaves if follows else ())
            self._check_loss_weights()
        except UsageError:
            self._state.is_damaged = True
            raise
        self._foreign_tensors.record_versions(leaves if begins else ())

    def _check_loss_weights(self) -> None:
        means = [
            [None if mean is None else (float(mean.count), float(weight), mean.has_weight) for mean in terms]
            for terms, weight in self._step.means
        ]
        by_rank: list[list[list[Any]]] = all_gather_object(means, self._world)
        num_terms = {len(terms) for rank_means in by_rank for terms in rank_means}
        for term in range(num_terms.pop() if len(num_terms) == 1 else 0):
            self._check_weights_of_term([[terms[term] for terms in rank_means] for rank_means in by_rank])

    def _check_weights_of_term(self, by_rank: list[list[Any]]) -> None:
        if any(mean is None for rank_means in by_rank for mean in rank_means):
            return  # a different loss, or several: their weights cannot be checked
        used = [mean for rank_means in by_rank for mean in rank_means if mean[1]]
        if len({count for count, _, _ in used}) == 1 and not all(has_weight for _, _, has_weight in used):
            return  # perhaps a mean over tasks or layers, or over a fixed number of generated samples
        ratios = [count / weight for count, weight, _ in used]
        if ratios and max(ratios) - min(ratios) > WEIGHT_RATIO_TOLERANCE * max(ratios):
            counts = "; ".join(
                f"rank {rank}: " + ", ".join(f"{count:g} (weight {weight:g})" for count, weight, _ in rank_means)
                for rank, rank_means in enumerate(by_rank)
            )
            raise error_on_one_rank(UsageError(code="weights-not-of-targets", what=counts), self._world)


class UnpreparedTensorTracker:
    """The tensors outside of prepared models on which losses depend, in two consecutive steps."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, int]] = {}  # by id: a weak reference and the version
        self._others: dict[int, Any] = {}  # all other leaves that require a gradient, at the end of the previous step

    def check_unchanged(self, leaves: Sequence[Tensor]) -> None:
        for leaf in leaves:
            record, other_ref = self._seen.get(id(leaf)), self._others.get(id(leaf))
            is_changed = record is not None and record[0]() is leaf and record[1] != leaf._version  # pyright: ignore[reportPrivateUsage]
            if is_changed or (other_ref is not None and other_ref() is leaf):
                raise unprepared_parameters_error(
                    f"the loss depends on a tensor of shape {tuple(leaf.shape)} that the loop itself updates. Make it "
                    "an nn.Parameter of a module, and prepare this module with an optimizer"
                )
        self._seen, self._others = {}, {}

    def record_versions(self, leaves: Sequence[Tensor]) -> None:
        self._seen = {id(leaf): (weakref.ref(leaf), leaf._version) for leaf in leaves}  # pyright: ignore[reportPrivateUsage]
        tensors = find_live_instances(Tensor) if leaves else []
        others = (t for t in tensors if t.requires_grad and t.is_leaf and id(t) not in self._seen)
        self._others = {id(tensor): weakref.ref(tensor) for tensor in others}


def check_no_grad_scaler(code: str) -> None:
    if any(scaler.is_enabled() for scaler in find_live_instances(torch.amp.GradScaler)):
        raise UsageError(code=code)
