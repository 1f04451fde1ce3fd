"""The options of a command: from the fields of its settings, a dataclass, to a parser and to its help.

The type of a field says what its option takes: int, float, str, Path, Literal, a union of these; bool: none, with
--no-NAME for the opposite; tuple[str, ...]: it may be repeated. The text below a field is its help, that of the class
the title of a group.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import shutil
import textwrap
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import ExitCode, UsageError

WIDEST, COLUMN = 100, 24  # columns of the help; where the texts of options begin
SHORTEST = 20  # with so many options or fewer, --help shows all of them
HELP = ("-h", "--help", "--help-all")
METAVARS = {  # what stands for a value, by the names of options; else by the type
    "RUN": "run runs", "TASK": "task", "LOG": "logs", "ACTION": "action",
    "DIR": "data-dir run-dir folder", "FILE": "config out", "PATH": "init-from python",
    "SECONDS": "timeout stop-grace stall-after join-timeout save-before", "MINUTES": "time",
    "HOSTS": "hosts", "COMMAND": "ssh", "N|MIN:MAX": "nodes", "NAME=VALUE": "set env", "KEY=VALUE": "sbatch",
    "N,N": "ranks batch-sizes", "NAME,NAME": "strategies optimizers track allow-change", "MESH": "mesh meshes",
    "NAME": "optimizer partition module", "MODULES": "fsdp-wrap checkpoint-activations stages-at",
    "FILE|conda:NAME": "activate", "METRIC": "keep-best", "RANK": "rank stdin", "REGEX": "grep", "WHEN": "since",
    "RATE,LATENCY": "network", "X": "lr weight-decay momentum ema clip-norm outer-lr outer-momentum",
    "N|TIME": "checkpoint-every",
}  # fmt: skip
FAMILIAR = {  # of other frameworks' flags, ours
    "--lr": "learning-rate",
    "--batch-size": "bs per-device-train-batch-size per-gpu-batch-size train-batch-size micro-batch-size",
    "--global-batch": "global-batch-size",
    "--epochs": "n-epochs num-epochs max-epochs num-train-epochs",
    "--steps": "max-steps n-steps num-steps iterations",
    "--nproc": "num-processes nproc-per-node world-size gpus n-gpus num-gpus devices ranks",
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
BY_TYPE = {int: "N", float: "X", Path: "FILE"}
WORDS = {int: "a whole number", float: "a number", str: "text", Path: "a path"}


@dataclass(frozen=True)
class Option:
    """One option, or argument without a name, of a command."""

    name: str
    """--batch-size; task, for an argument"""
    own_text: str
    """its help, if that is not the text below its field"""
    path: tuple[str, ...]
    """of its field in the settings"""
    group: type
    """the class that has the field"""
    types: tuple[Any, ...]
    """of its value; None is left out"""
    default: Any
    """dataclasses.MISSING: there is none"""
    short: str = ""

    @property
    def text(self) -> str:
        """Its help, without its default."""
        return self.own_text or " ".join(field_texts(self.group).get(self.path[-1], "").split())

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.types == (bool,)

    @property
    def is_many(self) -> bool:
        """Whether several values are put together."""
        return get_origin(self.types[0]) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values that it takes, beside those of its other types."""
        return tuple(str(word) for kind in self.types if get_origin(kind) is Literal for word in get_args(kind))

    @property
    def metavar(self) -> str:
        """What stands for its value; empty for a flag."""
        name = self.name.removeprefix("--")
        free = [kind for kind in self.types if get_origin(kind) is not Literal]
        if self.is_flag:
            return ""
        if not free:
            return f"{{{','.join(self.choices)}}}"
        own = next((metavar for metavar, names in METAVARS.items() if name in names.split()), "")
        if own and ("|" not in own or str in free):  # of doctor, --nodes is a number
            return own
        return "|".join([BY_TYPE.get(free[0], name.upper()), *self.choices])

    @property
    def shown(self) -> str:
        """As help has it: -o, --out FILE."""
        if not self.name.startswith("-"):
            words = f"{self.metavar} ..." if self.is_many else self.metavar
            return words if self.default is dataclasses.MISSING else f"[{words}]"
        names = ", ".join(filter(None, (self.short, self.name, self.negated if self.default is True else "")))
        return f"{names} {self.metavar}".rstrip()

    @property
    def negated(self) -> str:
        """The opposite of a flag."""
        return f"--no-{self.name[2:]}"

    @property
    def default_shown(self) -> str:
        """Its default, if there is one that its text does not state."""
        value = self.default
        is_none = value in (dataclasses.MISSING, None, "", ()) or isinstance(value, bool)
        if is_none or "default" in self.text.lower():
            return ""
        return f"{value:g}" if isinstance(value, float) else str(value)

    def read(self, word: str) -> Any:
        """The value that a word stands for.

        Raises:
            UsageError: none.
        """
        if word in self.choices:
            return word
        free = [kind for kind in self.types if get_origin(kind) is not Literal]
        for kind in [str] if self.is_many else free:
            try:
                return kind(word)
            except ValueError:
                pass
        if self.choices and not free:
            near = difflib.get_close_matches(word, self.choices, n=1)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"{self.name}: invalid choice {word!r}.{meant} Choose from: {', '.join(self.choices)}")
        wanted = [*(WORDS[kind] for kind in free), *self.choices]
        listed = " or ".join(filter(None, (", ".join(wanted[:-1]), wanted[-1])))
        raise UsageError(f"{self.name} must be {listed}, got {word!r}")


