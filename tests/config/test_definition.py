"""What may differ between a run and its resumption, and what a person is told where it may not."""

import re
from dataclasses import replace

import pytest
from tests.errors import check, raises

from paceline.config.definition import (
    ADDED_SETTING_DEFAULTS,
    CHANGEABLE_SETTINGS,
    EXACT_ONLY_SETTINGS,
    FIXED_SETTINGS,
    check_definition_changes,
    make_run_definition,
    parse_allowed_changes,
)
from paceline.config.settings import TrainConfig, load, resolve_defaults
from paceline.errors import PacelineError, UsageError

SAVED = {name: f"old-{name}" for name in (*FIXED_SETTINGS, *CHANGEABLE_SETTINGS)} | {"strategy": "exact"}
WHERE = "run/checkpoints/step-00000007"


def changed(*names: str, **more: object) -> dict[str, object]:
    return {**SAVED, **{name: f"new-{name}" for name in names}, **more}


def refusal(*names: str, allowed: tuple[str, ...] = (), **more: object) -> PacelineError:
    with pytest.raises(UsageError) as caught:
        check_definition_changes(SAVED, changed(*names, **more), allowed, WHERE)
    return caught.value


@pytest.mark.parametrize("name", FIXED_SETTINGS)
def test_what_is_fixed_is_refused_with_both_values_and_the_reason(name):
    error = refusal(name)
    check(error, "another-run-for-good", where=WHERE, saved={name: f"old-{name}"}, now={name: f"new-{name}"})
    assert FIXED_SETTINGS[name] in str(error)
    assert "--allow-change" not in str(error)  # nothing to allow here
    assert str(refusal(name, allowed=("lr",))) == str(error)


@pytest.mark.parametrize("name", CHANGEABLE_SETTINGS)
def test_what_may_change_is_refused_with_the_flag_that_allows_it(name):
    error, code = refusal(name), "another-task" if name == "task" else "another-run"
    check(error, code, saved={name: f"old-{name}"}, now={name: f"new-{name}"}, allow=name, never="")
    assert str(error).endswith(f" --allow-change {name}")


@pytest.mark.parametrize("name", CHANGEABLE_SETTINGS)
def test_an_allowed_change_is_told_in_words(name):
    assert parse_allowed_changes(name) == [name]
    [told] = check_definition_changes(SAVED, changed(name), [name], WHERE)
    assert told.startswith(f"{name}: old-{name} ") and f" new-{name} " in told


def test_several_differences_are_told_at_once_and_the_flag_keeps_what_was_allowed_before():
    error = refusal("seed", "lr", "epochs", "momentum", allowed=("lr",))
    assert set(error.fields["saved"]) == {"seed", "epochs", "momentum"}  # lr is allowed
    assert all(f"{name}: old-{name}" in str(error) for name in error.fields["saved"])
    assert error.code == "another-run" and error.fields["allow"] in ("lr,epochs,momentum", "lr,momentum,epochs")
    assert FIXED_SETTINGS["seed"] in error.fields["never"]


@pytest.mark.parametrize("name", EXACT_ONLY_SETTINGS)
@pytest.mark.parametrize(
    ("before", "now", "compared"),
    [
        ("exact", "exact", True),
        ("exact", "zero", True),
        ("zero", "exact", True),
        ("exact", "bucketed", False),
        ("ddp", "exact", False),
        ("bucketed", "bucketed", False),
    ],
)
def test_hardware_and_threads_count_only_where_bits_were_promised(name, before, now, compared):
    saved = {**SAVED, "strategy": before}
    other = changed(name, strategy=now)
    if compared:
        with raises("another-run", allow=name):
            check_definition_changes(saved, other, [], WHERE)
    else:
        assert check_definition_changes(saved, other, [], WHERE) == []


def test_what_is_not_known_yet_is_not_compared():
    """The launcher knows the settings, not the data; the workers compare the rest."""
    known = {name: SAVED[name] for name in ("seed", "lr", "strategy")}
    assert check_definition_changes(SAVED, known, [], WHERE) == []
    older = {**changed("data"), **ADDED_SETTING_DEFAULTS}
    assert check_definition_changes(known, older, [], WHERE) == []  # saved by an older paceline


def test_a_value_that_was_not_set_is_said_and_a_long_one_cut():
    told = str(refusal(clip_norm=None, data="x" * 1000))
    assert "old-clip_norm" in told and "not set" in told
    assert "x" * 200 + "... now" in told and "x" * 201 not in told


def test_of_two_tables_only_what_differs_is_told():
    """Of processors and libraries, say, whose whole description is longer than what is shown."""
    saved = {**SAVED, "hardware": {"long": "x" * 300, "torch": "2.12", "mkl": "3"}}
    now = {**SAVED, "hardware": {"torch": "2.13", "mkl": "3", "long": "x" * 300, "new": 1}}
    with pytest.raises(UsageError) as caught:
        check_definition_changes(saved, now, [], WHERE)
    assert re.search("{'torch': '2.12'} .*{'new': 1, 'torch': '2.13'}", str(caught.value))


