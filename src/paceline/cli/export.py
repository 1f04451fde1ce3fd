"""`paceline export RUN -o FILE`: a run's weights, as plain torch and Hugging Face read them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.checkpoint.format import Damaged
from paceline.checkpoint.manager import Checkpoints
from paceline.cli.commands import command_line
from paceline.cli.finding import find_run
from paceline.cli.flags import check_out_file, check_positive
from paceline.errors import ExitCode, PacelineError, UsageError, plural, unknown
from paceline.runs.folder import BEST_WEIGHTS, CHECKPOINTS, WEIGHTS
from paceline.runs.owners import check_ours
from paceline.runs.reading import is_file, is_folder, names, real_path
from paceline.runs.summary import read_summary

if TYPE_CHECKING:
    from torch import Tensor

    Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class ExportConfig:
    """Write a run's weights for plain torch or Hugging Face, from a checkpoint of any strategy."""

    run: str
    """run folder, or the beginning of its name under runs/"""
    out: Path = field(metadata={"short": "-o"})
    """file to write; for huggingface, a folder"""
    step: int | Literal["best"] | None = None
    """step of the checkpoint; best: the weights of --keep-best (default: the final weights, else the newest valid
    checkpoint)"""
    model: int = 1
    """number of the model, from 1, in the order of s.prepare, for a session with several"""
    format: Literal["safetensors", "torch", "huggingface"] | None = None
    """format of the file. huggingface: a folder for `from_pretrained`. Default: safetensors for a file of that name,
    otherwise torch"""
    config: Path | None = None
    """huggingface: folder of the model's config.json (default: the config of the task's model)"""
    overwrite: bool = False
    """replace an existing file"""
    trust: bool = False
    """use a run folder that another user owns or could have written"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline export ARGUMENTS`."""
    config: ExportConfig = command_line("export").parse(arguments)
    check_positive(config, "model")
    run_dir, out = find_run(config.run), real_path(config.out)
    if not config.trust:
        check_ours(run_dir)
    kind = config.format or ("safetensors" if out.suffix == ".safetensors" else "torch")
    _check_out(config, out, kind)
    from paceline.checkpoint.shards import sha256_of  # imports torch

    write = _writer(config, run_dir, out, kind)  # what is wrong with it is told before minutes of reading
    weights, where = _found(config, run_dir)
    try:
        weights = write(weights)
    except OSError as error:
        raise PacelineError(str(error)) from None
    print(f"{where}: {plural(len(weights), 'tensor')} written to {config.out}\nweights {sha256_of(weights)}")
    return ExitCode.DONE


def _writer(config: ExportConfig, run_dir: Path, out: Path, kind: str) -> Callable[[Weights], Weights]:
    """What writes weights in a format, and returns those that it has written."""
    if kind == "huggingface":
        from paceline.cli.huggingface import model_of, save_pretrained

        return partial(save_pretrained, model_of(run_dir, config.config, trust=config.trust), out)
    from paceline.train.weights import save

    def write(weights: Weights) -> Weights:
        if kind == "torch":
            save(weights, out, pickled=True)
        else:  # which holds no memory twice: a tied tensor is written under each of its names
            save({name: tensor.clone() for name, tensor in weights.items()}, out)
        return weights

    return write


def _check_out(config: ExportConfig, out: Path, kind: str) -> None:
    if kind != "huggingface":
        check_out_file("--out", out)
        if config.config is not None:
            raise UsageError(code="config-without-huggingface")
    elif is_file(out) or not is_folder(out.parent):
        raise UsageError(code="out-not-a-folder", value=config.out)
    if not config.overwrite and (is_file(out) or names(out)):
        raise UsageError(code="out-exists", out=config.out)


def _found(config: ExportConfig, run_dir: Path) -> tuple[Weights, str]:
    """The weights that are asked for, under all their names, and where they are from, in words.

    Raises:
        UsageError: if they are not there, damaged or not to be trusted.
    """
    summary = read_summary(run_dir)
    if config.step == "best":
        return _complete(config, run_dir, BEST_WEIGHTS), f"the best weights of {run_dir.name}"
    if config.step is None and summary is not None and summary.exit == ExitCode.DONE:
        name = WEIGHTS if config.model == 1 else f"model-{config.model}.safetensors"
        sha256 = summary.weights_sha256 if config.model == 1 else None
        return _complete(config, run_dir, name, sha256), f"the final weights of {run_dir.name}"
    checkpoints = Checkpoints(run_dir / CHECKPOINTS, trust=config.trust)
    steps = {str(entry.step): entry.path for entry in reversed(checkpoints.entries())}
    if config.step is not None and str(config.step) not in steps:
        raise unknown("checkpoint of step", str(config.step), steps or ["(it has none)"])
    try:
        if config.step is None:
            found = checkpoints.newest_valid(lambda words: print(f"paceline: {words}", file=sys.stderr))
        else:
            found = steps[str(config.step)], checkpoints.check(steps[str(config.step)])
        if found is None:
            raise UsageError(code="nothing-to-export", run_dir=run_dir)
        from paceline.checkpoint.export import of_checkpoint

        return of_checkpoint(*found, config.model), f"step {found[1].step} of {run_dir.name}"
    except Damaged as error:
        which = "" if config.step is None else f"the checkpoint of step {config.step} is damaged: "
        raise UsageError(code="step-not-exported", which=which, reason=str(error), run_dir=run_dir) from None


def _complete(config: ExportConfig, run_dir: Path, name: str, sha256: str | None = None) -> Weights:
    """The weights in a file that the run itself has written."""
    from paceline.checkpoint.shards import sha256_of
    from paceline.train.weights import load

    there = [name for name in names(run_dir) if name.startswith("model") and name.endswith(".safetensors")]
    if name not in there:
        raise unknown("weights of the run", name, there or ["(it has saved none)"])
    weights = load(run_dir / name, ours=not config.trust)
    if sha256 is not None and sha256_of(weights) != sha256:
        raise UsageError(code="weights-damaged", name=name)
    return weights
