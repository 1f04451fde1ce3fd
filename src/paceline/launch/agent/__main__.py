"""`python -m paceline.launch.agent`: starts and watches the workers of one node.

The agent reads one JSON line (a NodePlan) from stdin or from a file. The launcher keeps stdin open: its end means that
the launcher has ended, as does a long time without a heartbeat if the plan announces heartbeats. The agent of node 0 is
the coordinator of all agents. An agent leaves no process behind, even after an error.

    --announce     first write one JSON line with the facts of this machine (host/facts.py) to stdout
    --plan FILE    read the plan from a file; there is no lifeline: under Slurm, or if the user starts the agent
    --node K       number of this node, if the plan does not set it (default: SLURM_NODEID)
    --node0 NAME    a name or address of node 0; may be repeated, the best first
    --join         become any free node of a running run
    --nproc N      number of workers, instead of that of the plan
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from msgspec.structs import replace

from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.host.cgroup import threads_per_rank, usable_cores
from paceline.host.cleanup import start_cleanup_process
from paceline.host.facts import gather_facts as gather_facts
from paceline.host.shell_environment import activate_environment
from paceline.launch.agent.preload import start_preloader
from paceline.launch.agent.workers import InheritedResources, create_memory_snapshot_files, worker_environment
from paceline.protocol import control
from paceline.protocol.job import NodePlan
from paceline.runs import writing
from paceline.runs.console import print_to_stderr
from paceline.runs.folder import create_attempt_dir, lock_run_dir
from paceline.runs.reading import read_file

MAX_PLAN_BYTES = 1 << 20


def read_plan(options: argparse.Namespace) -> NodePlan | None:
    """The complete plan; None if stdin ends before the plan, because the launcher has ended."""
    try:
        # the agent executes the command in the plan: no other user may have written it
        file = options.plan and options.plan.parent.resolve() / options.plan.name
        line = read_file(file, limit_bytes=MAX_PLAN_BYTES, ours=True) if file else _first_line()
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
    if options.node0:
        plan = replace(plan, node0=tuple(options.node0))
    if plan.nodes > 1 and plan.node != 0 and not plan.node0:
        raise UsageError(code="no-address-of-node-0")
    return plan


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_PLAN_BYTES:
        # one byte at a time, without the buffer of sys.stdin: orders that follow the plan must stay in the pipe
        byte = os.read(control.LIFELINE_DESCRIPTOR, 1)
        if not byte:
            return b""
        line += byte
    return line


def detach(log: Path) -> Callable[[], None]:
    """Continue in a child process with a new session; return a function that the child calls once its workers run.

    Until that call, the output of the child reaches the launcher, and this process ends with the child. The call
    redirects the output to `log`; this process then ends with code 0. Call `detach` before there are threads or
    children.
    """
    ready, started = os.pipe()
    child = os.fork()
    if child:
        os.close(started)
        if os.read(ready, 1):
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.close(ready)
    os.setsid()
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    pipe = [started]

    def on_started() -> None:
        while pipe:  # at the first call
            sys.stdout.flush()
            sys.stderr.flush()
            _redirect(writing.open_or_create(log, append=True), 1, 2)
            os.write(pipe[0], b"+")
            os.close(pipe.pop())

    return on_started


def _redirect(descriptor: int, *numbers: int) -> None:
    for number in numbers:
        os.dup2(descriptor, number)
    os.close(descriptor)


def prepare_environment(plan: NodePlan) -> NodePlan:
    if plan.cwd:
        try:
            os.chdir(plan.cwd)
        except OSError as error:
            host, strerror = os.uname().nodename, error.strerror
            raise UsageError(code="folder-not-entered", folder=plan.cwd, host=host, strerror=strerror) from None
    if plan.modules or plan.activate or plan.env:
        env = activate_environment(plan.modules, plan.activate, plan.env, dict(os.environ))
        os.environ.clear()
        os.environ.update(env)
    return replace(plan, threads=plan.threads or threads_per_rank(usable_cores(), plan.nproc))


def prepare_run_dir(plan: NodePlan) -> tuple[NodePlan, tuple[int, ...]]:
    """On node 0 of a run that no launcher has prepared: lock the run folder, and create the folder of the attempt."""
    if plan.node != 0 or plan.attempt_dir or not plan.run_dir:
        return plan, ()
    run_dir = Path(plan.run_dir).resolve()
    if not run_dir.is_dir():
        raise UsageError(code="no-run-dir-on-node-0", run_dir=run_dir, host=os.uname().nodename)
    lock = lock_run_dir(run_dir)
    os.set_inheritable(lock, True)
    return replace(plan, attempt_dir=str(create_attempt_dir(run_dir)[1])), (lock,)


def run_agent(plan: NodePlan, *, lifeline: bool) -> int:
    if plan.attach >= 0:
        from paceline.launch.agent.attach import watch_attached_ranks

        return watch_attached_ranks(plan)
    on_started = detach(Path(plan.run_dir) / f"agent-{plan.node}.log") if plan.detached else lambda: None
    plan = prepare_environment(plan)
    with TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as temporary:
        not_kept = [number for number in (*plan.keep_open, plan.stdin) if number >= 0]
        cleanup_fd = start_cleanup_process(not_kept=not_kept, temporary=temporary)
        # start it first: it imports torch while the agent checks folders and ports
        preloader = start_preloader(plan.argv, worker_environment(plan, 0, 0)) if plan.preload else None
        try:
            plan, locks = prepare_run_dir(plan)
            pairs = create_memory_snapshot_files(plan.nproc) if plan.max_restarts or plan.elastic else ()
            inherited = InheritedResources(pairs, (*plan.keep_open, *locks), cleanup_fd, temporary, preloader)
            return _serve(plan, inherited, on_started, lifeline=lifeline)
        finally:
            if preloader is not None:
                preloader.close()


def _serve(plan: NodePlan, inherited: InheritedResources, on_started: Callable[[], None], *, lifeline: bool) -> int:
    from paceline.launch.agent.coordinator import Coordinator
    from paceline.launch.agent.follower import Follower  # while the preloader imports torch

    with control.signal_wakeup((*control.STOP_SIGNALS, signal.SIGCHLD)) as wakeup:
        orders = control.StopSignals(
            wakeup, lifeline=lifeline and not plan.detached, silence_seconds=plan.silence_seconds
        )
        if inherited.preloader is not None:
            inherited.preloader.wait_ready(orders)
        try:
            return (Coordinator if plan.node == 0 else Follower)(plan, orders, inherited, on_started).run()
        finally:  # the exit code is final: a later signal must not interrupt the cleanup
            signal.pthread_sigmask(signal.SIG_BLOCK, control.STOP_SIGNALS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0: done; 2: wrong use; 75: saved; 128 + n: stopped by signal n; or the code of the first failed worker."""
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.agent", description=__doc__)
    parser.add_argument("--announce", action="store_true")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--node", type=int)
    parser.add_argument("--node0", action="append", default=[])
    parser.add_argument("--join", action="store_true")
    parser.add_argument("--nproc", type=int, default=0)
    options = parser.parse_args(arguments)
    control.hold_standard_descriptors()
    if options.announce:
        os.write(1, msgspec.json.encode(gather_facts()) + b"\n")
    code: int = ExitCode.FAILED
    try:
        plan = read_plan(options)
        if plan is not None:
            code = run_agent(plan, lifeline=options.plan is None)
    except PacelineError as error:
        print_to_stderr(error.message_with_code)
        code = error.exit_code
    except OSError as error:
        print_to_stderr(f"cannot start the workers: {error}")
        code = ExitCode.USAGE
    # The exit code is final: a scheduler that signals all tasks after the first failure must not change it
    signal.pthread_sigmask(signal.SIG_BLOCK, control.STOP_SIGNALS)
    return code


if __name__ == "__main__":
    sys.exit(main())
