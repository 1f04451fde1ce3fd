"""`launch --check`: runs a script with shorter epochs, and writes the facts of the run to a file.

`lab.check` evaluates the facts. This module writes the file, and observes files, seeds, threads, losses that ignore
padding, and output.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from paceline.protocol.code_locations import PACKAGE_FOLDERS
from paceline.protocol.evidence import Frame
from paceline.protocol.facts import (
    MAX_DIGESTS,
    MAX_STEPS,
    FileAccess,
    LoaderPass,
    MaskedMeanLoss,
    PaddingEffect,
    ScriptFacts,
    SeenSchedule,
    facts_file_name,
    finite_or_default,
)
from paceline.rank.check.loaders import LoaderRecorder
from paceline.rank.check.saved import SavedStateRecorder
from paceline.rank.check.steps import StepRecorder
from paceline.rank.guard import HangGuard
from paceline.rank.probes import ScriptListener, leaves, wrap_function, wrap_when_imported
from paceline.rank.probes.steps import SyncedOptimizerDetector
from paceline.rank.sites import format_frame, format_user_site, short_filename
from paceline.runs import writing

EVERY_SECONDS = 2.0  # interval of writes, because a script may be killed
MAX_FILES, MAX_SCORES = 200, 16
FAR, ROUNDING = 1 << 24, 1e-12
COMBINING_OP_NAMES = ("reduce", "gather", "all_to_all", "send", "recv")
IGNORED_PATHS = ("/dev/", "/proc/", "/sys/", "/__pycache__/", "/.cache/", *PACKAGE_FOLDERS)


class MiscellaneousFactsRecorder(ScriptListener):
    def __init__(self, facts: ScriptFacts, own_folder: str) -> None:
        self._facts, self._own, self._pid = facts, own_folder, os.getpid()
        self._losses: dict[str, MaskedMeanLoss] = {}
        self._passes: list[tuple[LoaderPass, int, int]] = []  # evaluations: start time, and number of prints before
        self._printed = 0
        self.schedules: dict[int, tuple[Any, str, str]] = {}  # by id: the lines that made and last stepped it

        sys.addaudithook(self._on_audit_event)
        for stream in (sys.stdout, sys.stderr):
            stream.write = self._wrap_stream_write(stream.write)
        wrap_when_imported(
            "accelerate.accelerator", "Accelerator", "gather_for_metrics",
            before=lambda *_, **__: setattr(facts, "gathers_for_metrics", True),
        )  # fmt: skip
        wrap_when_imported("transformers.trainer", "Trainer", "__init__", after=self._check_padding)

    def on_torch_imported(self) -> None:
        torch: Any = sys.modules["torch"]
        wrap_function(torch, "manual_seed", before=lambda *_, **__: self._facts.seeds.update(torch=format_user_site()))
        wrap_function(
            torch, "set_num_threads", before=lambda _: setattr(self._facts, "threads_site", format_user_site())
        )
        wrap_function(torch, "save", before=self._on_torch_save)
        wrap_function(torch, "load", after=self._on_torch_load)
        torch.serialization.save, torch.serialization.load = torch.save, torch.load
        schedulers = torch.optim.lr_scheduler
        for scheduler in (schedulers.LRScheduler, schedulers.ReduceLROnPlateau):  # the latter overrides `step`
            wrap_function(scheduler, "step", before=self._on_schedule_step)
        wrap_function(torch.distributed, "all_reduce", before=self._on_all_reduce)
        torch.distributed.distributed_c10d.all_reduce = torch.distributed.all_reduce
        for name in ("cross_entropy", "nll_loss"):
            wrap_function(torch.nn.functional, name, after=self._record_mean_loss)

    def on_epoch_begin(self, batches: Any) -> None:
        number = next((n for n, x in enumerate(self._facts.loaders) if x.passes and not x.passes[-1].sizes), -1)
        if number >= 0:
            self._passes.append((self._facts.loaders[number].passes[-1], time.monotonic_ns(), self._printed))

    def on_backward_begin(self, losses: Any) -> None:
        self._finish_passes()

    def finish(self) -> None:
        self._finish_passes()
        torch: Any = sys.modules.get("torch")
        self._facts.threads = torch.get_num_threads() if torch is not None else 0
        for schedule, origin, site in self.schedules.values():
            with suppress(Exception):  # from a function of the script
                name = type(schedule).__name__
                self._facts.schedules.append(
                    SeenSchedule(site, origin, schedule.last_epoch, lr_schedule_end_step(schedule), name)
                )

    def _finish_passes(self) -> None:
        for loader_pass, began_ns, prints_before in self._passes:
            calls = HangGuard.of_process().page.calls_since(began_ns)
            loader_pass.summed = any(word in op.kind for _, _, op in calls for word in COMBINING_OP_NAMES)
            loader_pass.printed = self._printed > prints_before
        self._passes.clear()

    def _on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename") or os.getpid() != self._pid:
            return
        path, _, flags = arguments if event == "open" else (arguments[1], "", os.O_TRUNC)
        if isinstance(path, (str, bytes)) and isinstance(flags, int) and flags & os.O_TRUNC and not flags & os.O_EXCL:
            self._record_written_file(os.fsdecode(path))

    def _record_written_file(self, path: str) -> None:
        path = os.path.realpath(path)
        if path.startswith(self._own) or any(part in path for part in IGNORED_PATHS):
            return
        if len(self._facts.saved_files) < MAX_FILES and not any(file.path == path for file in self._facts.saved_files):
            self._facts.saved_files.append(FileAccess(path, format_user_site()))

    def _on_torch_save(self, state: Any, file: Any = None, *_: Any) -> None:
        if isinstance(file, (str, os.PathLike)):
            self._record_written_file(os.fspath(file))  # pyright: ignore[reportUnknownArgumentType]

    def _on_torch_load(self, loaded: Any, file: Any, *_: Any, **__: Any) -> None:
        on_gpu = (leaf for leaf in leaves(loaded) if getattr(getattr(leaf, "device", None), "type", "") == "cuda")
        devices = sorted({int(leaf.device.index or 0) for leaf in on_gpu})
        if devices and isinstance(file, (str, os.PathLike)):
            path = os.path.realpath(os.fspath(file))  # pyright: ignore[reportUnknownArgumentType]
            cuda: Any = sys.modules["torch.cuda"]
            self._facts.loaded_files.append(FileAccess(path, format_user_site(), devices, cuda.current_device()))

    def _record_mean_loss(self, result: Any, predicted: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if not result.requires_grad or target.is_floating_point() or result.dim():
            return
        if kwargs.get("reduction", args[4] if len(args) > 4 else "mean") == "mean":
            site = format_user_site()
            record = self._losses.get(site)
            if record is None:
                record = self._losses[site] = MaskedMeanLoss(site)
                self._facts.losses.append(record)
            if len(record.counts) < MAX_DIGESTS:
                ignore_index = kwargs.get("ignore_index", args[2] if len(args) > 2 else -100)
                record.counts.append(int((target != ignore_index).sum()))
                record.sizes.append(target.numel())

    def _on_all_reduce(self, tensor: Any, op: Any = None, *_: Any, **__: Any) -> None:
        if not self._passes or tensor.numel() > MAX_SCORES or tensor.is_complex():
            return
        reduce_op = sys.modules["torch.distributed"].ReduceOp
        if op in (None, reduce_op.SUM, reduce_op.AVG):
            for loader_pass, *_when in self._passes:
                if len(loader_pass.reduced) < MAX_DIGESTS:
                    loader_pass.reduced += [finite_or_default(value) for value in tensor.detach().reshape(-1).tolist()]
                    loader_pass.reduced_site = loader_pass.reduced_site or format_user_site()

    def _on_schedule_step(self, schedule: Any, *_: Any, **__: Any) -> None:
        site = format_user_site()
        self.schedules[id(schedule)] = schedule, self.schedules.get(id(schedule), ("", site))[1], site

    def _wrap_stream_write(self, write: Callable[[str], int]) -> Callable[[str], int]:
        def wrote(text: str) -> int:
            self._printed += bool(text.strip())
            return write(text)

        return wrote

    def _check_padding(self, _: Any, trainer: Any, *__: Any, **___: Any) -> None:
        """Call each `compute_metrics` again with more padding. Its arguments are numpy arrays with -100 as padding."""
        metrics, asked = trainer.compute_metrics, False
        if metrics is None or trainer.args.batch_eval_metrics:
            return
        code: Any = getattr(metrics, "__code__", None)
        file, line = (code.co_filename, code.co_firstlineno) if code is not None else ("?", 0)
        site = format_frame(Frame(short_filename(file), line, getattr(metrics, "__name__", "compute_metrics")))

        def computed(predictions: Any) -> Any:
            nonlocal asked
            scores = metrics(predictions)
            if not asked and (padded := add_padding_column(predictions)) is not None:
                asked = True
                with suppress(Exception):  # the function accepts only one width
                    found = find_padding_sensitive_score(site, scores, metrics(predictions), metrics(padded))
                    self._facts.metrics.append(found)
            return scores

        trainer.compute_metrics = computed


def find_padding_sensitive_score(site: str, scores: Any, again: Any, padded: Any) -> PaddingEffect:
    """The first score that changes with more padding, but not in a repeated call."""
    for name, value in scores.items():
        if value == again[name] and value != padded[name]:
            return PaddingEffect(site, name, finite_or_default(value), finite_or_default(padded[name]))
    return PaddingEffect(site)


def add_padding_column(prediction: Any) -> Any:
    """An `EvalPrediction` with one more column of padding; None if it has no padding."""
    numpy: Any = sys.modules["numpy"]
    labels, predicted = prediction.label_ids, prediction.predictions
    are_arrays = all(isinstance(array, numpy.ndarray) for array in (labels, predicted))
    if not are_arrays or labels.ndim != 2 or predicted.shape[:2] != labels.shape or not (labels == -100).any():
        return None
    pads = ([(0, 0), (0, 1)] + [(0, 0)] * (array.ndim - 2) for array in (predicted, labels))
    predicted, labels = (
        numpy.pad(array, widths, constant_values=-100) for array, widths in zip((predicted, labels), pads, strict=True)
    )
    return type(prediction)(predictions=predicted, label_ids=labels, inputs=prediction.inputs, losses=prediction.losses)


def lr_schedule_end_step(schedule: Any) -> int:
    """The step from which a schedule's rate is constant; -1: unknown."""
    for name in ("total_steps", "T_max", "total_iters"):
        if isinstance(steps := getattr(schedule, name, None), int):
            return steps
    factor = next(iter(getattr(schedule, "lr_lambdas", ())), None)
    if factor is None:
        return -1
    return 1 + bisect_left(range(1, FAR), True, key=lambda step: abs(factor(step) - factor(FAR)) < ROUNDING)


