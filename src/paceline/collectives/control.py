"""Numbers, messages and errors that ranks exchange besides gradients.

- `Deferred`: numbers that a device is still computing. A step reads all of them in one transfer, and waits for a GPU
  only once.
- `are_finite`, `scale_and_check_gradients`: the check of gradients for infinity and NaN.
- `all_gather_object`, `check_equal`, `raise_on_all_ranks`: messages, values that must be equal, shared errors.
- `all_gather_tensors`: tensors of any number and shape.

Messages are sent as JSON in byte tensors. torch's object collectives would unpickle data from a peer, i.e. run its
code.

Sums and gathers of a loop (`s.sum`, `s.gather`) look the same to a transport, wherever a rank calls them. A rank that
has left a loop early would silently add its numbers to those of a different line. Each rank therefore sends a hash of
its stack along, of the user's lines only (see `CallSiteComparison`). Ranks may call from different lines on purpose:

    if s.rank == 0: s.sum(mine) else: s.sum(0)

Then no rank ever calls from the line of a different rank. It is an error if a rank has called before from the line that
a different rank calls from now. A `where` (for example, the epoch) must always be the same.
"""

import cmath
import json
import math
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from operator import attrgetter
from traceback import walk_stack
from types import FrameType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.collectives.buckets import grad_of, group_tensors_by_dtype, is_present
from paceline.collectives.communicator import get_communicator
from paceline.errors import ExitCode, PacelineError, ReportedByPeer, TrainingError, UsageError
from paceline.rank.guard import HangGuard
from paceline.rank.sites import MAX_DEPTH, CodeOwner, code_owner, format_frame, frame_record, short_filename
from paceline.rank.world import World

_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True)
class Deferred(Generic[_T]):
    """A value that the host computes from `numbers`, after it has read them from the device."""

    numbers: Tensor
    """(n,) float64 or float32, on any device"""
    compute: Callable[[list[float]], _T]
    """May be a collective: all ranks that have read the same numbers must call it."""

    def map(self, change: Callable[[_T], _U]) -> "Deferred[_U]":
        """A value computed by `change` from this one, without another read."""
        return Deferred(self.numbers, lambda numbers: change(self.compute(numbers)))

    def result(self) -> _T:
        """Read the numbers (see `read_all_deferred`), and compute the value."""
        return self.compute(read_all_deferred([self])[0])


def read_all_deferred(deferred: Sequence[Deferred[Any]]) -> list[list[float]]:
    """The numbers of each; the host waits for the device at most once.

    Raises:
        StallError: if the guard has unblocked this rank. The numbers are then undefined.
    """
    tensors = [value.numbers for value in deferred]
    on_device = [numbers for numbers in tensors if is_async_device(numbers.device)]
    from_device: list[float] = torch.cat(on_device).tolist() if on_device else []
    HangGuard.of_process().check_not_released()
    rest = iter(from_device)
    return [
        [*islice(rest, len(numbers))] if is_async_device(numbers.device) else numbers.tolist() for numbers in tensors
    ]


def resolve_deferred(value: "_T | Deferred[_T]") -> _T:
    """The value itself, or the result of a `Deferred`."""
    if isinstance(value, Deferred):
        deferred: Deferred[_T] = value  # pyright: ignore[reportUnknownVariableType]
        return deferred.result()
    return value


def is_async_device(device: torch.device) -> bool:
    """Whether the host must wait for `device` to read one of its numbers."""
    return device.type != "cpu"


def to_device_async(numbers: Sequence[float], device: torch.device) -> Tensor:
    """(n,) float64 on `device`; the host does not wait for the copy."""
    on_host = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


class PinnedNumberBuffers:
    """Copies (n,) float64 between the host and a device in each step, through memory that is allocated once.

    Two page-locked buffers take turns: the numbers of a step are read before those of the next but one are written.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._buffers = device, list[Tensor]()

    def to_device(self, numbers: Sequence[float]) -> Tensor:
        """The numbers on the device; the host does not wait for the copy."""
        buffer = self._next(len(numbers))
        buffer.numpy()[:] = numbers
        return buffer.to(self._device, non_blocking=True, copy=True)

    def start_to_host(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Start to copy the numbers behind the work of a step. The result waits until they have arrived."""
        buffer = self._next(len(numbers)).copy_(numbers, non_blocking=True)
        arrived = None if self._device.type == "cpu" else torch.Event(self._device)
        if arrived is not None:
            arrived.record()

        def wait() -> list[float]:
            if arrived is not None:
                arrived.synchronize()
            return buffer.tolist()

        return wait

    def _next(self, size: int) -> Tensor:
        if not self._buffers or len(self._buffers[0]) != size:
            pinned = self._device.type == "cuda"
            self._buffers = [torch.empty(size, dtype=torch.float64, pin_memory=pinned) for _ in range(2)]
        self._buffers.reverse()
        return self._buffers[0]


