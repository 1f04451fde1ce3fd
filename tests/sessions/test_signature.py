"""The arguments of `session()`: each setting of a run is one, with its type and default, or is listed here."""

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any, cast, get_type_hints

import pytest
from tests.errors import raises

import paceline
from paceline.config.settings import TrainConfig
from paceline.errors import UsageError
from paceline.sessions.arguments import SessionConfig
from paceline.sessions.session import Session

RENAMED = {"threads_per_rank": "threads"}
DIFFERENT = {  # type or default
    "resume": "True and False in place of auto and no",
    "strategy": "known before the number of ranks is, so there is one default",
    "seed": "None: torch is not seeded",
    "not_finite": "a session has no snapshot to roll back to",
    "run_dir": "strings too; None: no folder",
    "precision": "None: as the script sets it",
}
LEFT_OUT = {
    "the script's own: model, data, optimizer, loop, evaluation": {
        *("task", "task_arg", "data_dir", "num_workers", "data_on_device", "batch_size", "accumulation", "micro_batch"),
        *("global_batch", "last_batch", "stem", "init_from", "batchnorm", "optimizer", "lr", "weight_decay"),
        *("momentum", "ema", "clip_norm"),
        *("schedule", "warmup_steps", "lr_scaling", "lr_base_batch", "checkpoint_activations", "compile"),
        *("cuda_graphs", "epochs", "steps", "log_interval", "eval_every", "keep_best", "patience", "record_samples"),
    },
    "the launcher's": {
        *("nproc", "port", "max_restarts", "min_nproc", "grace_period", "hang_timeout", "preload", "snapshot_every"),
        *("allocator", "collectives", "rehearse_preemption", "on", "nodes", "hosts", "ssh", "sync", "python", "env"),
        *("module", "activate", "join_timeout", "on_event", "balance", "dry_run", "detach", "agent", "partition"),
        *("time", "gpus_per_node"),
        *("cpus_per_rank", "save_before", "sbatch", "follow", "cancel_on_interrupt"),
    },
    "of a run of `paceline train` only": {
        *("mesh", "sequence_parallel", "schedule_pipeline", "stages_at", "checkpoint_epochs", "restart", "allow_change")
    },
}


def settings() -> dict[str, tuple[Any, Any]]:
    """Type and default of each setting, by name."""
    found: dict[str, tuple[Any, Any]] = {}
    for owner in (TrainConfig, *(kind for kind in get_type_hints(TrainConfig).values() if is_dataclass(kind))):
        hints = get_type_hints(owner)
        own = [one for one in fields(owner) if not is_dataclass(hints[one.name])]
        found |= {one.name: (hints[one.name], one.default) for one in own}
    return found


@pytest.mark.parametrize(("former", "current"), vars(paceline)["_RENAMED"].items())
def test_a_former_name_of_the_interface_is_an_error_that_states_the_current_name(former: str, current: str) -> None:
    with pytest.raises(AttributeError, match=rf"{former}.*paceline\.{current}$"):
        getattr(paceline, former)
    assert getattr(paceline, current)


def test_each_setting_is_an_argument_with_the_same_type_and_default_or_is_left_out_on_purpose() -> None:
    parameters, hints = inspect.signature(paceline.session).parameters, get_type_hints(paceline.session)
    left_out = set().union(*LEFT_OUT.values())
    seen = set[str]()
    for setting, (kind, default) in settings().items():
        name = RENAMED.get(setting, setting)
        assert (name in parameters) != (setting in left_out), f"a new setting: {setting}"
        if name in parameters:
            seen.add(name)
            if name not in DIFFERENT:
                assert (hints[name], parameters[name].default) == (kind, default), name
    assert seen == set(parameters)
    assert left_out <= set(settings())
    assert not any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parameters.values())


def test_each_argument_has_one_line() -> None:
    text = inspect.getdoc(paceline.session) or ""
    entries = re.findall(r"^    (\w+): (.*)$", text.partition("Args:\n")[2].partition("\n\n")[0], re.MULTILINE)
    assert [name for name, _ in entries] == [*inspect.signature(paceline.session).parameters]
    assert len(entries) == len(text.partition("Args:\n")[2].partition("\n\n")[0].splitlines())


@pytest.mark.parametrize(
    ("wrong", "meant"), [("stratgy", "strategy"), ("virtual_rank", "virtual_ranks"), ("threads_per_rank", "threads")]
)
def test_an_unknown_argument_is_an_error_that_names_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        paceline.session(**{wrong: 1})  # pyright: ignore
    assert f"'{wrong}'" in str(caught.value)
    assert f"'{meant}'" in str(caught.value)


def test_an_option_of_another_strategy_is_an_error_that_names_it() -> None:
    with raises("argument-of-another-strategy", owner="fsdp"):
        paceline.session(strategy="ddp", fsdp_wrap="Block")


def test_options_of_a_strategy_follow_from_the_arguments() -> None:
    defaults = {name: parameter.default for name, parameter in inspect.signature(paceline.session).parameters.items()}
    config = SessionConfig(**defaults | {"strategy": "fsdp", "fsdp_wrap": "Block"})
    assert (config.strategy_arguments, config.strategy_options) == ({"fsdp_wrap": "Block"}, {"wrap": "Block"})


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("seed", "1", "argument-type"), ("seed", 1.5, "argument-type"), ("resume", "runs/b", "argument-type"),
        ("checkpoint_every", 2.5, "argument-type"), ("strategy", None, "argument-type"),
        ("run_dir", 1, "argument-type"), ("virtual_ranks", 0, "argument-too-small"),
        ("keep_checkpoints", 1, "argument-too-small"), ("timeout", -1.0, "argument-too-small"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_an_error_that_names_the_argument(name: str, value: Any, code: str) -> None:
    with raises(code, name=name, value=value):
        paceline.session(**{"run_dir": "run", name: value})


def test_a_different_word_is_not_called_a_typo() -> None:
    with raises("unknown-name", value="gpu", meant=""):  # xpu is similar
        paceline.session(device="gpu")


def test_checkpoints_without_a_folder_are_an_error() -> None:
    with raises("checkpoints-without-folder"):
        paceline.session(checkpoint_every=5)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("shuffle", "no", "argument-type"), ("batch_size", True, "argument-type"), ("split", "2", "argument-type"),
        ("batch_size", 0, "argument-too-small"), ("last_batch", "dropp", "unknown-name"),
    ],
)  # fmt: skip
def test_a_wrong_value_of_a_loader_is_an_error(name: str, value: Any, code: str) -> None:
    with raises(code, value=value):
        Session.loader(cast("Session", None), [1, 2, 3], **{name: value})
