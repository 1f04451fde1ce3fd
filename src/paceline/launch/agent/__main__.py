"""`python -m paceline.launch.agent`: the parent of one node's workers, which observes how they end.

It reads one JSON line (a NodePlan), on stdin or in a file. On stdin, the launcher keeps the line open: its end, or a
long silence if signs of life were promised, means that the launcher is gone. Node 0's agent is the head of all agents.
An agent leaves no process behind, even after an error.

    --announce     first write one JSON line with this machine's facts (host/facts.py) to stdout
    --plan FILE    the plan is in a file, and nobody holds a line open: under Slurm, or typed by hand
    --node K       this node's number, where the plan leaves it open (default: SLURM_NODEID)
    --head NAME    a name or address of node 0; may be repeated, the best first
    --join         become any free node of a run that is running
    --nproc N      the number of workers, instead of the plan's
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from msgspec.structs import replace

from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.host.cgroup import threads_per_rank, usable_cores
from paceline.host.facts import gather as gather_facts
from paceline.host.shell_environment import environment_after
from paceline.host.sweep import start_janitor
from paceline.launch.agent.preload import start_preloader
from paceline.launch.agent.workers import Inherited, make_snapshots, worker_environment
from paceline.protocol.control import LIFELINE, STOP_SIGNALS, Orders, hold_standard_descriptors, signal_inbox
from paceline.protocol.job import NodePlan
from paceline.runs import writing
from paceline.runs.console import say
from paceline.runs.folder import create_attempt_dir, lock_run_dir
from paceline.runs.reading import read

MAX_PLAN_BYTES = 1 << 20


def read_plan(options: argparse.Namespace) -> NodePlan | None:
    """The plan, complete; None if stdin ends before it came: the launcher is gone."""
    try:
        # what a plan says is run: nobody else may have written it
        file = options.plan and options.plan.parent.resolve() / options.plan.name
        line = read(file, limit_bytes=MAX_PLAN_BYTES, ours=True) if file else _first_line()
        if not line:
            return None
        plan = msgspec.json.decode(line, type=NodePlan)
    except OSError as error:
        raise UsageError(code="plan-not-readable", path=options.plan, strerror=error.strerror) from None
    except msgspec.MsgspecError as error:
        raise UsageError(code="plan-not-valid", reason=error) from None
    number = str(options.node if options.node is not None else os.environ.get("SLURM_NODEID", ""))
    plan = replace(plan, nproc=options.nproc or plan.nproc)
    if (plan.node < 0 and not options.join) or options.node is not None:
        if not number.isdecimal() or int(number) >= plan.nodes:
            number = number or "none, and no SLURM_NODEID"
            raise UsageError(code="node-out-of-range", value=number, most=plan.nodes - 1)
        plan = replace(plan, node=int(number))
    if options.head:
        plan = replace(plan, head=tuple(options.head))
    if plan.nodes > 1 and plan.node != 0 and not plan.head:
        raise UsageError(code="no-address-of-node-0")
    return plan


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_PLAN_BYTES:
        # a byte at a time: what follows the plan is not ours to take; and not sys.stdin, whose buffer would
        byte = os.read(LIFELINE, 1)
        if not byte:
            return b""
        line += byte
    return line


def detach(log: Path) -> Callable[[], None]:
    """Continue in a child with a separate session; return a function for it to call once its workers are started.

    Before that call its output reaches the launcher, and its end is ours. After it the output goes to `log`, and this
    process reports that to the launcher and ends. Call `detach` before there are threads or children.
    """
    ready, begun = os.pipe()
    child = os.fork()
    if child:
        os.close(begun)
        if os.read(ready, 1):
            with suppress(OSError):
                os.write(1, b'{"detached": true}\n')  # the last word to the launcher, see launch/ssh/remote.py
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.close(ready)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def on_started() -> None:
        nonlocal begun
        if begun < 0:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        words = writing.keep(log, append=True)
        os.dup2(words, 1)
        os.dup2(words, 2)
        os.close(words)
        os.write(begun, b"+")
        os.close(begun)
        begun = -1

    return on_started


def enter(plan: NodePlan) -> NodePlan:
    """Enter the working folder of the workers, and take on their environment.

    Raises:
        UsageError: the folder is not there, a module cannot be loaded.
    """
    if plan.cwd:
        try:
            os.chdir(plan.cwd)
        except OSError as error:
            host, strerror = os.uname().nodename, error.strerror
            raise UsageError(code="folder-not-entered", folder=plan.cwd, host=host, strerror=strerror) from None
    if plan.modules or plan.activate or plan.env:
        changed = environment_after(plan.modules, plan.activate, plan.env, dict(os.environ))
        for name in os.environ.keys() - changed.keys():
            del os.environ[name]
        os.environ.update(changed)
    return replace(plan, threads=plan.threads or threads_per_rank(usable_cores(), plan.nproc))


def take_run_dir(plan: NodePlan) -> tuple[NodePlan, tuple[int, ...]]:
    """On node 0 of a run that no launcher has prepared, lock its folder and make the attempt's folder.

    Returns:
        The complete plan, and the descriptors that hold the lock.
    """
    if plan.node != 0 or plan.attempt_dir or not plan.run_dir:
        return plan, ()
    run_dir = Path(plan.run_dir).resolve()
    if not run_dir.is_dir():
        raise UsageError(code="no-run-dir-on-node-0", run_dir=run_dir, host=os.uname().nodename)
    lock = lock_run_dir(run_dir)
    os.set_inheritable(lock, True)
    return replace(plan, attempt_dir=str(create_attempt_dir(run_dir)[1])), (lock,)


def run_agent(plan: NodePlan, *, lifeline: bool) -> int:
    """Run the agent of `plan` to its end; the exit code."""
    if plan.attach >= 0:
        from paceline.launch.agent.attach import watch_over

        return watch_over(plan)
    on_started = detach(Path(plan.run_dir) / f"agent-{plan.node}.log") if plan.detached else lambda: None
    plan = enter(plan)
    with TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as temporary:
        not_kept = [number for number in (*plan.keep_open, plan.stdin) if number >= 0]
        janitor = start_janitor(not_kept=not_kept, temporary=temporary)
        # before all else that takes time: it imports while we look at folders and ports
        preloader = start_preloader(plan.argv, worker_environment(plan, 0, 0)) if plan.preload else None
        try:
            plan, locks = take_run_dir(plan)
            pairs = make_snapshots(plan.nproc) if plan.max_restarts or plan.elastic else ()
            inherited = Inherited(pairs, (*plan.keep_open, *locks), janitor, temporary, preloader)
            return _serve(plan, inherited, on_started, lifeline=lifeline)
        finally:
            if preloader is not None:
                preloader.close()


def _serve(plan: NodePlan, inherited: Inherited, on_started: Callable[[], None], *, lifeline: bool) -> int:
    from paceline.launch.agent.follower import Follower  # while the preloader imports torch
    from paceline.launch.agent.head import Head

    with signal_inbox((*STOP_SIGNALS, signal.SIGCHLD)) as inbox:
        orders = Orders(inbox, lifeline=lifeline and not plan.detached, silence_seconds=plan.silence_seconds)
        if inherited.preloader is not None:
            inherited.preloader.wait_ready(orders)
        if plan.node == 0:
            return Head(plan, orders, inherited, on_started).run()
        return Follower(plan, orders, inherited, on_started).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 wrong use, 75 saved, 128 + n stopped by signal n, else the first failing worker's."""
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.agent", description=__doc__)
    parser.add_argument("--announce", action="store_true")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--node", type=int)
    parser.add_argument("--head", action="append", default=[])
    parser.add_argument("--join", action="store_true")
    parser.add_argument("--nproc", type=int, default=0)
    options = parser.parse_args(arguments)
    hold_standard_descriptors()
    if options.announce:
        os.write(1, msgspec.json.encode(gather_facts()) + b"\n")
    code: int = ExitCode.FAILED
    try:
        plan = read_plan(options)
        if plan is not None:
            code = run_agent(plan, lifeline=options.plan is None)
    except PacelineError as error:
        say(error.shown)
        code = error.exit_code
    except OSError as error:
        say(f"the workers cannot be started: {error}")
        code = ExitCode.USAGE
    # The code is decided: a scheduler that ends all tasks of a step at the first bad exit shall not change it
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    return code


if __name__ == "__main__":
    sys.exit(main())