MAX_FUSED_ELEMENTS_ON_DEVICE = 1 << 24
MAX_FUSED_ELEMENTS = 1 << 16
"""The most elements for one fused kernel. It writes each element: for more, one kernel per tensor is faster."""


def are_finite_on_cpu(gradients: Sequence[Tensor]) -> bool:
    """Whether gradients on the CPU hold no infinity and no NaN."""
    if not gradients:
        return True
    is_plain = {*map(_dtype_and_layout, gradients)} == {(torch.float32, torch.strided)}
    if is_plain and sum(map(Tensor.numel, gradients)) <= MAX_FUSED_ELEMENTS:
        flag = torch.zeros(1)
        try:
            torch._amp_foreach_non_finite_check_and_unscale_([*gradients], flag, device_constant(flag.device, 1.0))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            return not flag.item()
        except RuntimeError:  # memory that several elements share cannot be written
            return _have_finite_sums(gradients)
    return _have_finite_sums(gradients)


def _have_finite_sums(gradients: Sequence[Tensor]) -> bool:
    # a sum is faster than a look at each element. One of finite elements may overflow: then each is looked at
    sums = [grad.sum(dtype=torch.float32 if grad.element_size() < 4 else None) for grad in gradients]
    return cmath.isfinite(torch.stack(sums).sum().item()) or all(bool(grad.isfinite().all()) for grad in gradients)


_dtype_and_layout = attrgetter("dtype", "layout")


