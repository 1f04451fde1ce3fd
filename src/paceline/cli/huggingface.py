"""Weights as a folder that Hugging Face's `from_pretrained` reads."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from paceline.config.settings import load, task_options
from paceline.disk import writing
from paceline.disk.reading import is_file, names
from paceline.errors import UsageError, first_few
from paceline.observe.folder import CONFIG
from paceline.tasks import TASKS, check_task, load_task

try:
    import transformers
except ImportError:
    raise UsageError(code="no-transformers") from None


def model_of(run_dir: Path, folder: Path | None, *, trust: bool) -> Any:
    """The Hugging Face model that a folder's config.json describes, or else the one in the model of the run's task.

    Raises:
        UsageError: if there is none, several, or the run is not to be trusted.
    """
    if folder is not None:
        if not is_file(folder / "config.json"):
            raise UsageError(code="no-hf-config", folder=folder)
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        kind: Any = getattr(transformers, next(iter(config.architectures or []), ""), None)
        if kind is None:
            raise UsageError(code="no-hf-class", folder=folder)
        return kind(config)
    settings, advice = load(run_dir / CONFIG, ours=not trust), "name the folder of its config.json: --config FOLDER"
    task, options = str(settings.task), task_options(settings)
    if task not in TASKS and ":" not in task:
        raise UsageError(code="session-without-model", run_dir=run_dir, task=task, advice=advice)
    check_task(task, options)
    found: dict[str, Any] = {}
    for name, module in load_task(task, options).make_model().named_modules():
        inner = any(name.startswith(f"{outer}." if outer else "") for outer in found)
        if isinstance(module, transformers.PreTrainedModel) and not inner:
            found[name] = module
    if len(found) != 1:
        raise UsageError(code="several-hf-models", task=task, count=len(found), advice=advice)
    return next(iter(found.values()))


def save_pretrained(model: Any, out: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write a model's config, and those of the weights that are its own, into the folder `out`; return these weights.

    Raises:
        UsageError: if they are not this model's.
        OSError: if they cannot be written.
    """
    one, *others = model.state_dict()
    starts = [name.removesuffix(one) for name in weights if name == one or name.endswith(f".{one}")]
    starts = [start for start in starts if all(start + other in weights for other in others)]
    if len(starts) != 1:
        kind = type(model).__name__
        if starts:
            raise UsageError(code="several-hf-copies", count=len(starts), kind=kind, one=one)
        raise UsageError(code="no-hf-model-in-weights", kind=kind, one=one)
    own = {name.removeprefix(starts[0]): tensor for name, tensor in weights.items() if name.startswith(starts[0])}
    try:
        model.load_state_dict(own, assign=True)
    except RuntimeError as error:
        raise UsageError(code="hf-weights-do-not-fit", reason=str(error)) from None
    model.tie_weights()
    transformers.utils.logging.disable_progress_bar()
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        model.save_pretrained(folder)
        writing.make_folder(out, exist_ok=True)
        for name in names(Path(folder)):
            writing.rename(Path(folder, name), out / name)
    if starts[0]:
        print(f"the model is the attribute {starts[0][:-1]} of the module that was trained")
    if left := [name for name in weights if not name.startswith(starts[0])]:
        print(f"left out, as no part of it: {first_few(left, 5)}")
    return own
