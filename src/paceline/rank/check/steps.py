"""`--check`: records facts about replicas, backwards and optimizer steps."""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from paceline.protocol.facts import (
    MAX_DIGESTS,
    MAX_STEPS,
    DroppedGradients,
    OptimizerStep,
    ScriptFacts,
    SeenReplica,
    finite_or_default,
)
from paceline.rank.check.loaders import LoaderRecorder
from paceline.rank.guard import HangGuard
from paceline.rank.imports import hide_from_warnings, when_imported
from paceline.rank.probes import (
    MAX_ELEMENTS,
    ScriptListener,
    leaf_digests,
    leaves,
    sampled_digest,
    short_hash,
    wrap_function,
)
from paceline.rank.probes.steps import SyncedOptimizerDetector, is_sharded
from paceline.rank.sites import CodeOwner, call_site, code_owner, format_user_site

MAX_UNJOINED_STEPS = 1000  # replaces MAX_STEPS while there is no evidence that the rank trains with others
MAX_RECORDS, MAX_PRIVATE = 400, 100
MAX_PARAMETER_DIGESTS = 20_000  # digests of single parameters, in an optimizer's first steps
SCALAR_SHAPES = ("", "[]", "[1]")  # shapes of scalars in collectives
VARYING_SHAPE_OPS = ("all_to_all", "all_gather", "reduce_scatter", "send", "recv")  # shapes may differ between ranks
MAX_UNUSED_CHECKS = 16
FSDP_PACKAGE = "torch.distributed.fsdp"
FULLY_SHARD_MODULES = (f"{FSDP_PACKAGE}._fully_shard._fully_shard", f"{FSDP_PACKAGE}._fully_shard", FSDP_PACKAGE)
MAX_FACTORS = 4


@dataclass
class AccumulationWindow:
    optimizer: Any
    pending_backwards: int = 0  # backwards whose gradients no step of any optimizer has followed yet
    last_batch_number: int = 0  # the number of the last batch of these backwards
    loader_and_pass: tuple[int, int] = (-1, -1)  # of that batch
    has_nonzero_gradients: bool = False  # whether gradients were nonzero after the last backward
    lost_backwards: int = 0  # backwards of earlier batches whose gradients were cleared
    clear_site: str = ""


