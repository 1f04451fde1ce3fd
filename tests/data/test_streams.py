"""A stream's samples reach virtual ranks by their number, whoever reads them and from wherever."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import pytest
import torch
from tests.errors import raises
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data.fingerprint import hash_samples
from paceline.data.loader import LoadingOptions
from paceline.data.plan import BatchPlan, virtual_ranks_of
from paceline.data.streams import (
    ENDLESS_NUM_SAMPLES,
    LocalBatch,
    LocalBatchReader,
    StreamBatchPlan,
    StreamReader,
    read_local_batches,
    shard_stream,
)
from paceline.rank.world import World
from paceline.train.json_values import as_json
from paceline.train.streaming import GlobalBatchStream

CPU = LoadingOptions(torch.device("cpu"))


class Numbers(IterableDataset[Any]):
    num_shards = 4

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is None or (info.id, info.num_workers, info.dataset) == (0, 1, self)
        while self.at < len(self.numbers):
            self.at += 1
            yield self.numbers[self.at - 1], torch.rand(())

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]

    def shard(self, num_shards: int, index: int) -> Numbers:
        return Numbers(self.numbers[index::num_shards])


def plan(virtual_ranks: int, *, parts: int = 1, accumulation: int = 1) -> StreamBatchPlan:
    return StreamBatchPlan(ENDLESS_NUM_SAMPLES, 8, virtual_ranks, accumulation, 7, False, "keep", parts, parts > 1)


def chunks(parts: list[StreamReader], of: StreamBatchPlan, share: range, **how: Any) -> list[LocalBatch]:
    """All up to the end."""
    loading = how.pop("loading", CPU)
    found: list[LocalBatch] = []
    for chunk in read_local_batches(
        LocalBatchReader(parts, of, share, torch.tensor(how.pop("epoch", 0)), **how), loading
    ):
        if not chunk.num_samples:
            return found
        found.append(chunk)
    return found


def dealt(found: list[list[LocalBatch]]) -> dict[tuple[int, int, int], tuple[list[int], list[float]]]:
    """(step, virtual rank, micro-batch) -> its samples' numbers, and what was drawn for each."""
    return {
        (step, share.virtual_rank, share.micro_batch): (share.sample_numbers, share.batch[1].tolist())
        for of_rank in found
        for step, chunk in enumerate(of_rank)
        for share in chunk.micro_batches
        if share.counted
    }


@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_is_dealt_as_samples_with_numbers_are_on_every_number_of_ranks(accumulation: int) -> None:
    of, same = plan(3, accumulation=accumulation), BatchPlan(21, 8, 3, accumulation, shuffle=False)
    alone = None
    for size in (1, 2, 3):
        found = dealt(
            [
                chunks([StreamReader(Numbers([*range(21)]), 7)], of, virtual_ranks_of(3, rank, size))
                for rank in range(size)
            ]
        )
        alone = alone or found
        assert found == alone
    assert alone is not None
    for (step, virtual_rank, part), (numbers, _) in alone.items():
        assert numbers == same.microbatch(0, step, virtual_rank, part).tolist()
    assert sorted(number for numbers, _ in alone.values() for number in numbers) == [*range(21)]


def test_in_parts_each_virtual_rank_has_a_stream_of_its_own_and_none_is_cut_short() -> None:
    of, stream, alone = plan(4, parts=4), Numbers([*range(42)]), None
    for size in (1, 2, 3):
        shares = [virtual_ranks_of(4, rank, size) for rank in range(size)]
        found = dealt(
            [chunks([StreamReader(shard_stream(stream, v, 4), 7, v, 4) for v in share], of, share) for share in shares]
        )
        alone = alone or found
        assert found == alone
    assert alone is not None
    assert sorted(number for numbers, _ in alone.values() for number in numbers) == [*range(42)]
    assert all(number % 4 == virtual_rank for (_, virtual_rank, _), (ns, _) in alone.items() for number in ns)


