"""`paceline train --config FILE` where an agent of ours has typed it: a rank, without what only a command needs.

It does what `paceline.cli.train` would. But there are no flags to parse and no launchers to choose from, whose imports
would keep all ranks waiting, and one process can import what they need for all of them.
"""

from pathlib import Path

from paceline.cli.train_checks import check_guard
from paceline.config import check_values
from paceline.config import load as load_config
from paceline.disk.reading import real_path
from paceline.worker.imports import TRAINING, import_all


def of_settings(path: str) -> int:
    """Be a rank of a training with the settings in this file; the exit code."""
    config = load_config(real_path(Path(path)), ours=True)
    check_values(config)
    check_guard(config)
    import_all(TRAINING)  # the first import of torch
    from paceline.train.run import train

    return train(config, run_dir=config.run.run_dir).code
