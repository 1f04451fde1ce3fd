"""`paceline train --config FILE` where an agent of ours has typed it: a rank, without what only a command needs.

It does what `paceline.cli.train` would. But there are no flags to parse and no launchers to choose from, whose imports
would keep all ranks waiting, and one process can import what they need for all of them.
"""

from pathlib import Path

from paceline.cli.train_checks import check_guard
from paceline.config import TrainConfig, check_values
from paceline.config import load as load_config
from paceline.disk.reading import real_path
from paceline.ladder import DEFAULT, LADDER
from paceline.worker.imports import COMPILER, TRAINING, import_all


def of_settings(path: str) -> int:
    """Be a rank of a training with the settings in this file; the exit code."""
    config = _settings(path)
    check_values(config)
    check_guard(config)
    import_all([TRAINING])  # the first import of torch
    from paceline.train.run import train

    return train(config, run_dir=config.run.run_dir).code


def import_for(path: str) -> None:
    """Import what ranks with these settings will, on behalf of those that are forked from this process."""
    config = _settings(path)
    compute, rung = config.compute, LADDER[config.strategy or DEFAULT]
    compiles = compute.compile or compute.checkpoint_activations is not None or rung.compiler
    import_all([TRAINING, COMPILER] if compiles else [TRAINING])


def _settings(path: str) -> TrainConfig:
    return load_config(real_path(Path(path)), ours=True)
