"""A rank that was freed out of a collective saves the whole state alone, or nothing at all."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises
from tests.worlds import world as world
from torch import nn

from paceline import World
from paceline.checkpoint.manager import Checkpoints, FencedError, PublishClaim
from paceline.checkpoint.resume import TrainerState
from paceline.checkpoint.shards import ShardFileSource
from paceline.data.loader import MicroBatch
from paceline.data.plan import MicroBatchPlan
from paceline.errors import TrainingError
from paceline.strategies import STRATEGIES, Strategy
from paceline.train.checkpointing import must_save_after_failure, save_on_one_rank

CONTENT = TrainerState(24, {"loss": 0.5}, {"seed": 0}, 3)


@given(st.integers(1, 6), st.data())
def test_exactly_one_rank_saves_and_never_a_guilty_one(world_size, data):
    causes = data.draw(st.sets(st.integers(0, world_size - 1)))
    word = json.dumps({"kind": "BEHIND", "page": "...", "exit_code": 3, "causes": [*causes]})
    writers = [rank for rank in range(world_size) if must_save_after_failure(word, rank, world_size)]
    assert len(writers) == (len(causes) < world_size)
    assert not causes & {*writers}


@pytest.mark.parametrize("word", ["", "{}", "{", "[]", '{"causes": 1}', '{"causes": null}', '{"causes": ["a"]}'])
def test_without_a_word_that_says_who_is_guilty_nobody_saves(word):
    assert not must_save_after_failure(word, 0, 2)


# ---- writing -----------------------------------------------------------------------------------------------------


def trained(world: World, model: nn.Module, strategy: str = "exact") -> Strategy:
    """Made alone, then said to be one of two."""
    replica = STRATEGIES[strategy](model, lambda p: torch.optim.AdamW(p), world)
    with torch.enable_grad():
        model(torch.ones(4, 3)).sum().backward()
    replica.optimizer.step()
    replica.world = World(1, 2, 1, 2, torch.device("cpu"), "gloo")
    return replica


def checkpoints(root, *, generation: int = 0) -> Checkpoints:
    """Of rank 1, which has not claimed anything; rank 0 has."""
    Checkpoints(root).claim_publishing(1, generation)
    return Checkpoints(root)


def test_what_is_saved_alone_is_the_whole_state_and_the_newest_checkpoint(world, tmp_path):
    replica = trained(world, nn.Linear(3, 2))
    said: list[str] = []
    there = Checkpoints(tmp_path)
    there.claim_publishing(1, 0)
    begun = there.begin(7)  # one of the same step, that all ranks had begun, and may still be writing
    (begun / "shard-0-of-2.safetensors").touch()
    path = save_on_one_rank(replica, 7, CONTENT, Checkpoints(tmp_path), PublishClaim(1, 0), keep=2, say=said.append)
    found = Checkpoints(tmp_path).newest_valid(said.append)
    assert found is not None and found[0] == path and said == []
    manifest = found[1]
    assert (manifest.step, manifest.samples_seen, manifest.virtual_ranks) == (7, 24, 1)
    assert manifest.scalars == {"evaluated": 3}
    source = ShardFileSource.from_checkpoint(path, manifest)
    held = {one.name: one.tensor for one in replica.state()}
    assert {*source.names("")} == held.keys()
    for name, tensor in held.items():
        saved = source.tensor(name)
        assert saved is not None and torch.equal(saved, tensor)
    assert begun.exists()


@pytest.mark.parametrize(("strategy", "model"), [
    ("exact", lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))), ("zero", lambda: nn.Linear(3, 2)),
], ids=["buffers of virtual ranks", "zero"])  # fmt: skip
def test_where_a_part_is_on_other_ranks_nothing_is_published(world, tmp_path, strategy, model):
    replica = trained(world, model(), strategy)
    if strategy == "exact":  # the other virtual rank's are with the other rank
        with replica.alone(MicroBatch(None, None, MicroBatchPlan(0, 0, 0, 0, torch.arange(4)), 0)):
            replica.model(torch.ones(4, 3))
    with raises("state-on-other-ranks", raised=TrainingError):
        save_on_one_rank(replica, 7, CONTENT, checkpoints(tmp_path), PublishClaim(1, 0), keep=2, say=print)
    assert [p.name for p in tmp_path.iterdir()] == [".fence"]


def test_a_rank_of_an_older_generation_publishes_nothing(world, tmp_path):
    replica = trained(world, nn.Linear(3, 2))
    with pytest.raises(FencedError):
        save_on_one_rank(
            replica, 7, CONTENT, checkpoints(tmp_path, generation=1), PublishClaim(1, 0), keep=2, say=print
        )
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("step-")]
