"""What `--check` sees of DataLoaders; and how it shortens their epochs, so that a script is through in a minute."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import index as as_index
from typing import Any

from paceline.protocol.facts import EPOCHS, MAX_DIGESTS, MAX_INDICES, Pass, ScriptFacts, SeenLoader, kept_batches
from paceline.rank.guard import Guard
from paceline.rank.probes.digests import leading, leaf_digests
from paceline.rank.probes.generators import LOOKS, Fetched, Generators, watch_setters
from paceline.rank.probes.graphs import divided_by_world
from paceline.rank.probes.hooks import Events, hang
from paceline.rank.sites import call_site, user_site

MAX_PASSED_OVER = 100_000  # batches: of more the last one is not waited for
MAX_SECONDS, LATER_SECONDS = 5.0, 1.0  # nor longer than this, in an epoch that is looked at, and in a later one
MAX_PASSES = 20  # a script that goes on longer is ended
MAX_ALONE = 200  # the same, as long as nothing is known that the rank trains with others in these passes
PROBES = 6


class Cut:
    """A sampler's draws: the first of them, and its last, so that what is odd at the end of an epoch is there.

    Who asks for more has the sampler drawn to its end, as in a whole epoch: one that counts its epochs does so after
    its last index. One that goes on for as long again is endless.
    """

    def __init__(self, draws: Iterator[Any], batches: int, kept: int, seen: Pass, seconds: float = MAX_SECONDS) -> None:
        self._draws, self._left, self._batches, self._over, self._seen = draws, kept, batches, batches - kept, seen
        self._seconds = seconds
        self._ended = False

    def __iter__(self) -> Cut:
        return self

    def __next__(self) -> Any:
        if self._left == 0:
            self._go_to_the_end()
            raise StopIteration
        drawn = self._drawn()
        self._left -= 1
        return drawn if self._left else self._passed_over(self._over, drawn)

    def _go_to_the_end(self) -> None:
        if self._ended or self._seen.cut_off:
            return
        before, count = self._seen.drawn, len(self._seen.indices)
        with suppress(Exception):  # of a sampler that cannot go so far
            self._passed_over(self._batches + 1, None)
        if not self._ended:
            self._seen.cut_off, self._seen.drawn = True, before
            del self._seen.indices[count:]

    def _passed_over(self, batches: int, drawn: Any) -> Any:
        """The last of so many draws, or of those for which there is time."""
        began_ns = time.monotonic_ns()
        for _ in range(min(batches, MAX_PASSED_OVER)):
            if time.monotonic_ns() - began_ns > self._seconds * 1e9 and not _calls_since(began_ns):
                self._seen.cut_off = True
                break
            try:
                drawn = self._drawn()
            except StopIteration:
                self._ended = True
                break
        self._seen.cut_off |= batches > MAX_PASSED_OVER and not self._ended
        return drawn

    def _drawn(self) -> Any:
        drawn = next(self._draws)
        indices: list[Any] = [*drawn] if isinstance(drawn, (list, tuple)) else [drawn]
        self._seen.drawn += len(indices)
        room = MAX_INDICES - len(self._seen.indices)
        self._seen.indices += [as_index(one) for one in islice(indices, max(0, room)) if hasattr(one, "__index__")]
        return drawn


class LoaderWatch(Events):
    """Of one process; `fed` is the loader that gave the last batch, and where in it that was."""

    def __init__(self, facts: ScriptFacts) -> None:
        self._facts = facts
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._live: dict[int, Any] = {}  # data sets, by the numbers of their loaders
        self._began: dict[int, float] = {}
        self._fetched = Fetched()
        self._generators: Generators | None = None
        self.joint = set[int]()  # loaders whose batches ranks have trained on together
        self.fed = -1
        self.given = 0  # batches, of all loaders

    def torch_is_there(self) -> None:
        watch_setters()
        dataloader: Any = sys.modules["torch.utils.data.dataloader"]
        fetchers: Any = sys.modules["torch.utils.data._utils.fetch"]
        loader = dataloader.DataLoader
        map_style, length, facts = dataloader._DatasetKind.Map, loader.__len__, self._facts

        def shortened(self: Any) -> int:
            is_cut = self._dataset_kind == map_style and not facts.session
            return kept_batches(length(self)) if is_cut else length(self)

        def made(_: Any, loader: Any, *__: Any, **___: Any) -> None:
            loader.made_at = user_site()
            loader.divided = divided_by_world(call_site(sys._getframe(1)).frame, "batch_size", 1)  # pyright: ignore[reportPrivateUsage]

        loader.__len__, loader.whole_length = shortened, length
        hang(loader, "__init__", after=made)
        hang(dataloader._BaseDataLoaderIter, "_next_index", before=partial(self._shorten, map_style))
        for fetcher in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):
            fetcher.fetch = self._fetched.watched(fetcher.fetch, self._number_of_data)

    def _number_of_data(self, data: Any) -> int:
        return next((number for number, known in self._live.items() if known is data), -1)

    def _shorten(self, map_style: Any, batches: Any) -> None:
        number = _number_of(batches)
        if number < 0 or isinstance(batches._sampler_iter, Cut) or batches._dataset_kind != map_style:
            return
        record = self._facts.loaders[number]
        if (whole := record.batches) >= 0 and not self._facts.session:
            looked_at = len(record.passes) <= EPOCHS
            kept = kept_batches(whole) if looked_at else min(1, whole)
            seconds = MAX_SECONDS if looked_at else LATER_SECONDS
            batches._sampler_iter = Cut(batches._sampler_iter, whole, kept, record.passes[-1], seconds)

    def epoch_begins(self, batches: Any) -> None:
        loader = batches.of_loader()
        if loader not in self._numbers:
            self._numbers[loader] = self._number(loader)
        number = batches.loader_number = self._numbers[loader]  # the loader may be gone in the loop: `in DataLoader(x)`
        record = self._facts.loaders[number]
        most = MAX_PASSES if number in self.joint else MAX_ALONE
        if record.training and len(record.passes) >= most:
            raise SystemExit(0)
        record.passes.append(Pass())
        self._began[number] = time.monotonic()

    def _number(self, loader: Any) -> int:
        """Its record: the one of an older loader of this data, if that was made and used at the same lines."""
        record = seen_loader(loader)
        for number, data in self._live.items():
            known = self._facts.loaders[number]
            if data is loader.dataset and (known.site, known.made) == (record.site, record.made):
                return number
        self._live[len(self._facts.loaders)] = loader.dataset
        self._facts.loaders.append(record)
        return len(self._facts.loaders) - 1

    def batch_given(self, batches: Any, batch: Any) -> None:
        self._generators = None
        self.fed = _number_of(batches)
        self.given += 1
        if self.fed < 0:
            return
        seen = self._facts.loaders[self.fed].passes[-1]
        seen.sizes.append(leading(batch))
        if len(seen.leaves) < MAX_DIGESTS and len(self._facts.loaders[self.fed].passes) <= EPOCHS:
            seen.leaves.append(leaf_digests(batch))
        if len(self._facts.loaders[self.fed].passes) == 1 and len(seen.sizes) in LOOKS:
            self._generators = Generators()

    def forward_begins(self, ddp: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._generators is None:
            return
        record = self._facts.loaders[self.fed]
        for name, state in self._generators.used(record.passes[-1].sizes[-1]).items():
            record.random.setdefault(f"{name}, in the loop", state)
        self._generators = None

    def epoch_ended(self, batches: Any) -> None:
        number = _number_of(batches)
        if number < 0:
            return
        seen = self._facts.loaders[number].passes[-1]
        seen.ended, seen.seconds = True, time.monotonic() - self._began[number]

    def finish(self) -> None:
        """At the end: a look at a few samples, by which ranks' data are told apart; which generators were used."""
        for number, data in self._live.items():
            record = self._facts.loaders[number]
            try:
                if record.batches >= 0 and not record.probes:
                    record.probes = _probed(data, record.samples)
            except Exception:  # the user's own data may raise anything when looked at: then they are not compared
                record.probes = []
            record.random |= self._fetched.of(number)


