"""The commands. Each is a module with `main(arguments) -> exit code`, imported only when it is called."""

import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ExitCode, unknown
from paceline.protocol.control import WorkerBirth, hold_standard_descriptors
from paceline.rank.environment import understood

GROUPS = {
    "run": {
        "train": "train a model on one process or many",
        "launch": "start any script that torchrun could, on one machine or many",
        "watchover": "guard ranks that torchrun, srun or mpirun started",
        "join": "add this host to a running multi-node job",
        "cancel": "stop a run after it has saved its state",
        "doctor": "check that machines are fit to train on, and list the fixes",
    },
    "inspect": {
        "status": "show the progress or the outcome of a run",
        "runs": "list the runs of a folder with their progress",
        "watch": "watch a run live, rank by rank; show stacks, save, stop",
        "report": "write an HTML report of a run, or compare several",
        "logs": "show the output of a run's ranks",
        "hang": "show which rank is blocking a run, with every rank's stack",
        "monitor": "show live use of cores, memory, network and GPUs, by process",
        "analyze": "print throughput and loss of any training log or run",
        "trace": "write a Perfetto trace of a run, with every rank on one clock",
    },
    "check and measure": {
        "verify": "check that N processes compute the same as one",
        "compare": "measure every strategy (speed, memory, bytes, bits), and recommend one",
        "scale": "measure scaling and lost time, and estimate a step on more machines",
        "ledger": "check that each sample was used once per epoch, over all attempts",
    },
    "checkpoints": {
        "checkpoint": "list a run's checkpoints, and check every byte of them",
        "export": "write a run's weights for plain torch or Hugging Face",
    },
}
"""What `paceline --help` shows under each heading: command -> its line."""
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}

HELP = """Distributed PyTorch training with the result of a single process, and an answer when it hangs.

Examples:
  paceline train mnist-cnn --nproc 2
  paceline launch --nproc 2 train.py

usage: paceline COMMAND [OPTIONS]

{commands}

  paceline COMMAND --help        examples and common options of a command
  paceline COMMAND --help-all    all options of a command
  paceline --version
"""


def _reader_is_gone() -> bool:
    """Whether nobody reads what we print any more, as with `| head`; then the rest goes nowhere."""
    asked = select.poll()
    asked.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in asked.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _listed() -> str:
    """The commands, by group."""
    lines = {title: "\n".join(f"  {name:11}{line}" for name, line in group.items()) for title, group in GROUPS.items()}
    return "\n\n".join(f"{title}:\n{text}" for title, text in lines.items())


def entry() -> None:
    """The program `paceline`: `main`, and then the end of the process."""
    code = main()
    if "torch" in sys.modules:
        from paceline.rank.attach import leave

        leave(code)
    sys.exit(code)


def _train_as_rank(settings: Path) -> int:
    """Run `paceline train --config FILE` as an agent of paceline types it; the exit code.

    A rank does what `cli.train` would do, without its imports of options and launchers, which would delay all ranks.
    """
    from paceline.cli.train_checks import check_guard
    from paceline.config import check_values, load
    from paceline.disk.reading import real_path
    from paceline.rank.imports import TRAINING, import_all

    config = load(real_path(settings), ours=True)
    check_values(config)
    check_guard(config)
    import_all(TRAINING)  # the first import of torch
    from paceline.train.run import train

    return train(config).code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `paceline ARGUMENTS` and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    hold_standard_descriptors()
    birth = WorkerBirth.here()
    if birth is not None and birth.preload >= 0:  # this node's workers are forked from here: they go on below
        from paceline.rank.imports import TRAINING, import_all
        from paceline.rank.preload import serve

        serve(birth, lambda: import_all(TRAINING))
    if birth is not None:  # before anything slow: a worker must not outlive its agent
        from paceline.rank.attach import attach

        attach()
    if not arguments or arguments[0] in ("-h", "--help", "--help-all"):
        print(HELP.format(commands=_listed()), end="")
        return ExitCode.DONE if arguments else ExitCode.USAGE
    if arguments[0] == "--version":
        from paceline import __version__

        print(__version__)
        return ExitCode.DONE
    try:
        # srun's and mpirun's variables for rank and world become torchrun's here, once, before anything reads them
        os.environ.update(understood(os.environ))
        if arguments[0] not in COMMANDS:
            raise unknown("command", arguments[0], COMMANDS)
        if birth is not None and arguments[:2] == ["train", "--config"] and len(arguments) == 3:
            return _train_as_rank(Path(arguments[2]))
        return importlib.import_module(f"paceline.cli.{arguments[0]}").main(arguments[1:])
    except (Exception, KeyboardInterrupt) as error:
        if birth is None and isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 128 + signal.SIGPIPE
        from paceline.rank.attach import tell

        return tell(error)
