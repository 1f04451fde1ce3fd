"""How ranks are laid out in a mesh: by names, the last dimension fastest."""

from typing import Any

import pytest
from tests.errors import raises

from paceline.config.mesh import DIMENSIONS, Mesh, enumerate_meshes, resolve_mesh
from paceline.config.settings import (
    ComputeConfig,
    LaunchConfig,
    SlowNetworkConfig,
    TrainConfig,
    check_values,
    resolve_defaults,
    resolve_strategy,
)


def test_ranks_along_tensor_are_neighbours_and_those_along_data_far_apart() -> None:
    mesh = Mesh.parse("tensor=2, data=3")
    assert str(mesh) == "data=3,tensor=2"
    assert (mesh.size, mesh.replicas, mesh.has_model_parallelism) == (6, 3, True)
    assert mesh.peers(3, ["tensor"]) == (2, 3)
    assert mesh.peers(3, ["data"]) == mesh.peers(3, ["data", "shard"]) == (1, 3, 5)


def test_each_rank_has_its_own_place_and_is_in_one_group_along_each_dimension() -> None:
    mesh = Mesh.parse("pipeline=2,data=2,shard=3,tensor=2")
    assert mesh.peers(7, DIMENSIONS) == (*range(mesh.size),)
    assert mesh.peers(7, ["pipeline", "tensor"]) == (6, 7, 18, 19)
    for name in DIMENSIONS:
        groups = {mesh.peers(rank, [name]) for rank in range(mesh.size)}
        assert sorted(rank for group in groups for rank in group) == [*range(mesh.size)]
        assert {len(group) for group in groups} == {mesh.size_of(name)}


@pytest.mark.parametrize(
    ("text", "code", "fields"),
    [
        ("tensor", "mesh-not-name-size", {"value": "tensor"}),
        ("tensor=0", "mesh-not-name-size", {"value": "tensor=0"}),
        ("tensor=2,tensor=2", "mesh-dimension-twice", {"name": "tensor"}),
        ("tensors=2", "unknown-name", {"allowed": ["pipeline", "data", "shard", "context", "tensor"]}),
        ("data=2,tensor=2", "mesh-size", {"size": 4, "processes": 6}),
        ("tensor=3", "mesh-size-without-data", {"with_data": "data=2,tensor=3", "size": 3}),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_in_words(text: str, code: str, fields: dict[str, Any]) -> None:
    with raises(code, **fields):
        resolve_mesh(text, 6)


def test_a_run_is_defined_for_as_many_virtual_ranks_as_see_different_samples() -> None:
    config = TrainConfig("mnist-cnn", launch=LaunchConfig(mesh="data=2,tensor=2"))
    assert resolve_defaults(config, 4).data.virtual_ranks == 2
    assert resolve_strategy(config, 4) == "bucketed"
    alone = TrainConfig("mnist-cnn", launch=LaunchConfig(mesh="tensor=2"))
    assert resolve_strategy(alone, 2) == "single"
    with raises("strategy-not-on-mesh", strategy="exact"):
        check_values(TrainConfig("mnist-cnn", "exact", launch=LaunchConfig(mesh="tensor=2")))


TENSOR = LaunchConfig(mesh="tensor=2")


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"launch": LaunchConfig(mesh="context=2,tensor=2")}, "context-with-tensor"),
        ({"launch": LaunchConfig(mesh="pipeline=2,context=2")}, "context-with-pipeline"),
        ({"launch": LaunchConfig(mesh="pipeline=2,tensor=2")}, "pipeline-with-tensor"),
        ({"launch": LaunchConfig(mesh="pipeline=2", stages_at="a,b")}, "wrong-number-of-stages"),
        ({"launch": LaunchConfig(schedule_pipeline="gpipe")}, "option-needs-pipeline"),
        ({"launch": LaunchConfig(sequence_parallel=True)}, "sequence-parallel-without-tensor"),
        ({"launch": LaunchConfig(mesh="pipeline=2", sequence_parallel=True)}, "sequence-parallel-without-tensor"),
        ({"strategy": "fsdp", "launch": LaunchConfig(mesh="pipeline=2")}, "pipeline-with-fsdp"),
        ({"launch": LaunchConfig(mesh="data=2,shard=2")}, "shard-without-fsdp"),
        ({"launch": LaunchConfig(mesh="tensor=2", min_nproc=1)}, "mesh-with-min-nproc"),
        ({"launch": TENSOR, "compute": ComputeConfig(compile=True)}, "mesh-with-compile"),
        ({"launch": TENSOR, "network": SlowNetworkConfig(compress="int8")}, "mesh-with-slow-network"),
        ({"launch": TENSOR, "compute": ComputeConfig(checkpoint_activations="Block")}, "mesh-with-recomputation"),
    ],
)
def test_what_a_mesh_cannot_do_is_refused_before_any_process_is_started(given: Any, code: str) -> None:
    with raises(code):
        check_values(TrainConfig("mnist-cnn", **given))


@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [
        (1, ""),
        (2, "tensor=2 pipeline=2 context=2"),
        (3, "tensor=3 pipeline=3 context=3"),
        (4, "data=2,tensor=2 tensor=4 pipeline=2,data=2 pipeline=4 "
            "data=2,context=2 context=4 data=2,shard=2 shard=2,tensor=2"),
    ],
)  # fmt: skip
def test_all_meshes_of_a_world_are_such_as_a_training_takes(ranks: int, meshes: str) -> None:
    assert " ".join(map(str, enumerate_meshes(ranks))) == meshes
    for mesh in enumerate_meshes(ranks):
        strategy = "fsdp" if mesh.size_of("shard") > 1 else "bucketed"
        check_values(TrainConfig(strategy=strategy, launch=LaunchConfig(mesh=str(mesh))))
