"""A rank of `paceline.run`: python called.py FOLDER calls the function that lies there, and leaves what it returns."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import cloudpickle


def main() -> None:
    """Call it."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    sys.path[:], call = cloudpickle.loads((folder / "call").read_bytes())
    function, args, kwargs = cloudpickle.loads(call)  # by modules that are found there
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        with suppress(Exception):  # an exception that cannot be pickled is told by its words all the same
            (folder / f"error-{rank}").write_bytes(cloudpickle.dumps((error.with_traceback(None), trace)))
        raise
    partial = folder / f".result-{rank}"
    partial.write_bytes(cloudpickle.dumps(result))
    partial.rename(folder / f"result-{rank}")


if __name__ == "__main__":
    main()
