"""paceline.rank.bootstrap for an agent that may fork its workers: they share one import of torch."""

import sys

from paceline.protocol.control import WorkerSpec

if (spec := WorkerSpec.from_environment()) is not None and spec.preload >= 0:
    from paceline.rank.imports import import_without_gc
    from paceline.rank.preload import serve

    serve(spec, lambda: import_without_gc(["torch.distributed"]))

from paceline.rank.bootstrap import main

main(sys.argv[1:])
