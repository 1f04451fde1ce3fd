"""Numbers, messages and errors between ranks: what a step and its loop exchange besides gradients.

Numbers that a device has still to compute: a step reads all of them at once, and waits for a GPU one time only.

Whether gradients hold an infinity or NaN: asked in every step, of every element.

Checks that all ranks have called a sum or a gather of their loop from the same place of the program.

`s.sum` and its like are alike to every transport wherever they are called. A rank that has left a loop early would add
its numbers to those that the others add up at another line, and nobody would see it. So each rank sends a hash of its
stack along, of the user's lines only.

Ranks may call from different lines on purpose (`if s.rank == 0: s.sum(mine) else: s.sum(0)`): then no rank calls from
another one's line. It is an error if a rank has called before from the place where another rank calls now. A `where`
(the epoch, say) must always be the same.

Words between ranks: what each has to say, what must be the same on all, and errors that all of them share.

Words travel as JSON in byte tensors: torch's own object collectives unpickle what a peer sends, i.e. run its code.

Sums of metrics over virtual ranks, which travel while a step computes.

Tensors of any number and shape from every rank, on every rank.
"""

import cmath
import json
import math
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from operator import attrgetter
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.collectives.buckets import by_type
from paceline.collectives.communicator import communicator, memory_communicator
from paceline.collectives.tree import tree_sum
from paceline.errors import ExitCode, PacelineError, ReportedByPeer, TrainingError, UsageError
from paceline.rank.guard import Guard
from paceline.rank.sites import MAX_DEPTH, Owner, frame_of, owner, short, site_words
from paceline.rank.world import World

if TYPE_CHECKING:
    from paceline.collectives.hosts import Hosts

_T = TypeVar("_T")
_U = TypeVar("_U")
_N = TypeVar("_N", float, Tensor, float | Tensor)


@dataclass(frozen=True)
class Pending(Generic[_T]):
    """What the host makes of `numbers`, (n,) float64 or float32 on any device, once it has read them."""

    numbers: Tensor
    made: Callable[[list[float]], _T]
    """where all ranks have read the same numbers all call it, as it may be a collective"""

    def then(self, change: Callable[[_T], _U]) -> "Pending[_U]":
        """The same numbers, of which `change` makes something else."""
        return Pending(self.numbers, lambda numbers: change(self.made(numbers)))

    def now(self) -> _T:
        """Read them (see `read_at_once`)."""
        return self.made(read_at_once([self])[0])


def read_at_once(pending: Sequence[Pending[Any]]) -> list[list[float]]:
    """The numbers of each; the host waits for the device at most once.

    Raises:
        StallError: if the guard has freed this rank: then the numbers are none.
    """
    everything = [one.numbers for one in pending]
    far = [numbers for numbers in everything if costs(numbers.device)]
    told: list[float] = torch.cat(far).tolist() if far else []
    Guard.of_process().check_freed()
    rest = iter(told)
    return [[*islice(rest, len(numbers))] if costs(numbers.device) else numbers.tolist() for numbers in everything]


def now(found: "_T | Pending[_T]") -> _T:
    """What is known already, or read now."""
    if isinstance(found, Pending):
        pending: Pending[_T] = found  # pyright: ignore[reportUnknownVariableType]
        return pending.now()
    return found


def costs(device: torch.device) -> bool:
    """Whether the host has to wait for `device` to read a number there."""
    return device.type != "cpu"


def sent(numbers: Sequence[float], device: torch.device) -> Tensor:
    """(n,) float64 on `device`, without waiting for it."""
    here = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


SMALL_ON_DEVICE = 1 << 24
SMALL = 1 << 16
"""elements; more take longer to be read and written once more than each tensor's own operation takes"""


def are_finite_here(gradients: Sequence[Tensor]) -> bool:
    """Whether none of them, all on the host's device, holds an infinity or NaN."""
    if not gradients:
        return True
    is_plain = {*map(_dtype_and_layout, gradients)} == {(torch.float32, torch.strided)}
    if is_plain and sum(map(Tensor.numel, gradients)) <= SMALL:
        with suppress(RuntimeError):  # memory that several elements share cannot be written
            found = torch.zeros(1)
            torch._amp_foreach_non_finite_check_and_unscale_([*gradients], found, torch.ones(()))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            return not found.item()
    # a sum is faster than a look at each element. One of finite elements may overflow: then each is looked at
    sums = [one.sum(dtype=torch.float32 if one.element_size() < 4 else None) for one in gradients]
    return cmath.isfinite(torch.stack(sums).sum().item()) or all(bool(one.isfinite().all()) for one in gradients)


