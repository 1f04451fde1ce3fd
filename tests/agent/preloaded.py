"""paceline.worker.bootstrap for an agent that may fork its workers: they share one import of torch."""

import sys

from paceline.contract.birth import WorkerBirth

if (birth := WorkerBirth.here()) is not None and birth.preload >= 0:
    from paceline.worker.preload import serve

    serve(birth, ("torch.distributed",))

from paceline.worker.bootstrap import main

main(sys.argv[1:])
