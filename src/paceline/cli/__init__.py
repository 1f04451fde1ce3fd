"""The table of all commands. The module of a command is imported only when the command is called."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import ExitCode, unknown_name_error
from paceline.protocol.control import WorkerSpec, hold_standard_descriptors
from paceline.rank.environment import translate_slurm_mpi_variables

if TYPE_CHECKING:
    from paceline.cli.options import CommandParser


class Command(NamedTuple):
    """A command, described without importing its module."""

    help_line: str  # its line in `paceline --help`
    settings: str  # module.Class of its settings
    arguments: str  # fields of the settings that are positional arguments
    examples: tuple[str, str]  # the prefix `paceline NAME` is left out
    main: str = "main"  # its function `main(arguments) -> exit code` in that module
    usage_suffix: str = ""  # this and the other fields: see `CommandParser`
    common_options: str = ""
    config_help: str = ""


GROUPS = {
    "run": {
        "train": Command(
            "train a model on one process or many", "train.TrainConfig", "task",
            ("mnist-cnn --nproc 2 --run-dir runs/first", "mnist-cnn --nproc 2 --run-dir runs/first --resume auto"),
            common_options="config strategy batch-size global-batch lr epochs steps run-dir checkpoint-every resume "
            "nproc device on nodes hosts",
            config_help="TOML file with settings, e.g. the config.toml of a run; options override it",
        ),
        "launch": Command(
            "start any script that torchrun could, on one node or many", "launch.ScriptLaunchConfig", "",
            ("--nproc 2 train.py --epochs 5", "--nproc 2 --check train.py --epochs 5"),
            common_options="nproc show run-dir max-restarts hang-timeout on-drift check on nodes hosts env dry-run "
            "detach", usage_suffix="SCRIPT [ARGUMENTS]",
        ),
        "watchover": Command(
            "guard ranks that torchrun, srun or mpirun started", "watchover.WatchoverConfig", "",
            ("torchrun --nproc-per-node 4 -m paceline watchover train.py --epochs 5",
             "srun python -m paceline watchover -m my_package.train --epochs 5"), usage_suffix="SCRIPT [ARGUMENTS]",
        ),
        "join": Command(
            "add this machine as a node to a running multi-node job", "live.JoinConfig", "run",
            ("runs/first", "runs/first --nproc 4"), "join_run",
        ),
        "cancel": Command(
            "stop a run after it has saved its state", "live.CancelConfig", "run",
            ("runs/first", "runs/first --now"), "cancel",
        ),
        "doctor": Command(
            "check that machines are fit to train on, and list the fixes", "doctor.DoctorConfig", "",
            ("--nproc 2", "--on ssh --hosts n1,n2 --nproc 8"),
        ),
    },
    "inspect": {
        "status": Command(
            "show the progress or the outcome of a run", "status.StatusConfig", "run",
            ("runs/first", "runs/first --json"),
        ),
        "runs": Command(
            "list the runs of a folder with their progress", "status.RunsConfig", "folder",
            ("", "/shared/runs --json"), "list_runs",
        ),
        "watch": Command(
            "watch a run live, rank by rank; show stacks, save, stop", "live.WatchConfig", "run",
            ("runs/first", "first"), "watch",
        ),
        "report": Command(
            "write an HTML report of a run, or compare several", "report.ReportConfig", "runs",
            ("runs/first --open", "runs/first runs/second -o compared.html"),
        ),
        "logs": Command(
            "show the output of a run's ranks", "logs.LogsConfig", "run",
            ("runs/first --rank 0 --lines 100", "runs/first --grep loss --follow"),
        ),
        "hang": Command(
            "show which rank is blocking a run, with every rank's stack", "live.HangConfig", "run",
            ("runs/first", "runs/first --json"), "hang",
        ),
        "monitor": Command(
            "show live use of cores, memory, network and GPUs, by process", "monitor.MonitorConfig", "",
            ("", "--hosts n1,n2 --once"),
        ),
        "analyze": Command(
            "print throughput and loss of any training log or run", "logs.AnalyzeConfig", "logs",
            ("train.log", "runs/first --json"), "analyze",
        ),
        "trace": Command(
            "write a Perfetto trace of a run, with every rank on one clock", "report.TraceConfig", "run",
            ("runs/first", "runs/first -o first.json --overwrite"), "trace",
        ),
    },
    "check and measure": {
        "verify": Command(
            "check that N processes compute the same as one", "verify.VerifyConfig", "task",
            ("mnist-cnn --ranks 1,2,4", "my_loop.py:main -- --batch 16"), usage_suffix="[-- ARGUMENTS]",
        ),
        "compare": Command(
            "measure every strategy (speed, memory, bytes, bits), and recommend one", "measure.CompareConfig", "task",
            ("mnist-cnn --nproc 2", "mnist-cnn --strategies ddp,exact --nproc 2"), "compare_strategies",
            common_options="strategies meshes nproc batch-sizes steps rounds config device optimizer precision out "
            "json",
        ),
        "scale": Command(
            "measure scaling and lost time, and estimate a step on more nodes", "measure.ScaleConfig", "task",
            ("mnist-cnn --ranks 1,2", "mnist-cnn --ranks 1,2 --network 100Gbit,5us"), "scale",
            common_options="runs ranks strategy mesh mode batch-size network steps rounds config device task-arg out "
            "json",
        ),
        "replay": Command(
            "repeat one step on one process: loss per sample, gradients per layer", "replay.ReplayConfig", "run script",
            ("runs/first --step 20", "runs/first --step 20 --find-nonfinite"), usage_suffix="[-- ARGUMENTS]",
        ),
        "diff": Command(
            "show the first setting, step and tensor in which two runs differ", "replay.DiffConfig", "run other script",
            ("runs/first runs/second", "runs/first --against-python new-env"), "diff", "[-- ARGUMENTS]",
        ),
        "ledger": Command(
            "check that each sample was used once per epoch, over all attempts", "ledger.LedgerConfig", "run",
            ("runs/first", "runs/first --json ledger.json"),
        ),
    },
    "checkpoints": {
        "checkpoint": Command(
            "list a run's checkpoints, and check every byte of them", "checkpoint.CheckpointsConfig", "action run",
            ("list runs/first", "verify runs/first"),
        ),
        "export": Command(
            "write a run's weights for plain torch or Hugging Face", "checkpoint.ExportConfig", "run",
            ("runs/first -o model.safetensors", "runs/first --step best -o best.pt"), "export",
        ),
    },
}  # fmt: skip
"""The commands under each heading of `paceline --help`."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

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


