"""Stops scripts that use Accelerate.

The loop is the script's, so only the script knows what a checkpoint must contain. A stop therefore takes effect after
the next `save_state` of the script, and the script resumes with its own `load_state`.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from paceline.rank.imports import hide_from_warnings
from paceline.rank.stops import StepStops

RESUMES = re.compile(rb"\.save_state\(.*\.load_state\(|\.load_state\(.*\.save_state\(", re.DOTALL)


def install(stops: StepStops, module: str) -> None:
    """Change `Accelerator.prepare` and `Accelerator.save_state`. Call it after the import of `module`."""
    accelerator_class: Any = sys.modules[module].Accelerator
    prepare, save_state = accelerator_class.prepare, accelerator_class.save_state

    @hide_from_warnings
    @wraps(prepare)
    def prepare_and_begin(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        if stops.can_begin and _is_resumable():
            stops.begin()
        return prepare(accelerator, *args, **kwargs)

    @hide_from_warnings
    @wraps(save_state)
    def save_and_stop(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        result = save_state(accelerator, *args, **kwargs)
        if stops.can_begin:
            stops.begin()
        if stops.end_step():
            for tracker in accelerator.trackers:
                tracker.finish()
            stops.exit_saved("after its save_state")
        return result

    accelerator_class.prepare, accelerator_class.save_state = prepare_and_begin, save_and_stop


def _is_resumable() -> bool:
    """Whether the file of the script both saves and loads states."""
    with suppress(OSError):
        return RESUMES.search(Path(sys.modules["__main__"].__file__ or "").read_bytes()) is not None
    return False