@dataclass(frozen=True)
class CommandLine:
    """A command with options."""

    prog: str
    """as it is typed: paceline train"""
    settings: type
    arguments: tuple[str, ...] = ()
    """fields that are given without a name, in this order"""
    examples: tuple[str, ...] = ()
    """commands that work as they are"""
    behind: str = ""
    """what follows the options and is not parsed here, in the usage line"""
    common: str = ""
    """names of the options that --help shows, of a command with many"""
    config: str = ""
    """help of --config FILE, of which the caller makes the settings' default; empty: there is no such option"""

    def options(self) -> list[Option]:
        """All of them."""
        found = [*self._options(self.settings, ())]
        found += [Option("--config", self.config, ("config",), self.settings, (Path,), None)] if self.config else []
        return sorted(found, key=lambda one: self.arguments.index(one.name) if one.name in self.arguments else 99)

    def _options(self, kind: type, path: tuple[str, ...]) -> Iterator[Option]:
        hints = get_type_hints(kind)
        for one in dataclasses.fields(kind):
            hint, here = hints[one.name], (*path, one.name)
            if dataclasses.is_dataclass(hint):
                yield from self._options(hint, here)  # pyright: ignore[reportArgumentType]
                continue
            kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
            owner = next(each for each in kind.__mro__ if one.name in vars(each).get("__annotations__", {}))
            name = one.name if one.name in self.arguments else "--" + one.name.replace("_", "-")
            given = tuple(each for each in kinds if each is not types.NoneType)
            own_text, short = (one.metadata.get(key, "") for key in ("help", "short"))
            yield Option(name, own_text, here, owner, given, one.default, short)

    def parse(self, words: Sequence[str]) -> Any:
        """The settings that the words give; see `given`."""
        return built(self.settings, self.given(words))

    def given(self, words: Sequence[str]) -> dict[tuple[str, ...], Any]:
        """The values that the words give, by the paths of their fields; asked for help, the process ends with code 0.

        Raises:
            UsageError: an option that there is not, a value that is none, or one that is missing.
        """
        options = self.options()
        if asked := [word for word in words if word in HELP]:
            print(self.help(options, whole="--help-all" in asked), flush=True)  # here: a reader may be gone
            raise SystemExit(ExitCode.DONE)
        named = {name: one for one in options if one.name.startswith("-") for name in (one.name, one.short) if name}
        negated = {one.negated: one for one in named.values() if one.is_flag}
        waiting = [one for one in options if not one.name.startswith("-")]
        left, values = list(words), dict[tuple[str, ...], Any]()
        while left:
            word = left.pop(0)
            if not _is_option(word):
                if not waiting:
                    raise UsageError(f"{self.prog}: unexpected argument {word!r}. See {self.prog} --help")
                one = waiting[0] if waiting[0].is_many else waiting.pop(0)
                values[one.path] = (*values.get(one.path, ()), word) if one.is_many else one.read(word)
                continue
            name, equals, value = word.partition("=")
            name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
            one = named.get(name) or negated.get(name)
            if one is None:
                raise unknown_option(self.prog, name, [*named, *(negated if name.startswith("--no-") else ())])
            if one.is_flag:
                if equals:
                    raise UsageError(f"{name} takes no value, got {word!r}")
                values[one.path] = name not in negated
                continue
            if not equals and (not left or _is_option(left[0])):
                raise UsageError(f"{name} needs a value: {one.name} {one.metavar}")
            value = value if equals else left.pop(0)
            values[one.path] = (*values.get(one.path, ()), value) if one.is_many else one.read(value)
        for one in options:
            if one.default is dataclasses.MISSING and one.path not in values:
                if one.is_many:
                    values[one.path] = ()
                else:
                    raise UsageError(f"{self.prog} needs {one.shown}: {one.text}. See {self.prog} --help")
        return values

    # help

    def groups(self, options: Sequence[Option]) -> list[tuple[str, type, list[Option]]]:
        """(title, class, options) of each group, the command's own first."""
        found: dict[type, list[Option]] = {self.settings: []}
        for one in options:
            if one.name.startswith("-"):
                found.setdefault(one.group, []).append(one)
        return [("Options" if group is self.settings else paragraphs(group)[0].removesuffix("."), group, those)
                for group, those in found.items() if those]  # fmt: skip

    def usage(self, options: Sequence[Option]) -> str:
        """One line."""
        places = [one.shown for one in options if not one.name.startswith("-")]
        return " ".join(("usage:", self.prog, "[OPTIONS]", *places, self.behind)).rstrip()

    def help(self, options: Sequence[Option], *, whole: bool) -> str:
        """What --help prints, or `whole`, --help-all."""
        width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
        named = [one for one in options if one.name.startswith("-")]
        common = [f"--{word}" for word in self.common.split()] if len(named) > SHORTEST and not whole else []
        chosen = [one for one in named if not common or one.name in common]
        places = [one for one in options if not one.name.startswith("-")]
        first, *others = paragraphs(self.settings)
        out = [*textwrap.wrap(first, width), "", "Examples:", *(f"  {line}" for line in self.examples), ""]
        out += [line for words in others for line in (*textwrap.wrap(words, width), "")] + [self.usage(options), ""]
        for title, rows in (("Arguments", places), *((title, rows) for title, _, rows in self.groups(chosen))):
            out += [f"{title}:", *(line for one in rows for line in _row(one, width)), ""] if rows else []
        hidden, negatable = len(named) - len(chosen), whole and any(one.is_flag for one in chosen)
        out += [f"{hidden} more options: {self.prog} --help-all"] if hidden else []
        out += ["An option without a value has an opposite: --no-NAME."] if negatable else []
        return "\n".join(out).rstrip()


