"""The definition of a run: the settings and facts in which a checkpoint must agree before it is resumed.

No torch here: settings that differ are reported before any process starts.
"""

from collections.abc import Collection, Mapping
from typing import Any

from paceline.config.settings import TrainConfig
from paceline.config.strategies import EXACT, SLOW
from paceline.errors import UsageError, unknown

FIXED = {
    "virtual_ranks": "buffers, random streams and shares belong to virtual ranks",
    "global_batch": "the position in an epoch is counted in global batches",
    "tail": "it decides which samples an epoch has",
    "seed": "it decides the order of samples and all random streams",
    "batchnorm": "its statistics are of another kind",
    "optimizer": "it keeps another state",
    "make_optimizer": "it keeps another state, and goes on with the settings of the checkpoint",
    "make_schedule": "it goes on with the numbers of the checkpoint",
    "init_from": "a run that goes on has its weights from the checkpoint",
    "stem": "it is another model",
    "data": "the samples used so far would not be those left out from now on",
}
"""what may never change in a run, and why"""

BITS_ONLY = ("threads_per_rank", "hardware")  # compared only where bits were promised
CHANGEABLE = (
    "task", "accumulation", "lr", "weight_decay", "momentum", "clip_norm", "schedule", "warmup_steps", "lr_scaling",
    "lr_base_batch", "ema", "epochs", "steps", "precision", *SLOW, *BITS_ONLY,
)  # fmt: skip
"""what may change if `--allow-change` names it; everything else (world size, strategy, ...) may change freely"""

OF_TASK = "set."  # the prefix of the task's settings, which may change in the same way

ADDED = {
    "precision": "fp32", "make_optimizer": None, "make_schedule": None, "init_from": None, "ema": None,
    **dict.fromkeys(SLOW),
}  # fmt: skip
"""what the definitions of older checkpoints do not contain, with the value at that time"""


def settings(config: TrainConfig) -> dict[str, Any]:
    """The part of the definition that comes from the (resolved) settings."""
    o = config.optimizer
    definition: dict[str, Any] = {
        "task": _in_its_folder(str(config.task)),
        "stem": config.model.stem,
        "init_from": None if config.model.init_from is None else str(config.model.init_from),
        "batchnorm": config.model.batchnorm,
        "virtual_ranks": config.data.virtual_ranks,
        "global_batch": config.data.global_batch,
        "accumulation": config.data.accumulation,
        "tail": config.data.tail,
        "seed": config.run.seed,
        "epochs": config.run.epochs if config.run.steps is None else None,
        "steps": config.run.steps,
        "optimizer": _in_its_folder(o.optimizer),
        "lr": o.lr,
        "weight_decay": o.weight_decay,
        "momentum": o.momentum if o.optimizer == "sgd" else None,
        "clip_norm": o.clip_norm,
        "ema": o.ema,
        "schedule": o.schedule,
        "warmup_steps": o.warmup_steps,
        "lr_scaling": o.lr_scaling,
        "lr_base_batch": o.lr_base_batch if o.lr_scaling != "none" else None,
        "strategy": config.strategy,
        "threads_per_rank": config.launch.threads_per_rank if config.strategy in EXACT else None,
        "precision": config.compute.precision,
        **vars(config.network),
    }
    if config.compute.precision == "auto":  # not chosen yet
        del definition["precision"]
    return definition


def _in_its_folder(reference: str) -> str:
    """`module:name` without the folder of the module, which may differ between machines."""
    return ":".join(reference.split(":")[-2:])


def allowed_changes(text: str) -> list[str]:
    """The names in `--allow-change`.

    Raises:
        UsageError: for a name that does not exist, or that nothing can allow.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name in FIXED:
            raise UsageError(code="change-never-allowed", value=name, never=_never(name))
        if name not in CHANGEABLE and not name.startswith(OF_TASK):
            raise unknown("setting to change", name, CHANGEABLE)
    return names


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str], where: str) -> list[str]:
    """Compare the definition `saved` in the checkpoint `where` with the part of it that is known `now`.

    Only names in `allowed` may differ. Returns these differences, as text.

    Raises:
        UsageError: naming each difference, both values, and what to do.
    """
    saved = ADDED | dict(saved)
    bits = saved.get("strategy") in EXACT and now.get("strategy") in EXACT
    of_task = sorted(name for name in saved if name.startswith(OF_TASK))
    compared = [n for n in (*FIXED, *CHANGEABLE, *of_task) if bits or n not in BITS_ONLY]
    differ = [name for name in compared if name in now and name in saved and now[name] != saved[name]]
    differences = {
        name: f"{name}: {_shown(saved[name], now[name])} in the checkpoint, {_shown(now[name], saved[name])} now"
        for name in differ
    }
    refused = [name for name in differ if name not in allowed]
    if refused:
        may = [name for name in refused if name not in FIXED]
        raise UsageError(
            code="another-run" if may else "another-run-for-good", where=where,
            saved={name: saved[name] for name in refused}, now={name: now[name] for name in refused},
            differences="; ".join(differences[name] for name in refused), allow=",".join([*allowed, *may]),
            never="".join(f" {_never(name)}." for name in refused if name in FIXED),
        )  # fmt: skip
    return list(differences.values())


def _never(name: str) -> str:
    return f"{name} can never change on the way, since {FIXED[name]}"


def _shown(value: Any, other: Any) -> str:
    if isinstance(value, dict) and isinstance(other, dict):  # of two tables, only the differences
        table: dict[str, Any] = value
        value = {key: table[key] for key in sorted(table) if key not in other or table[key] != other[key]}
    text = "not set" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
