"""A rank that runs many loops as verify does: python loop_ranks.py FOLDER NAME..., each into a folder of its own."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))
from tests.lab.ranks.loop_table import spec_of

from paceline.lab.ranks.loop import run_loop_cases
from paceline.rank.world import World

folder, *names = sys.argv[1:]
for name in names:
    run_loop_cases(spec_of(name), Path(folder) / name, World.from_env(device="cpu"))