@cache
def device_constant(device: torch.device, number: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A constant, () on `device`."""
    return torch.tensor(number, dtype=dtype, device=device)


def are_finite(gradients: Sequence[Tensor], device: torch.device) -> Deferred[bool]:
    """Whether gradients on `device` hold no infinity and no NaN.

    `numbers` are [0] if they do not. Other numbers may be an overflow: `compute` then checks each element.
    """
    if not gradients:
        return Deferred(torch.zeros(1, dtype=torch.float64, device=device), lambda _: True)
    if not is_async_device(device):
        flag = torch.tensor([float(not are_finite_on_cpu(gradients))], dtype=torch.float64)
        return Deferred(flag, lambda bad: not bad[0])
    found_inf = torch.zeros(1, device=device)
    is_plain = {*map(_dtype_and_layout, gradients)} == {(torch.float32, torch.strided)}
    if is_plain and sum(map(Tensor.numel, gradients)) <= MAX_FUSED_ELEMENTS_ON_DEVICE:
        unscale = device_constant(device, 1.0)
        torch._amp_foreach_non_finite_check_and_unscale_([*gradients], found_inf, unscale)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    else:  # only reads the gradients; a norm times 0 is 0 or NaN, which is not 0
        found_inf = (nn.utils.get_total_norm(gradients, math.inf) * 0).ne(0).float().view(1)
    return Deferred(found_inf, lambda bad: bad[0] == 0 or all(bool(grad.isfinite().all()) for grad in gradients))


def set_found_inf(numbers: Tensor, found_inf: Tensor) -> None:
    """Set `found_inf`, (1,) float32, to 1 if one of `numbers`, (n,), is infinite or NaN. The host does not wait.

    `numbers` must be float32, because CUDA rounds others to it in place.
    """
    torch._amp_foreach_non_finite_check_and_unscale_([numbers], found_inf, device_constant(numbers.device, 1.0))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def scale_and_check_gradients(
    parameters: Iterable[nn.Parameter], factor: float | Tensor, device: torch.device
) -> bool | Deferred[bool]:
    """Multiply all gradients on `device` by the scalar `factor`. Returns whether they were finite."""
    gradients: list[Tensor] = [*filter(is_present, map(grad_of, parameters))]
    # The fused kernel doubles the memory on the CPU, and takes float32 only. It checks an element before it multiplies
    # it, and with a factor above 1 the product may overflow.
    on_host, may_overflow = device.type == "cpu", not isinstance(factor, Tensor) and abs(factor) > 1
    if on_host or may_overflow or not gradients or any(gradient.dtype != torch.float32 for gradient in gradients):
        has_effect = isinstance(factor, Tensor) or factor != 1.0
        for group, number in group_tensors_by_dtype(gradients, factor) if has_effect else ():
            torch._foreach_mul_(group, number)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        return are_finite_on_cpu(gradients) if on_host else are_finite(gradients, device)
    if isinstance(factor, Tensor):
        factor = factor.float()
        found_inf = (factor.abs() > 1).float().view(1)
    else:
        found_inf, factor = torch.zeros(1, device=device), device_constant(device, factor)
    torch._amp_foreach_non_finite_check_and_unscale_([*gradients], found_inf, factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return Deferred(found_inf, lambda bad: not bad[0] or all(bool(grad.isfinite().all()) for grad in gradients))


MAX_SHOWN_LINES = 3  # lines of a rank in an error
FACTOR, PRIME = 1_000_003, (1 << 61) - 1
HALF_HASH_LIMIT = 1 << 26  # a float64 holds two such hashes exactly


class CallSiteComparison:
    """The call sites of the sums and gathers of this process's loops: detects ranks that call from different lines."""

    def __init__(self) -> None:
        self._called: set[int] = set()  # hashes of lines
        self._agreed: set[tuple[int, ...]] = set()  # combinations of different lines that were checked and accepted

    def compare(self, hashes: Sequence[int], name: str, gather: Callable[[Any], list[Any]]) -> None:
        """Compare the hashes of all ranks, by rank. If they differ, this is a collective: it calls `gather`.

        Raises:
            TrainingError: with MISMATCH, on one rank.
            ReportedByPeer: on the other ranks.
        """
        rank = dist.get_rank()
        lines = tuple(h // HALF_HASH_LIMIT for h in hashes)  # without `where`: it changes each step
        same_where = len({h % HALF_HASH_LIMIT for h in hashes}) == 1
        if len({*hashes}) > 1 and not (same_where and lines in self._agreed):
            reports = gather([_user_lines(), [line in self._called for line in lines]])
            has_called_before = any(
                called and lines[other] != lines[by]
                for by, (_, called_lines) in enumerate(reports)
                for other, called in enumerate(called_lines)
            )
            if has_called_before or not same_where:
                raise _mismatch(hashes, [site for site, _ in reports], name, rank)
            self._agreed.add(lines)
        self._called.add(lines[rank])


def call_site_hash(where: Sequence[int] = ()) -> int:
    """A hash of the user's lines on the stack, and of `where`: 0 <= n < 2**52."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    stack_hash, depth = 0, 0
    while frame is not None and depth < MAX_DEPTH:
        if file_hash := _file_hash(frame.f_code.co_filename):
            stack_hash = (stack_hash * FACTOR + file_hash + frame.f_lineno) % PRIME
        frame, depth = frame.f_back, depth + 1
    return stack_hash % HALF_HASH_LIMIT * HALF_HASH_LIMIT + zlib.crc32(repr([*where]).encode()) % HALF_HASH_LIMIT


@cache
def _file_hash(filename: str) -> int:
    return 1 + zlib.crc32(short_filename(filename).encode()) if code_owner(filename) is CodeOwner.USER else 0


def _user_lines() -> str:
    frames = (frame for frame, _ in islice(walk_stack(sys._getframe(1)), MAX_DEPTH))  # pyright: ignore[reportPrivateUsage]
    of_user = (frame for frame in frames if code_owner(frame.f_code.co_filename) is CodeOwner.USER)
    return ", called from ".join(format_frame(frame_record(frame)) for frame in islice(of_user, MAX_SHOWN_LINES))


def default_group_call_sites() -> CallSiteComparison:
    """The call sites of torch's default group."""
    group = dist.group.WORLD
    assert group is not None  # torch.distributed is initialized
    return _of_group.setdefault(group, CallSiteComparison())


_of_group: WeakKeyDictionary[dist.ProcessGroup, CallSiteComparison] = WeakKeyDictionary()


def _mismatch(hashes: Sequence[int], sites: Sequence[str], name: str, rank: int) -> PacelineError:
    (usual, votes), *_ = Counter(hashes).most_common()
    minority = [number for number, value in enumerate(hashes) if value != usual] if 2 * votes > len(hashes) else []
    reporter = min(minority, default=0)
    if rank != reporter:
        return ReportedByPeer(f"rank {reporter} reports the error", ExitCode.MISMATCH)
    shown = "; ".join(f"rank {number} at {site or 'an unknown line'}" for number, site in enumerate(sites))
    return TrainingError(
        f"the ranks exchange {name} from different lines of the program: {shown}. Their values do not belong together. "
        "One rank has left a loop earlier than the others, or has made one more call. All ranks must call s.sum, "
        "s.mean, s.any, s.gather and s.compute in the same order. A decision of one rank must reach all ranks: "
        "if s.any(stop): break.",
        ExitCode.MISMATCH,
    )


_SKIPPED_MODULES = ("paceline.collectives.", "contextlib")
GatherFunction = Callable[[Any], dict[int, Any]]
"""A collective: (a JSON value) -> the values of several ranks, by their rank in the world"""


def new_group() -> dist.ProcessGroup:
    """A new group of all ranks. Its collectives cannot be confused with those of the default group."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    return group


def all_gather_object(value: Any, world: World) -> list[Any]:
    """The `value` (JSON) of every rank, by rank (a collective).

    The collective has the name of the calling function: ranks that gather for different purposes fail.
    """
    if world.size == 1:
        return [value]
    return get_communicator(world.group).all_gather_object(value, f"messages of {_caller()}", world.device)


def _caller() -> str:
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_SKIPPED_MODULES):
        frame = frame.f_back
    return frame.f_code.co_name


def make_world_gather(world: World) -> GatherFunction:
    """Gathers from all ranks."""
    return lambda value: dict(enumerate(all_gather_object(value, world)))


@contextmanager
def raise_on_all_ranks(world: World, *, prepares: bool = True) -> Generator[None]:
    """If the block fails on one rank, raise an error on all ranks: no rank waits for a rank that has ended.

    The block must not contain a collective. A failed rank skips it, and the other ranks would wait in it. If it
    `prepares`, it runs before the first step, and every failure is wrong use.

    Raises:
        UsageError: on the first rank that failed, with the text of its error, or with its traceback.
        Exception: the error of that rank, if not `prepares`.
        ReportedByPeer: on all other ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    code = int(error.exit_code) if isinstance(error, PacelineError) else ExitCode.FAILED
    failures = all_gather_object(None if error is None else ExitCode.USAGE if prepares else code, world)
    failed = [rank for rank, failure in enumerate(failures) if failure is not None]
    if not failed:
        return
    if world.rank != failed[0]:
        raise ReportedByPeer(f"rank {failed[0]} failed", ExitCode(failures[failed[0]])) from None
    assert error is not None
    if not prepares:
        raise error
    failed_ranks = "every rank" if len(failed) == world.size else "rank " + ", ".join(map(str, failed))
    where = f" (on {failed_ranks} of {world.size})" if world.size > 1 else ""
    if isinstance(error, PacelineError):
        raise UsageError.from_error(error, after=where) from None
    shown = "".join(traceback.format_exception(error)).rstrip()
    raise UsageError(
        f"{shown}\nThis was raised before the first step{where}, while the run was being prepared."
    ) from None


def check_equal(what: str, mine: Any, world: World, *, error: type[PacelineError] = UsageError) -> None:
    """Raise an error unless `mine` (a JSON value) is the same on all ranks (a collective).

    Raises:
        UsageError: (or `error`) on rank 0, with the ranks in the minority and both values.
        ReportedByPeer: on all other ranks.
    """
    values = [json.dumps(value, sort_keys=True) for value in all_gather_object(mine, world)]
    (common, votes), *others = Counter(values).most_common()
    if not others:
        return
    if votes == 1 or votes == others[0][1]:  # no majority: list all ranks
        differences = "; ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
    else:
        minority = [rank for rank, value in enumerate(values) if value != common]
        differences = "; ".join(f"rank {rank} has {values[rank]}" for rank in minority) + f", all others {common}"
    raise error_on_one_rank(error(code="ranks-differ", what=what, values=differences), world)


def error_on_one_rank(error: PacelineError, world: World, *, by: int = 0) -> PacelineError:
    """If all ranks have found the same `error`: `error` on rank `by`, which reports it, `ReportedByPeer` elsewhere."""
    return error if world.rank == by else ReportedByPeer(f"rank {by} reports the error", error.exit_code)


LOOP_SUMS_NAME = "numbers of the loop"


def sum_over_ranks(
    numbers: Tensor, name: str, group: dist.ProcessGroup | None = None, *, where: Sequence[int] = ()
) -> Tensor:
    """The sum of a few `numbers`, (n,) float64, over all ranks or a group, the same on all of them (a collective).

    With the name LOOP_SUMS_NAME, all ranks must call this from the same line of the program and with the same `where`.

    Raises:
        TrainingError: with MISMATCH, on one rank, if they do not; see `CallSiteComparison`.
        ReportedByPeer: on the other ranks.
    """
    exchange = get_communicator(group)
    if group is not None or name != LOOP_SUMS_NAME or (size := exchange.size) == 1:
        return exchange.start_sum(numbers, name)()
    hashes = [0.0] * size
    hashes[dist.get_rank()] = float(call_site_hash(where))
    total = exchange.start_sum(torch.cat([numbers, to_device_async(hashes, numbers.device)]), name)()
    site_hashes: list[float] = total[len(numbers) :].tolist()
    gather = partial(exchange.all_gather_object, device=numbers.device, name=f"call sites of {name}")
    default_group_call_sites().compare([int(value) for value in site_hashes], name, gather)
    return total[: len(numbers)]


def all_gather_tensors(value: Any, world: World, name: str, *, where: Sequence[int] = ()) -> list[Any]:
    """The `value` of every rank, by rank, bit for bit, on the world's device (a collective of all ranks).

    `value`: tensors and JSON values in lists and dicts with strings as keys. Ranks may have different ones. `where`
    must be the same on all ranks, like the line of the call.

    Raises:
        TrainingError: with MISMATCH, on one rank, if ranks call from different lines; see `CallSiteComparison`.
        ReportedByPeer: on the other ranks.
    """
    if world.size == 1:
        return [value]
    tensors: list[Tensor] = []
    skeleton = _without_tensors(value, tensors)
    header = [skeleton, [[str(t.dtype)[6:], [*t.shape]] for t in tensors], call_site_hash(where)]
    headers = all_gather_object(header, world)
    sites, gather = [site for *_, site in headers], partial(all_gather_object, world=world)
    default_group_call_sites().compare(sites, name, gather)
    copies = [t.detach().to(world.device).clone(memory_format=torch.contiguous_format) for t in tensors]
    payload = torch.cat([torch.empty(0, dtype=torch.uint8, device=world.device), *map(_bytes, copies)])
    sizes = [[math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in specs] for _, specs, _ in headers]
    padded = payload.new_zeros(max(map(sum, sizes)))
    padded[: len(payload)] = payload
    payloads = get_communicator().start_all_gather(padded, name)() if len(padded) else [padded] * world.size
    values: list[Any] = []
    for (skeleton, specs, _), sizes_of_rank, received in zip(headers, sizes, payloads, strict=True):
        pieces = received[: sum(sizes_of_rank)].split(sizes_of_rank)
        of_rank = [_tensor(piece, *spec) for piece, spec in zip(pieces, specs, strict=True)]
        values.append(_with_tensors(skeleton, of_rank))
    return values


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _tensor(content: Tensor, dtype: str, shape: list[int]) -> Tensor:
    return content.clone().view(getattr(torch, dtype)).view(shape)  # a copy, because a view must be aligned


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with an index in place of each tensor; appends the tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"table": {key: _without_tensors(part, tensors) for key, part in value.items()}}
    return [_without_tensors(part, tensors) for part in value] if isinstance(value, (list, tuple)) else value


def _with_tensors(skeleton: Any, tensors: list[Tensor]) -> Any:
    if isinstance(skeleton, list):
        return [_with_tensors(part, tensors) for part in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if "tensor" in skeleton:
        return tensors[skeleton["tensor"]]
    return {key: _with_tensors(part, tensors) for key, part in skeleton["table"].items()}
