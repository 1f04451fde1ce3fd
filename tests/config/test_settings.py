"""The configuration: the same from flags and files, and wrong values named."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises

from paceline.config.settings import (
    BatchSizes,
    DataConfig,
    LaunchConfig,
    OptimizerConfig,
    RunConfig,
    SlowNetworkConfig,
    StrategyName,
    TrainConfig,
    check_values,
    config_to_toml,
    load,
    resolve_batch_sizes,
    strategy_options,
)

positive = st.none() | st.integers(1, 10_000)
configs = st.builds(
    TrainConfig,
    task=st.sampled_from(["mnist-cnn", "a.b:c", 'quo"te:x']),
    strategy=st.none() | st.sampled_from(get_args(StrategyName)),
    data=st.builds(DataConfig, data_dir=st.none() | st.just(Path("/a b/é")), batch_size=positive, global_batch=positive,
                   last_batch=st.sampled_from(["keep", "drop", "pad"])),
    optimizer=st.builds(OptimizerConfig, lr=st.floats(1e-9, 1e3), clip_norm=st.none() | st.floats(1e-3, 10)),
    run=st.builds(RunConfig, epochs=st.integers(1, 99), seed=st.integers(0, 2**40), record_samples=st.booleans()),
    launch=st.builds(LaunchConfig, nproc=st.none() | st.just("auto") | st.integers(1, 64)),
)  # fmt: skip


@given(configs)
def test_what_is_written_is_read_back(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(config_to_toml(config))
    assert load(path, must_own=True) == config
    check_values(config)
    assert strategy_options(load(path, must_own=True)) == strategy_options(config)  # where nothing was set, too


def read(tmp_path, text: str) -> TrainConfig:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load(path, must_own=True)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("tusk = 'x'", "unknown-name", "Did you mean 'task'"),
        ("[optimizer]\nlrr = 1.0", "unknown-name", "Did you mean 'optimizer.lr'"),
        ("[data]\nlr = 1.0", "unknown-name", "[optimizer]"),
        ("task = 3", "config-invalid", "Expected `str"),
        ("[run]\nepochs = 'two'", "config-invalid", "`$.run.epochs`"),
        ("[data]\nlast_batch = 'cut'", "config-invalid", "`$.data.last_batch`"),
        ("[data]\ndata_dir = 3", "config-invalid", "`$.data.data_dir`"),
        ("strategy = 'dpp'", "config-invalid", "`$.strategy`"),
        ("[task]\nx = 1", "config-not-a-table", "task"),
        ("= 3", "config-refused", "not valid TOML"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path, text, code, words):
    with raises(code) as caught:
        read(tmp_path, text)
    assert "run.toml" in str(caught.value) and words in str(caught.value)


def test_a_missing_file():
    with raises("config-unreadable", strerror="No such file or directory"):
        load(Path("/nowhere/run.toml"), must_own=True)


@pytest.mark.parametrize(
    ("section", "setting", "value", "code"),
    [
        ("data", "batch_size", 0, "not-positive"),
        ("data", "num_workers", -1, "negative"),
        ("optimizer", "lr", 0.0, "not-positive"),
        ("optimizer", "lr", math.nan, "not-positive"),
        ("optimizer", "lr", math.inf, "not-finite-setting"),
        ("run", "epochs", 0, "not-positive"),
        ("run", "steps", -5, "not-positive"),
        ("launch", "nproc", 0, "not-positive"),
        ("launch", "port", 70000, "port-out-of-range"),
    ],
)
def test_values_without_meaning(section, setting, value, code):
    config = TrainConfig()
    with raises(code, setting=setting, value=value):
        check_values(replace(config, **{section: replace(getattr(config, section), **{setting: value})}))


@pytest.mark.parametrize(
    ("strategy", "given", "code", "setting"),
    [
        ("exact", {"compress": "int8"}, "exact-on-slow-network", "compress"),
        ("zero", {"local_steps": 4}, "exact-on-slow-network", "local_steps"),
        ("fsdp", {"local_steps": 4}, "not-for-slow-network", "local_steps"),
        ("ddp", {"compress": "bf16"}, "not-for-slow-network", "compress"),
        (None, {"local_steps": 0}, "not-positive", "local_steps"),
        (None, {"outer_lr": 0.7}, "outer-step-alone", "outer_lr"),
        (None, {"powersgd_rank": 2, "compress": "int8"}, "powersgd-rank-alone", "powersgd_rank"),
        (None, {"local_steps": 4, "outer_momentum": 1.0}, "outer-step-out-of-range", "outer_lr"),
    ],
)
def test_what_cannot_be_done_between_hosts_is_refused_before_anything_starts(strategy, given, code, setting):
    with raises(code, setting=setting):
        check_values(TrainConfig(strategy=strategy, network=SlowNetworkConfig(**given)))


def test_an_average_of_weights_needs_weights_of_all_hosts():
    for local_steps, refused in ((4, True), (None, False)):
        config = TrainConfig(network=SlowNetworkConfig(local_steps=local_steps), optimizer=OptimizerConfig(ema=0.9))
        with raises("ema-with-local-steps") if refused else nullcontext():
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
    assert resolve_batch_sizes(DataConfig(**data), world) == BatchSizes(*shape)


def test_a_global_batch_that_does_not_fit_is_refused():
    with raises("batch-does-not-fit", global_batch=100, virtual_ranks=2, accumulation=1, batch_size=32, most=64):
        resolve_batch_sizes(DataConfig(global_batch=100, batch_size=32, accumulation=1), 2)
