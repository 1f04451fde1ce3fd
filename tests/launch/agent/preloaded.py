"""paceline.rank.bootstrap for an agent that may fork its workers: they share one import of torch."""

import sys

from paceline.protocol.control import WorkerBirth

if (birth := WorkerBirth.here()) is not None and birth.preload >= 0:
    from paceline.rank.imports import import_all
    from paceline.rank.preload import serve

    serve(birth, lambda: import_all(["torch.distributed"]))

from paceline.rank.bootstrap import main

main(sys.argv[1:])
