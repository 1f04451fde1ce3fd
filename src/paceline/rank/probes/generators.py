"""Which random generators a script makes its batches with, and in which state: `--check` asks whether ranks draw alike.

Beside those that everybody shares there are generators of a script's own, of numpy, Python and torch. They are found
by way of the garbage collector, so nothing is put in place of their classes. One counts as used for a batch's samples
if it has gone on by half as many numbers as there are samples, or more: a number or two for all of a batch, its size,
say, may be the same on purpose. One of those that are shared may be put into another state, as by a checkpoint that is
loaded: then what counts is how far it goes on from there.
"""

from __future__ import annotations

import copy
import gc
import mmap
import random
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import FrameType
from typing import Any

from paceline.protocol.facts import OWN_GENERATORS
from paceline.rank.imports import when_imported
from paceline.rank.probes.digests import hashed
from paceline.rank.probes.hooks import hang
from paceline.rank.sites import USER, owner
from paceline.rank.unseen import unseen

SLOTS, DIGEST_BYTES = 64, 16
NAMES = ("torch", "random", "numpy", OWN_GENERATORS)
SETTERS = {  # of the shared generators, by the modules that have them
    "torch": ("torch", ("manual_seed", "set_rng_state")),
    "torch.random": ("torch", ("manual_seed", "set_rng_state")),
    "random": ("random", ("seed", "setstate")),
    "numpy.random": ("numpy", ("seed", "set_state")),
}
CHUNK = 10_000  # objects: their references fit into the cache
LOOKS = range(2, 5)  # at these batches of a loader it is looked: what the first one makes is there then


class Fetched:
    """With which generators each loader's samples are fetched, in processes of the loader, too."""

    def __init__(self) -> None:
        self._states = mmap.mmap(-1, SLOTS * len(NAMES) * DIGEST_BYTES)  # loader processes are forks: they share it
        self._count: defaultdict[int, int] = defaultdict(int)

    def watched(self, fetch: Any, number_of: Callable[[Any], int]) -> Any:
        """`fetch`, looked at; `number_of` a data set is that of its loader, -1 if it is of none."""

        @unseen
        @wraps(fetch)
        def fetched(fetcher: Any, indices: Any) -> Any:
            number = number_of(fetcher.dataset)
            worker = sys.modules["torch.utils.data"].get_worker_info()
            if not 0 <= number < SLOTS or (worker is not None and worker.id):
                return fetch(fetcher, indices)
            self._count[number] += 1
            if self._count[number] not in LOOKS:
                return fetch(fetcher, indices)
            generators = Generators()
            batch = fetch(fetcher, indices)
            for name, state in generators.used(len(indices) if isinstance(indices, list) else 1).items():
                at = self._place(number, name)
                if not self._states[at]:
                    self._states[at : at + DIGEST_BYTES] = state.encode()
            return batch

        return fetched

    def of(self, number: int) -> dict[str, str]:
        """Their states before they were used first, by their names."""
        found: dict[str, str] = {}
        for name in NAMES if number < SLOTS else ():
            at = self._place(number, name)
            if state := self._states[at : at + DIGEST_BYTES].strip(b"\0"):
                found[name] = state.decode()
        return found

    def _place(self, number: int, name: str) -> int:
        return (number * len(NAMES) + NAMES.index(name)) * DIGEST_BYTES


