"""The options of a command: an `argparse.ArgumentParser` made from a dataclass of settings. Also common checks.

The type of a field defines the values of its option:

    int, float, str, Path, Literal, or a union of these   one value
    bool                                                  no value, and --no-NAME is the opposite
    tuple[str, ...]                                       the option is repeatable

The text below a field is the help of its option. The docstring of a class is the title of a group of options.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import os
import re
import shlex
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec

from paceline.config.choices import check_not_renamed
from paceline.errors import UsageError, plural, unknown_name_error
from paceline.host.cgroup import usable_cores
from paceline.host.gpus import GPU_SHARING_BACKENDS, count_gpus
from paceline.runs.console import escape_json_control_characters
from paceline.runs.reading import real_path

HELP_WIDTH = 100  # most columns of the help
MAX_OPTIONS_SHOWN_IN_FULL = 15  # a command with at most this number of options shows all of them in --help
HELP_OPTIONS = ("-h", "--help", "--help-all")
METAVARS = {  # placeholder of a value -> names of options; other options have a placeholder by type
    "RUN": "run runs other", "TASK": "task", "LOG": "logs", "ACTION": "action",
    "DIR": "data-dir run-dir folder", "FILE": "config out", "PATH": "init-from python against-python",
    "SECONDS": "timeout grace-period hang-timeout join-timeout save-before", "MINUTES": "time",
    "HOSTS": "hosts", "COMMAND": "ssh on-event", "N|MIN:MAX": "nodes", "NAME=VALUE": "task-arg env",
    "KEY=VALUE": "sbatch", "N,N": "ranks batch-sizes without", "MESH": "mesh meshes", "SCRIPT": "script",
    "NAME,NAME": "strategies optimizers report-to allow-change", "NAME": "optimizer partition module",
    "METRIC": "keep-best", "RANK": "rank stdin",
    "MODULES": "fsdp-wrap checkpoint-activations stages-at", "REGEX": "grep", "WHEN": "since",
    "FILE|conda:NAME": "activate", "RATE,LATENCY": "network", "N|TIME": "checkpoint-every",
    "X": "lr weight-decay momentum ema clip-norm outer-lr outer-momentum",
}  # fmt: skip
FOREIGN_OPTION_NAMES = {  # our option -> options of other frameworks with the same meaning
    "--lr": "learning-rate",
    "--batch-size": "bs per-device-train-batch-size per-gpu-batch-size train-batch-size micro-batch-size",
    "--global-batch": "global-batch-size",
    "--epochs": "n-epochs num-epochs max-epochs num-train-epochs",
    "--steps": "max-steps n-steps num-steps iterations",
    "--nproc": "np ncpu n-proc num-procs num-processes nproc-per-node world-size gpus n-gpus num-gpus devices ranks",
    "--nodes": "nnodes num-nodes num-machines",
    "--accumulation": "gradient-accumulation-steps accumulate-grad-batches grad-accum",
    "--clip-norm": "max-grad-norm gradient-clip-val grad-clip clip-grad",
    "--precision": "mixed-precision fp16 bf16 amp",
    "--run-dir": "output-dir out-dir save-dir log-dir default-root-dir checkpoint-dir",
    "--num-workers": "workers dataloader-num-workers",
    "--resume auto": "resume-from-checkpoint ckpt-path",
    "--warmup-steps": "warmup num-warmup-steps",
    "--schedule": "scheduler lr-scheduler lr-scheduler-type",
}
# metavar, description
TYPE_METAVARS = {int: ("N", "a whole number"), float: ("X", "a number"), Path: ("FILE", "a path")}


@dataclass(frozen=True)
class Option:
    name: str  # --batch-size; task, for an argument
    dest: str  # path of its field in the settings: data.batch_size
    settings_class: type  # the class that has the field
    types: list[Any]  # types of the value, except None and Literal; [bool]: a flag; [tuple]: a repeatable option
    choices: list[str]  # further valid values
    default: Any  # MISSING: the option is required
    text: str  # its help, without the default
    short: str = ""  # the short name, e.g. -o
    file_value: str = ""  # the value in the settings file, unless it is the default

    @property
    def is_flag(self) -> bool:
        return self.types == [bool]

    @property
    def names(self) -> list[str]:
        negated = f"--no-{self.name[2:]}" if self.is_flag else ""
        return [name for name in (self.short, self.name, negated) if name.startswith("-")]

    @property
    def metavar(self) -> str:
        """The placeholder of the value in the help; empty for a flag."""
        name = self.name.removeprefix("--")
        if self.is_flag:
            return ""
        if not self.types:
            return f"{{{','.join(self.choices)}}}"
        special = next((metavar for metavar, names in METAVARS.items() if name in names.split()), "")
        if special and ("|" not in special or str in self.types):  # --nodes of doctor takes only a number
            return special
        return "|".join([TYPE_METAVARS.get(self.types[0], (name.upper(),))[0], *self.choices])

    @property
    def usage_form(self) -> str:
        if not self.names:
            form = f"{self.metavar} ..." if self.types == [tuple] else self.metavar
            return form if self.default is MISSING else f"[{form}]"
        names = self.names[:1] if self.is_flag and self.default is not True else self.names
        return f"{', '.join(names)} {self.metavar}".rstrip()

    @property
    def default_text(self) -> str:
        """The default for the help; empty if there is none or the help text states it."""
        value = self.default
        if value in (MISSING, None, "", ()) or isinstance(value, bool) or "default" in self.text.lower():
            return ""
        return f"{value:g}" if isinstance(value, float) else str(value)

    def convert(self, text: str) -> Any:
        if text in self.choices or self.types == [tuple]:
            return text
        for value_type in self.types:
            with suppress(ValueError):
                return value_type(text)
        if not self.types:
            raise argparse.ArgumentTypeError(str(unknown_name_error("choice", text, self.choices)))
        wanted = " or ".join([*(TYPE_METAVARS[value_type][1] for value_type in self.types), *self.choices])
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")

    def add_to_parser(self, add_argument: Callable[..., argparse.Action], *, hidden: bool) -> None:
        default = self.file_value or (f"default: {self.default_text}" if self.default_text else "")
        text = f"{self.text} ({default})" if default else self.text
        how: dict[str, Any] = {"help": argparse.SUPPRESS if hidden else text.replace("%", "%%")}
        if self.is_flag:
            action = add_argument(self.name, dest=self.dest, action=argparse.BooleanOptionalAction, **how)
        elif self.names:
            store = "append" if self.types == [tuple] else "store"
            action = add_argument(*self.names, dest=self.dest, action=store, type=self.convert, **how)
        else:
            many: dict[str, Any] = {"nargs": "*", "default": []} if self.types == [tuple] else {"nargs": "?"}
            action = add_argument(self.dest, type=self.convert, **many, **how)
        action.metavar = self.usage_form


class _HelpFormatter(argparse.HelpFormatter):
    """Shows an option as `Option.usage_form`. Never breaks a line inside the name of an option."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return str(action.metavar)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


