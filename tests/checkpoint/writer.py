"""A run that only saves: `writer.py ROOT ATTEMPT GENERATION STEPS` prints each step that it publishes."""

import sys
from pathlib import Path

from checkpoint_harness import save

from paceline.checkpoint.manager import Checkpoints, FencedError

root, attempt, generation, steps = Path(sys.argv[1]), *map(int, sys.argv[2:])
checkpoints = Checkpoints(root)
checkpoints.claim_publishing(attempt, generation)
for step in range(1, steps + 1):
    try:
        save(checkpoints, step)
    except OSError:
        continue  # a newer generation has removed the folder that we write to: the next commit is told so
    except FencedError as error:
        print(error.code, flush=True)
        break
    print(step, flush=True)