class Generators:
    """Those that are alive, as they are now."""

    def __init__(self) -> None:
        self._before = [(name, one, copied) for name, one in _alive() if (copied := _copy(one)) is not None]
        _LOOKED_AT.add(self)

    def was_set(self, which: str) -> None:
        """A shared one has been put into the state that it has now."""
        self._before = [(name, one, _copy(one) if name == which else before) for name, one, before in self._before]

    def used(self, samples: int) -> dict[str, str]:
        """By name, a digest of the states in which those were that have since been used for so many samples."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for name, one, before in self._before:
            if _goes_on(before, one, max(1, samples // 2)):
                found[name].append(_state(before))
        return {name: hashed("".join(sorted(states)).encode()) for name, states in found.items()}


_LOOKED_AT: weakref.WeakSet[Generators] = weakref.WeakSet()


def watch_setters() -> None:
    """Have it noticed when a generator that everybody shares is put into another state."""
    for module in SETTERS:
        when_imported(module, partial(_watch_setters, module))


def _watch_setters(module: str, *, late: bool) -> None:
    generator, names = SETTERS[module]
    for name in names:
        hang(sys.modules[module], name, after=partial(_was_set, generator))
        setter = getattr(sys.modules[module], name)
        setter.__module__, setter.__qualname__ = module, name  # by which it is pickled


def _was_set(which: str, *_: Any, **__: Any) -> None:
    for one in [*_LOOKED_AT]:
        one.was_set(which)


def _alive() -> Iterator[tuple[str, Any]]:
    numpy: Any = sys.modules.get("numpy.random")
    torch: Any = sys.modules["torch"]
    kinds: set[type] = {random.Random, torch.Generator}
    shared = {"torch": torch.default_generator, "random": vars(random)["_inst"]}
    if numpy is not None:
        kinds |= {numpy.Generator, numpy.RandomState}
        shared["numpy"] = numpy.mtrand._rand
    yield from shared.items()
    seen = {id(one) for one in shared.values()}
    for one in (*_of_kinds(kinds), *_locals(sys._getframe(1))):  # pyright: ignore[reportPrivateUsage]
        if type(one) in kinds and id(one) not in seen:
            seen.add(id(one))
            yield OWN_GENERATORS, one


def _of_kinds(kinds: set[type]) -> list[Any]:
    """All instances of these classes, also those that only objects without a cycle refer to; at least once each."""
    found: list[Any] = []
    known: list[Any] = gc.get_objects()
    for at in range(0, len(known), CHUNK):
        part = known[at : at + CHUNK]
        held = gc.get_referents(*part)
        untracked = [one for one in held if type(one) is dict and not gc.is_tracked(one)]
        for some in (part, held, gc.get_referents(*untracked)):
            if not kinds.isdisjoint(map(type, some)):
                found += [one for one in some if type(one) in kinds]
    return found


def _locals(frame: FrameType | None) -> Iterator[Any]:
    """Of the script's functions that are running: frames are not among what is collected."""
    while frame is not None:
        if owner(frame.f_code.co_filename) is USER:
            yield from frame.f_locals.values()
        frame = frame.f_back


def _copy(one: Any) -> Any:
    if not hasattr(one, "device"):
        return copy.deepcopy(one)
    if one.device.type != "cpu":
        return None  # a device is not waited for
    copied = type(one)()
    copied.set_state(one.get_state())
    return copied


def _state(one: Any) -> str:
    if isinstance(one, random.Random):
        return repr(one.getstate()[1])
    if hasattr(one, "device"):
        return hashed(one.get_state().numpy().tobytes())
    inner = _bits(one).state["state"]
    return repr({name: value.tobytes() if hasattr(value, "tobytes") else value for name, value in inner.items()})


def _bits(one: Any) -> Any:
    """What numpy's two kinds of generators draw from."""
    return one.bit_generator if hasattr(one, "bit_generator") else one._bit_generator


def _goes_on(before: Any, now: Any, numbers: int) -> bool:
    """Whether it has drawn so many, or more."""
    goal, going = _state(now), _copy(before)
    for drawn in range(numbers):
        if _state(going) == goal:
            return False
        if drawn < numbers - 1:
            _draw(going)
    return True


def _draw(one: Any) -> None:
    if isinstance(one, random.Random):
        one.getrandbits(32)
    elif hasattr(one, "device"):
        sys.modules["torch"].rand(1, generator=one)
    else:
        _bits(one).random_raw()
