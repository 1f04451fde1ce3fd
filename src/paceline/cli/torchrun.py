"""torchrun's words for `paceline launch`: its options, spellings and variables, and what each means here. Pure.

    --nproc-per-node 4 train.py --epochs 5       -> --nproc 4, and the script with its words
    --rdzv-backend c10d                          -> ignored, and said once: our ranks meet by themselves
    --nnodes 2 --node-rank 1 ...                 -> torchrun itself, with the guard in front of the script

An option of torchrun's means one of ours, has no meaning here, or wants what only torchrun does.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
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
MEET = "the ranks meet by themselves"
IDLE = {  # what has no meaning here, by the reason
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
ELSE = (  # what has, in `cli.launch` or below
    *("--standalone", "--module", "--no-python", "--log-dir", "--node-rank"),
    "--tee",  # is what we do
    *("--rdzv-id", "--role"),  # in variables, for the script
    "--virtual-local-rank",  # the script counts on GPU 0: torchrun itself shows each rank its own
)
TORCHRUN = (*OURS, *ELSE, *(name for names in IDLE.values() for name in names))
FLAGS = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
NO_VARIABLE = ("--logs-specs", "--numa-binding", "--print-completion")
SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
OF_WATCHOVER = ("--stall-after", "--run-dir")  # options of ours that `paceline watchover` has, too


@dataclass(frozen=True)
class Typed:
    """What was typed, sorted. The names are as in the tables, `--nproc-per-node` for `--nproc_per_node`."""

    own: tuple[str, ...]  # our options, as they were typed
    given: Mapping[str, str]  # their values, by name
    torchrun: Mapping[str, str]  # torchrun's; "" is the value of a flag
    variables: Mapping[str, str]  # the same from the environment
    script: tuple[str, ...]

    def value(self, name: str) -> str | None:
        """Of an option of torchrun's; what was typed wins over the environment."""
        return self.torchrun.get(name, self.variables.get(name))

    def said(self, name: str) -> str:
        """The name, as the user knows it."""
        return name if name in self.torchrun else _variable(name)

    @property
    def elsewhere(self) -> bool:
        """Whether one of our launchers starts other machines."""
        return self.given.get("--on", "local") != "local"

    @property
    def for_torchrun(self) -> bool:
        """Whether torchrun itself has to start this: several nodes by its words, or what only it does.

        Raises:
            UsageError: --nnodes is no number, or contradicts --standalone or --node-rank.
        """
        if self.elsewhere:
            if mine := [name for name in ("--standalone", "--node-rank") if name in self.torchrun]:
                raise UsageError(code="nodes-started-twice", launcher=self.given["--on"], options=" and ".join(mine))
            return False
        text = self.value("--nnodes") or "1"
        if not re.fullmatch(r"\d+(:\d+)?", text) or not 1 <= int(text.split(":")[0]) <= int(text.split(":")[-1]):
            raise UsageError(code="nnodes-not-a-number", setting=self.said("--nnodes"), value=text)
        several = int(text.split(":")[-1]) > 1
        if several and self.value("--standalone") is not None:
            if "--nnodes" in self.torchrun and "--standalone" in self.torchrun:
                raise UsageError(code="standalone-with-nodes", value=text)
            several = "--nnodes" in self.torchrun
        if not several and self.value("--node-rank") not in (None, "0"):
            where = f"{self.said('--node-rank')} {self.value('--node-rank')}"
            raise UsageError(code="node-rank-alone", where=where)
        return several or self.value("--virtual-local-rank") is not None


def read_words(arguments: Sequence[str], environ: Mapping[str, str], ours: Mapping[str, bool]) -> Typed:
    """Sort the words behind `paceline launch`: the script begins at the first that is no option, or behind `--`.

    Args:
        arguments: as they were typed.
        environ: where torchrun's variables are, PET_NPROC_PER_NODE and the like.
        ours: our own options, and whether each takes a value.

    Raises:
        UsageError: an option that nobody has, or the value of a variable that is none.
    """
    words, own = list(arguments), list[str]()
    given: dict[str, str] = {}
    theirs: dict[str, str] = {}
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        name, has_value, value = _parted(word)
        # with `--` it is an environment module, as it was before torchrun's words were understood
        loads = word.startswith("--module") and (has_value or ("--" in words[1:] and words[0][:1] != "-"))
        mine = name in ours and (name not in TORCHRUN or name == "--max-restarts" or loads)
        if not mine and name not in TORCHRUN:
            raise unknown_option("paceline launch", name, [*ours, *TORCHRUN])
        takes = ours[name] if mine else name not in FLAGS
        if has_value and not takes:
            raise UsageError(code="option-takes-no-value", setting=name, value=word)
        after = [words.pop(0)] if takes and not has_value and words else []
        (given if mine else theirs)[name] = value or (after[0] if after else "")
        if takes and not (has_value or after) and not mine:
            raise UsageError(code="option-needs-a-value", setting=name)
        own += [word, *after] if mine else []
    script = words[1:] if words[:1] == ["--"] else words
    return Typed(tuple(own), given, theirs, _variables(environ), tuple(script))


