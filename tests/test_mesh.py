"""How ranks are laid out in a mesh: by names, the last dimension fastest."""

from typing import Any

import pytest

from paceline.config import (
    ComputeConfig,
    LaunchConfig,
    NetworkConfig,
    TrainConfig,
    check_values,
    default_strategy,
    with_defaults,
)
from paceline.errors import UsageError
from paceline.mesh import DIMENSIONS, Mesh, mesh_of, meshes_of


def test_ranks_along_tensor_are_neighbours_and_those_along_data_far_apart() -> None:
    mesh = Mesh.parse("tensor=2, data=3")
    assert str(mesh) == "data=3,tensor=2"
    assert (mesh.size, mesh.replicas, mesh.shares_model) == (6, 3, True)
    assert [mesh.peers(3, names) for names in (["tensor"], ["data"], ["data", "shard"])] == [
        (2, 3),
        (1, 3, 5),
        (1, 3, 5),
    ]
    assert mesh.place(3) == {"pipeline": 0, "data": 1, "shard": 0, "context": 0, "tensor": 1}


def test_each_rank_has_its_own_place_and_is_in_one_group_along_each_dimension() -> None:
    mesh = Mesh.parse("pipeline=2,data=2,shard=3,tensor=2")
    places = [tuple(mesh.place(rank).values()) for rank in range(mesh.size)]
    assert places == sorted(set(places))
    for name in DIMENSIONS:
        groups = {mesh.peers(rank, [name]) for rank in range(mesh.size)}
        assert sorted(rank for group in groups for rank in group) == [*range(mesh.size)]
        assert {len(group) for group in groups} == {mesh.of(name)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tensor", "write NAME=SIZE"),
        ("tensor=0", "sizes from 1 on"),
        ("tensor=2,tensor=2", "named twice"),
        ("tensors=2", "Choose from: pipeline, data, shard, context, tensor"),
        ("data=2,tensor=2", "2 x 2 = 4 places, and there are 6 processes"),
        ("tensor=3", "--mesh data=2,tensor=3, or --nproc 3"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mesh_of(text, 6)


def test_a_run_is_defined_for_as_many_virtual_ranks_as_see_different_samples() -> None:
    config = TrainConfig("mnist-cnn", launch=LaunchConfig(mesh="data=2,tensor=2"))
    assert with_defaults(config, 4).data.virtual_ranks == 2
    assert default_strategy(config, 4) == "bucketed"
    alone = TrainConfig("mnist-cnn", launch=LaunchConfig(mesh="tensor=2"))
    assert default_strategy(alone, 2) == "single"
    with pytest.raises(UsageError, match="it cannot train a part of a model"):
        check_values(TrainConfig("mnist-cnn", "exact", launch=LaunchConfig(mesh="tensor=2")))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"launch": LaunchConfig(mesh="context=2,tensor=2")}, "where every rank has whole layers. Leave out tensor"),
        (
            {"launch": LaunchConfig(mesh="pipeline=2,context=2")},
            "where every rank has whole layers. Leave out pipeline",
        ),
        ({"launch": LaunchConfig(mesh="pipeline=2,tensor=2")}, "Leave out tensor"),
        ({"launch": LaunchConfig(mesh="pipeline=2", stages_at="a,b")}, "2 stages begin at 1 module, and 2 are named"),
        ({"launch": LaunchConfig(schedule_pipeline="gpipe")}, "--schedule-pipeline requires a pipeline mesh"),
        ({"launch": LaunchConfig(sequence_parallel=True)}, "--sequence-parallel requires a tensor mesh"),
        ({"launch": LaunchConfig(mesh="pipeline=2", sequence_parallel=True)}, "e.g. --mesh tensor=2"),
        ({"strategy": "fsdp", "launch": LaunchConfig(mesh="pipeline=2")}, "Use bucketed"),
        ({"launch": LaunchConfig(mesh="data=2,shard=2")}, "shard is for strategy fsdp"),
        ({"launch": LaunchConfig(mesh="tensor=2", min_nproc=1)}, "no rank for each place"),
        ({"launch": LaunchConfig(mesh="tensor=2"), "compute": ComputeConfig(compile=True)}, "are not compiled"),
        ({"launch": LaunchConfig(mesh="tensor=2"), "network": NetworkConfig(compress="int8")}, "has the whole model"),
        (
            {"launch": LaunchConfig(mesh="tensor=2"), "compute": ComputeConfig(checkpoint_activations="Block")},
            "are not computed again",
        ),
    ],
)
def test_what_a_mesh_cannot_do_is_refused_before_any_process_is_started(given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_values(TrainConfig("mnist-cnn", **given))


@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [
        (1, []),
        (2, ["tensor=2", "pipeline=2", "context=2"]),
        (3, ["tensor=3", "pipeline=3", "context=3"]),
        (
            4,
            [
                "data=2,tensor=2",
                "tensor=4",
                "pipeline=2,data=2",
                "pipeline=4",
                "data=2,context=2",
                "context=4",
                "data=2,shard=2",
                "shard=2,tensor=2",
            ],
        ),
    ],
)
def test_all_meshes_of_a_world_are_such_as_a_training_takes(ranks: int, meshes: list[str]) -> None:
    assert [str(mesh) for mesh in meshes_of(ranks)] == meshes
    for mesh in meshes_of(ranks):
        strategy = "fsdp" if mesh.of("shard") > 1 else "bucketed"
        check_values(TrainConfig(strategy=strategy, launch=LaunchConfig(mesh=str(mesh))))
