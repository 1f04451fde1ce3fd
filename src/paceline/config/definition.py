"""The definition of a run: the settings and facts in which a checkpoint must agree before it is resumed.

No torch here: settings that differ are reported before any process starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from paceline.config.choices import check_not_renamed, current_setting_name
from paceline.config.strategies import EXACT_STRATEGIES, SLOW_NETWORK_SETTINGS
from paceline.errors import UsageError, unknown_name_error

if TYPE_CHECKING:
    from paceline.config.settings import TrainConfig

FIXED_SETTINGS = {
    "virtual_ranks": "buffers, random streams and portions of batches belong to virtual ranks",
    "global_batch": "the position in an epoch is counted in global batches",
    "last_batch": "it determines the samples of an epoch",
    "seed": "it determines the order of samples and all random streams",
    "batchnorm": "local and synchronized statistics differ",
    "optimizer": "each optimizer has a different state",
    "make_optimizer": "the state of the optimizer and its settings come from the checkpoint",
    "make_schedule": "the state of the scheduler comes from the checkpoint",
    "init_from": "a resumed run has its weights from the checkpoint",
    "stem": "the model would have different layers",
    "data": "paceline could not tell which samples are already used",
}
"""The settings that can never change in a run, with the reason."""

EXACT_ONLY_SETTINGS = ("threads_per_rank", "hardware")  # compared only with exact strategies
CHANGEABLE_SETTINGS = (
    "task", "accumulation", "lr", "weight_decay", "momentum", "clip_norm", "schedule", "warmup_steps", "lr_scaling",
    "lr_base_batch", "ema", "epochs", "steps", "precision", *SLOW_NETWORK_SETTINGS, *EXACT_ONLY_SETTINGS,
)  # fmt: skip
"""The settings that can change with `--allow-change`. All others (world size, strategy, ...) can always change."""

TASK_SETTING_PREFIX = "task_arg."  # the prefix of task settings, which can also change with `--allow-change`

ADDED_SETTING_DEFAULTS = {
    "precision": "fp32", "make_optimizer": None, "make_schedule": None, "init_from": None, "ema": None,
    **dict.fromkeys(SLOW_NETWORK_SETTINGS),
}  # fmt: skip
"""Entries that are missing in the definitions of older checkpoints, with their values in those versions."""

UNCHANGED_SETTINGS = (  # those that a definition contains as they are
    "stem", "batchnorm", "virtual_ranks", "global_batch", "accumulation", "last_batch", "seed", "steps", "lr",
    "weight_decay", "clip_norm", "ema", "schedule", "warmup_steps", "lr_scaling", "precision", *SLOW_NETWORK_SETTINGS,
)  # fmt: skip


def make_run_definition(config: TrainConfig) -> dict[str, Any]:
    from paceline.config.settings import flat_setting_values  # a session does not import it

    values = flat_setting_values(config)
    definition: dict[str, Any] = {name: values[name] for name in UNCHANGED_SETTINGS} | {
        "task": _in_its_folder(str(config.task)),
        "init_from": None if values["init_from"] is None else str(values["init_from"]),
        "epochs": values["epochs"] if values["steps"] is None else None,
        "optimizer": _in_its_folder(values["optimizer"]),
        "momentum": values["momentum"] if values["optimizer"] == "sgd" else None,
        "lr_base_batch": values["lr_base_batch"] if values["lr_scaling"] != "none" else None,
        "strategy": config.strategy,
        "threads_per_rank": values["threads_per_rank"] if config.strategy in EXACT_STRATEGIES else None,
    }
    if values["micro_batch"] is not None:  # not found yet
        del definition["accumulation"]
    if values["precision"] == "auto":  # not resolved yet
        del definition["precision"]
    return definition


def _in_its_folder(reference: str) -> str:
    """`module:name` without the folder of the module, which may differ between machines."""
    return ":".join(reference.split(":")[-2:])


def parse_allowed_changes(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name in FIXED_SETTINGS:
            raise UsageError(code="change-never-allowed", value=name, never=_never(name))
        check_not_renamed("--allow-change", name, [current_setting_name(name)])
        if name not in CHANGEABLE_SETTINGS and not name.startswith(TASK_SETTING_PREFIX):
            raise unknown_name_error("setting to change", name, CHANGEABLE_SETTINGS)
    return names


def check_definition_changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str], where: str
) -> list[str]:
    """Compare the definition `saved` in the checkpoint `where` with the part of it that is known `now`.

    Only names in `allowed` may differ. Returns a text for each of these differences. The error lists all other
    differences, but only the task if this differs.
    """
    saved = ADDED_SETTING_DEFAULTS | {current_setting_name(name): value for name, value in saved.items()}
    bits = saved.get("strategy") in EXACT_STRATEGIES and now.get("strategy") in EXACT_STRATEGIES
    of_task = sorted(name for name in saved if name.startswith(TASK_SETTING_PREFIX))
    compared = [n for n in (*FIXED_SETTINGS, *CHANGEABLE_SETTINGS, *of_task) if bits or n not in EXACT_ONLY_SETTINGS]
    differ = [name for name in compared if name in now and name in saved and now[name] != saved[name]]
    differences = {
        name: f"{name}: {_shown(saved[name], now[name])} in the checkpoint, {_shown(now[name], saved[name])} now"
        for name in differ
    }
    not_allowed = [name for name in differ if name not in allowed]
    if "task" in not_allowed:  # the other differences follow from this one
        not_allowed = ["task"]
    if not_allowed:
        changeable = [name for name in not_allowed if name not in FIXED_SETTINGS]
        raise UsageError(
            code="another-task" if "task" in changeable else "another-run" if changeable else "another-run-for-good",
            where=where, old_task=saved.get("task"), task=now.get("task"),
            saved={name: saved[name] for name in not_allowed}, now={name: now[name] for name in not_allowed},
            differences="; ".join(differences[name] for name in not_allowed), allow=",".join([*allowed, *changeable]),
            never="".join(f" {_never(name)}." for name in not_allowed if name in FIXED_SETTINGS),
        )  # fmt: skip
    return list(differences.values())


def _never(name: str) -> str:
    return f"{name} can never change in a run, because {FIXED_SETTINGS[name]}"


def _shown(value: Any, other: Any) -> str:
    if isinstance(value, dict) and isinstance(other, dict):  # show only the entries that differ
        table: dict[str, Any] = value
        value = {key: table[key] for key in sorted(table) if key not in other or table[key] != other[key]}
    text = "not set" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
