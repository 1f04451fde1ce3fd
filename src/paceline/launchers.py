"""The table of launchers, as `ladder` is that of strategies: their names, and the settings that not all of them take.

LAUNCHERS in cli/elsewhere.py says which function makes each one's plan. The names are also what a run's record has.
"""

from typing import Literal, get_args

LauncherName = Literal["local", "ssh", "slurm", "print"]

OWN: dict[LauncherName, str] = {  # settings of [cluster] which have no meaning with the launchers that do not list them
    "local": "detach",
    "ssh": "hosts ssh sync join_timeout detach",
    "slurm": "join_timeout partition time gpus_per_node cpus_per_rank save_before sbatch follow cancel_on_interrupt",
    "print": "hosts join_timeout agent",
}
assert tuple(OWN) == get_args(LauncherName)


def launchers_of(setting: str) -> list[LauncherName]:
    """Those with which a setting has a meaning; all, if it is nobody's own."""
    return [name for name, own in OWN.items() if setting in own.split()] or [*OWN]
