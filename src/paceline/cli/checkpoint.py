"""`paceline checkpoint` lists and verifies the checkpoints of a run; `paceline export` writes its weights to a file."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from paceline.checkpoint.manager import CheckpointEntry, Checkpoints
from paceline.cli import make_parser
from paceline.cli.options import check_out_file, check_positive
from paceline.errors import ExitCode, PacelineError, UsageError, first_few, plural, unknown_name_error
from paceline.runs import writing
from paceline.runs.checkpoint_format import DamagedCheckpoint, Manifest
from paceline.runs.console import format_timestamp, table_console
from paceline.runs.folder import ADAPTER, BEST_WEIGHTS, CHECKPOINTS, CONFIG, WEIGHTS
from paceline.runs.owners import check_owned_by_us, warn_if_shared
from paceline.runs.reading import is_file, is_folder, list_names, real_path
from paceline.runs.summary import read_summary

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.train.adapters import InitialAdapters

    Weights = Mapping[str, Tensor]

MAX_LISTED_CHECKPOINTS = 50  # checkpoints that are listed


@dataclass(frozen=True)
class CheckpointsConfig:
    """List a run's checkpoints, or verify every byte of them. Exit code 1 if a checkpoint is damaged."""

    action: Literal["list", "verify"]
    """list: compare sizes only, fast; verify: hash every file"""
    run: Path
    """run folder, or its checkpoints folder"""


@dataclass(frozen=True)
class ExportConfig:
    """Write a run's weights for plain torch or Hugging Face, from a checkpoint of any strategy."""

    run: str
    """run folder, or the beginning of its name under runs/"""
    out: Path = field(metadata={"short": "-o"})
    """file to write; for huggingface and peft, a folder"""
    step: int | Literal["best"] | None = None
    """step of the checkpoint; best: the weights of --keep-best (default: the final weights, else the newest valid
    checkpoint)"""
    model: int = 1
    """number of the model, from 1, in the order of s.prepare, for a session with several"""
    format: Literal["safetensors", "torch", "huggingface", "peft"] | None = None
    """format of the file. huggingface: a folder for `from_pretrained`; peft: the same, with the adapter only. Default:
    safetensors for a file of that name, otherwise torch"""
    config: Path | None = None
    """huggingface: folder of the model's config.json (default: the config of the task's model)"""
    overwrite: bool = False
    """replace an existing file"""
    trust: bool = False
    """use a run folder that another user owns or could have written"""


def main(arguments: Sequence[str]) -> int:
    typed = [argument for argument in arguments if not argument.startswith("-")]
    if typed and typed[0] not in ("list", "verify") and (len(typed) == 1 or is_folder(Path(typed[0]))):
        raise UsageError(code="checkpoint-without-action", run=shlex.quote(typed[0]), allowed=["list", "verify"])
    config: CheckpointsConfig = make_parser("checkpoint").parse(arguments)
    run = real_path(config.run)
    if not is_folder(run):
        raise UsageError(code="no-such-folder", folder=run)
    root = run / CHECKPOINTS if is_folder(run / CHECKPOINTS) else run
    is_foreign = warn_if_shared(root)
    checkpoints = Checkpoints(root, trust=is_foreign)
    try:
        entries = checkpoints.entries()[::-1]
    except OSError as error:
        raise UsageError(code="checkpoints-unreadable", root=checkpoints.root, strerror=error.strerror) from None
    if len(entries) > MAX_LISTED_CHECKPOINTS:
        print(f"only the newest {MAX_LISTED_CHECKPOINTS} of {len(entries):,} checkpoints are checked", file=sys.stderr)
        entries = entries[-MAX_LISTED_CHECKPOINTS:]
    if not entries:
        raise UsageError(code="no-checkpoints", run=run)
    if config.action == "list":
        return _list(checkpoints, entries)
    return _verify(checkpoints, entries, is_foreign=is_foreign)


def _list(checkpoints: Checkpoints, entries: Sequence[CheckpointEntry]) -> int:
    from rich.table import Table
    from rich.text import Text

    console, table = table_console(), Table("step", "when", "size", "world size", "virtual ranks", "state")
    for step, path in entries:
        result = _check(checkpoints, path, hashed=False)
        if isinstance(result, Manifest):
            size_bytes = sum(file.bytes for file in result.files)
            numbers = (f"{size_bytes:,} bytes", str(result.world_size), str(result.virtual_ranks))
            table.add_row(str(step), _modification_time(path), *numbers, "sizes are right")
        elif result:
            table.add_row(str(step), _modification_time(path), "", "", "", Text(f"damaged: {result}"))
    console.print(table)
    console.print("`paceline checkpoint verify` also reads the contents")
    return ExitCode.DONE


