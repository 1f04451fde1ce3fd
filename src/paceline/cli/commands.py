"""How each command is typed: the class of its settings, its arguments, two examples and its common options."""

from importlib import import_module
from typing import Any

from paceline.cli.options import CommandLine

TABLE: dict[str, tuple[str, str, tuple[str, str], dict[str, Any]]] = {
    # command: class of its settings, fields that are given without a name, examples, fields of CommandLine
    "train": (
        "TrainConfig", "task",
        ("mnist-cnn --nproc 2 --run-dir runs/first", "mnist-cnn --nproc 2 --run-dir runs/first --resume auto"),
        {"common": "config strategy set batch-size global-batch virtual-ranks lr precision epochs steps run-dir "
         "checkpoint-every resume nproc device on nodes hosts",
         "config": "TOML file with settings, e.g. the config.toml of a run; options override it"},
    ),
    "launch": (
        "LaunchScript", "", ("--nproc 2 train.py --epochs 5", "--nproc 2 --check train.py --epochs 5"),
        {"common": "nproc show run-dir max-restarts stall-after on-drift check on nodes hosts env dry-run detach",
         "behind": "SCRIPT [ARGUMENTS]"},
    ),
    "watchover": (
        "WatchoverConfig", "",
        ("torchrun --nproc-per-node 4 -m paceline watchover train.py --epochs 5",
         "srun python -m paceline watchover -m my_package.train --epochs 5"),
        {"behind": "SCRIPT [ARGUMENTS]"},
    ),
    "join": ("JoinConfig", "run", ("runs/first", "runs/first --nproc 4"), {}),
    "cancel": ("CancelConfig", "run", ("runs/first", "runs/first --now"), {}),
    "doctor": ("DoctorConfig", "", ("--nproc 2", "--on ssh --hosts n1,n2 --nproc 8"), {}),
    "status": ("StatusConfig", "run", ("runs/first", "runs/first --json"), {}),
    "runs": ("RunsConfig", "folder", ("", "/shared/runs --json"), {}),
    "watch": ("WatchConfig", "run", ("runs/first", "first"), {}),
    "report": ("ReportConfig", "runs", ("runs/first --open", "runs/first runs/second -o compared.html"), {}),
    "logs": ("LogsConfig", "run", ("runs/first --rank 0 --lines 100", "runs/first --grep loss --follow"), {}),
    "hang": ("HangConfig", "run", ("runs/first", "runs/first --json"), {}),
    "monitor": ("MonitorConfig", "", ("", "--hosts n1,n2 --once"), {}),
    "analyze": ("AnalyzeConfig", "logs", ("train.log", "runs/first --json"), {}),
    "trace": ("TraceConfig", "run", ("runs/first", "runs/first -o first.json --overwrite"), {}),
    "verify": (
        "VerifyConfig", "task", ("mnist-cnn --ranks 1,2,4", "my_loop.py:main -- --batch 16"),
        {"behind": "[-- ARGUMENTS]"},
    ),
    "compare": ("CompareConfig", "task", ("mnist-cnn --nproc 2", "mnist-cnn --strategies ddp,exact --nproc 2"), {}),
    "scale": (
        "ScaleConfig", "task", ("mnist-cnn --ranks 1,2", "mnist-cnn --ranks 1,2 --network 100Gbit,5us"),
        {"common": "runs ranks strategy mesh mode batch-size network steps rounds config device set out json"},
    ),
    "ledger": ("LedgerConfig", "run", ("runs/first", "runs/first --json ledger.json"), {}),
    "checkpoint": ("CheckpointsConfig", "action run", ("list runs/first", "verify runs/first"), {}),
    "export": ("ExportConfig", "run", ("runs/first -o model.safetensors", "runs/first --step best -o best.pt"), {}),
}  # fmt: skip


def command_line(name: str) -> CommandLine:
    """That of `paceline NAME`."""
    settings, arguments, examples, others = TABLE[name]
    kind = getattr(import_module(f"paceline.cli.{name}"), settings)
    typed = tuple(one if "paceline" in one else f"paceline {name} {one}".rstrip() for one in examples)
    return CommandLine(f"paceline {name}", kind, tuple(arguments.split()), typed, **others)
