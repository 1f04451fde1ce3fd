"""Reports a run to trackers, in addition to its records: tensorboard, wandb, mlflow (no torch here).

Trackers run in a thread. Their errors (no network, a full disk) are printed once and never stop training.
"""

import os
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from typing import Any

from paceline.errors import UsageError, unknown_name_error

MAX_QUEUED = 10_000
CLOSE_SECONDS = 30.0  # the longest wait at the end of the run


Tracker = tuple[Callable[[int, Mapping[str, float]], object], Callable[[], object]]
"""(logs a step and its numbers, closes the tracker)"""


def _tensorboard(folder: Path, _: Mapping[str, Any]) -> Tracker:
    from tensorboard.summary import Writer

    writer = Writer(str(folder / "tensorboard"))

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(folder: Path, settings: Mapping[str, Any]) -> Tracker:
    import wandb

    # without a key wandb would prompt for one and wait
    has_key = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "paceline"), name=folder.name, dir=str(folder),
        mode=None if has_key else "offline", config=dict(settings), settings=wandb.Settings(silent=True),
    )  # fmt: skip
    return lambda step, values: run.log(dict(values), step=step), run.finish


def _mlflow(folder: Path, settings: Mapping[str, Any]) -> Tracker:
    import mlflow

    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # files need no server and no database
        mlflow.set_tracking_uri((folder / "mlflow").resolve().as_uri())
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "paceline"))
    client, run_id = mlflow.MlflowClient(), mlflow.start_run(run_name=folder.name).info.run_id
    mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            client.log_metric(run_id, name, value, step=step)

    return log, mlflow.end_run


TRACKERS: dict[str, tuple[str, Callable[[Path, Mapping[str, Any]], Tracker]]] = {
    "tensorboard": ("tensorboard", _tensorboard),
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", _mlflow),
}
"""(the required package, the function that starts a run), by name"""


def parse_report_to(report_to: str | None) -> list[str]:
    names = [name.strip() for name in (report_to or "").split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise unknown_name_error("tracker", name, TRACKERS)
        if find_spec(TRACKERS[name][0]) is None:
            raise UsageError(code="tracker-not-installed", value=name, package=TRACKERS[name][0])
    return names


class TrackerQueue:
    def __init__(self, names: list[str], folder: Path, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._say = say
        self._queue: Queue[tuple[int, dict[str, float]] | None] = Queue(MAX_QUEUED)
        self._complaints: dict[str, str] = {}
        self._logged = self._dropped = 0
        self._thread = threading.Thread(target=self._run, args=(names, folder, settings), daemon=True, name="track")
        if names:
            self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers of the state after `step` steps. Does not wait, and raises no error."""
        if not self._thread.is_alive():
            return
        self._logged += 1
        try:
            self._queue.put_nowait((step, dict(values)))
        except Full:
            self._dropped += 1

    def close(self) -> None:
        """Wait a limited time for the queue, and print which numbers were lost. Raises no error."""
        if self._thread.ident is None:
            return
        if self._thread.is_alive():
            if not self._queue.full():
                self._queue.put_nowait(None)
            self._thread.join(CLOSE_SECONDS)
        if self._dropped or self._thread.is_alive():
            self._complaints["a tracker"] = f"it is too slow; the newest of {self._logged} reports are missing"
        for name, problem in self._complaints.items():
            self._say(f"WARNING: {name} is incomplete: {problem}. The records in the run folder are complete")

    def _run(self, names: list[str], folder: Path, settings: Mapping[str, Any]) -> None:
        trackers: dict[str, Tracker] = {}
        for name in names:
            self._catch_errors(name, lambda name=name: trackers.update({name: TRACKERS[name][1](folder, settings)}))
        while (item := self._queue.get()) is not None:
            for name, (log, _) in trackers.items():
                if name not in self._complaints:
                    self._catch_errors(name, lambda log=log, item=item: log(*item))
        for name, (_, close) in trackers.items():
            self._catch_errors(name, close)

    def _catch_errors(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as error:
            self._complaints.setdefault(name, f"{type(error).__name__}: {error}"[:300])
