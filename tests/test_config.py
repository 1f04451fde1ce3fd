"""The configuration: the same from flags and files, and wrong values named."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import (
    BatchShape,
    DataConfig,
    LaunchConfig,
    NetworkConfig,
    OptimizerConfig,
    RunConfig,
    StrategyName,
    TrainConfig,
    batch_shape,
    check_values,
    dump,
    load,
    strategy_options,
)
from paceline.errors import UsageError

positive = st.none() | st.integers(1, 10_000)
configs = st.builds(
    TrainConfig,
    task=st.sampled_from(["mnist-cnn", "a.b:c", 'quo"te:x']),
    strategy=st.none() | st.sampled_from(get_args(StrategyName)),
    data=st.builds(DataConfig, data_dir=st.none() | st.just(Path("/a b/é")), batch_size=positive, global_batch=positive,
                   tail=st.sampled_from(["keep", "drop", "pad"])),
    optimizer=st.builds(OptimizerConfig, lr=st.floats(1e-9, 1e3), clip_norm=st.none() | st.floats(1e-3, 10)),
    run=st.builds(RunConfig, epochs=st.integers(1, 99), seed=st.integers(0, 2**40), record_samples=st.booleans()),
    launch=st.builds(LaunchConfig, nproc=st.none() | st.just("auto") | st.integers(1, 64)),
)  # fmt: skip


@given(configs)
def test_what_is_written_is_read_back(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(dump(config))
    assert load(path, ours=True) == config
    check_values(config)
    assert strategy_options(load(path, ours=True)) == strategy_options(config)  # where nothing was set, too


def read(tmp_path, text: str) -> TrainConfig:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load(path, ours=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tusk = 'x'", "Did you mean 'task'"),
        ("[optimizer]\nlrr = 1.0", r"Did you mean 'optimizer\.lr'"),
        ("[data]\nlr = 1.0", r"belongs into \[optimizer\]"),
        ("task = 3", "Expected `str"),
        ("[run]\nepochs = 'two'", "Expected `int`, got `str`"),
        ("[data]\ntail = 'cut'", "tail"),
        ("[data]\ndata_dir = 3", "path"),
        ("strategy = 'dpp'", "strategy"),
        ("[task]\nx = 1", "a value, not a table"),
        ("= 3", "not valid TOML"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path, text, words):
    with pytest.raises(UsageError, match=words) as caught:
        read(tmp_path, text)
    assert "run.toml" in str(caught.value)


def test_a_missing_file():
    with pytest.raises(UsageError, match="No such file"):
        load(Path("/nowhere/run.toml"), ours=True)


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("data", {"batch_size": 0}, "--batch-size must be greater than 0, got 0"),
        ("data", {"num_workers": -1}, "--num-workers must be 0 or more"),
        ("optimizer", {"lr": 0.0}, "--lr"),
        ("optimizer", {"lr": float("nan")}, "--lr"),
        ("optimizer", {"lr": float("inf")}, "--lr must be finite"),
        ("run", {"epochs": 0}, "--epochs"),
        ("run", {"steps": -5}, "--steps"),
        ("launch", {"nproc": 0}, "--nproc"),
        ("launch", {"port": 70000}, "--port must be at most 65535"),
    ],
)
def test_values_without_meaning(section, values, words):
    config = TrainConfig()
    with pytest.raises(UsageError, match=words):
        check_values(replace(config, **{section: replace(getattr(config, section), **values)}))


@pytest.mark.parametrize(
    ("strategy", "given", "words"),
    [
        ("exact", {"compress": "int8"}, "--compress with --strategy exact: it promises the same bits"),
        ("zero", {"local_steps": 4}, "--local-steps with --strategy zero: it promises the same bits"),
        ("fsdp", {"local_steps": 4}, "--local-steps with --strategy fsdp: it does not add up by host first"),
        ("ddp", {"compress": "bf16"}, "--compress with --strategy ddp: it does not add up by host first"),
        (None, {"local_steps": 0}, "--local-steps must be greater than 0, got 0"),
        (None, {"outer_lr": 0.7}, "--outer-lr and --outer-momentum are for --local-steps"),
        (None, {"powersgd_rank": 2, "compress": "int8"}, "--powersgd-rank is for --compress powersgd"),
        (None, {"local_steps": 4, "outer_momentum": 1.0}, "the latter below 1, got (None, 1.0)"),
    ],
)
def test_what_cannot_be_done_between_hosts_is_refused_before_anything_starts(strategy, given, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        check_values(TrainConfig(strategy=strategy, network=NetworkConfig(**given)))


def test_an_average_of_weights_needs_weights_of_all_hosts():
    for local_steps, refused in ((4, True), (None, False)):
        config = TrainConfig(network=NetworkConfig(local_steps=local_steps), optimizer=OptimizerConfig(ema=0.9))
        with pytest.raises(UsageError, match="--ema with --local-steps") if refused else nullcontext():
            check_values(config)


@pytest.mark.parametrize(
    ("data", "world", "shape"),
    [
        ({}, 2, (2, 1, 128)),
        ({"batch_size": 32, "accumulation": 3}, 4, (4, 3, 384)),
        ({"virtual_ranks": 8, "batch_size": 16}, 2, (8, 1, 128)),
        ({"global_batch": 100}, 3, (3, 1, 100)),
        ({"global_batch": 100, "batch_size": 10}, 3, (3, 4, 100)),
        ({"global_batch": 100, "accumulation": 2}, 3, (3, 2, 100)),
    ],
)
def test_batch_shapes(data, world, shape):
    assert batch_shape(DataConfig(**data), world) == BatchShape(*shape)


def test_a_global_batch_that_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="does not fit into 2 virtual ranks x 1 micro-batches x 32 = 64"):
        batch_shape(DataConfig(global_batch=100, batch_size=32, accumulation=1), 2)
