"""The commands. Each is a module with `main(arguments) -> exit code`, imported only when it is called."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from paceline.errors import ExitCode, PacelineError, ToldElsewhere, unknown

COMMANDS = {
    "train": "train a model on one process or on many",
    "verify": "prove that N processes compute what one computes",
    "shards": "show who sees which sample, and what the textbook variants get wrong",
}

HELP = """usage: paceline COMMAND [OPTIONS]

Train a PyTorch model on one device or on many, in lockstep: the same result at every world size.

commands:
{commands}

  paceline COMMAND --help    the options of a command
  paceline --version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `paceline ARGUMENTS` and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "PACELINE_AGENT_PID" in os.environ:  # before anything slow: a worker must not outlive its agent
        from paceline.launch.worker import attach  # noqa: PLC0415

        attach()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP.format(commands="\n".join(f"  {name:8}{text}" for name, text in COMMANDS.items())), end="")
        return ExitCode.DONE if arguments else ExitCode.USAGE
    if arguments[0] == "--version":
        from paceline import __version__  # noqa: PLC0415

        print(__version__)
        return ExitCode.DONE
    try:
        if arguments[0] not in COMMANDS:
            raise unknown("command", arguments[0], COMMANDS)
        return importlib.import_module(f"paceline.cli.{arguments[0]}").main(arguments[1:])
    except (Exception, KeyboardInterrupt) as error:
        return tell(error)


def tell(error: BaseException) -> int:
    """Say once what went wrong, and return the exit code for it.

    A worker leaves its words to its agent, which knows whose failure came first. Without an agent (torchrun), what
    was found before the first step is told by one rank, and everything else by the rank that it happened on.
    """
    from paceline.launch.worker import record_failure  # noqa: PLC0415

    code = error.exit_code if isinstance(error, PacelineError) else ExitCode.FAILED
    if isinstance(error, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    if record_failure(error, code, traceback=not isinstance(error, PacelineError)):
        return code
    alike = isinstance(error, PacelineError) and "torch.distributed" not in sys.modules  # every rank finds it alike
    if isinstance(error, ToldElsewhere) or (alike and os.environ.get("RANK", "0") != "0"):
        return code
    if isinstance(error, PacelineError):
        print(f"paceline: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return code
