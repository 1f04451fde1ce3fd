"""`paceline join RUN`: adds this host to a running multi-node job, from its next step on."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cli.commands import command_line
from paceline.cli.finding import RunFlags, attempts, existing_run
from paceline.cli.flags import check_positive
from paceline.cli.run_state import LIVE, standing
from paceline.errors import UsageError
from paceline.protocol.job import NodePlan
from paceline.runs.folder import INVITATION
from paceline.runs.owners import Unreadable
from paceline.runs.reading import decode

MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class JoinConfig(RunFlags):
    """Add this host to a running job that was started with --nodes MIN:MAX and has fewer than MAX nodes.

    Run the command on the new host, in a folder from which RUN is the same folder as on the other hosts. The run
    saves its state after the current step and continues with one more host. Ctrl-C removes the host again after a
    step.
    """

    nproc: int | None = None
    """worker processes on this host (default: the --nproc of the run)"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline join ARGUMENTS`."""
    config: JoinConfig = command_line("join").parse(arguments)
    check_positive(config, "nproc")
    run_dir, means = existing_run(config, act=True)  # what it says is run here: nobody else may have written it
    run = shlex.quote(str(run_dir))
    file = next((attempt / INVITATION for attempt in reversed(attempts(run_dir))), run_dir / INVITATION)
    try:
        decode(file, NodePlan, limit_bytes=MAX_BYTES, ours=True)
    except FileNotFoundError:
        state = standing(run_dir, means).state
        if state in LIVE:
            why = "was not started with --nodes MIN:MAX, or is only just starting"
        else:
            why = f"is {state}. Start it again with this host: paceline train --resume auto --run-dir {run} --hosts ..."
        raise UsageError(code="run-takes-no-hosts", run=run, why=why) from None
    except Unreadable as error:
        raise UsageError(code="invitation-unreadable", reason=str(error)) from None
    words = ["--plan", str(file), "--join", *(("--nproc", str(config.nproc)) if config.nproc else ())]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "paceline.launch.agent", *words])