class StepRecorder(ScriptListener):
    def __init__(
        self, facts: ScriptFacts, loading: LoaderRecorder, joint: SyncedOptimizerDetector | None = None
    ) -> None:
        self._facts, self._loading, self._joint = facts, loading, joint or SyncedOptimizerDetector(lambda: 0)
        self._meshes = ModelParallelDetector()
        self._taken: defaultdict[int, int] = defaultdict(int)  # steps with others, by optimizer
        self._looked: defaultdict[int, int] = defaultdict(int)  # number of digests of single gradients
        self._records: Counter[str] = Counter()
        self._stepped, self._called_ns = True, 0  # no module call since the last step; time of the first call
        self._exchanged = 0
        self._replicas: dict[int, SeenReplica] = {}
        self._inner: dict[int, tuple[weakref.ref[Any], SeenReplica]] = {}  # by id of the wrapped model
        self._parts: dict[int, tuple[weakref.ref[Any], SeenReplica]] = {}  # by id of the model and of its modules
        self._averaged = set[int]()  # ids of the parameters of all replicas
        self._evaluated: dict[int, int] = {}  # number of steps at the last evaluation
        self._optimizers: list[Any] = []
        self._step: OptimizerStep | None = None  # the current step, if its parameters are compared
        self._depth = 0  # of nested steps: a step may call another one, or run backward in a closure
        self._inside = 0  # replicas in their forward
        self._windows: dict[int, AccumulationWindow] = {}  # by id of the optimizer
        self._clear_site, self._backwards = "", 0
        self._pending: defaultdict[int, int] = defaultdict(int)  # backwards, by optimizer, since its last step
        self._forwards, self._synced = 0, 0  # since any step
        self._backward_site, self._factors = "", list[float]()
        self._local: list[float] = []  # by optimizer: `_weighted_gradient_sum` after the last backward
        self._unclipped: list[float] = []  # by optimizer: `_weighted_gradient_sum` before clipping
        self._at = (-1, -1)  # loader and pass of the last backward
        self._clipped = set[int](), 0.0, 0.0, ""  # since any step: ids, norm, limit, line

    def on_torch_imported(self) -> None:
        when_imported(FULLY_SHARD_MODULES[0], self._meshes.wrap_fully_shard)
        torch: Any = sys.modules["torch"]
        torch.nn.modules.module.register_module_forward_pre_hook(self._on_module_forward)
        wrap_function(torch.nn.parallel.DistributedDataParallel, "no_sync", before=self._on_no_sync)
        wrap_function(torch.optim.Optimizer, "zero_grad", before=self._on_zero_grad)
        wrap_function(torch.nn.Module, "zero_grad", before=lambda *_, **__: self._on_zero_grad(None))
        clipping = torch.nn.utils.clip_grad
        scale = self.wrap_clip(clipping._clip_grads_with_norm_)  # clip_grad_norm_ also calls it
        clipping._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = scale

    def on_session_begin(self) -> None:
        self._facts.session = True

    def _on_no_sync(self, ddp: Any) -> None:
        if id(ddp) in self._replicas:
            self._replicas[id(ddp)].no_sync_site = format_user_site()

    def _on_zero_grad(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if not self._depth:
            self._clear_site = format_user_site()
            if optimizer is not None:
                self._gradient_window(optimizer)

    def _gradient_window(self, optimizer: Any) -> AccumulationWindow | None:
        window = self._windows.get(id(optimizer))
        if window is None and not any(is_sharded(p) for p in _parameters(optimizer)):
            window = self._windows[id(optimizer)] = AccumulationWindow(optimizer)
        return window

    def wrap_clip(self, clip: Any) -> Any:
        @hide_from_warnings
        @wraps(clip)
        def clipped(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            parameter_list = [parameters] if hasattr(parameters, "grad") else list(parameters)  # may be an iterator
            if not self._depth and not self._unclipped:
                self._unclipped = [_weighted_gradient_sum(optimizer) for optimizer in self._optimizers]
            clip(parameter_list, max_norm, total_norm, *args, **kwargs)
            compiling = sys.modules["torch.compiler"].is_compiling()
            if not self._depth and not compiling and not any(map(is_sharded, parameter_list)):
                norm, limit = finite_or_default(total_norm), finite_or_default(max_norm)
                self._clipped = {id(p) for p in parameter_list}, norm, limit, format_user_site()

        return clipped

    def on_replica_created(self, ddp: Any) -> None:
        caller = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        while "/paceline/rank/" in caller.f_code.co_filename and caller.f_back is not None:
            caller = caller.f_back
        record = SeenReplica(
            site=format_user_site(),
            by_library=code_owner(caller.f_code.co_filename) is CodeOwner.LIBRARY,
            find_unused=bool(ddp.find_unused_parameters),
        )
        self._replicas[id(ddp)] = record
        self._averaged.update(map(id, ddp._module_parameters))
        self._facts.replicas.append(record)
        self._inner[id(ddp.module)] = weakref.ref(ddp.module), record
        self._parts |= {id(part): (weakref.ref(part), record) for part in ddp.module.modules()}

    def _on_module_forward(self, module: Any, _: Any) -> None:
        """A module runs forward: possibly that of a replica, either bypassing DDP or for an evaluation."""
        if self._stepped:
            self._stepped, self._exchanged, self._called_ns = False, 0, time.monotonic_ns()
        module_ref, record = self._inner.get(id(module)) or self._parts.get(id(module), (None, None))
        if record is None or module_ref is None or module_ref() is not module:
            return
        if module.training:
            if sys.modules["torch"].is_grad_enabled() and not self._inside:
                record.past_site = record.past_site or self._site_outside_model()
            return
        if id(module) not in self._inner:
            return
        num_steps = len(self._facts.steps)
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        if buffers and self._evaluated.get(id(module)) != num_steps and len(record.buffers) < MAX_DIGESTS:
            self._evaluated[id(module)] = num_steps
            record.buffers.append(sampled_digest(buffers))
            record.evaluation_site = format_user_site()

    def _site_outside_model(self) -> str:
        """The line outside of a replica's model that called the model or one of its methods."""
        frame = call_site(sys._getframe(1)).frame  # pyright: ignore[reportPrivateUsage]
        outer = frame
        while outer is not None and id(outer.f_locals.get("self")) in self._parts:
            outer = call_site(outer.f_back).frame
        return format_user_site(outer or frame)

    def on_forward_begin(self, ddp: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._inside += 1
        record = self._replicas.get(id(ddp))
        if record is None or not sys.modules["torch"].is_grad_enabled() or not ddp.training:
            return
        join_config: Any = getattr(ddp, "_join_config", None)
        record.joined = record.joined or bool(join_config is not None and join_config.enable)
        self._forwards += 1
        self._synced += bool(ddp.require_backward_grad_sync)
        if len(record.inputs) < MAX_DIGESTS:
            record.inputs.append(leaf_digests([inputs, named]))

    def on_forward_end(self, ddp: Any, output: Any) -> None:
        self._inside -= 1
        record = self._replicas.get(id(ddp))
        if record is None or not record.find_unused or record.looked >= MAX_UNUSED_CHECKS or not ddp.training:
            return
        used_ids = parameter_ids_in_graph([getattr(leaf, "grad_fn", None) for leaf in leaves(output)])
        if used_ids:
            # DDP reduces the parameters from its construction, not later replacements
            num_unused = sum(p.requires_grad and id(p) not in used_ids for p in ddp._module_parameters)
            record.looked, record.unused = record.looked + 1, max(record.unused, num_unused)

    def on_exception(self, where: str, error: BaseException) -> None:
        if where == "forward":
            self._inside -= 1

    def on_backward_begin(self, losses: Any) -> None:
        if self._facts.session:
            return
        loader_number = self._loading.fed
        at = (loader_number, len(self._facts.loaders[loader_number].passes) if loader_number >= 0 else 0)
        if loader_number >= 0:
            self._facts.loaders[loader_number].passes[-1].trains = True
        if self._depth:  # in a closure, which may run backward any number of times
            self._at = at
            return
        self._find_lost_gradients(at)
        self._backward_site = format_user_site()
        self._factors = constant_loss_factors(losses)
        for number, optimizer in enumerate(self._optimizers):
            if at != self._at and self._at[0] == loader_number and self._pending[number]:
                cleared = not any(p.grad is not None and bool(p.grad.any()) for p in _parameters(optimizer))
                self._facts.dropped.append(DroppedGradients(number, *self._at, self._pending[number], cleared))
                if cleared:
                    self._pending[number] = 0
            self._pending[number] += 1
        self._pending[-1] += 1  # for an optimizer that has not stepped yet
        self._at = at

    def _find_lost_gradients(self, at: tuple[int, int]) -> None:
        """Find gradients of earlier batches that were cleared although no optimizer has stepped with them.

        Several backwards of one batch are not accumulation, but an adversarial example or a GAN, for example. Remaining
        gradients at the start of an epoch belong to the previous epoch.
        """
        self._backwards += 1
        batch = self._loading.given or self._backwards  # without a loader, each backward counts as a batch
        for window in self._windows.values():
            other_batch = window.pending_backwards and window.has_nonzero_gradients and batch > window.last_batch_number
            if other_batch and not any(map(_has_gradient, _parameters(window.optimizer))):
                if window.loader_and_pass == at:
                    window.lost_backwards += window.pending_backwards
                    window.clear_site = self._clear_site
                window.pending_backwards = 0
            window.pending_backwards += 1
            window.last_batch_number, window.loader_and_pass = batch, at

    def on_backward_end(self) -> None:
        if self._facts.session:
            return
        if self._called_ns and self._joint.num_calls():
            calls = HangGuard.of_process().page.calls_since(self._called_ns)
            self._exchanged = sum(
                op.kind.startswith(VARYING_SHAPE_OPS) or op.shape not in SCALAR_SHAPES for _, _, op in calls
            )
        if not self._depth:
            for window in self._windows.values():
                window.has_nonzero_gradients = any(map(_has_gradient, _parameters(window.optimizer)))
            self._local = [_weighted_gradient_sum(optimizer) for optimizer in self._optimizers]

    def on_step_begin(self, optimizer: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        index = next((n for n, other in enumerate(self._optimizers) if other is optimizer), None)
        number = len(self._optimizers) if index is None else index
        if index is None:
            self._optimizers.append(optimizer)
        if self._facts.session:
            self._facts.steps.append(OptimizerStep(number, format_user_site()))
            return
        history, private = self._joint.history_of(optimizer), self._joint.is_last_step_local(optimizer)
        loader = self._at[0]
        if loader >= 0 and self._joint.highest_evidence_level:
            if not private:
                self._loading.joint.add(loader)
            self._facts.loaders[loader].local_only = loader not in self._loading.joint
        self._taken[number] += not private
        kind = "private" if private else "joint" if self._joint.highest_evidence_level else "unknown"
        self._records[kind] += 1
        if self._records[kind] > (MAX_PRIVATE if private else MAX_RECORDS):
            return
        parameters = _parameters(optimizer)
        unsharded = not any(is_sharded(p) for p in parameters)
        if not unsharded and index is None:
            split = self._meshes.model_parallel_position(parameters)
            self._facts.split, self._facts.split_rank = max(split, (self._facts.split, self._facts.split_rank))
        step = OptimizerStep(
            optimizer=number,
            site=format_user_site(),
            loader=self._at[0],
            epoch=self._at[1],
            gradients=sampled_digest(p.grad for p in parameters) if unsharded else "",
            lost=window.lost_backwards if (window := self._gradient_window(optimizer)) else 0,
            clear_site=window.clear_site if window else "",
            backwards=self._pending.pop(-1, 0) if index is None else self._pending[number],
            backward_site=self._backward_site,
            factors=self._factors,
            forwards=self._forwards,
            synced=self._synced,
            learning_rate=finite_or_default(optimizer.param_groups[0].get("lr", 0.0)),
            settings=_settings_hash(optimizer),
            parameters=sampled_digest(parameters) if unsharded else "",
            own=history.has_shared_parameters,
            past=history.bypasses_ddp,
            exchanged=self._exchanged,
        )
        if unsharded and self._looked[number] + len(parameters) <= MAX_PARAMETER_DIGESTS:
            self._looked[number] += len(parameters)
            step.outside = [n for n, p in enumerate(parameters) if id(p) not in self._averaged]
            step.each = [sampled_digest([p.grad]) for p in parameters]
            step.each_before = [sampled_digest([p]) for p in parameters]
        if self._averaged:
            step.strangers = sum(p.grad is not None and id(p) not in self._averaged for p in parameters)
        clipped_ids, norm, limit, clip_site = self._clipped
        if not clipped_ids.isdisjoint(map(id, parameters)):
            step.norm, step.limit, step.clip_site = norm, limit, clip_site
        if unsharded and index is not None and index < len(self._local):
            local, applied = self._local[index], _weighted_gradient_sum(optimizer)
            if not self._replicas:
                step.local, step.applied = local, applied
            elif local:
                before_clip = self._unclipped[index] if index < len(self._unclipped) else applied
                step.scaled = finite_or_default(before_clip / local, 1.0)
        step.shapes = sampled_digest([]) if not unsharded else str(hash(tuple(tuple(p.shape) for p in parameters)))
        self._facts.steps.append(step)
        self._step = step if unsharded else None
        self._pending[number] = 0
        for each_window in self._windows.values():
            each_window.pending_backwards = 0
        if window is not None:
            window.lost_backwards = 0

    def on_step_end(self, optimizer: Any) -> None:
        self._depth -= 1
        if self._depth or self._facts.session:
            return
        self._stepped = True
        if self._step is not None:
            parameters = _parameters(optimizer)
            self._step.after, self._step.met = (
                sampled_digest(parameters),
                self._joint.history_of(optimizer).has_communicated,
            )
            if self._step.each:
                self._step.each_after = [sampled_digest([p]) for p in parameters]
            self._step = None
        self._forwards = self._synced = 0
        self._clipped, self._unclipped = (set(), 0.0, 0.0, ""), []
        shortened = any(loader.training_passes and loader.batches >= 0 for loader in self._facts.loaders)
        max_steps = MAX_STEPS if self._joint.highest_evidence_level else MAX_UNJOINED_STEPS
        if (
            not shortened
            and not self._joint.is_last_step_local(optimizer)
            and max(self._taken.values(), default=0) >= max_steps
        ):
            raise SystemExit(0)


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_gradient(parameter: Any) -> bool:
    gradient = parameter.grad
    return gradient is not None and (gradient.is_sparse or bool(gradient.any()))


def _settings_hash(optimizer: Any) -> str:
    settings: list[tuple[str, object]] = []
    for group in optimizer.param_groups:
        for name, value in sorted(group.items()):
            if hasattr(value, "numel") and value.numel() == 1:  # a learning rate may be a tensor
                value = float(value)
            if isinstance(value, (int, float, str, tuple)):
                settings.append((name, value))
    return short_hash(repr(settings).encode())


def _weighted_gradient_sum(optimizer: Any) -> float:
    """A weighted sum of the gradients, which is linear in them; plain sums of gradients are often 0."""
    torch: Any = sys.modules["torch"]
    total = 0.0
    for parameter in _parameters(optimizer):
        if parameter.grad is not None and not is_sharded(parameter):
            values = parameter.grad.detach().reshape(-1)[:MAX_ELEMENTS].double().cpu()
            total += float(values @ torch.arange(values.numel(), dtype=torch.float64).cos())
    return finite_or_default(total)


class ModelParallelDetector:
    """Finds the ranks that hold parts of the same layers (tensor parallel) and therefore get the same batches.

    A DTensor is split along the dimensions of its mesh. The dimensions along which `fully_shard` sharded a model are
    data parallel: each rank has different batches. The others split the work on one batch.
    """

    def __init__(self) -> None:
        self._fsdp_ranks = set[int]()

    def wrap_fully_shard(self) -> None:
        first: Any = sys.modules[FULLY_SHARD_MODULES[0]]
        original = first.fully_shard
        wrap_function(first, "fully_shard", before=self._record_fsdp_ranks)
        for module in (sys.modules.get(name) for name in FULLY_SHARD_MODULES[1:]):
            if getattr(module, "fully_shard", None) is original:
                vars(module)["fully_shard"] = first.fully_shard

    def _record_fsdp_ranks(self, *_: Any, mesh: Any = None, **__: Any) -> None:
        world_size = sys.modules["torch.distributed"].get_world_size
        self._fsdp_ranks.update(range(world_size()) if mesh is None else mesh.mesh.flatten().tolist())

    def model_parallel_position(self, parameters: Iterable[Any]) -> tuple[int, int]:
        """The number of ranks among which layers are split, and the index of this rank among them."""
        count, number = 1, 0
        for parameter in parameters:
            if not hasattr(parameter, "device_mesh") or (coordinate := parameter.device_mesh.get_coordinate()) is None:
                continue
            mesh, placements, parts, part = parameter.device_mesh, parameter.placements, 1, 0
            for dimension, placement in enumerate(placements):
                selection = tuple(slice(None) if n == dimension else index for n, index in enumerate(coordinate))
                if not placement.is_replicate() and not self._fsdp_ranks.issuperset(mesh.mesh[selection].tolist()):
                    parts, part = parts * mesh.size(dimension), part * mesh.size(dimension) + coordinate[dimension]
            count, number = max((count, number), (parts, part))
        return count, number


def constant_loss_factors(losses: Any) -> list[float]:
    """The constants by which a loss was multiplied last; for divisions their reciprocals."""
    factors: list[float] = []
    node = getattr(losses, "grad_fn", None)
    while node is not None and len(factors) < MAX_FACTORS and node.name() in ("DivBackward0", "MulBackward0"):
        saved_self, saved_other = node._saved_self, node._saved_other
        constant = saved_other if saved_self is None else saved_self if saved_other is None else None
        if constant is None or constant.numel() != 1:
            break
        value = float(constant)
        if value and math.isfinite(value):
            factors.append(1 / value if node.name() == "DivBackward0" else value)
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return factors


def parameter_ids_in_graph(nodes: list[Any]) -> set[int]:
    visited, reached_ids = set[Any](), set[int]()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            reached_ids.add(id(variable))
        nodes += [following for following, _ in node.next_functions]
    return reached_ids
