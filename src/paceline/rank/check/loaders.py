"""`--check`: records facts about DataLoaders, and shortens epochs, so that a script completes in a minute."""

from __future__ import annotations

import ast
import copy
import ctypes
import gc
import linecache
import mmap
import random
import re
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from itertools import islice
from operator import index as as_index
from types import FrameType
from typing import Any

from paceline.protocol.facts import (
    MAX_DIGESTS,
    MAX_INDICES,
    OWN_GENERATORS,
    RECORDED_EPOCHS,
    LoaderPass,
    ScriptFacts,
    SeenLoader,
    shortened_epoch_length,
)
from paceline.rank.guard import HangGuard
from paceline.rank.imports import hide_from_warnings, when_imported
from paceline.rank.probes import ScriptListener, leaf_digests, sample_count, short_hash, wrap_function
from paceline.rank.sites import USER, call_site, code_owner, format_user_site

MAX_SKIPPED_BATCHES = 100_000  # skipped batches to reach the last one
MAX_SECONDS, LATER_SECONDS = 5.0, 1.0  # time limit for skipping, in a recorded epoch and in a later one
MAX_PASSES = 20  # a longer script is ended
MAX_UNJOINED_PASSES = 200  # the same while there is no evidence that the rank trains with others in these passes
NUM_PROBED_SAMPLES = 6
SLOTS, DIGEST_BYTES = 64, 16
GENERATOR_NAMES = ("torch", "random", "numpy", OWN_GENERATORS)
GENERATOR_STATE_SETTERS = {  # functions that set the global generators, by module
    "torch": ("torch", ("manual_seed", "set_rng_state")),
    "torch.random": ("torch", ("manual_seed", "set_rng_state")),
    "random": ("random", ("seed", "setstate")),
    "numpy.random": ("numpy", ("seed", "set_state")),
}
GC_CHUNK_OBJECTS = 10_000  # objects whose references fit into the cache
INSPECTED_BATCHES = range(2, 5)  # the inspected batches of a loader; the first batch may still create generators
MAX_ASSIGNMENTS_FOLLOWED = 4  # assignments that are followed backwards
WORLD_SIZE_PATTERN = re.compile(r"world|num_processes|num_replicas|n_?gpus|nproc", re.IGNORECASE)


class TruncatedSampler:
    """The first draws of a sampler and its last one, which shows faults at the end of an epoch.

    One further draw exhausts the sampler, as a full epoch does, because a sampler may count its epochs after its last
    index. A sampler that returns the same number of draws again counts as infinite.
    """

    def __init__(
        self, draws: Iterator[Any], batches: int, kept: int, seen: LoaderPass, seconds: float = MAX_SECONDS
    ) -> None:
        self._draws, self._left, self._batches, self._over, self._seen = draws, kept, batches, batches - kept, seen
        self._seconds = seconds
        self._ended = False

    def __iter__(self) -> TruncatedSampler:
        return self

    def __next__(self) -> Any:
        if self._left == 0:
            self._exhaust()
            raise StopIteration
        drawn = self._draw()
        self._left -= 1
        return drawn if self._left else self._skip_to_last(self._over, drawn)

    def _exhaust(self) -> None:
        if self._ended or self._seen.cut_off:
            return
        before, count = self._seen.drawn, len(self._seen.indices)
        with suppress(Exception):  # from a sampler that cannot continue
            self._skip_to_last(self._batches + 1, None)
        if not self._ended:
            self._seen.cut_off, self._seen.drawn = True, before
            del self._seen.indices[count:]

    def _skip_to_last(self, batches: int, drawn: Any) -> Any:
        began_ns, page = time.monotonic_ns(), HangGuard.of_process().page
        for _ in range(min(batches, MAX_SKIPPED_BATCHES)):
            if time.monotonic_ns() - began_ns > self._seconds * 1e9 and not page.calls_since(began_ns):
                self._seen.cut_off = True
                break
            try:
                drawn = self._draw()
            except StopIteration:
                self._ended = True
                break
        self._seen.cut_off |= batches > MAX_SKIPPED_BATCHES and not self._ended
        return drawn

    def _draw(self) -> Any:
        drawn = next(self._draws)
        indices: list[Any] = [*drawn] if isinstance(drawn, (list, tuple)) else [drawn]
        self._seen.drawn += len(indices)
        room = MAX_INDICES - len(self._seen.indices)
        self._seen.indices += [as_index(i) for i in islice(indices, max(0, room)) if hasattr(i, "__index__")]
        return drawn