class _Parser(argparse.ArgumentParser):
    """A parser whose help begins with `about` and whose errors are UsageErrors."""

    about = ""

    def format_help(self) -> str:
        return f"{self.about}\n\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        raise UsageError(code="wrong-command-line", prog=self.prog, message=message)


@dataclass(frozen=True)
class CommandParser:
    prog: str  # the command as typed, e.g. paceline train
    settings: type
    arguments: tuple[str, ...] = ()  # fields that are positional arguments, in this order
    examples: tuple[str, ...] = ()  # complete commands
    usage_suffix: str = ""  # end of the usage line: arguments that are not parsed here
    common_options: str = ""  # names of the options in --help, if the command has more than SHORTEST
    config_help: str = ""  # help of --config FILE, which the caller reads; empty: the command has no such option

    def options(self, file: str = "", settings: Any = None) -> list[Option]:
        options = [*self._options(self.settings, "", file, settings)]
        if self.config_help:
            options.append(Option("--config", "config", self.settings, [Path], [], None, self.config_help))
        return sorted(options, key=lambda option: 99 if option.names else self.arguments.index(option.name))

    def _options(self, settings_class: type, prefix: str, file: str, settings: Any) -> Iterator[Option]:
        hints = get_type_hints(settings_class)
        for field in dataclasses.fields(settings_class):
            hint, dest, value = hints[field.name], prefix + field.name, getattr(settings, field.name, field.default)
            if dataclasses.is_dataclass(hint):
                yield from self._options(hint, f"{dest}.", file, value)  # pyright: ignore[reportArgumentType]
                continue
            parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
            choices = [str(choice) for part in parts if get_origin(part) is Literal for choice in get_args(part)]
            others = [origin for part in parts if (origin := get_origin(part) or part) not in (types.NoneType, Literal)]
            owner = next(base for base in settings_class.__mro__ if field.name in vars(base).get("__annotations__", {}))
            name = field.name if field.name in self.arguments else "--" + field.name.replace("_", "-")
            text = field.metadata.get("help") or _field_texts(Path(inspect.getfile(owner)))[owner.__name__, field.name]
            short = field.metadata.get("short", "")
            in_file = f"in {file}: {_shown(value)}" if value != field.default else ""
            yield Option(name, dest, owner, others, choices, field.default, text, short, in_file)

    def groups(self, options: Sequence[Option]) -> list[tuple[str, type, list[Option]]]:
        """(title, class, options) of each group. The options of `settings` itself come first."""
        members: dict[type, list[Option]] = {self.settings: []}
        for option in options:
            if option.names:
                members.setdefault(option.settings_class, []).append(option)
        return [("Options" if group is self.settings else docstring_paragraphs(group)[0].removesuffix("."), group,
                 of_group) for group, of_group in members.items() if of_group]  # fmt: skip

    def usage(self, options: Sequence[Option]) -> str:
        arguments = [option.usage_form for option in options if not option.names]
        return " ".join((self.prog, "[OPTIONS]", *arguments, self.usage_suffix)).rstrip()

    def parser(self, options: Sequence[Option], *, whole: bool) -> argparse.ArgumentParser:
        """The parser. Its help shows the common options; with `whole`, all options."""
        named = [option for option in options if option.names]
        shown = {option.name for option in named}
        if len(named) > MAX_OPTIONS_SHOWN_IN_FULL and not whole:
            shown = {f"--{name}" for name in self.common_options.split()}
            shown |= {option.name for option in named if option.file_value}
        note = f"{len(named) - len(shown)} more options: {self.prog} --help-all" if len(named) > len(shown) else ""
        if whole and any(option.is_flag for option in named):
            note = "An option without a value has an opposite: --no-NAME."
        width = min(HELP_WIDTH, shutil.get_terminal_size((HELP_WIDTH, 24)).columns)
        parser = _Parser(self.prog, self.usage(options), epilog=note, add_help=False, allow_abbrev=False,
                         formatter_class=partial(_HelpFormatter, width=width))  # fmt: skip
        about, *others = (textwrap.fill(text, width) for text in docstring_paragraphs(self.settings))
        parser.about = "\n\n".join([about, "\n  ".join(("Examples:", *self.examples)), *others])
        for name in HELP_OPTIONS:
            parser.add_argument(name, dest="help", action="store_const", const=name, help=argparse.SUPPRESS)
        arguments = parser.add_argument_group("Arguments")
        for option in options:
            if not option.names:
                option.add_to_parser(arguments.add_argument, hidden=False)
        for title, _, of_group in self.groups(options):
            group = parser.add_argument_group(title)
            for option in of_group:
                option.add_to_parser(group.add_argument, hidden=option.name not in shown)
        return parser

    def parse(self, arguments: Sequence[str]) -> Any:
        values = self.values(arguments)
        if help_option := values.get("help"):
            self.print_help(help_option)
            raise SystemExit(0)
        return build_settings(self.settings, values)

    def values(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The values from the command line, by `Option.dest`. The key `help` has the help option, if there is one."""
        options = self.options()
        # --run_dir means --run-dir, as in torchrun
        arguments = [re.sub(r"^--[\w-]+(?==|$)", lambda name: name[0].replace("_", "-"), word) for word in arguments]
        parsed, rest = self.parser(options, whole=False).parse_known_intermixed_args(arguments)
        values = {dest: value for dest, value in vars(parsed).items() if value is not None}
        if "help" in values:
            return values
        if unexpected := [word for word in rest if word.startswith("-")]:
            names = [name for option in options for name in option.names]
            raise unknown_option_error(self.prog, unexpected[0].partition("=")[0], names)
        if rest:
            raise UsageError(code="unexpected-argument", prog=self.prog, value=rest[0])
        for option in options:  # argparse's `required` would report this before an unknown option
            if option.default is MISSING and option.dest not in values:
                raise UsageError(code="missing-argument", prog=self.prog, value=option.usage_form, about=option.text)
        return values

    def print_help(self, asked: str, file: str = "", settings: Any = None) -> None:
        """Print the help for `asked`: --help or --help-all. The `settings` of a `file` replace the defaults."""
        parser = self.parser(self.options(file, settings), whole=asked == "--help-all")
        print(parser.format_help(), end="", flush=True)  # `main` handles a closed pipe


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType]
    return str(value).lower() if isinstance(value, bool) else str(value)


def unknown_option_error(prog: str, name: str, names: Collection[str]) -> UsageError:
    """The error for an option that is not one of `names`. It suggests the equivalent option, or the closest name."""
    check_not_renamed(prog, name, names)
    equivalents = [ours for ours, others in FOREIGN_OPTION_NAMES.items() if name[2:].lower() in others.split()]
    matches = [ours for ours in equivalents if ours.split()[0] in names] or difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {matches[0]}?" if matches else ""
    return UsageError(code="unknown-option", prog=prog, value=name, meant=hint)


def docstring_paragraphs(settings_class: type) -> list[str]:
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n", inspect.cleandoc(settings_class.__doc__ or ""))]


@cache
def _field_texts(module: Path) -> dict[tuple[str, str], str]:
    """The text below each field of the classes in a module, by (class, field)."""
    return {
        (definition.name, ast.unparse(node.target)): " ".join(str(after.value.value).split())
        for definition in ast.parse(module.read_text()).body
        if isinstance(definition, ast.ClassDef)
        for node, after in pairwise(definition.body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def build_settings(settings_class: type, given: Mapping[str, Any], default: Any = None, prefix: str = "") -> Any:
    """Create the settings from the values in `given`. Missing values are those of `default`."""
    hints, values = get_type_hints(settings_class), dict[str, Any]()
    for field in dataclasses.fields(settings_class):
        name, dest, before = field.name, prefix + field.name, getattr(default, field.name, None)
        if dataclasses.is_dataclass(hints[name]):
            values[name] = build_settings(hints[name], given, before, f"{dest}.")  # pyright: ignore[reportArgumentType]
        elif dest in given:  # a list belongs to a repeatable option: its values are appended to the default
            value = given[dest]
            values[name] = (*(before or ()), *value) if isinstance(value, list) else value
        elif default is not None:
            values[name] = before
    return settings_class(**values)


def check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, int) and value < 1:
            raise UsageError(code="below-one", setting=name, value=value)


def parse_whole_numbers(flag: str, text: str) -> list[int]:
    """Parse comma-separated whole numbers of at least 1: ascending, without duplicates."""
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise UsageError(code="not-whole-numbers", setting=flag, value=text)
    return numbers


def parse_names(kind: str, text: str, choices: Collection[str]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in choices:
            raise unknown_name_error(kind, name, choices)
    if not names:
        raise UsageError(code="nothing-named", kind=kind, allowed=[*choices])
    return names


def parse_shell_command(flag: str, text: str) -> tuple[str, ...]:
    try:
        command = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(code="not-a-command", setting=flag, value=text, reason=str(error)) from None
    if not command:
        raise UsageError(code="empty-command", setting=flag)
    return command


def ssh_argv(ssh: Sequence[str], host: str, command: str) -> tuple[str, ...]:
    """The command line that runs a shell command on a host, `name` or `name:port`, without prompts."""
    name, _, port = host.partition(":")
    where = ("-p", port, "--", name) if port.isdecimal() else ("--", host)
    return (*ssh, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *where, command)


def resolve_threads_per_rank(threads: int | None) -> int:
    """CPU threads of each rank: `threads`, or the user's OMP_NUM_THREADS; 0: the agent decides."""
    env_threads = os.environ.get("OMP_NUM_THREADS", "")
    return threads or (int(env_threads) if env_threads.isdecimal() else 0)


def usable_gpus(device: str) -> int | None:
    """The GPUs of this machine that ranks may use: 0 with --device cpu, None if only workers can count them."""
    gpus = None if device == "xpu" else 0 if device == "cpu" else count_gpus()
    if device == "cuda" and gpus == 0:
        raise UsageError(code="no-cuda")
    return gpus


def resolve_auto_nproc(device: str) -> int:
    """The value of `--nproc auto` on this machine: the number of GPUs, or of cores without a GPU."""
    gpus = usable_gpus(device)
    if gpus is None:
        raise UsageError(code="gpus-uncountable")
    return gpus or usable_cores()


def check_enough_gpus(option: str, nproc: int, gpus: int | None, backend: str = "auto") -> None:
    if gpus and nproc > gpus and backend not in GPU_SHARING_BACKENDS:
        processes = plural(gpus, "process", "processes")
        raise UsageError(code="too-few-gpus", option=option, nproc=nproc, gpus=gpus, processes=processes)


def check_out_file(flag: str, path: Path | None) -> None:
    """Check that a file can be written later, before work that may take hours."""
    if path and path.is_dir():
        raise UsageError(code="out-is-a-folder", setting=flag, value=path)
    if path and not path.absolute().parent.is_dir():
        raise UsageError(code="out-folder-missing", setting=flag, value=path, folder=path.absolute().parent)


def resolve_output_path(flag: str, path: Path) -> Path:
    """The path of the file to replace. A link is replaced itself, not its target, which another user may have made."""
    check_out_file(flag, path)
    if path.exists() and not path.is_file():  # for example, /dev/null must stay a device
        raise UsageError(code="out-not-a-file", setting=flag, value=path)
    return real_path(path.parent) / path.name


def write_json(path: Path, results: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")


def print_json(results: object) -> None:
    text = msgspec.json.format(msgspec.json.encode(results), indent=2).decode()
    sys.stdout.write(escape_json_control_characters(text) + "\n")
