"""paceline.launch.worker.bootstrap for an agent that may fork its workers: they share one import of torch."""

import os
import sys

if "PACELINE_PRELOAD_FD" in os.environ:
    from paceline.launch.worker.preload import serve

    serve(("torch.distributed",))

from paceline.launch.worker.bootstrap import main

main(sys.argv[1:])