class LoaderRecorder(ScriptListener):
    def __init__(self, facts: ScriptFacts) -> None:
        self._facts = facts
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._live: dict[int, Any] = {}  # data sets, by the numbers of their loaders
        self._began: dict[int, float] = {}
        self._fetched = LoaderRngRecorder()
        self._generators: RngSnapshots | None = None
        self.joint = set[int]()  # loaders whose batches the ranks have used in joint training
        self.fed = -1  # the number of the loader of the last batch
        self.given = 0  # number of batches of all loaders

    def on_torch_imported(self) -> None:
        wrap_seed_functions()
        dataloader: Any = sys.modules["torch.utils.data.dataloader"]
        fetchers: Any = sys.modules["torch.utils.data._utils.fetch"]
        loader = dataloader.DataLoader
        map_style, length, facts = dataloader._DatasetKind.Map, loader.__len__, self._facts

        def shortened(self: Any) -> int:
            is_cut = self._dataset_kind == map_style and not facts.session
            return shortened_epoch_length(length(self)) if is_cut else length(self)

        def made(_: Any, loader: Any, *__: Any, **___: Any) -> None:
            loader.made_at = format_user_site()
            loader.divided = find_division_by_world_size(call_site(sys._getframe(1)).frame, "batch_size", 1)  # pyright: ignore[reportPrivateUsage]

        loader.__len__, loader.whole_length = shortened, length
        wrap_function(loader, "__init__", after=made)
        wrap_function(dataloader._BaseDataLoaderIter, "_next_index", before=partial(self._truncate_sampler, map_style))
        for fetcher in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):
            fetcher.fetch = self._fetched.wrap_fetch(
                fetcher.fetch, lambda data: next((n for n, dataset in self._live.items() if dataset is data), -1)
            )

    def _truncate_sampler(self, map_style: Any, batches: Any) -> None:
        number = _loader_number_of(batches)
        if number < 0 or isinstance(batches._sampler_iter, TruncatedSampler) or batches._dataset_kind != map_style:
            return
        record = self._facts.loaders[number]
        if (length := record.batches) >= 0 and not self._facts.session:
            is_recorded = len(record.passes) <= RECORDED_EPOCHS
            kept = shortened_epoch_length(length) if is_recorded else min(1, length)
            seconds = MAX_SECONDS if is_recorded else LATER_SECONDS
            batches._sampler_iter = TruncatedSampler(batches._sampler_iter, length, kept, record.passes[-1], seconds)

    def on_epoch_begin(self, batches: Any) -> None:
        loader = batches.of_loader()
        if loader not in self._numbers:
            self._numbers[loader] = self._loader_number(loader)
        number = batches.loader_number = self._numbers[loader]  # stored, because the loader may be deleted in the loop
        record = self._facts.loaders[number]
        max_passes = MAX_PASSES if number in self.joint else MAX_UNJOINED_PASSES
        if record.training_passes and len(record.passes) >= max_passes:
            raise SystemExit(0)
        record.passes.append(LoaderPass())
        self._began[number] = time.monotonic()

    def _loader_number(self, loader: Any) -> int:
        """The number of a loader's record, which may be that of an earlier loader of this data at the same lines."""
        record = inspect_loader(loader)
        for number, data in self._live.items():
            known = self._facts.loaders[number]
            if data is loader.dataset and (known.site, known.constructed_at) == (record.site, record.constructed_at):
                return number
        self._live[len(self._facts.loaders)] = loader.dataset
        self._facts.loaders.append(record)
        return len(self._facts.loaders) - 1

    def on_batch_received(self, batches: Any, batch: Any) -> None:
        self._generators = None
        self.fed = _loader_number_of(batches)
        self.given += 1
        if self.fed < 0:
            return
        loader_pass = self._facts.loaders[self.fed].passes[-1]
        loader_pass.sizes.append(sample_count(batch))
        if len(loader_pass.leaves) < MAX_DIGESTS and len(self._facts.loaders[self.fed].passes) <= RECORDED_EPOCHS:
            loader_pass.leaves.append(leaf_digests(batch))
        if len(self._facts.loaders[self.fed].passes) == 1 and len(loader_pass.sizes) in INSPECTED_BATCHES:
            self._generators = RngSnapshots()

    def on_forward_begin(self, ddp: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._generators is None:
            return
        record = self._facts.loaders[self.fed]
        for name, state in self._generators.used_since(record.passes[-1].sizes[-1]).items():
            record.random.setdefault(f"{name}, in the loop", state)
        self._generators = None

    def on_epoch_end(self, batches: Any) -> None:
        number = _loader_number_of(batches)
        if number < 0:
            return
        loader_pass = self._facts.loaders[number].passes[-1]
        loader_pass.ended, loader_pass.seconds = True, time.monotonic() - self._began[number]

    def finish(self) -> None:
        for number, data in self._live.items():
            record = self._facts.loaders[number]
            try:
                if record.batches >= 0 and record.samples > 0 and not record.probes:
                    record.probes = _probe_samples(data, record.samples)
            except Exception:  # data of the user may raise any error; they are not compared then
                record.probes = []
            record.random |= self._fetched.states_before_use(number)


def _loader_number_of(batches: Any) -> int:
    return getattr(batches, "loader_number", -1)


def inspect_loader(loader: Any) -> SeenLoader:
    # with a custom batch sampler, the loader does not use its default sampler
    first_sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    samplers = [first_sampler, getattr(first_sampler, "batch_sampler", None), getattr(first_sampler, "sampler", None)]
    samplers += [getattr(samplers[1], "sampler", None)]
    names = [type(s).__name__ for s in samplers if s is not None]
    batch_sampler = "" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
    sampler = next((name for name in names if "istributed" in name or name.startswith("BatchSamplerShard")), "")
    base_sampler = next((name for name in reversed(names) if name != "BatchSampler"), "")
    shuffle = next((value for s in samplers if isinstance(value := getattr(s, "shuffle", None), bool)), None)
    shuffles = False if "SequentialSampler" in names else True if "RandomSampler" in names else shuffle
    return SeenLoader(
        site=format_user_site(),
        constructed_at=getattr(loader, "made_at", ""),
        sampler=sampler or base_sampler,
        shuffles=shuffles,
        samples=_length(len, loader.dataset),
        batches=-1 if loader._dataset_kind else _length(getattr(loader, "whole_length", loader.__len__)),
        batch_size=getattr(loader, "batch_size", None) or getattr(first_sampler, "batch_size", None) or 0,
        workers=loader.num_workers,
        plain=all(type(s).__module__.startswith("torch.utils.data.") for s in samplers if s is not None),
        batch_sampler="" if batch_sampler == "BatchSampler" else batch_sampler,
        divided=getattr(loader, "divided", ""),
    )


def _length(function: Any, *args: Any) -> int:
    try:
        return int(function(*args))
    except (TypeError, NotImplementedError):
        return -1


def _probe_samples(data: Any, samples: int) -> list[list[str]]:
    # imports torch, which the script may not use
    from paceline.seeding import preserve_generator_states, seed_generators

    with preserve_generator_states():
        digests: list[list[str]] = []
        for index in sorted({samples * k // NUM_PROBED_SAMPLES for k in range(NUM_PROBED_SAMPLES)}):
            seed_generators(0)
            first = leaf_digests(data[index])
            seed_generators(0)
            again = leaf_digests(data[index])  # differs with other generators: unknown
            digests.append([a if a == b else "" for a, b in zip(first, again, strict=True)])
        return digests


class LoaderRngRecorder:
    """The random generators that are used to fetch samples of each loader, also in processes of the loader.

    A script may have more generators of numpy, Python and torch than the global ones. The garbage collector finds them,
    so their classes stay unchanged. A generator counts as used for a batch if it has drawn at least half a number per
    sample. One or two numbers for a whole batch, for example its size, may be equal on purpose. If a global generator
    gets a new state, for example from a checkpoint, only the numbers drawn since then count.
    """

    def __init__(self) -> None:
        states = ctypes.c_char * DIGEST_BYTES * len(GENERATOR_NAMES) * SLOTS  # by loader and generator
        # common memory with forked loader processes
        self._states: Any = states.from_buffer(mmap.mmap(-1, ctypes.sizeof(states)))
        self._count: defaultdict[int, int] = defaultdict(int)

    def wrap_fetch(self, fetch: Any, number_of: Callable[[Any], int]) -> Any:
        """Wrap `fetch` to record generators. `number_of` returns the number of a data set's loader, or -1."""

        @hide_from_warnings
        @wraps(fetch)
        def fetched(fetcher: Any, indices: Any) -> Any:
            number = number_of(fetcher.dataset)
            worker = sys.modules["torch.utils.data"].get_worker_info()
            if not 0 <= number < SLOTS or (worker is not None and worker.id):
                return fetch(fetcher, indices)
            self._count[number] += 1
            if self._count[number] not in INSPECTED_BATCHES:
                return fetch(fetcher, indices)
            generators = RngSnapshots()
            batch = fetch(fetcher, indices)
            for name, state in generators.used_since(len(indices) if isinstance(indices, list) else 1).items():
                first = self._states[number][GENERATOR_NAMES.index(name)]
                first.value = first.value or state.encode()
            return batch

        return fetched

    def states_before_use(self, number: int) -> dict[str, str]:
        states = zip(GENERATOR_NAMES, self._states[number], strict=True) if number < SLOTS else ()
        return {name: state.value.decode() for name, state in states if state.value}


class RngSnapshots:
    def __init__(self) -> None:
        self._before = [(name, rng, copied) for name, rng in _find_rngs() if (copied := _copy(rng)) is not None]
        _LIVE_SNAPSHOTS.add(self)

    def update_copy(self, which: str) -> None:
        self._before = [(name, rng, _copy(rng) if name == which else before) for name, rng, before in self._before]

    def used_since(self, samples: int) -> dict[str, str]:
        """The generators that were used since for this number of samples: name -> digest of their earlier states."""
        states_by_name: defaultdict[str, list[str]] = defaultdict(list)
        for name, rng, before in self._before:
            if _has_drawn(before, rng, max(1, samples // 2)):
                states_by_name[name].append(_state(before))
        return {name: short_hash("".join(sorted(states)).encode()) for name, states in states_by_name.items()}


_LIVE_SNAPSHOTS: weakref.WeakSet[RngSnapshots] = weakref.WeakSet()


def wrap_seed_functions() -> None:
    for module in GENERATOR_STATE_SETTERS:
        when_imported(module, partial(_wrap_setters_of_module, module))


def _wrap_setters_of_module(module: str) -> None:
    generator, names = GENERATOR_STATE_SETTERS[module]
    for name in names:
        wrap_function(sys.modules[module], name, after=partial(_on_generator_set, generator))
        setter = getattr(sys.modules[module], name)
        setter.__module__, setter.__qualname__ = module, name  # by which it is pickled


def _on_generator_set(generator_name: str, *_: Any, **__: Any) -> None:
    for generators in [*_LIVE_SNAPSHOTS]:
        generators.update_copy(generator_name)


def _find_rngs() -> Iterator[tuple[str, Any]]:
    numpy: Any = sys.modules.get("numpy.random")
    torch: Any = sys.modules["torch"]
    kinds: set[type] = {random.Random, torch.Generator}
    global_generators = {"torch": torch.default_generator, "random": vars(random)["_inst"]}
    if numpy is not None:
        kinds |= {numpy.Generator, numpy.RandomState}
        global_generators["numpy"] = numpy.mtrand._rand
    yield from global_generators.items()
    seen_ids = {id(rng) for rng in global_generators.values()}
    for rng in (*_find_instances(kinds), *_user_frame_locals(sys._getframe(1))):  # pyright: ignore[reportPrivateUsage]
        if type(rng) in kinds and id(rng) not in seen_ids:
            seen_ids.add(id(rng))
            yield OWN_GENERATORS, rng


def _find_instances(kinds: set[type]) -> list[Any]:
    """All instances of these classes, at least once each; also those that only untracked objects reference."""
    instances: list[Any] = []
    tracked_objects: list[Any] = gc.get_objects()
    for at in range(0, len(tracked_objects), GC_CHUNK_OBJECTS):
        chunk = tracked_objects[at : at + GC_CHUNK_OBJECTS]
        referents = gc.get_referents(*chunk)
        untracked = [obj for obj in referents if type(obj) is dict and not gc.is_tracked(obj)]
        for candidates in (chunk, referents, gc.get_referents(*untracked)):
            if not kinds.isdisjoint(map(type, candidates)):
                instances += [obj for obj in candidates if type(obj) in kinds]
    return instances


def _user_frame_locals(frame: FrameType | None) -> Iterator[Any]:
    while frame is not None:
        if code_owner(frame.f_code.co_filename) is USER:
            yield from frame.f_locals.values()
        frame = frame.f_back


def _copy(rng: Any) -> Any:
    if not hasattr(rng, "device"):
        return copy.deepcopy(rng)
    if rng.device.type != "cpu":
        return None  # reading its state would wait for the device
    copied = type(rng)()
    copied.set_state(rng.get_state())
    return copied


def _state(rng: Any) -> str:
    if isinstance(rng, random.Random):
        return repr(rng.getstate()[1])
    if hasattr(rng, "device"):
        return short_hash(rng.get_state().numpy().tobytes())
    inner = _bit_generator_of(rng).state["state"]
    return repr({name: value.tobytes() if hasattr(value, "tobytes") else value for name, value in inner.items()})


def _bit_generator_of(rng: Any) -> Any:
    return rng.bit_generator if hasattr(rng, "bit_generator") else rng._bit_generator


def _has_drawn(before: Any, now: Any, numbers: int) -> bool:
    goal, rng = _state(now), _copy(before)
    for drawn in range(numbers):
        if _state(rng) == goal:
            return False
        if drawn < numbers - 1:
            _draw(rng)
    return True


def _draw(rng: Any) -> None:
    if isinstance(rng, random.Random):
        rng.getrandbits(32)
    elif hasattr(rng, "device"):
        sys.modules["torch"].rand(1, generator=rng)
    else:
        _bit_generator_of(rng).random_raw()


def find_division_by_world_size(frame: FrameType | None, argument: str, place: int) -> str:
    """The expression that divides an argument of this frame's current call by the number of ranks; empty if none."""
    if frame is None:
        return ""
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    try:
        nodes = [*ast.walk(ast.parse("".join(linecache.getlines(frame.f_code.co_filename))))]
    except (SyntaxError, ValueError):
        return ""
    calls = (n for n in nodes if isinstance(n, ast.Call))
    call = next((n for n in calls if position == (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset)), None)
    if call is None:
        return ""
    before = (n for n in nodes if isinstance(n, ast.Assign) and n.lineno < call.lineno)
    assignments = sorted(before, key=lambda n: n.lineno)
    assigned = {ast.unparse(target): n.value for n in assignments for target in n.targets}  # the last value counts
    values = [*[kw.value for kw in call.keywords if kw.arg == argument], *call.args[place : place + 1]][:1]
    for _ in range(MAX_ASSIGNMENTS_FOLLOWED):
        parts = [part for value in values for part in ast.walk(value)]
        if divided := next(filter(_is_division_by_ranks, parts), None):
            return ast.unparse(divided)
        names = {ast.unparse(part) for part in parts if isinstance(part, (ast.Name, ast.Attribute))}
        values = [assigned[name] for name in names if name in assigned]
    return ""


def _is_division_by_ranks(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div | ast.FloorDiv):
        return False
    return WORLD_SIZE_PATTERN.search(ast.unparse(node.right)) is not None
