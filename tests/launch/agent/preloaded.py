"""paceline.worker.bootstrap for an agent that may fork its workers: they share one import of torch."""

import sys

from paceline.contract.birth import WorkerBirth

if (birth := WorkerBirth.here()) is not None and birth.preload >= 0:
    from paceline.worker.imports import import_all
    from paceline.worker.preload import serve

    serve(birth, lambda: import_all(["torch.distributed"]))

from paceline.worker.bootstrap import main

main(sys.argv[1:])
