"""The memory of a training on this rank: its parts, the largest micro-batch that fits, and out-of-memory errors.

`--micro-batch auto` finds the largest micro-batch by trials. The last two give a model of the memory: fixed bytes
and bytes per sample. The next trial has the largest size that fits by this model, and at most GROWTH times the samples.
So no trial should fail, because a failure in a custom loop ends the run. The result was tried on all ranks.
"""

import math
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from paceline.collectives.batchnorm import SyncBatchNorm
from paceline.collectives.control import error_on_one_rank
from paceline.compute.memory import MemoryMeter, SavedForBackward, is_out_of_memory, storage_bytes
from paceline.errors import PacelineError, TrainingError, UsageError, plural
from paceline.rank.world import World
from paceline.strategies.base import Strategy
from paceline.train.records import memory_breakdown

GROWTH = 4
Result = TypeVar("Result")
CPU_HEADROOM = 0.65  # of the free memory: the gaps of a heap (see `tune_malloc`) take up to a third of it
CPU_OTHER_BYTES = 64 << 20  # threads, records, evaluation
GPU_HEADROOM = 0.9  # for gaps, and buffers of the exchange of gradients
OPTIMIZER_STATES = 2  # assumption for each parameter, as long as the optimizer has none


class MicroBatchSearch:
    """Finds the largest micro-batch that fits on all ranks.

    while size := search.next_size():
        with search.trial():
            ...  # forward and backward of `size` samples
    """

    def __init__(
        self, replicas: Sequence[Strategy], world: World, portion: int, gather: Callable[[int], list[int]]
    ) -> None:
        """`portion`: samples to split into micro-batches of at most `size`. `gather`: the values of all ranks."""
        self._replicas, self._world, self._portion, self._gather = replicas, world, portion, gather
        modules = [module for replica in replicas for module in replica.model.modules()]
        self.smallest = min(2 if any(isinstance(module, _BatchNorm) for module in modules) else 1, portion)
        """the least samples of a micro-batch; batch norm needs two"""
        self._saved = SavedForBackward(replica.model for replica in replicas)
        memory = memory_breakdown(replicas)
        held_bytes = memory.weight_bytes + memory.buffer_bytes + memory.optimizer_bytes
        groups = [group for replica in replicas for one in replica.optimizers for group in one.param_groups]
        states = 0 if memory.optimizer_bytes else OPTIMIZER_STATES
        later_bytes = states * storage_bytes(p for group in groups for p in group["params"])
        self.state_bytes = held_bytes + later_bytes + memory.gradient_bytes
        self.meter = MemoryMeter(world.device, world.local_size)
        self._free_bytes = _free_bytes(self.meter, world, held_bytes + later_bytes) - later_bytes
        self._usable_bytes = _headroom(world) * self._free_bytes
        self._trials = [(0, memory.gradient_bytes)]  # (samples, peak bytes)
        self._most, self._has_failed = portion, False
        self.is_found, self.size = False, 0
        """the size of the last trial; after the search the result"""

    @property
    def accumulation(self) -> int:
        return math.ceil(self._portion / self.size)

    @property
    def bytes_per_sample(self) -> float:
        if len(self._trials) == 1:  # the first trial has failed
            return max(0, self._free_bytes) / self.smallest
        (few, low), (many, high) = self._trials[-2:]
        return max(0.0, (high - low) / (many - few))

    def next_size(self) -> int:
        """The size of the next trial, the same on all ranks; 0 if the last one fits on all of them (a collective)."""
        sizes = self._gather(self._fitting_size() if self.size else self.smallest)
        size = min(sizes)
        if size < self.smallest:
            error = self.error_of_smallest()
            raise error_on_one_rank(error, self._world, by=sizes.index(size)) if len(sizes) > 1 else error
        self.is_found, self.size = size == self.size, size
        return 0 if self.is_found else size

    def error_of_smallest(self) -> UsageError:
        return UsageError(code="micro-batch-of-one", samples=self.smallest, **self.error_fields(self.smallest))

    def _fitting_size(self) -> int:
        """The largest size that fits on this rank by the last two trials."""
        samples, peak_bytes = self._trials[-1]
        fixed_bytes, per_sample = peak_bytes - samples * self.bytes_per_sample, self.bytes_per_sample
        size = min(self._most, GROWTH * max(1, *(tried for tried, _ in self._trials)))
        if self._has_failed:
            size = min(size, self.size // 2)
        elif per_sample:
            fitting = int((self._usable_bytes - fixed_bytes) // per_sample)
            if samples == self.smallest and peak_bytes <= self._free_bytes:
                fitting = max(fitting, samples)  # it has just been computed
            size = min(size, fitting)
        if size < self.size:
            self._most = size
        return math.ceil(self._portion / math.ceil(self._portion / size)) if size > 0 else 0

    def largest_tried(self, *, below: int) -> int:
        """The largest size below this one whose trial has succeeded; 0 if there is none."""
        return max(size for size, _ in self._trials if size < below)

    @contextmanager
    def trial(self, *, may_fail: bool = False) -> Generator[None]:
        """Measure the forward and backward of `size` samples inside. `may_fail`: then try a smaller size."""
        self._has_failed = False
        self.meter.start()
        self.meter.set_limit()
        try:
            with self._saved.count() if self.size == self.smallest else nullcontext():
                yield
        except Exception as error:
            if not is_out_of_memory(error) or not may_fail:
                raise
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            self._has_failed = True
        else:
            self._trials = [trial for trial in self._trials if trial[0] != self.size]
            self._trials.append((self.size, self.meter.peak()))
        finally:
            self.meter.remove_limit()

    def describe(self, setting: str, to_repeat: str) -> str:
        """The result in words, for the setting that has started the search and the one that repeats it."""
        mib = self.error_fields(self.size)
        return (
            f"{setting}: {plural(self.size, 'sample')}, with {mib['activations']:,.0f} MiB of activations. "
            f"{mib['free']:,.0f} MiB were free on this rank. To repeat it: {to_repeat}{self.accumulation}"
        )

    def error_fields(self, samples: int) -> dict[str, Any]:
        """The fields of an error about a micro-batch of `samples` samples. Sizes are in MiB."""
        is_sharded = any(replica.sharded for replica in self._replicas)
        sizes = self.state_bytes, samples * self.bytes_per_sample, self._free_bytes
        return _sizes(*sizes, self._world, self._saved, is_sharded=is_sharded, replicas=self._replicas)


def _sizes(
    state_bytes: int, activation_bytes: float, free_bytes: int, world: World, saved: SavedForBackward, *,
    is_sharded: bool = False, replicas: Sequence[Strategy] = (),
) -> dict[str, Any]:  # fmt: skip
    ranks, by_balance = max(2, world.size), sum(map(extra_virtual_rank_bytes, replicas)) / 2**20
    by_bytes = {
        "state": state_bytes, "activations": activation_bytes, "free": max(0, free_bytes),
        "by_fsdp": 0 if is_sharded else state_bytes * (ranks - 1) / ranks,
        "by_recomputation": saved.recomputable_fraction * activation_bytes,
    }  # fmt: skip
    one = f", one virtual rank on this rank (--balance) {by_balance:,.1f} MiB of sums and buffers" if by_balance else ""
    return {"ranks": ranks, "by_balance": one, **{name: size / 2**20 for name, size in by_bytes.items()}}


def _free_bytes(meter: MemoryMeter, world: World, state_bytes: int) -> int:
    """The free memory, on the CPU without the copy of the state that a checkpoint writes."""
    return meter.free_bytes - (CPU_OTHER_BYTES + state_bytes if world.device.type == "cpu" else 0)


def _headroom(world: World) -> float:
    return CPU_HEADROOM if world.device.type == "cpu" else GPU_HEADROOM


def max_virtual_ranks(replicas: Sequence[Strategy], world: World, virtual_ranks: int) -> int:
    """The largest number of virtual ranks that the memory of this rank allows, for `--balance auto`.

    Call it after the first step: then only the sums and copies of `extra_virtual_rank_bytes` grow with the number, and
    on the CPU the copy that a checkpoint writes. A rank has between log2(n) and 2 log2(n) sums, which depends on the
    position of its virtual ranks in the tree.
    """
    memory, own = memory_breakdown(replicas), len(world.share(virtual_ranks))
    sum_bytes = sum(storage_bytes(replica.parameters) for replica in replicas if replica.keeps_partial_sums)
    meter = MemoryMeter(world.device, world.local_size)
    free_bytes = _free_bytes(meter, world, memory.weight_bytes + memory.optimizer_bytes)
    usable_bytes = _headroom(world) * free_bytes - meter.peak()

    def fits(count: int) -> bool:
        sums = 2 * (count.bit_length() - 1) - (own.bit_length() - 1)
        copies = 2 * (count - own) + (count if world.device.type == "cpu" else 0)
        return sums * sum_bytes + copies * memory.buffer_bytes <= usable_bytes

    return max(filter(fits, range(own + 1, virtual_ranks + 1)), default=own)


def extra_virtual_rank_bytes(replica: Strategy) -> int:
    """The memory that a rank with several virtual ranks would save with one of them; see docs/balance.md.

    It has two copies of the buffers for each, and up to log2(count + 1) partial sums of gradients.
    """
    count, is_split = len(replica.world.share(replica.virtual_ranks)), replica.parts is not None or replica.in_lockstep
    if replica.world.size == 1 or count == 1 or is_split or replica.module is not replica.model:
        return 0
    sums = (count + 1).bit_length() - 1 if replica.keeps_partial_sums else 0
    return sums * storage_bytes(replica.parameters) + 2 * (count - 1) * storage_bytes(replica.model.buffers())


def try_smallest_batch(compute: Callable[[int], Result], model: nn.Module, world: World) -> Result:
    """`compute` forward and backward of two samples, or of one if two do not fit into the free memory."""
    meter, saved = MemoryMeter(world.device, world.local_size), SavedForBackward([model])
    for samples in (2, 1):
        meter.set_limit()
        try:
            with saved.count() if samples == 1 else nullcontext():
                return compute(samples)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold tensors
        finally:
            meter.remove_limit()
    state_bytes = (2 + OPTIMIZER_STATES) * storage_bytes(model.parameters())
    fields = _sizes(state_bytes, meter.free_bytes, meter.free_bytes, world, saved)
    raise UsageError(code="micro-batch-of-one", samples=1, **fields)


def has_no_collectives(replica: Strategy) -> bool:
    """Whether forward and backward have no collective, so that a rank can repeat them."""
    has_sync = any(isinstance(module, SyncBatchNorm) for module in replica.model.modules())
    return not (has_sync or replica.in_lockstep or replica.parts is not None or replica.pipeline is not None)


def out_of_memory_error(
    replicas: Sequence[Strategy], world: World, where: str, samples: int,
    compute: Callable[[int], None] | None = None, search: MicroBatchSearch | None = None,
) -> PacelineError:  # fmt: skip
    """The error for a rank that is out of memory in a micro-batch of `samples` samples.

    `compute` runs a trial of some of these samples on this rank alone; None: no rank can. Then the result of an earlier
    `search` is used, if there is one.
    """
    fits, code = 0, "out-of-memory-not-measured"
    if compute is not None:
        search = MicroBatchSearch(replicas, world, samples, lambda size: [size])
        try:
            while size := search.next_size():
                with search.trial(may_fail=True):
                    compute(size)
            fits = min(search.size, samples // 2)  # if all samples fit, what follows the forward did not
            code = "out-of-memory" if fits >= search.smallest else "out-of-memory-of-one"
        except Exception as error:  # for example an error of DDP after a step that has failed
            is_of_one = isinstance(error, UsageError) and error.code == "micro-batch-of-one"
            code = "out-of-memory-of-one" if is_of_one else code
    elif search is not None:
        if not (fits := search.largest_tried(below=samples)):
            return search.error_of_smallest()
        code = "out-of-memory"
    search = search or MicroBatchSearch(replicas, world, samples, lambda size: [size])
    return TrainingError(code=code, where=where, samples=samples, fits=fits, **search.error_fields(samples))
