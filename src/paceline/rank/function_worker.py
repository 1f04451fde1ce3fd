"""A rank of `paceline.run`: `python function_worker.py FOLDER` calls the function in FOLDER and stores its result."""

import linecache
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle

from paceline.errors import UsageError
from paceline.runs.progress import ProgressWriter
from paceline.runs.reading import read_bytes

_MOST_BYTES = 1 << 40  # the data of a closure may be large


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    interpreter_state, call = cloudpickle.loads(read_bytes(folder / "call", limit_bytes=_MOST_BYTES, ours=True))
    _restore_interpreter(**interpreter_state)
    function, args, kwargs = cloudpickle.loads(call)  # needs the restored sys.path
    if rank == 0:
        ProgressWriter.of_process = ProgressWriter(folder / "progress")
        for stale_path in folder.glob("result-*"):  # from a generation with more ranks
            if int(stale_path.name.rpartition("-")[2]) >= int(os.environ["WORLD_SIZE"]):
                stale_path.unlink()
    try:
        result = _pickle_result(function(*args, **kwargs))
    except BaseException as error:
        user_traceback = error.__traceback__ and error.__traceback__.tb_next  # this function
        trace = "".join(traceback.format_exception(type(error), error, user_traceback))
        with suppress(Exception):  # for an exception that cannot be pickled, the caller uses the failure record
            (folder / f"error-{rank}").write_bytes(cloudpickle.dumps((error.with_traceback(None), trace)))
        raise
    partial_path = folder / f".result-{rank}"
    partial_path.write_bytes(result)
    partial_path.rename(folder / f"result-{rank}")


def _pickle_result(result: Any) -> bytes:
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        raise UsageError(code="result-not-sendable", kind=type(result).__name__, why=str(error)) from error


def _restore_interpreter(path: list[str], argv: list[str], main: str | None, sources: dict[str, Any]) -> None:
    sys.path[:], sys.argv[:] = path, argv
    linecache.cache.update(sources)  # so that a traceback shows the lines of a notebook's cell
    if main is None:
        del sys.modules["__main__"].__file__
    else:
        sys.modules["__main__"].__file__ = main


if __name__ == "__main__":
    main()