@pytest.mark.parametrize("start", [1, 2, 3])
def test_from_a_state_as_from_counting_as_from_the_begin(start: int) -> None:
    of, share = plan(3), range(1, 3)
    whole = chunks([StreamReader(Numbers([*range(21)]), 7)], of, share, epoch=2)
    whole += [] if len(whole) > start else [whole[-1]._replace(micro_batches=[])]
    part = StreamReader(Numbers([*range(21)]), 7)
    for state in (None, {"at": 8 * start}, None):  # the last: it begins again, though it stands at its end
        found = chunks([part], of, share, epoch=2, positions={0: (start, state)})
        assert [chunk.probe_hash for chunk in found if chunk.local_samples] == [
            chunk.probe_hash for chunk in whole[start:] if chunk.local_samples
        ]
        assert dealt([found]) == dealt([whole[start:]])


@pytest.mark.needs("webdataset")
def test_a_stream_of_webdataset_is_shuffled_by_the_epoch_however_often_it_was_read() -> None:
    wds: Any = importlib.import_module("webdataset")

    def order(part: StreamReader, epoch: int) -> list[Any]:
        part.seek_sample(epoch, 0, None)
        return [one["url"] for _, one in part.take(99)]

    def made(*more: Any) -> Any:
        return wds.DataPipeline(
            wds.SimpleShardList([f"{n:02}.tar" for n in range(50)]), wds.detshuffle(20, 10, seed=3), *more
        )

    again, fresh = (StreamReader(made(wds.shuffle(9, rng=random)), 7) for _ in range(2))
    orders = [order(again, epoch) for epoch in (0, 0, 1, 2)]
    assert orders[0] == orders[1] and order(fresh, 2) == orders[3]
    assert len(set(orders[0])) == 50 and len({tuple(one) for one in orders}) == 3
    script, part = made(), StreamReader(made(), 7)
    assert [order(part, epoch) for epoch in range(3)] == [[one["url"] for one in script] for _ in range(3)]


@pytest.mark.needs("webdataset")
def test_a_stream_of_webdataset_that_refuses_several_ranks_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    wds: Any = importlib.import_module("webdataset")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    part = StreamReader(wds.WebDataset(["no.tar"], shardshuffle=False), 7)
    part.seek_sample(0, 0, None)
    with pytest.raises(ValueError, match="nodesplitter") as error:
        part.take(1)
    assert "WebDataset(nodesplitter=None)" in error.value.__notes__[0]


def test_a_process_that_reads_ahead_gives_what_this_one_does() -> None:
    part, of, ahead = StreamReader(Numbers([*range(21)]), 7), plan(2), LoadingOptions(CPU.device, 1)
    here, there = (chunks([part], of, range(2), loading=loading) for loading in (CPU, ahead))
    assert dealt([here]) == dealt([there]) and [c.positions for c in here] == [c.positions for c in there]


def test_a_rank_without_a_share_has_a_stand_in_and_a_few_last_ones_join_the_batch_before() -> None:
    part, of = StreamReader(Numbers([*range(9)]), 7), plan(3)
    last = chunks([part], of, range(2, 3))[-1]
    assert [(share.sample_numbers, share.counted) for share in last.micro_batches] == [
        ([8], False)
    ] and last.local_samples == 0
    joined = chunks([part], of, range(2, 3), min_last_batch=3)
    assert [share.sample_numbers for chunk in joined for share in chunk.micro_batches] == [[2, 5, 8]]
    exact = chunks([StreamReader(Numbers([*range(11)]), 7)], of, range(2, 3), min_last_batch=3)
    assert [share.sample_numbers for chunk in exact for share in chunk.micro_batches] == [[2, 5], [10]]


