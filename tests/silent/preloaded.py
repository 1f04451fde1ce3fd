"""paceline.rank.bootstrap for an agent that forks its workers from one process that has imported a framework."""

import sys

from paceline.protocol.control import WorkerSpec

if (spec := WorkerSpec.from_environment()) is not None and spec.preload >= 0:
    from paceline.rank.preload import serve

    frameworks = {"accelerated.py": ("accelerate",), "trainer.py": ("transformers.trainer",)}
    serve(spec, ("torch.distributed", *frameworks.get(sys.argv[1].rpartition("/")[2], ())))

from paceline.rank.bootstrap import main

main(sys.argv[1:])