def _calls_since(began_ns: int) -> bool:
    """Whether collectives were called: a sampler that calls them must be drawn from as often on all ranks."""
    return bool(Guard.of_process().box.calls_since(began_ns))


def _number_of(batches: Any) -> int:
    return getattr(batches, "loader_number", -1)


def seen_loader(loader: Any) -> SeenLoader:
    """Its record, with no pass in it yet."""
    # beside a batch sampler that it was given, a loader's own sampler is made up, and nobody asks it
    inner = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    chain = [inner, getattr(inner, "batch_sampler", None), getattr(inner, "sampler", None)]
    chain += [getattr(chain[1], "sampler", None)]
    names = [type(one).__name__ for one in chain if one is not None]
    batch_sampler = "" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
    sampler = next((name for name in names if "istributed" in name or name.startswith("BatchSamplerShard")), "")
    plain = next((name for name in reversed(names) if name != "BatchSampler"), "")
    told = next((told for one in chain if isinstance(told := getattr(one, "shuffle", None), bool)), None)
    shuffles = False if "SequentialSampler" in names else True if "RandomSampler" in names else told
    return SeenLoader(
        site=user_site(),
        made=getattr(loader, "made_at", ""),
        sampler=sampler or plain,
        shuffles=shuffles,
        samples=_length(len, loader.dataset),
        batches=-1 if loader._dataset_kind else _length(getattr(loader, "whole_length", loader.__len__)),
        batch_size=getattr(loader, "batch_size", None) or getattr(inner, "batch_size", None) or 0,
        workers=loader.num_workers,
        plain=all(type(one).__module__.startswith("torch.utils.data.") for one in chain if one is not None),
        batch_sampler="" if batch_sampler == "BatchSampler" else batch_sampler,
        divided=getattr(loader, "divided", ""),
    )


def _length(asked: Any, *of: Any) -> int:
    try:
        return int(asked(*of))
    except (TypeError, NotImplementedError):
        return -1


def _probed(data: Any, samples: int) -> list[list[str]]:
    """A few samples as every rank would see them: with random generators in one state, which is put back."""
    from paceline.seeding import preserved_streams, seed_streams  # imports torch, which the script may never do

    with preserved_streams():
        found: list[list[str]] = []
        for index in sorted({samples * k // PROBES for k in range(PROBES)}) if samples > 0 else ():
            looks: list[list[str]] = []
            for _ in range(2):
                seed_streams(0)
                looks.append(leaf_digests(data[index]))
            found.append([a if a == b else "" for a, b in zip(*looks, strict=True)])  # a generator of its own: unknown
        return found