class Constant(IterableDataset[Any]):
    """Splits itself if `is_split`; its first samples are equal."""

    def __init__(self, equal: int, *, is_split: bool) -> None:
        self.equal, self.is_split = equal, is_split

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        begin, by = (info.id, info.num_workers) if info is not None and self.is_split else (0, 1)
        yield from (max(number, self.equal) for number in range(begin, 44, by))


@pytest.mark.parametrize(("equal", "is_split"), [(43, True), (16, True), (0, True), (0, False), (10, False)])
def test_equal_first_samples_do_not_show_that_processes_read_the_same(equal: int, is_split: bool) -> None:
    stream, of = Constant(equal, is_split=is_split), replace(plan(1), parts_of_stream=2)
    parts = [StreamReader(stream, 7, number, 2) for number in range(2)]
    reader = LocalBatchReader(parts, of, range(1), torch.tensor(0))
    read = list[int]()
    with (
        nullcontext() if is_split else raises("stream-repeated-by-processes"),
        closing(read_local_batches(reader, LoadingOptions(torch.device("cpu"), 2))) as found,
    ):
        for chunk in found:
            if not chunk.num_samples:
                break
            read += chunk.micro_batches[0].batch.tolist()
    assert sorted(read) == [max(number, equal) for number in range(44)] * is_split


def resumed(saved: dict[str, Any], start: int, *, length: int = 42, share: range = range(4)) -> list[list[int]]:
    """The sample numbers of the steps after a resume at batch `start` of a split stream."""
    of = plan(4, parts=4)
    stream = GlobalBatchStream(
        Numbers([*range(length)]), of, CPU, World(0, 1, 0, 1, torch.device("cpu"), "gloo"), print
    )
    stream.saved = saved
    batches = stream.training_batches(of, share, 0, start)
    return [[*chain.from_iterable(batch.work.indices.tolist() for batch in step)] for step in islice(batches, 1)]


@pytest.mark.parametrize("share", [range(4), range(2, 4)])
def test_a_part_without_saved_position_begins_at_the_batch_and_not_at_the_start(share: range) -> None:
    positions = [[number, 2, as_json({"at": 4})] for number in range(2)]
    (step,) = resumed({"probe": None, "positions": positions}, 2, share=share)
    assert sorted(step) == [number for number in range(16, 24) if number % 4 in share]


def test_the_end_of_an_epoch_in_a_checkpoint_of_version_0_1_is_recognized() -> None:
    assert resumed({"probe": hash_samples([]), "states": {}}, 6) == []
    with raises("stream-differs-from-saved"):
        resumed({"probe": hash_samples([]), "states": {}}, 5)


class Uneven(Numbers):
    def shard(self, num_shards: int, index: int) -> Numbers:
        return Numbers([*range(8 * index + 4)])


@pytest.mark.parametrize("is_split", [True, False])
def test_only_a_split_stream_is_said_to_have_parts_of_different_lengths(is_split: bool) -> None:
    said = list[str]()
    of = plan(4, parts=4) if is_split else replace(plan(4), parts_of_stream=2)
    data = Uneven([]) if is_split else Constant(0, is_split=True)  # each process has an incomplete last batch
    loading = LoadingOptions(torch.device("cpu"), 0 if is_split else 2)
    stream = GlobalBatchStream(data, of, loading, World(0, 1, 0, 1, torch.device("cpu"), "gloo"), said.append)
    sizes = list[float]()
    for step, _ in enumerate(stream.training_batches(of, range(4), 0, 0)):
        sizes.append(stream.next_batch_samples)
        stream.is_last_batch(step, sizes[-1])
    assert sum(0 < size < 8 for size in sizes) > 1
    assert len(said) == is_split


def test_reading_draws_nothing_from_the_streams_outside() -> None:
    before, parts = torch.get_rng_state(), [StreamReader(Numbers([*range(21)]), 7)]
    assert len([*islice(read_local_batches(LocalBatchReader(parts, plan(1), range(1), torch.tensor(0)), CPU), 2)]) == 2
    assert torch.equal(before, torch.get_rng_state())