class FactsWriter(ScriptListener):
    def __init__(self, facts: ScriptFacts, folder: Path) -> None:
        self._facts, self._path, self._pid = facts, folder / facts_file_name(facts.rank), os.getpid()
        self._last = 0.0

    def on_step_end(self, optimizer: Any) -> None:
        if time.monotonic() - self._last > EVERY_SECONDS:
            self.write()

    def write(self) -> None:
        with suppress(OSError):  # a full disk, which the script itself reports
            writing.replace_file(self._path, msgspec.json.encode(self._facts))
        self._last = time.monotonic()

    def finish(self, *watches: MiscellaneousFactsRecorder | LoaderRecorder) -> None:
        if os.getpid() != self._pid:
            return
        self._facts.ended = True
        for listener in watches:
            try:
                listener.finish()
            except Exception as error:
                print(f"paceline: --check has recorded only a part of the facts: {error!r}", file=sys.stderr)
        self.write()


def create_fact_recorders(folder: Path) -> tuple[ScriptListener, ...]:
    facts = ScriptFacts(
        rank=int(os.environ["RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
        local_world=int(os.environ["LOCAL_WORLD_SIZE"]),
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
    )
    guard = HangGuard.of_process()
    guard.max_steps, joint = MAX_STEPS, SyncedOptimizerDetector(lambda: guard.page.get("ops"))
    loaders, recorder = LoaderRecorder(facts), MiscellaneousFactsRecorder(facts, str(folder))
    writer = FactsWriter(facts, folder)
    atexit.register(writer.finish, recorder, loaders)
    saved = SavedStateRecorder(facts, recorder.schedules)
    return joint, loaders, StepRecorder(facts, loaders, joint), recorder, saved, writer