_dtype_and_layout = attrgetter("dtype", "layout")


@cache
def number_on(device: torch.device, number: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A constant, () on `device`."""
    return torch.tensor(number, dtype=dtype, device=device)


def are_finite(gradients: Sequence[Tensor], device: torch.device) -> Pending[bool]:
    """Whether none of them, all on `device`, holds an infinity or NaN; `numbers` are [0], or perhaps one does."""
    if not gradients:
        return Pending(torch.zeros(1, dtype=torch.float64, device=device), lambda _: True)
    if not costs(device):
        return Pending(
            torch.tensor([float(not are_finite_here(gradients))], dtype=torch.float64), lambda bad: not bad[0]
        )
    perhaps = torch.zeros(1, device=device)
    is_plain = {*map(_dtype_and_layout, gradients)} == {(torch.float32, torch.strided)}
    if is_plain and sum(map(Tensor.numel, gradients)) <= SMALL_ON_DEVICE:
        one = number_on(device, 1.0)
        torch._amp_foreach_non_finite_check_and_unscale_([*gradients], perhaps, one)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    else:  # it only reads; times 0 it is 0, or NaN
        perhaps = (nn.utils.get_total_norm(gradients, math.inf) * 0).view(1)
    return Pending(perhaps, lambda bad: bad[0] == 0 or all(bool(gradient.isfinite().all()) for gradient in gradients))


def scaled(gradients: Sequence[Tensor], factor: float | Tensor, device: torch.device) -> bool | Pending[bool]:
    """Multiply gradients, all on `device`, by the scalar `factor`; whether they are finite, answered on the way."""
    # on the CPU that kernel takes as much memory again; and the factor it takes is a float32
    if not gradients or not costs(device) or any(gradient.dtype != torch.float32 for gradient in gradients):
        for group, number in by_type(gradients, factor):
            torch._foreach_mul_(group, number)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        return are_finite(gradients, device) if costs(device) else are_finite_here(gradients)
    # an element is looked at before it is multiplied: by more than one, it may overflow then
    if isinstance(factor, Tensor):
        factor = factor.float()
        perhaps = (factor.abs() > 1).float().view(1)
    else:
        perhaps = (torch.zeros if abs(factor) <= 1 else torch.ones)(1, device=device)
        factor = number_on(device, factor)
    torch._amp_foreach_non_finite_check_and_unscale_([*gradients], perhaps, factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return Pending(perhaps, lambda found: not found[0] or all(bool(g.isfinite().all()) for g in gradients))


SHOWN = 3  # lines of a rank in an error
FACTOR, PRIME = 1_000_003, (1 << 61) - 1
HALF = 1 << 26  # a float64 holds two such hashes exactly


class Places:
    """What one process knows of the places from which its ranks have called."""

    def __init__(self) -> None:
        self._called: set[int] = set()  # hashes of lines
        self._agreed: set[tuple[int, ...]] = set()  # those of different lines that were right together

    def compare(self, hashes: Sequence[int], what: str, gather: Callable[[Any], list[Any]]) -> None:
        """Compare the hashes of all ranks, by rank (a collective, `gather`, where they differ).

        Raises:
            TrainingError: with MISMATCH, on one rank; ReportedByPeer on the others.
        """
        rank, lines = dist.get_rank(), tuple(one // HALF for one in hashes)  # without `where`, which changes each step
        same_where = len({one % HALF for one in hashes}) == 1
        if len({*hashes}) > 1 and not (same_where and lines in self._agreed):
            told = gather([_lines(), [one in self._called for one in lines]])
            known = any(
                called and lines[other] != lines[by]
                for by, (_, of_rank) in enumerate(told)
                for other, called in enumerate(of_rank)
            )
            if known or not same_where:
                raise _mismatch(hashes, [site for site, _ in told], what, rank)
            self._agreed.add(lines)
        self._called.add(lines[rank])


def place_hash(where: Sequence[int] = ()) -> int:
    """A hash of the user's lines that have led here, and of `where`: 0 <= n < 2**52."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    found, depth = 0, 0
    while frame is not None and depth < MAX_DEPTH:
        if of_file := _of_file(frame.f_code.co_filename):
            found = (found * FACTOR + of_file + frame.f_lineno) % PRIME
        frame, depth = frame.f_back, depth + 1
    return found % HALF * HALF + zlib.crc32(repr([*where]).encode()) % HALF


@cache
def _of_file(filename: str) -> int:
    """A number for a file of the user's, the same on every host; 0 for any other."""
    return 1 + zlib.crc32(short(filename).encode()) if owner(filename) is Owner.USER else 0


def _lines() -> str:
    """The user's lines, the innermost first."""
    return ", called from ".join(site_words(frame_of(frame)) for frame in islice(_users_frames(), SHOWN))


def _users_frames() -> Iterator[FrameType]:
    frames = (frame for frame, _ in islice(walk_stack(sys._getframe(1)), MAX_DEPTH))  # pyright: ignore[reportPrivateUsage]
    return (frame for frame in frames if owner(frame.f_code.co_filename) is Owner.USER)


def places() -> Places:
    """Those of torch's default group."""
    group = dist.group.WORLD
    assert group is not None  # joined
    if group not in _of_group:
        _of_group[group] = Places()
    return _of_group[group]


_of_group: WeakKeyDictionary[dist.ProcessGroup, Places] = WeakKeyDictionary()


def _mismatch(hashes: Sequence[int], sites: Sequence[str], what: str, rank: int) -> PacelineError:
    (usual, votes), *_ = Counter(hashes).most_common()
    odd = [number for number, one in enumerate(hashes) if one != usual] if 2 * votes > len(hashes) else []
    told_by = min(odd, default=0)
    if rank != told_by:
        return ReportedByPeer(f"rank {told_by} tells what happened", ExitCode.MISMATCH)
    shown = "; ".join(f"rank {number} at {site or 'an unknown line'}" for number, site in enumerate(sites))
    return TrainingError(
        f"the ranks exchange {what} from different places of the program: {shown}. What they add up or gather does "
        "not belong together. One of them has left a loop earlier than the others, or has called once more: all ranks "
        "must call s.sum, s.mean, s.any, s.gather and s.compute in the same order. A decision of one rank must reach "
        "all: if s.any(stop): break.",
        ExitCode.MISMATCH,
    )


_PASSED = ("paceline.collectives.", "contextlib")
Gather = Callable[[Any], dict[int, Any]]
"""(words, anything JSON can hold) -> those of several ranks, by their number in the world (a collective of these)"""


def new_group() -> dist.ProcessGroup:
    """Another group of all ranks, whose collectives cannot be mistaken for those of the default group."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    return group


def gather_words(words: Any, world: World) -> list[Any]:
    """Every rank's `words` (anything JSON can hold), by rank, on every rank.

    They carry the name of the function that gathers them: ranks that gather for different purposes fail.
    """
    if world.size == 1:
        return [words]
    return communicator(world.group).gather(words, f"words of {_caller()}", world.device)


def _caller() -> str:
    """The function that exchanges words, which is none of this folder's and no context manager's."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASSED):
        frame = frame.f_back
    return frame.f_code.co_name


def by_all(world: World) -> Gather:
    """Among all ranks."""
    return lambda words: dict(enumerate(gather_words(words, world)))


def by_host(host: "Hosts") -> Gather:
    """Among the ranks of this host."""
    those, first = memory_communicator(host.memory), host.number * host.memory.size
    return lambda words: dict(enumerate(those.gather(words, "words of a host"), first))


def by_itself(world: World) -> Gather:
    """This rank alone."""
    return lambda words: {world.rank: words}


@contextmanager
def together(world: World, *, prepares: bool = True) -> Generator[None]:
    """Inside, what fails on one rank fails on all of them: nobody is left waiting for a rank that has gone.

    Nothing inside may be a collective: a rank that has failed answers here, and the others would wait there.

    Args:
        world: the ranks.
        prepares: whether this comes before the first step: then anything that fails there is wrong use.

    Raises:
        UsageError: on the first rank that failed, with its own words, or its own traceback as the cause.
        Exception: in its place the rank's own error, unless this `prepares`.
        ReportedByPeer: on all other ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    code = int(error.exit_code) if isinstance(error, PacelineError) else ExitCode.FAILED
    failures = gather_words(None if error is None else ExitCode.USAGE if prepares else code, world)
    failed = [rank for rank, failure in enumerate(failures) if failure is not None]
    if not failed:
        return
    if world.rank != failed[0]:
        raise ReportedByPeer(f"rank {failed[0]} failed", ExitCode(failures[failed[0]])) from None
    assert error is not None
    if not prepares:
        raise error
    who = "every rank" if len(failed) == world.size else "rank " + ", ".join(map(str, failed))
    where = f" (on {who} of {world.size})" if world.size > 1 else ""
    if isinstance(error, PacelineError):
        raise UsageError.of(error, after=where) from None
    shown = "".join(traceback.format_exception(error)).rstrip()
    raise UsageError(
        f"{shown}\nThis was raised before the first step{where}, while the run was being prepared."
    ) from None


def check_equal(what: str, mine: Any, world: World, *, error: type[PacelineError] = UsageError) -> None:
    """Refuse to go on unless `mine` (anything JSON can hold) is the same on all ranks.

    Raises:
        UsageError: (or `error`) on rank 0, naming the ranks in the minority and both values.
        ReportedByPeer: on all other ranks.
    """
    everybody = [json.dumps(words, sort_keys=True) for words in gather_words(mine, world)]
    (common, votes), *others = Counter(everybody).most_common()
    if not others:
        return
    if votes == 1 or votes == others[0][1]:  # a tie accuses nobody
        told = "; ".join(f"rank {rank} has {words}" for rank, words in enumerate(everybody))
    else:
        odd = [rank for rank, words in enumerate(everybody) if words != common]
        told = "; ".join(f"rank {rank} has {everybody[rank]}" for rank in odd) + f", all others {common}"
    raise told_once(error(code="ranks-differ", what=what, told=told), world)


def told_once(error: PacelineError, world: World, *, by: int = 0) -> PacelineError:
    """What each rank raises when all of them have found the same `error`: rank `by` tells it, the others only end."""
    return error if world.rank == by else ReportedByPeer(f"rank {by} tells what happened", error.exit_code)


NAME = "totals of the step"
LOOP_NUMBERS = "numbers of the loop"


@dataclass(frozen=True)
class Totals:
    """What a `start_totals` gave: the sums of losses and of weights over virtual ranks, and votes summed over ranks."""

    sums: list[float]
    votes: list[float]


@dataclass(frozen=True)
class SummedTotals:
    """The totals of a step over all ranks. If the host must wait for the device, they are pending."""

    totals: Totals | Pending[Totals]
    weights: float | Tensor
    """the sum of weights; (V,), by virtual rank, if it is on the device only"""

    @property
    def weight(self) -> float | Tensor:
        """The sum of weights."""
        return _tree_sum(self.weights.unbind()) if isinstance(self.weights, Tensor) else self.weights


def start_totals(
    losses: Sequence[float | Tensor], weights: Sequence[float | Tensor], votes: Sequence[float], world: World
) -> Callable[[], SummedTotals]:
    """Start the sum over ranks. Call the returned function once: it waits for the other ranks, not for the device.

    Args:
        losses: by virtual rank; 0.0 for those of other ranks. They are added in the order of `tree`, so the bits do not
            depend on the world size. () float64 on the device if the host would have to wait for it.
        weights: as losses; they may be numbers on the host.
        votes: m numbers of this rank, added in any order.
        world: the ranks.
    """
    if world.size == 1:
        loss, weight = _tree_sum(losses), _tree_sum(weights)
        if costs(world.device):
            return lambda: _summed_here(loss, weight, [*votes])
        here = [float(loss), float(weight)]
        return lambda: SummedTotals(Totals(here, [*votes]), here[1])
    # One slot for each virtual rank: all others add zeros, so each rank gets the numbers unchanged.
    numbers = [*chain.from_iterable(zip(losses, weights, strict=True)), *votes]
    slots = sent([0.0 if isinstance(number, Tensor) else number for number in numbers], world.device)
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            slots[place] = number
    finish = communicator().start_sum(slots, NAME)
    return lambda: _summed_over_ranks(finish(), len(losses))


def _summed_here(loss: float | Tensor, weight: float | Tensor, votes: list[float]) -> SummedTotals:
    """On a device, without other ranks: the host reads only the numbers that it does not know."""
    unknown = [number for number in (loss, weight) if isinstance(number, Tensor)]

    def made(found: list[float]) -> Totals:
        rest = iter(found)
        return Totals([next(rest) if isinstance(number, Tensor) else number for number in (loss, weight)], votes)

    numbers = unknown[0].view(1) if len(unknown) == 1 else torch.stack(unknown) if unknown else torch.zeros(0)
    return SummedTotals(Pending(numbers, made), weight.view(1) if isinstance(weight, Tensor) else weight)


def _summed_over_ranks(everything: Tensor, ranks: int) -> SummedTotals:
    if not costs(everything.device):
        found: list[float] = everything.tolist()
        Guard.of_process().check_freed()
        totals = _totals(found, ranks)
        return SummedTotals(totals, totals.sums[1])
    return SummedTotals(Pending(everything, lambda found: _totals(found, ranks)), everything[1 : 2 * ranks : 2])


def _totals(found: list[float], ranks: int) -> Totals:
    pairs, votes = found[: 2 * ranks], found[2 * ranks :]
    return Totals([_tree_sum(pairs[::2]), _tree_sum(pairs[1::2])], votes)


def _tree_sum(of_each: Sequence[_N]) -> _N:
    """The sum of one number of each virtual rank, or of tensors."""
    if len(of_each) == 1:
        return of_each[0]
    return tree_sum({(v, v + 1): number for v, number in enumerate(of_each)}, lambda a, b: a + b, len(of_each))


def sum_over_ranks(
    numbers: Tensor, name: str, group: dist.ProcessGroup | None = None, *, where: Sequence[int] = ()
) -> Tensor:
    """(n,) float64, a few numbers: added up over all ranks or a group, the same on all of them (a collective).

    Numbers of the loop must come from the same place of the program on all ranks, and from the same `where`: see
    `places`.

    Raises:
        TrainingError: with MISMATCH, if they do not; ReportedByPeer on all ranks but one.
    """
    exchange = communicator(group)
    if group is not None or name != LOOP_NUMBERS or (size := exchange.size) == 1:
        return exchange.start_sum(numbers, name)()
    hashes = [0.0] * size
    hashes[dist.get_rank()] = float(place_hash(where))
    total = exchange.start_sum(torch.cat([numbers, sent(hashes, numbers.device)]), name)()
    told: list[float] = total[len(numbers) :].tolist()
    gather = partial(exchange.gather, device=numbers.device, name=f"places of {name}")
    places().compare([int(one) for one in told], name, gather)
    return total[: len(numbers)]


def gather_tensors(value: Any, world: World, name: str, *, where: Sequence[int] = ()) -> list[Any]:
    """Every rank's `value`, by rank, on every rank, the same to the bit, on the world's device (a collective).

    Args:
        value: tensors in lists and dicts with words as keys, beside whatever else JSON can hold there. Ranks may have
            different ones.
        world: of all ranks.
        name: for the hang guard.
        where: must be the same on all ranks, as the place of the program must.

    Raises:
        TrainingError: with MISMATCH, if ranks call from different places; see `places`. ReportedByPeer on all but one.
    """
    if world.size == 1:
        return [value]
    held: list[Tensor] = []
    mine = [_described(value, held), [[str(t.dtype)[6:], [*t.shape]] for t in held], place_hash(where)]
    found_of = gather_words(mine, world)
    places().compare([place for *_, place in found_of], name, partial(gather_words, world=world))
    told = [(described, kinds) for described, kinds, _ in found_of]
    copies = [t.detach().to(world.device).clone(memory_format=torch.contiguous_format) for t in held]
    mine = torch.cat([torch.empty(0, dtype=torch.uint8, device=world.device), *(_bytes(t) for t in copies)])
    sizes = [[math.prod(shape) * getattr(torch, kind).itemsize for kind, shape in kinds] for _, kinds in told]
    padded = mine.new_zeros(max(map(sum, sizes)))
    padded[: len(mine)] = mine
    parts = communicator().start_gather(padded, name)() if len(padded) else [padded] * world.size
    found: list[Any] = []
    for (described, kinds), of_rank, part in zip(told, sizes, parts, strict=True):
        pieces = part[: sum(of_rank)].split(of_rank)
        tensors = [_tensor(piece, *kind) for piece, kind in zip(pieces, kinds, strict=True)]
        found.append(_filled(described, tensors))
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _tensor(content: Tensor, kind: str, shape: list[int]) -> Tensor:
    return content.clone().view(getattr(torch, kind)).view(shape)  # a copy begins where a number may


def _described(value: Any, held: list[Tensor]) -> Any:
    """`value` with numbers in place of its tensors, which are put into `held`."""
    if isinstance(value, Tensor):
        held.append(value)
        return {"tensor": len(held) - 1}
    if isinstance(value, Mapping):
        return {"table": {key: _described(part, held) for key, part in value.items()}}
    return [_described(part, held) for part in value] if isinstance(value, (list, tuple)) else value


def _filled(told: Any, tensors: list[Tensor]) -> Any:
    """What `_described` was given."""
    if isinstance(told, list):
        return [_filled(part, tensors) for part in told]
    if not isinstance(told, dict):
        return told
    if "tensor" in told:
        return tensors[told["tensor"]]
    return {key: _filled(part, tensors) for key, part in told["table"].items()}
