"""torchrun's options for `paceline launch`: their names, their environment variables and their translation. Pure.

    --nproc-per-node 4 train.py --epochs 5       -> --nproc 4, and the script with its arguments
    --rdzv-backend c10d                          -> ignored, with a message: paceline has its own rendezvous
    --nnodes 2 --node-rank 1 ...                 -> runs torchrun, with the guard around the script

An option of torchrun corresponds to an option of paceline, has no effect, or requires torchrun itself.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from paceline.cli.options import unknown_option_error
from paceline.errors import UsageError

PACELINE_EQUIVALENTS = {
    "--nnodes": "--nodes",
    "--nproc-per-node": "--nproc",
    "--max-restarts": "--max-restarts",
    "--master-port": "--port",
    "--shutdown-timeout": "--grace-period",
    "--local-ranks-filter": "--show",
}
NON_NUMERIC_VALUES = {"--nproc-per-node": ("auto", "cpu", "gpu"), "--local-ranks-filter": ("0",)}  # besides numbers
RENDEZVOUS = "paceline's rendezvous needs no options"
IGNORED_OPTIONS = {  # reason -> options without effect
    RENDEZVOUS: ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "--master-addr", "--local-addr"),
    "paceline shows the output of each rank and writes it to a log": (
        *("--redirects", "--duplicate-stdout-filters", "--duplicate-stderr-filters", "--logs-specs"),
        "--log-line-prefix-template",  # new in torch 2.14
    ),
    "internal to torchrun": ("--monitor-interval", "--start-method", "--event-log-handler", "--print-completion"),
    "each rank is a separate Python process": ("--run-path",),
    "paceline binds no rank to cores": ("--numa-binding",),
    "paceline forwards stop signals": ("--signals-to-handle",),
}
HANDLED_OPTIONS = (  # options that `cli.launch` or this module handles
    *("--standalone", "--module", "--no-python", "--log-dir", "--node-rank"),
    "--tee",  # paceline always does this
    *("--rdzv-id", "--role"),  # passed to the script in variables
    "--virtual-local-rank",  # the script expects GPU 0: torchrun makes one GPU visible to each rank
)
TORCHRUN_OPTIONS = (
    *PACELINE_EQUIVALENTS,
    *HANDLED_OPTIONS,
    *(name for names in IGNORED_OPTIONS.values() for name in names),
)
FLAGS = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
OPTIONS_WITHOUT_VARIABLE = ("--logs-specs", "--numa-binding", "--print-completion")
SHORT_OPTIONS = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
WATCHOVER_OPTIONS = ("--hang-timeout", "--run-dir")  # options that `paceline watchover` has as well


@dataclass(frozen=True)
class LaunchArguments:
    """The arguments of `paceline launch`, sorted into paceline's and torchrun's options and the script.

    Names are those of the tables: `--nproc_per_node` is `--nproc-per-node`. All methods raise UsageError if options
    contradict each other, or a value is invalid.
    """

    paceline_options: tuple[str, ...]  # paceline's options, as typed
    paceline_values: Mapping[str, str]  # the values of paceline's options, by name
    torchrun: Mapping[str, str]  # the values of torchrun's options, typed or in variables, by name; "" for a flag
    typed: Collection[str]  # the names of torchrun's options that are not from environment variables
    script_words: tuple[str, ...]  # the script and its arguments

    def value_origin(self, name: str) -> str:
        return name if name in self.typed else _variable(name)

    @property
    def launcher(self) -> str:
        return self.paceline_values.get("--on", "local")

    @property
    def need_torchrun(self) -> bool:
        """Whether torchrun must start the script: its options start several nodes, or only torchrun supports one."""
        if self.launcher != "local":
            if options := [name for name in ("--standalone", "--node-rank") if name in self.typed]:
                raise UsageError(code="nodes-started-twice", launcher=self.launcher, options=" and ".join(options))
            return False
        text = self.torchrun.get("--nnodes") or "1"
        if not re.fullmatch(r"\d+(:\d+)?", text) or not 1 <= int(text.split(":")[0]) <= int(text.split(":")[-1]):
            raise UsageError(code="nnodes-not-a-number", setting=self.value_origin("--nnodes"), value=text)
        several = int(text.split(":")[-1]) > 1
        if several and "--standalone" in self.torchrun:
            if "--nnodes" in self.typed and "--standalone" in self.typed:
                raise UsageError(code="standalone-with-nodes", value=text)
            several = "--nnodes" in self.typed
        if not several and self.torchrun.get("--node-rank") not in (None, "0"):
            where = f"{self.value_origin('--node-rank')} {self.torchrun.get('--node-rank')}"
            raise UsageError(code="node-rank-alone", where=where)
        return several or "--virtual-local-rank" in self.torchrun

    @property
    def script(self) -> tuple[str, ...]:
        if not self.script_words:
            raise UsageError(code="no-script")
        if "--module" not in self.torchrun:
            return self.script_words
        if "--no-python" in self.torchrun:
            raise UsageError(code="module-with-no-python")
        if not re.fullmatch(r"[\w.]+", self.script_words[0]):
            raise UsageError(code="not-a-module", value=self.script_words[0])
        return ("-m", *self.script_words)

    @property
    def paceline_arguments(self) -> list[str]:
        options, ignored = list(self.paceline_options), self._ignored()
        for name, ours in PACELINE_EQUIVALENTS.items():
            value = self.torchrun.get(name)
            if value is None or name in ignored or (name == "--nnodes" and self.launcher == "local"):
                continue
            choices = NON_NUMERIC_VALUES.get(name, ())
            if name != "--nnodes" and not value.isdecimal() and value not in choices:
                allowed = ", ".join(("a number", *choices))
                raise UsageError(code="torchrun-choice", setting=self.value_origin(name), choices=allowed, value=value)
            value = "rank 0" if name == "--local-ranks-filter" else value
            if ours not in self.paceline_values:
                options.append(f"{ours}={value}")
            elif name in self.typed and value != self.paceline_values[ours]:
                raise UsageError(
                    code="conflicting-options", ours=ours, our_value=self.paceline_values[ours], name=name,
                    value=self.torchrun[name],
                )  # fmt: skip
        return options

    def _ignored(self) -> dict[str, str]:
        """The options that are set but have no effect, with the reasons."""
        reasons = {name: why for why, names in IGNORED_OPTIONS.items() for name in names}
        if "--run-dir" in self.paceline_values:
            reasons["--log-dir"] = "--run-dir is set"
        if "--standalone" in self.torchrun:
            reasons["--master-port"] = RENDEZVOUS
        if self.torchrun.get("--local-ranks-filter") not in (None, "0"):
            reasons["--local-ranks-filter"] = "--show supports only all ranks, or rank 0"
        return {name: why for name, why in reasons.items() if name in self.torchrun}

    @property
    def ignored_options_text(self) -> str:
        names: dict[str, list[str]] = {}
        for name, why in self._ignored().items():
            names.setdefault(why, []).append(self.value_origin(name))
        return "; ".join(f"{', '.join(options)}: {why}" for why, options in names.items())

    def torchrun_command(self, python: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """The equivalent command of torchrun, with the guard around the script, and its environment variables."""
        _ = self.paceline_arguments  # raises errors for wrong values
        names = [name for name in self.typed if name not in ("--module", "--run-path")]
        options, guard = {name: self.torchrun[name] for name in names}, list[str]()
        env = {"PET_RUN_PATH": "0"} if "--run-path" in self.torchrun else {}
        for ours, value in self.paceline_values.items():
            if ours in ("--nproc", "--port", "--max-restarts"):
                options[next(name for name, translated in PACELINE_EQUIVALENTS.items() if translated == ours)] = value
            elif ours == "--threads-per-rank":
                env["OMP_NUM_THREADS"] = value
            elif ours in WATCHOVER_OPTIONS:
                guard.append(f"{ours}={value}")
            elif ours != "--dry-run":
                raise UsageError(code="no-effect-under-torchrun", setting=ours)
        typed = [f"{name}={value}" if value else name for name, value in options.items()]
        # --end: the guard ends a run that hangs, as under paceline's launcher
        watchover = ("-m", "paceline", "watchover", "--end", *guard)
        watchover = watchover if "--no-python" not in self.torchrun else ()
        return (python, "-P", "-m", "torch.distributed.run", *typed, *watchover, *self.script), env


def read_arguments(
    arguments: Sequence[str], environ: Mapping[str, str], takes_value: Mapping[str, bool]
) -> LaunchArguments:
    """Sort the arguments. The script is the first one that is not an option, or follows `--`."""
    remaining, own = list(arguments), list[str]()
    given: dict[str, str] = {}
    torchrun: dict[str, str] = {}
    while remaining and remaining[0].startswith("-") and remaining[0] != "--":
        word = remaining.pop(0)
        name, has_value, value = _split_option(word)
        # `--module NAME ... -- SCRIPT` loads an environment module: this syntax is older than torchrun's options here
        loads = word.startswith("--module") and (has_value or ("--" in remaining[1:] and remaining[0][:1] != "-"))
        is_ours = name in takes_value and (name not in TORCHRUN_OPTIONS or name == "--max-restarts" or loads)
        if not is_ours and name not in TORCHRUN_OPTIONS:
            raise unknown_option_error("paceline launch", name, [*takes_value, *TORCHRUN_OPTIONS])
        takes = takes_value[name] if is_ours else name not in FLAGS
        if has_value and not takes:
            raise UsageError(code="option-takes-no-value", setting=name, value=word)
        after = [remaining.pop(0)] if takes and not has_value and remaining else []
        (given if is_ours else torchrun)[name] = value or (after[0] if after else "")
        if takes and not (has_value or after) and not is_ours:
            raise UsageError(code="option-needs-a-value", setting=name)
        own += [word, *after] if is_ours else []
    rest = remaining[1:] if remaining[:1] == ["--"] else remaining
    return LaunchArguments(tuple(own), given, _variables(environ) | torchrun, [*torchrun], tuple(rest))


def _split_option(word: str) -> tuple[str, bool, str]:
    if not word.startswith("--") and word[:2] in SHORT_OPTIONS:
        return SHORT_OPTIONS[word[:2]], len(word) > 2, word[2:].removeprefix("=")
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), bool(equals), value


def _variable(name: str) -> str:
    return "PET_" + name.removeprefix("--").replace("-", "_").upper()


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for name in TORCHRUN_OPTIONS:
        value = "" if name in OPTIONS_WITHOUT_VARIABLE else environ.get(_variable(name), "")
        if name in FLAGS and value and not value.isdecimal():
            raise UsageError(code="variable-not-0-or-1", option=_variable(name), value=value)
        if value and (name not in FLAGS or int(value)):
            options[name] = "" if name in FLAGS else value
    return options