def _verify(checkpoints: Checkpoints, entries: Sequence[CheckpointEntry], *, is_foreign: bool) -> int:
    from rich.text import Text

    console, damaged = table_console(), 0
    newest_whole: Path | None = None
    for _, path in entries:
        result = _check(checkpoints, path, hashed=True)
        if isinstance(result, Manifest):
            newest_whole = path
            console.print(f"{path.name}  whole")
        elif result:
            damaged += 1
            console.print(Text(f"{path.name}  damaged: {result}"), soft_wrap=True)
    if newest_whole and is_foreign:
        console.print("other users own these checkpoints or could have written them: resuming needs --trust")
    elif newest_whole:
        console.print(f"--resume auto resumes from {newest_whole.name}")
    else:
        console.print("no checkpoint can be resumed from")
    return ExitCode.FAILED if damaged else ExitCode.DONE


def _check(checkpoints: Checkpoints, path: Path, *, hashed: bool) -> Manifest | str:
    """The manifest, or the damage; an empty text if the run has deleted the checkpoint meanwhile."""
    try:
        return checkpoints.check(path, files=None if hashed else ())
    except DamagedCheckpoint as error:
        return str(error) if os.path.lexists(path) else ""


def _modification_time(path: Path) -> str:
    try:
        return format_timestamp(path.lstat().st_mtime)
    except OSError:  # deleted meanwhile
        return ""


def export(arguments: Sequence[str]) -> int:
    from paceline.cli.run_state import find_run

    config: ExportConfig = make_parser("export").parse(arguments)
    check_positive(config, "model")
    run_dir, out = find_run(config.run), real_path(config.out)
    if not config.trust:
        check_owned_by_us(run_dir)
    file_format = config.format or ("safetensors" if out.suffix == ".safetensors" else "torch")
    _check_out(config, out, file_format)
    from paceline.checkpoint.shards import hash_tensors  # imports torch
    from paceline.train.weights import save

    # before minutes of reading weights
    model = _hugging_face_model(run_dir, config.config, trust=config.trust) if file_format == "huggingface" else None
    adapters = _adapters(config, run_dir) if file_format == "peft" else None
    weights, origin = _weights(config, run_dir)
    try:
        if model is not None:
            weights = _save_pretrained(model, out, weights)
        elif adapters is not None:
            weights = adapters.write(out, weights)
        elif file_format == "torch":
            save(weights, out, pickled=True)
        else:  # safetensors refuses shared memory: each name of a tied tensor gets a copy
            save({name: tensor.clone() for name, tensor in weights.items()}, out)
    except OSError as error:
        raise PacelineError(str(error)) from None
    print(f"{origin}: {plural(len(weights), 'tensor')} written to {config.out}\nweights {hash_tensors(weights)}")
    return ExitCode.DONE


def _adapters(config: ExportConfig, run_dir: Path) -> InitialAdapters:
    """The description of the adapter in the newest readable checkpoint. It is the same in all of them."""
    import msgspec

    from paceline.train.adapters import InitialAdapters

    checkpoints = Checkpoints(run_dir / CHECKPOINTS, trust=config.trust)
    for _, path in checkpoints.entries():
        with suppress(DamagedCheckpoint):
            models: list[dict[str, Any]] = checkpoints.check(path, files=()).scalars.get("loop", {}).get("parts", [])
            if "adapters" in (model := dict(enumerate(models, 1)).get(config.model, {})):
                return msgspec.convert(model["adapters"], InitialAdapters)
    raise UsageError(code="run-without-adapter", run_dir=run_dir, model=config.model)


def _check_out(config: ExportConfig, out: Path, file_format: str) -> None:
    if file_format != "huggingface" and config.config is not None:
        raise UsageError(code="config-without-huggingface")
    if file_format not in ("huggingface", "peft"):
        check_out_file("--out", out)
    elif is_file(out) or not is_folder(out.parent):
        raise UsageError(code="out-not-a-folder", value=config.out)
    if not config.overwrite and (is_file(out) or list_names(out)):
        raise UsageError(code="out-exists", out=config.out)


