"""torchrun's options for `paceline launch`: their spellings and variables, and what each means here. Pure.

    --nproc-per-node 4 train.py --epochs 5       -> --nproc 4, and the script with its arguments
    --rdzv-backend c10d                          -> ignored, with a message: our ranks meet by themselves
    --nnodes 2 --node-rank 1 ...                 -> torchrun itself, with the guard in front of the script

An option of torchrun means one of ours, has no meaning here, or needs torchrun itself.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.cli.options import unknown_option
from paceline.errors import UsageError

OURS = {
    "--nnodes": "--nodes",
    "--nproc-per-node": "--nproc",
    "--max-restarts": "--max-restarts",
    "--master-port": "--port",
    "--shutdown-timeout": "--stop-grace",
    "--local-ranks-filter": "--show",
}
CHOICES = {"--nproc-per-node": ("auto", "cpu", "gpu"), "--local-ranks-filter": ("0",)}  # besides numbers
MEET = "the ranks meet by themselves"
IGNORED = {  # what has no meaning here, by the reason
    MEET: ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "--master-addr", "--local-addr"),
    "what each rank prints is shown, and is in its log": (
        *("--redirects", "--duplicate-stdout-filters", "--duplicate-stderr-filters", "--logs-specs"),
        "--log-line-prefix-template",  # new in torch 2.14
    ),
    "torchrun's own workings": ("--monitor-interval", "--start-method", "--event-log-handler", "--print-completion"),
    "each rank is a Python of its own": ("--run-path",),
    "no rank is bound to cores": ("--numa-binding",),
    "signals that end a run are passed on": ("--signals-to-handle",),
}
OTHERS = (  # what has a meaning, in `cli.launch` or below
    *("--standalone", "--module", "--no-python", "--log-dir", "--node-rank"),
    "--tee",  # is what we do
    *("--rdzv-id", "--role"),  # in variables, for the script
    "--virtual-local-rank",  # the script counts on GPU 0: torchrun itself shows each rank its own
)
TORCHRUN = (*OURS, *OTHERS, *(name for names in IGNORED.values() for name in names))
FLAGS = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
NO_VARIABLE = ("--logs-specs", "--numa-binding", "--print-completion")
SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
OF_WATCHOVER = ("--stall-after", "--run-dir")  # options of ours that `paceline watchover` has, too


@dataclass(frozen=True)
class LaunchArguments:
    """The arguments of `paceline launch`, sorted. Names are those of the tables, also for `--nproc_per_node`.

    All methods raise UsageError if options contradict each other, or a value is invalid.
    """

    own: tuple[str, ...]  # our options, as they were typed
    given: Mapping[str, str]  # their values, by name
    torchrun: Mapping[str, str]  # torchrun's; "" is the value of a flag
    variables: Mapping[str, str]  # the same from the environment
    rest: tuple[str, ...]  # the script and its arguments

    def value(self, name: str) -> str | None:
        """The value of an option of torchrun; the command line has precedence over the environment."""
        return self.torchrun.get(name, self.variables.get(name))

    def typed_name(self, name: str) -> str:
        """The option or the variable that gives the value."""
        return name if name in self.torchrun else _variable(name)

    @property
    def launcher(self) -> str:
        """The value of --on."""
        return self.given.get("--on", "local")

    @property
    def need_torchrun(self) -> bool:
        """Whether torchrun itself must start this: several nodes by its options, or what only torchrun does."""
        if self.launcher != "local":
            if mine := [name for name in ("--standalone", "--node-rank") if name in self.torchrun]:
                raise UsageError(code="nodes-started-twice", launcher=self.launcher, options=" and ".join(mine))
            return False
        text = self.value("--nnodes") or "1"
        if not re.fullmatch(r"\d+(:\d+)?", text) or not 1 <= int(text.split(":")[0]) <= int(text.split(":")[-1]):
            raise UsageError(code="nnodes-not-a-number", setting=self.typed_name("--nnodes"), value=text)
        several = int(text.split(":")[-1]) > 1
        if several and self.value("--standalone") is not None:
            if "--nnodes" in self.torchrun and "--standalone" in self.torchrun:
                raise UsageError(code="standalone-with-nodes", value=text)
            several = "--nnodes" in self.torchrun
        if not several and self.value("--node-rank") not in (None, "0"):
            where = f"{self.typed_name('--node-rank')} {self.value('--node-rank')}"
            raise UsageError(code="node-rank-alone", where=where)
        return several or self.value("--virtual-local-rank") is not None

    @property
    def script(self) -> tuple[str, ...]:
        """The script with its arguments, `-m` before the name of a module."""
        if not self.rest:
            raise UsageError(code="no-script")
        if self.value("--module") is None:
            return self.rest
        if self.value("--no-python") is not None:
            raise UsageError(code="module-with-no-python")
        if not re.fullmatch(r"[\w.]+", self.rest[0]):
            raise UsageError(code="not-a-module", value=self.rest[0])
        return ("-m", *self.rest)

    @property
    def ours(self) -> list[str]:
        """The same start in our options: those that were typed, and torchrun's, translated."""
        found, ignored = list(self.own), self._ignored()
        for name, ours in OURS.items():
            value = self.value(name)
            if value is None or name in ignored or (name == "--nnodes" and self.launcher == "local"):
                continue
            choices = CHOICES.get(name, ())
            if name != "--nnodes" and not value.isdecimal() and value not in choices:
                allowed = ", ".join(("a number", *choices))
                raise UsageError(code="torchrun-choice", setting=self.typed_name(name), choices=allowed, value=value)
            value = "rank 0" if name == "--local-ranks-filter" else value
            if ours not in self.given:
                found.append(f"{ours}={value}")
            elif name in self.torchrun and value != self.given[ours]:
                raise UsageError(
                    code="conflicting-options", ours=ours, our_value=self.given[ours], name=name,
                    value=self.torchrun[name],
                )  # fmt: skip
        return found

    def _ignored(self) -> dict[str, str]:
        """The options that are set and have no meaning, with the reason."""
        reasons = {name: why for why, names in IGNORED.items() for name in names}
        if "--run-dir" in self.given:
            reasons["--log-dir"] = "--run-dir is given"
        if self.value("--standalone") is not None:
            reasons["--master-port"] = MEET
        if self.value("--local-ranks-filter") not in (None, "0"):
            reasons["--local-ranks-filter"] = "--show knows all ranks, or rank 0"
        return {name: why for name, why in reasons.items() if self.value(name) is not None}

    @property
    def ignored(self) -> str:
        """One line for all options that have no meaning here; empty without one."""
        names: dict[str, list[str]] = {}
        for name, why in self._ignored().items():
            names.setdefault(why, []).append(self.typed_name(name))
        return "; ".join(f"{', '.join(options)}: {why}" for why, options in names.items())

    def torchrun_command(self, python: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """The same start by torchrun, with the guard in front of the script, and variables that it needs."""
        _ = self.ours  # for its errors
        options = {name: value for name, value in self.torchrun.items() if name not in ("--module", "--run-path")}
        guard: list[str] = []
        env = {"PET_RUN_PATH": "0"} if "--run-path" in self.variables else {}
        for ours, value in self.given.items():
            if ours in ("--nproc", "--port", "--max-restarts"):
                options[next(name for name, translated in OURS.items() if translated == ours)] = value
            elif ours == "--threads-per-rank":
                env["OMP_NUM_THREADS"] = value
            elif ours in OF_WATCHOVER:
                guard.append(f"{ours}={value}")
            elif ours != "--dry-run":
                raise UsageError(code="no-effect-under-torchrun", setting=ours)
        words = [f"{name}={value}" if value else name for name, value in options.items()]
        # --end: a run that hangs ends, as under our launcher
        through = () if self.value("--no-python") is not None else ("-m", "paceline", "watchover", "--end", *guard)
        return (python, "-P", "-m", "torch.distributed.run", *words, *through, *self.script), env


def read_arguments(
    arguments: Sequence[str], environ: Mapping[str, str], takes_value: Mapping[str, bool]
) -> LaunchArguments:
    """Sort the arguments of `paceline launch`: the script begins at the first that is no option, or behind `--`.

    Args:
        arguments: as they were typed.
        environ: has torchrun's variables, PET_NPROC_PER_NODE and the like.
        takes_value: our own options, and whether each takes a value.

    Raises:
        UsageError: an option is unknown, or the value of a variable is invalid.
    """
    words, own = list(arguments), list[str]()
    given: dict[str, str] = {}
    torchrun: dict[str, str] = {}
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        name, has_value, value = _parted(word)
        # with `--` it is an environment module, as it was before torchrun's options were understood
        loads = word.startswith("--module") and (has_value or ("--" in words[1:] and words[0][:1] != "-"))
        mine = name in takes_value and (name not in TORCHRUN or name == "--max-restarts" or loads)
        if not mine and name not in TORCHRUN:
            raise unknown_option("paceline launch", name, [*takes_value, *TORCHRUN])
        takes = takes_value[name] if mine else name not in FLAGS
        if has_value and not takes:
            raise UsageError(code="option-takes-no-value", setting=name, value=word)
        after = [words.pop(0)] if takes and not has_value and words else []
        (given if mine else torchrun)[name] = value or (after[0] if after else "")
        if takes and not (has_value or after) and not mine:
            raise UsageError(code="option-needs-a-value", setting=name)
        own += [word, *after] if mine else []
    rest = words[1:] if words[:1] == ["--"] else words
    return LaunchArguments(tuple(own), given, torchrun, _variables(environ), tuple(rest))


def _parted(word: str) -> tuple[str, bool, str]:
    """Name, whether it has a value, and that: of --name=value, -r3, -r=3."""
    if not word.startswith("--") and word[:2] in SHORT:
        return SHORT[word[:2]], len(word) > 2, word[2:].removeprefix("=")
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), bool(equals), value


def _variable(name: str) -> str:
    return "PET_" + name.removeprefix("--").replace("-", "_").upper()


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The options in torchrun's variables, without flags that are 0."""
    found: dict[str, str] = {}
    for name in TORCHRUN:
        value = "" if name in NO_VARIABLE else environ.get(_variable(name), "")
        if name in FLAGS and value and not value.isdecimal():
            raise UsageError(code="variable-not-0-or-1", option=_variable(name), value=value)
        if value and (name not in FLAGS or int(value)):
            found[name] = "" if name in FLAGS else value
    return found
