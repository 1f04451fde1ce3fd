"""What the commands do with flags and results alike: refuse what has no meaning in the same words, print and write."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UsageError, plural, unknown
from paceline.host.cgroup import usable_cores
from paceline.host.gpus import SHARE_GPUS, count_gpus
from paceline.runs.console import escaped
from paceline.runs.reading import real_path


def check_positive(config: Any, *names: str) -> None:
    """Refuse numbers below 1 in these fields of a command's settings; None and words are none.

    Raises:
        UsageError: names the flag.
    """
    for name in names:
        value = getattr(config, name)
        if isinstance(value, int) and value < 1:
            raise UsageError(code="below-one", setting=name, value=value)


def whole_numbers(flag: str, text: str) -> list[int]:
    """Whole numbers from 1 on, ascending, each once.

    Raises:
        UsageError: says how they are written.
    """
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise UsageError(code="not-whole-numbers", setting=flag, value=text)
    return numbers


def chosen_names(kind: str, text: str, choices: Collection[str]) -> list[str]:
    """Names out of `choices` that were given separated by commas, each once.

    Raises:
        UsageError: for a name that is no choice, or none at all.
    """
    names = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in names:
        if name not in choices:
            raise unknown(kind, name, choices)
    if not names:
        raise UsageError(code="nothing-named", kind=kind, allowed=[*choices])
    return names


def command_words(flag: str, text: str) -> tuple[str, ...]:
    """The words of a command that a flag gives.

    Raises:
        UsageError: there are none, or a quote is left open.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(code="not-a-command", setting=flag, value=text, reason=str(error)) from None
    if not words:
        raise UsageError(code="empty-command", setting=flag)
    return words


def split_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and behind `--` the script with its own."""
    where = [*arguments, "--"].index("--")
    return list(arguments[:where]), list(arguments[where + 1 :])


def threads_of(asked: int | None) -> int:
    """CPU threads of each rank: as asked for, or as the user's OMP_NUM_THREADS says; 0: left to the agent."""
    users = os.environ.get("OMP_NUM_THREADS", "")
    return asked or (int(users) if users.isdecimal() else 0)


def usable_gpus(device: str) -> int | None:
    """How many GPUs of this machine ranks may use; with --device cpu none. None: only the workers can know.

    Raises:
        UsageError: --device cuda where there is none.
    """
    gpus = None if device == "xpu" else 0 if device == "cpu" else count_gpus()
    if device == "cuda" and gpus == 0:
        raise UsageError(code="no-cuda")
    return gpus


def nproc_auto(device: str) -> int:
    """What `--nproc auto` means here: one for each GPU, or each core.

    Raises:
        UsageError: there are GPUs, and only the workers can count them; or as `usable_gpus`.
    """
    gpus = usable_gpus(device)
    if gpus is None:
        raise UsageError(code="gpus-uncountable")
    return gpus or usable_cores()


def check_gpus(asked: str, nproc: int, gpus: int | None, backend: str = "auto") -> None:
    """Refuse more workers than this machine has GPUs, where the `backend` wants one for each; without any, the CPU
    computes.

    Raises:
        UsageError: says how many there are.
    """
    if gpus and nproc > gpus and backend not in SHARE_GPUS:
        raise UsageError(
            code="too-few-gpus", asked=asked, nproc=nproc, gpus=gpus, processes=plural(gpus, "process", "processes")
        )


def check_out_file(flag: str, path: Path | None) -> None:
    """Refuse a file that could not be written after hours of work.

    Raises:
        UsageError: says what is in the way.
    """
    if path and path.is_dir():
        raise UsageError(code="out-is-a-folder", setting=flag, value=path)
    if path and not path.absolute().parent.is_dir():
        raise UsageError(code="out-folder-missing", setting=flag, value=path, folder=path.absolute().parent)


def out_path(flag: str, path: Path) -> Path:
    """The file that is to be replaced: a link of that name, which others may have put there, not what it leads to.

    Raises:
        UsageError: as `check_out_file`; or there is something that is no plain file.
    """
    check_out_file(flag, path)
    if path.exists() and not path.is_file():  # /dev/null would be a file from then on
        raise UsageError(code="out-not-a-file", setting=flag, value=path)
    return real_path(path.parent) / path.name


def write_json(path: Path, found: object) -> None:
    """Write results as JSON that people can read, too."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def print_json(found: object) -> None:
    """Print results as JSON, without anything that could steer a terminal."""
    sys.stdout.write(escaped(msgspec.json.format(msgspec.json.encode(found), indent=2).decode()) + "\n")