def _parted(word: str) -> tuple[str, bool, str]:
    """Name, whether it has a value, and that: of --name=value, -r3, -r=3."""
    if not word.startswith("--") and word[:2] in SHORT:
        return SHORT[word[:2]], len(word) > 2, word[2:].removeprefix("=")
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), bool(equals), value


def _variable(name: str) -> str:
    return "PET_" + name.removeprefix("--").replace("-", "_").upper()


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What torchrun's variables give; flags that are 0 give nothing."""
    found: dict[str, str] = {}
    for name in TORCHRUN:
        value = "" if name in NO_VARIABLE else environ.get(_variable(name), "")
        if name in FLAGS and value and not value.isdecimal():
            raise UsageError(code="variable-not-0-or-1", option=_variable(name), value=value)
        if value and (name not in FLAGS or int(value)):
            found[name] = "" if name in FLAGS else value
    return found


def script_words(typed: Typed) -> tuple[str, ...]:
    """The script with its arguments, `-m` before a module's name.

    Raises:
        UsageError: there is none, or it cannot be a module.
    """
    module = typed.value("--module") is not None
    if not typed.script:
        raise UsageError(code="no-script")
    if not module:
        return typed.script
    if typed.value("--no-python") is not None:
        raise UsageError(code="module-with-no-python")
    if not re.fullmatch(r"[\w.]+", typed.script[0]):
        raise UsageError(code="not-a-module", value=typed.script[0])
    return ("-m", *typed.script)


def our_words(typed: Typed) -> list[str]:
    """The same start in our options: those that were typed, and torchrun's in our words.

    Raises:
        UsageError: two of them contradict each other, or a value is none.
    """
    found = list(typed.own)
    for name, value, ours in _translated(typed):
        if ours not in typed.given:
            found.append(f"{ours}={value}")
        elif name in typed.torchrun and value != typed.given[ours]:
            raise UsageError(
                code="conflicting-options", ours=ours, our_value=typed.given[ours], name=name,
                value=typed.torchrun[name],
            )  # fmt: skip
    return found


def _translated(typed: Typed) -> Iterator[tuple[str, str, str]]:
    """Name, value and our option, of torchrun's that mean one of ours."""
    idle = _idle(typed)
    for name, ours in OURS.items():
        value = typed.value(name)
        if value is None or name in idle or (name == "--nnodes" and not typed.elsewhere):
            continue
        words = {"--nproc-per-node": ("auto", "cpu", "gpu"), "--local-ranks-filter": ("0",)}.get(name, ())
        if name != "--nnodes" and not value.isdecimal() and value not in words:
            choices = ", ".join(("a number", *words))
            raise UsageError(code="torchrun-choice", setting=typed.said(name), choices=choices, value=value)
        yield name, "rank 0" if name == "--local-ranks-filter" else value, ours


def _idle(typed: Typed) -> dict[str, str]:
    """Torchrun's options that are set and have no meaning, with the reason."""
    found = {name: why for why, names in IDLE.items() for name in names}
    if "--run-dir" in typed.given:
        found["--log-dir"] = "--run-dir is given"
    if typed.value("--standalone") is not None:
        found["--master-port"] = MEET
    if typed.value("--local-ranks-filter") not in (None, "0"):
        found["--local-ranks-filter"] = "--show knows all ranks, or rank 0"
    return {name: why for name, why in found.items() if typed.value(name) is not None}


def ignored(typed: Typed) -> str:
    """One line for all options that have no meaning here; empty without one."""
    reasons: dict[str, list[str]] = {}
    for name, why in _idle(typed).items():
        reasons.setdefault(why, []).append(typed.said(name))
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())


def torchrun_command(typed: Typed, python: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The same start by torchrun, with the guard in front of the script, and variables that it needs.

    Raises:
        UsageError: as `our_words`; or an option of ours that torchrun cannot follow.
    """
    our_words(typed)  # for its refusals
    theirs = {name: value for name, value in typed.torchrun.items() if name not in ("--module", "--run-path")}
    guard: list[str] = []
    env = {"PET_RUN_PATH": "0"} if "--run-path" in typed.variables else {}
    for ours, value in typed.given.items():
        if ours in ("--nproc", "--port", "--max-restarts"):
            theirs[next(name for name, one in OURS.items() if one == ours)] = value
        elif ours == "--threads-per-rank":
            env["OMP_NUM_THREADS"] = value
        elif ours in OF_WATCHOVER:
            guard.append(f"{ours}={value}")
        elif ours != "--dry-run":
            raise UsageError(code="no-effect-under-torchrun", setting=ours)
    options = [f"{name}={value}" if value else name for name, value in theirs.items()]
    # --end: as ours does, it ends a run that hangs
    through = () if typed.value("--no-python") is not None else ("-m", "paceline", "watchover", "--end", *guard)
    return (python, "-P", "-m", "torch.distributed.run", *options, *through, *script_words(typed)), env
