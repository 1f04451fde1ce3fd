"""Ends a worker of ours: an error is reported once, by the right process, and turned into the exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from paceline.errors import ExitCode, PacelineError, ToldElsewhere
from paceline.observe.terminal import clean
from paceline.worker.attach import attach, leave, record_failure

INTERRUPTED = 130  # 128 + SIGINT


def run_worker(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Be a worker whose whole life is `main`: under its agent from the start, and ended with its exit code.

    Args:
        main: takes the command line's arguments.
    """
    attach()
    try:
        code = main(sys.argv[1:])
    except Exception as error:
        code = tell(error)
    leave(code)


def tell(error: BaseException) -> int:
    """Say once what went wrong, and return the exit code for it.

    A worker leaves the report to its agent, which knows whose failure came first. Without an agent (torchrun), rank 0
    reports what every rank finds alike before it has met the others; anything else the rank that it happened to.
    """
    if isinstance(error, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    in_words = isinstance(error, PacelineError)
    code = error.exit_code if in_words else ExitCode.FAILED
    told_elsewhere = isinstance(error, ToldElsewhere)
    if record_failure(error, code, traceback=not in_words, victim=told_elsewhere or None) or told_elsewhere:
        return code
    found_alike = in_words and "torch.distributed" not in sys.modules
    if found_alike and os.environ.get("RANK", "0") != "0":
        return code
    if in_words:
        print(f"paceline: {clean(str(error))}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return code