def make_parser(name: str) -> CommandParser:
    from paceline.cli.options import CommandParser

    command = COMMANDS[name]
    module, _, settings = command.settings.partition(".")
    settings_class = getattr(import_module(f"paceline.cli.{module}"), settings)
    examples = tuple(text if "paceline" in text else f"paceline {name} {text}".rstrip() for text in command.examples)
    arguments = tuple(command.arguments.split())
    return CommandParser(
        f"paceline {name}", settings_class, arguments, examples, command.usage_suffix,
        command.common_options, command.config_help,
    )  # fmt: skip


def load_command_main(name: str) -> Callable[[Sequence[str]], int]:
    command = COMMANDS[name]
    return getattr(import_module(f"paceline.cli.{command.settings.partition('.')[0]}"), command.main)


def _reader_is_gone() -> bool:
    """Whether the reader of our output has ended, as `| head` does. If so, discard the rest of the output."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def entry() -> None:
    """The entry point of the program `paceline`: call `main`, then end the process."""
    code = main()
    if "torch" in sys.modules:
        from paceline.rank.attach import exit_worker

        exit_worker(code)
    sys.exit(code)


def _train_as_rank(settings: Path) -> int:
    """Run `paceline train --config FILE`, the command that the agent uses for a worker; return the exit code.

    This is `cli.train` without its imports of options and launchers, which would delay all ranks.
    """
    from paceline.config.settings import check_values, load
    from paceline.rank.imports import TRAINING_MODULES, import_without_gc
    from paceline.runs.reading import real_path

    config = load(real_path(settings), must_own=True)
    check_values(config)  # of `paceline launch -m paceline train --config FILE` no launcher has read the file
    import_without_gc(TRAINING_MODULES)  # the first import of torch
    from paceline.train.run import train

    _, code = train(config)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    hold_standard_descriptors()
    spec = WorkerSpec.from_environment()
    if spec is not None and spec.preload >= 0:  # this node's workers are forked from here: they go on below
        from paceline.rank.imports import TRAINING_MODULES, import_without_gc
        from paceline.rank.preload import serve_fork_orders

        serve_fork_orders(spec, lambda: import_without_gc(TRAINING_MODULES))
    if spec is not None:  # before anything slow: a worker must not outlive its agent
        from paceline.rank.attach import bind_to_agent

        bind_to_agent()
    if not arguments or arguments[0] in ("-h", "--help", "--help-all"):
        listed = ((title, [f"  {name:11}{group[name].help_line}" for name in group]) for title, group in GROUPS.items())
        groups = ([f"{title}:", *lines] for title, lines in listed)
        print(HELP.format(commands="\n\n".join(map("\n".join, groups))), end="")
        return ExitCode.DONE if arguments else ExitCode.USAGE
    if arguments[0] == "--version":
        from paceline import __version__

        print(__version__)
        return ExitCode.DONE
    try:
        # srun's and mpirun's variables for rank and world become torchrun's here, once, before anything reads them
        os.environ.update(translate_slurm_mpi_variables(os.environ))
        if arguments[0] not in COMMANDS:
            raise unknown_name_error("command", arguments[0], COMMANDS)
        if spec is not None and arguments[:2] == ["train", "--config"] and len(arguments) == 3:
            return _train_as_rank(Path(arguments[2]))
        return load_command_main(arguments[0])(arguments[1:])
    except (Exception, KeyboardInterrupt) as error:
        if spec is None and isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 128 + signal.SIGPIPE
        from paceline.rank.attach import report_error

        return report_error(error)