def _weights(config: ExportConfig, run_dir: Path) -> tuple[Weights, str]:
    summary = read_summary(run_dir)
    if config.step == "best":
        return _saved_weights(config, run_dir, BEST_WEIGHTS), f"the best weights of {run_dir.name}"
    adapter = run_dir / (ADAPTER if config.model == 1 else f"{ADAPTER}-{config.model}")
    final = summary if config.step is None and summary is not None and summary.exit == ExitCode.DONE else None
    if final is not None and not is_folder(adapter):
        name = WEIGHTS if config.model == 1 else f"model-{config.model}.safetensors"
        sha256 = final.weights_sha256 if config.model == 1 else None
        return _saved_weights(config, run_dir, name, sha256), f"the final weights of {run_dir.name}"
    checkpoints = Checkpoints(run_dir / CHECKPOINTS, trust=config.trust)
    steps = {str(entry.step): entry.path for entry in reversed(checkpoints.entries())}
    if config.step is not None and str(config.step) not in steps:
        raise unknown_name_error("checkpoint of step", str(config.step), steps or ["(it has none)"])
    try:
        if config.step is None:
            newest = checkpoints.newest_valid(lambda warning: print(f"paceline: {warning}", file=sys.stderr))
        else:
            newest = steps[str(config.step)], checkpoints.check(steps[str(config.step)])
        if newest is None:
            raise UsageError(code="nothing-to-export", run_dir=run_dir)
        from paceline.checkpoint.export import state_dict_from_checkpoint
        from paceline.checkpoint.shards import hash_tensors

        weights = state_dict_from_checkpoint(*newest, config.model)
        if final is not None:  # the training has changed nothing but the adapter
            adapters = _adapters(config, run_dir)
            weights |= adapters.read(adapter, ours=not config.trust)
            sha256 = final.weights_sha256 if config.model == 1 else None
            if sha256 is not None and hash_tensors({name: weights[name] for name in adapters.weight_names}) != sha256:
                raise UsageError(code="weights-damaged", name=adapter.name)
            return weights, f"the final weights of {run_dir.name}"
        return weights, f"step {newest[1].step} of {run_dir.name}"
    except DamagedCheckpoint as error:
        prefix = "" if config.step is None else f"the checkpoint of step {config.step} is damaged: "
        raise UsageError(code="step-not-exported", which=prefix, reason=str(error), run_dir=run_dir) from None


def _saved_weights(config: ExportConfig, run_dir: Path, name: str, sha256: str | None = None) -> Weights:
    from paceline.checkpoint.shards import hash_tensors
    from paceline.train.weights import read_weight_file as load_weights

    saved = [name for name in list_names(run_dir) if name.startswith("model") and name.endswith(".safetensors")]
    if name not in saved:
        raise unknown_name_error("weights of the run", name, saved or ["(it has saved none)"])
    weights = load_weights(run_dir / name, require_trusted_owner=not config.trust)
    if sha256 is not None and hash_tensors(weights) != sha256:
        raise UsageError(code="weights-damaged", name=name)
    return weights


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError(code="no-transformers") from None
    return transformers


def _hugging_face_model(run_dir: Path, folder: Path | None, *, trust: bool) -> Any:
    from paceline.config.settings import load, task_options
    from paceline.tasks.registry import TASKS, check_task_without_import, load_task

    transformers = _transformers()
    if folder is not None:
        if not is_file(folder / "config.json"):
            raise UsageError(code="no-hf-config", folder=folder)
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        model_class: Any = getattr(transformers, next(iter(config.architectures or []), ""), None)
        if model_class is None:
            raise UsageError(code="no-hf-class", folder=folder)
        return model_class(config)
    advice = "specify the folder of its config.json: --config FOLDER"
    settings = load(run_dir / CONFIG, must_own=not trust)
    task, options = str(settings.task), task_options(settings)
    if task not in TASKS and ":" not in task:
        raise UsageError(code="session-without-model", run_dir=run_dir, task=task, advice=advice)
    check_task_without_import(task, options)
    models: dict[str, Any] = {}
    for name, module in load_task(task, options).make_model().named_modules():
        is_inner = any(name.startswith(f"{outer}." if outer else "") for outer in models)
        if isinstance(module, transformers.PreTrainedModel) and not is_inner:
            models[name] = module
    if len(models) != 1:
        raise UsageError(code="several-hf-models", task=task, count=len(models), advice=advice)
    return next(iter(models.values()))


def _save_pretrained(model: Any, out: Path, weights: Weights) -> dict[str, Tensor]:
    """Write the config and the weights of a model into the folder `out`; return the written weights.

    `weights` may hold further tensors, since the model can be an attribute of the trained module.
    """
    first, *others = names = model.state_dict()
    prefixes = [name.removesuffix(first) for name in weights if name == first or name.endswith(f".{first}")]
    prefixes = [prefix for prefix in prefixes if all(prefix + other in weights for other in others)]
    if len(prefixes) != 1:
        class_name = type(model).__name__
        if prefixes:
            raise UsageError(code="several-hf-copies", count=len(prefixes), kind=class_name, one=first)
        missing = next((name for name in names if not any(f".{own}".endswith(f".{name}") for own in weights)), first)
        raise UsageError(code="no-hf-model-in-weights", kind=class_name, one=missing)
    (prefix,) = prefixes
    state = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise UsageError(code="hf-weights-do-not-fit", reason=str(error)) from None
    model.tie_weights()
    _transformers().utils.logging.disable_progress_bar()
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        model.save_pretrained(folder)
        writing.make_folder(out, exist_ok=True)
        for name in list_names(Path(folder)):
            writing.rename(Path(folder, name), out / name)
    if prefix:
        print(f"the model is the attribute {prefix[:-1]} of the trained module")
    if skipped := [name for name in weights if not name.startswith(prefix)]:
        print(f"skipped, because the model does not contain them: {first_few(skipped, 5)}")
    return state