def unknown_option(prog: str, name: str, names: Collection[str]) -> UsageError:
    """The error for an option that is not one of `names`: it names the nearest, or ours for another framework's."""
    ours = [one for one, others in FAMILIAR.items() if name[2:].lower() in others.split() and one.split()[0] in names]
    near = ours or difflib.get_close_matches(name, names, n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    return UsageError(f"{prog} has no {name}.{meant} See {prog} --help-all")


def _row(one: Option, width: int) -> list[str]:
    default = f" (default: {one.default_shown})" if one.default_shown else ""
    lines = textwrap.wrap(one.text + default, width - COLUMN, break_on_hyphens=False, break_long_words=False)
    first = f"  {one.shown}"
    if len(first) <= COLUMN - 2 and lines:
        first = f"{first:{COLUMN}}{lines.pop(0)}"
    return [first, *(" " * COLUMN + line for line in lines)]


def _is_option(word: str) -> bool:
    """Whether it names one; -1 is a number."""
    return len(word) > 1 and word[0] == "-" and not re.match(r"-\.?\d", word)


def paragraphs(kind: type) -> list[str]:
    """Of the text of a class, each on one line; the first is the title of a group of options."""
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n", inspect.cleandoc(kind.__doc__ or ""))]


@cache
def field_texts(owner: type) -> dict[str, str]:
    """The text below each field of a class."""
    return {
        ast.unparse(node.target): str(after.value.value)
        for one in _classes(Path(inspect.getfile(owner)))
        if one.name == owner.__name__
        for node, after in pairwise(one.body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


@cache
def _classes(module: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(module.read_text()).body if isinstance(node, ast.ClassDef)]


def built(kind: type, values: Mapping[tuple[str, ...], Any], default: Any = None, path: tuple[str, ...] = ()) -> Any:
    """The settings that are `values`, over `default`, with those of the classes inside."""
    hints, given = get_type_hints(kind), dict[str, Any]()
    for one in dataclasses.fields(kind):
        here = (*path, one.name)
        if dataclasses.is_dataclass(hints[one.name]):
            inner = None if default is None else getattr(default, one.name)
            given[one.name] = built(hints[one.name], values, inner, here)  # pyright: ignore[reportArgumentType]
        elif here in values:
            before = getattr(default, one.name, ())  # values of a repeated option are added to those of a file
            given[one.name] = (*before, *values[here]) if isinstance(values[here], tuple) else values[here]
        elif default is not None:
            given[one.name] = getattr(default, one.name)
    return kind(**given)
