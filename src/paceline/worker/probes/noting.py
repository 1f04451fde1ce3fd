"""What `--check` sees beside the training: files, seeds, threads, losses that leave out padding, what is printed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from paceline.contract.facts import MAX_DIGESTS, MeanLoss, Pass, PlacedFile, ScriptFacts, SeenSchedule
from paceline.worker.guard import Guard
from paceline.worker.imports import when_imported
from paceline.worker.probes.hooks import Events
from paceline.worker.sites import user_site

MAX_FILES, MAX_SCORES = 200, 16
FAR, ROUNDING = 1 << 24, 1e-12
BRINGS_TOGETHER = ("reduce", "gather", "all_to_all", "send", "recv")
NOBODYS = ("/dev/", "/proc/", "/sys/", "/__pycache__/", "/.cache/", "-packages/")


class SideWatch(Events):
    """Of one process."""

    def __init__(self, facts: ScriptFacts, own_folder: str) -> None:
        self._facts, self._own, self._pid = facts, own_folder, os.getpid()
        self._losses: dict[str, MeanLoss] = {}
        self._passes: list[tuple[Pass, int, int]] = []  # evaluations: when each began, and what was printed before
        self._printed = 0
        self._schedules: dict[int, tuple[Any, str, str]] = {}  # by identity: where made, and where it went on last

    def begin(self) -> None:
        """Before the script begins, and torch is there."""
        sys.addaudithook(self._audited)
        for stream in (sys.stdout, sys.stderr):
            stream.write = self._counted(stream.write)
        when_imported("accelerate.accelerator", self._in_accelerate)

    def install(self) -> None:
        """When torch is there."""
        torch: Any = sys.modules["torch"]
        functional: Any = sys.modules["torch.nn.functional"]
        serialization: Any = sys.modules["torch.serialization"]
        torch.manual_seed = _before(torch.manual_seed, lambda *_: self._seeded("torch"))
        torch.set_num_threads = _before(torch.set_num_threads, self._threads_set)
        torch.save = serialization.save = _before(torch.save, self._saves)
        torch.load = serialization.load = self._loading(torch.load)
        schedule: Any = sys.modules["torch.optim.lr_scheduler"].LRScheduler
        schedule.step = _before(schedule.step, self._goes_on)
        ranks: Any = sys.modules["torch.distributed"]
        collectives: Any = sys.modules["torch.distributed.distributed_c10d"]
        ranks.all_reduce = collectives.all_reduce = _before(ranks.all_reduce, self._reduces)
        for name in ("cross_entropy", "nll_loss"):
            setattr(functional, name, self._counting(getattr(functional, name)))

    def epoch_begins(self, batches: Any) -> None:
        """Perhaps an evaluation."""
        number = next((n for n, one in enumerate(self._facts.loaders) if one.passes and not one.passes[-1].sizes), -1)
        if number >= 0:
            self._passes.append((self._facts.loaders[number].passes[-1], time.monotonic_ns(), self._printed))

    def backward_begins(self, losses: Any) -> None:
        """What came before is over."""
        self._close()

    def finish(self) -> None:
        """At the end."""
        self._close()
        torch: Any = sys.modules.get("torch")
        self._facts.threads = torch.get_num_threads() if torch is not None else 0
        for schedule, made, site in self._schedules.values():
            with suppress(Exception):  # a function of the script's own
                self._facts.schedules.append(SeenSchedule(site, made, schedule.last_epoch, length_of(schedule)))

    def _close(self) -> None:
        """Have ranks brought values together, and has something been printed, since the evaluations began?"""
        for seen, began_ns, printed in self._passes:
            calls = Guard.of_process().box.calls_since(began_ns)
            seen.summed = any(word in op.kind for _, _, op in calls for word in BRINGS_TOGETHER)
            seen.printed = self._printed > printed
        self._passes.clear()

    def _audited(self, event: str, told: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename") or os.getpid() != self._pid:
            return
        path, _, flags = told if event == "open" else (told[1], "", os.O_TRUNC)
        if isinstance(path, (str, bytes)) and isinstance(flags, int) and flags & os.O_TRUNC and not flags & os.O_EXCL:
            self._writes(os.fsdecode(path))

    def _writes(self, path: str) -> None:
        path = os.path.realpath(path)
        if path.startswith(self._own) or any(part in path for part in NOBODYS) or len(self._facts.written) >= MAX_FILES:
            return
        if not any(one.path == path for one in self._facts.written):
            self._facts.written.append(PlacedFile(path, user_site()))

    def _saves(self, state: Any, file: Any = None, *_: Any) -> None:
        if isinstance(file, (str, os.PathLike)):
            self._writes(os.fspath(file))  # pyright: ignore[reportUnknownArgumentType]

    def _loading(self, load: Any) -> Any:
        @wraps(load)
        def loaded(file: Any, *args: Any, **kwargs: Any) -> Any:
            found = load(file, *args, **kwargs)
            cuda: Any = sys.modules["torch.cuda"]
            devices = sorted(_gpus(found))
            if devices and isinstance(file, (str, os.PathLike)):
                path = os.path.realpath(os.fspath(file))  # pyright: ignore[reportUnknownArgumentType]
                self._facts.loaded.append(PlacedFile(path, user_site(), devices, cuda.current_device()))
            return found

        return loaded

    def _counting(self, loss: Any) -> Any:
        torch: Any = sys.modules["torch"]

        @wraps(loss)
        def counted(predicted: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            result = loss(predicted, target, *args, **kwargs)
            if torch.compiler.is_compiling() or not result.requires_grad or target.is_floating_point() or result.dim():
                return result
            if kwargs.get("reduction", args[4] if len(args) > 4 else "mean") == "mean":
                place = user_site()
                record = self._losses.get(place)
                if record is None:
                    record = self._losses[place] = MeanLoss(place)
                    self._facts.losses.append(record)
                if len(record.counts) < MAX_DIGESTS:
                    ignored = kwargs.get("ignore_index", args[2] if len(args) > 2 else -100)
                    record.counts.append(int((target != ignored).sum()))
                    record.sizes.append(target.numel())
            return result

        return counted

    def _reduces(self, tensor: Any, op: Any = None, *_: Any, **__: Any) -> None:
        """A sum over ranks, perhaps of scores: what this rank brings."""
        torch: Any = sys.modules["torch"]
        if not self._passes or torch.compiler.is_compiling() or tensor.numel() > MAX_SCORES or tensor.is_complex():
            return
        sums = sys.modules["torch.distributed"].ReduceOp
        if op in (None, sums.SUM, sums.AVG):
            for seen, *_when in self._passes:
                if len(seen.reduced) < MAX_DIGESTS:
                    seen.reduced += [float(value) for value in tensor.detach().reshape(-1).tolist()]
                    seen.reduced_site = seen.reduced_site or user_site()

    def _goes_on(self, schedule: Any, *_: Any) -> None:
        """A schedule of the learning rate: it goes its first step when it is made."""
        here = user_site()
        self._schedules[id(schedule)] = schedule, self._schedules.get(id(schedule), ("", here))[1], here

    def _seeded(self, generator: str) -> None:
        self._facts.seeds[generator] = user_site()

    def _threads_set(self, *_: Any) -> None:
        self._facts.threads_site = user_site()

    def _counted(self, write: Callable[[str], int]) -> Callable[[str], int]:
        def wrote(text: str) -> int:
            self._printed += bool(text.strip())
            return write(text)

        return wrote

    def _in_accelerate(self, *, late: bool) -> None:
        accelerator: Any = sys.modules["accelerate.accelerator"].Accelerator

        def gathers(*_: Any, **__: Any) -> None:
            self._facts.gathers_for_metrics = True

        accelerator.gather_for_metrics = _before(accelerator.gather_for_metrics, gathers)


def _before(function: Any, then: Callable[..., None]) -> Any:
    """`function`, with `then` called before it with the same arguments."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # what is not seen; the script goes on
            then(*args, **kwargs)
        return function(*args, **kwargs)

    return called


def length_of(schedule: Any) -> int:
    """The step from which on a schedule's rate is constant; -1 where nobody can say."""
    for name in ("total_steps", "T_max", "total_iters"):
        if isinstance(told := getattr(schedule, name, None), int):
            return told
    factor = next(iter(getattr(schedule, "lr_lambdas", ())), None)
    if factor is None:
        return -1
    low, high = 0, FAR
    while high - low > 1:  # it is not constant at `low`, and is from `high` on
        middle = (low + high) // 2
        low, high = (low, middle) if abs(factor(middle) - factor(FAR)) < ROUNDING else (middle, high)
    return high


def _gpus(state: Any, depth: int = 0) -> set[int]:
    """The GPUs on which the tensors of a loaded state lie."""
    if getattr(getattr(state, "device", None), "type", "") == "cuda":
        return {int(state.device.index or 0)}
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return {gpu for value in inner for gpu in _gpus(value, depth + 1)} if depth < 5 else set()