@pytest.mark.parametrize(
    ("text", "names"),
    [("", []), ("lr", ["lr"]), (" lr , epochs,", ["lr", "epochs"]), ("hardware,task", ["hardware", "task"])],
)
def test_names_are_separated_by_commas(text, names):
    assert parse_allowed_changes(text) == names


@pytest.mark.parametrize("name", FIXED_SETTINGS)
def test_what_is_fixed_cannot_be_allowed(name):
    with raises("change-never-allowed", setting="allow_change", value=name) as caught:
        parse_allowed_changes(f"lr,{name}")
    assert FIXED_SETTINGS[name] in str(caught.value)


@pytest.mark.parametrize(("wrong", "meant"), [("epoch", "epochs"), ("wait_decay", "weight_decay"), ("LR", None)])
def test_a_setting_that_does_not_exist_is_told_with_the_nearest_one_and_all(wrong, meant):
    with raises("unknown-name", kind="setting to change", value=wrong, allowed=[*CHANGEABLE_SETTINGS]) as caught:
        parse_allowed_changes(wrong)
    assert (repr(meant) in caught.value.fields["meant"]) if meant else not caught.value.fields["meant"]


def defined(**changes: object) -> dict[str, object]:
    """The settings of two processes with a batch of 64 each, with `section__name` changed."""
    config = TrainConfig(task="mnist-cnn")
    for path, value in changes.items():
        section, _, name = path.rpartition("__")
        if section:
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
        else:
            config = replace(config, **{name: value})
    nproc = config.launch.nproc
    return make_run_definition(resolve_defaults(config, 2 if nproc is None else int(nproc)))


@pytest.mark.parametrize(
    "free",
    [
        {"strategy": "ddp"},
        {"strategy": "exact"},
        {"run__log_interval": 7},
        {"launch__nproc": 1, "data__virtual_ranks": 2},
        {"data__global_batch": 128},  # as it was by default
        {"checkpoint__checkpoint_every": 3},
        {"launch__threads_per_rank": 3},  # no bits are promised
        {"optimizer__momentum": 0.5},  # adamw has none
        {"optimizer__lr_base_batch": 7},  # not scaled
    ],
)
def test_what_changes_nothing_of_the_run_may_change_freely(free):
    assert check_definition_changes(defined(), defined(**free), [], WHERE) == []


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"launch__nproc": 3}, ["virtual_ranks", "global_batch"]),
        ({"run__seed": 1}, ["seed"]),
        ({"data__last_batch": "drop"}, ["last_batch"]),
        ({"data__accumulation": 2, "data__global_batch": 128}, ["accumulation"]),
        ({"model__batchnorm": "sync"}, ["batchnorm"]),
        ({"model__stem": "small"}, ["stem"]),
        ({"optimizer__optimizer": "sgd"}, ["optimizer", "momentum"]),
        ({"optimizer__lr": 0.5}, ["lr"]),
        ({"optimizer__lr_scaling": "linear"}, ["lr_scaling", "lr_base_batch"]),
        ({"run__epochs": 3}, ["epochs"]),
        ({"run__steps": 3}, ["epochs", "steps"]),
        ({"task": "mnist-resnet18"}, ["task"]),
        ({"compute__precision": "bf16"}, ["precision"]),
    ],
)
def test_each_setting_that_matters_is_compared(change, names):
    with pytest.raises(UsageError) as caught:
        check_definition_changes(defined(), defined(**change), [], WHERE)
    assert [*caught.value.fields["saved"]] == names


def test_a_checkpoint_of_before_there_was_a_choice_of_precision_is_one_in_fp32():
    old = {name: value for name, value in defined().items() if name != "precision"}
    assert check_definition_changes(old, defined(), [], WHERE) == []
    with raises("another-run", saved={"precision": "fp32"}, now={"precision": "bf16"}):
        check_definition_changes(old, defined(compute__precision="bf16"), [], WHERE)
    assert (
        check_definition_changes(old, defined(compute__precision="auto"), [], WHERE) == []
    )  # compared when it is known


def test_what_a_table_of_a_file_leaves_out_is_compared_too(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[network]\ncompress = "bf16"\n')
    now = make_run_definition(load(path, must_own=True))
    with raises("another-run", saved={"local_steps": 4}, now={"local_steps": None}):
        check_definition_changes({**now, "local_steps": 4}, now, [], WHERE)


def test_every_setting_of_the_definition_has_a_rule():
    """A name that is written down, but compared by nobody, would be a promise that nobody keeps."""
    assert set(make_run_definition(TrainConfig())) | {"data", "hardware", "make_optimizer", "make_schedule"} == {
        *FIXED_SETTINGS,
        *CHANGEABLE_SETTINGS,
        "strategy",
    }


def test_a_setting_of_the_task_may_change_if_it_is_allowed_by_its_name():
    saved, now = {**SAVED, "task_arg.width": 2, "task_arg.old": 1}, {**SAVED, "task_arg.width": 3, "task_arg.new": 1}
    with raises("another-run", saved={"task_arg.width": 2}, now={"task_arg.width": 3}, allow="task_arg.width"):
        check_definition_changes(saved, now, [], WHERE)
    assert len(check_definition_changes(saved, now, parse_allowed_changes("task_arg.width"), WHERE)) == 1
