"""Which faults are there, and what is the truth about each? Every row of the design's fault tables that can be made.

Not made: a rank in a network file system that does not answer (`uninterruptible` is the same state of the process, made
with a fork that the kernel waits for), a slow network (kernels often lack netem), a damaged GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.errors import ExitCode, unknown
from paceline.faults.fault import End, Fault, Needs, Way

DONE, FAILED, USAGE = int(ExitCode.DONE), int(ExitCode.FAILED), int(ExitCode.USAGE)
STALLED, MISMATCH, NOT_FINITE, DIVERGED = 3, 4, 5, 6
KILLED, SEGFAULT, ABORTED = 137, 139, 134
ANY_FAILURE = (FAILED, STALLED, ABORTED)  # a rank that leaves takes others with it, in ways that luck decides
CHECKPOINTS = ("--checkpoint-every", "5")

SUDDEN = (
    Fault("killed", "is killed by SIGKILL", (End.DIED,), (KILLED,), line=False, fast=True),
    Fault("segfault", "reads address 0", (End.DIED,), (SEGFAULT,), line=False, fast=True),
    Fault("raises", "raises ValueError", (End.DIED,), (FAILED,), fast=True),
    Fault("raises-and-cleans-up", "raises ValueError, leaves the group and tidies up for 3 s", (End.DIED,), (FAILED,)),
    Fault("out-of-memory", "asks for more memory than there is", (End.DIED,), (FAILED,), fast=True),
    Fault(
        "oom-killed", "uses memory until the kernel kills it", (End.DIED,), (KILLED,), line=False,
        needs=Needs.ROOT, setup="cgroup",
    ),
    Fault("too-many-files", "opens files until it may not", (End.DIED,), (FAILED,), fast=True),
    Fault("exits-early", "ends with exit code 0", (End.LEFT,), ANY_FAILURE, line=False),
    Fault("fewer-batches", "has fewer batches than the others, and is done", (End.LEFT,), ANY_FAILURE, line=False),
    Fault("unused-parameters", "leaves out a layer", (End.DIED,), (FAILED,), step=7, line=False),
    Fault("model-shape-differs", "makes a wider layer", (End.DIED,), (FAILED,), line=False),
    Fault("extra-parameters", "makes one more layer", (End.DIED, End.MISMATCH), (FAILED, MISMATCH), line=False),
    Fault(
        "launcher-killed", "kills its agent", (End.ENDED,), (KILLED,), guilty=(), single=False, line=False, fast=True
    ),
)  # fmt: skip

HANGS = (
    Fault("frozen", "is stopped by SIGSTOP", (End.STOPPED,), (STALLED,), line=False),
    Fault("uninterruptible", "waits in the kernel, where signals do not reach it", (End.UNINTERRUPTIBLE,), (STALLED,)),
    Fault("sleeps", "sleeps", (End.BEHIND,), (STALLED,)),
    Fault("reads-for-ever", "reads from a pipe that nobody writes to", (End.BEHIND,), (STALLED,)),
    Fault("spins", "is caught in a loop of Python", (End.BEHIND,), (STALLED,)),
    Fault("holds-the-gil", "is caught in C code that holds the interpreter's lock", (End.BEHIND,), (STALLED,)),
    Fault("never-reaches-init", "does not come to init_process_group", (End.NOT_MET,), (STALLED,)),
    Fault(
        "two-ranks-sleep", "sleep", (End.BEHIND,), (STALLED,), guilty=(1, 2), world=4, single=False,
    ),
    Fault(
        "recv-without-send", "waits for a message that rank 0 does not send",
        (End.DEADLOCK, End.MISMATCH, End.BEHIND), (STALLED, MISMATCH), single=False,  # rank 0 may have forgotten it
    ),
    Fault("swapped-groups", "enters two groups in the other order", (End.DEADLOCK,), (STALLED, MISMATCH)),
    Fault("loader-hangs", "waits for a loader process that hangs", (End.LOADER,), (STALLED,), way=Way.TASK,
          options=("--num-workers", "1"), line=False),
)  # fmt: skip

MISMATCHES = (
    Fault("fewer-batches-then-barrier", "is at the last barrier already", (End.MISMATCH,), (MISMATCH,)),
    Fault("other-collective", "calls broadcast where the others call all_reduce", (End.MISMATCH,), (MISMATCH,)),
    Fault("extra-collective", "calls one all_reduce more", (End.MISMATCH,), (MISMATCH,)),
    Fault("other-shape", "reduces 7 numbers where the others reduce 5", (End.MISMATCH,), (MISMATCH,)),
    Fault("other-dtype", "reduces float64 where the others reduce float32", (End.MISMATCH,), (MISMATCH,)),
    Fault(
        "other-shape-of-two", "reduces 7 numbers where the one other reduces 5", (End.MISMATCH,), (MISMATCH,), world=2,
        single=False, tie=True,
    ),
)  # fmt: skip

SILENT = (
    Fault("nan", "has a sample that is not finite", (End.NOT_FINITE,), (NOT_FINITE,), way=Way.TASK, line=False),
    Fault(
        "swapped-collectives", "calls two all_reduces of one shape in the other order",
        (End.MISMATCH,), (MISMATCH,), way=Way.TASK,
    ),
    Fault("straggler", "needs 0.3 s more for each step", (End.SLOW,), (DONE,), way=Way.TASK, line=False),
    Fault("replica-flip", "has a bit flipped in a weight", (End.DIVERGED,), (DIVERGED,), way=Way.TASK, line=False,
          options=("--watch-every", "5")),
    Fault("data-differs", "has other data", (End.REFUSED,), (USAGE,), way=Way.TASK, line=False),
    Fault("settings-differ", "was given another learning rate", (End.REFUSED,), (USAGE,), way=Way.EACH, line=False),
    Fault("code-differs", "has another version of a module", (End.REFUSED,), (USAGE,), way=Way.TASK, line=False,
          setup="two versions", beside=False),
)  # fmt: skip

SURROUNDINGS = (
    Fault("loader-killed", "loses a loader process to SIGKILL", (End.DIED, End.LOADER), (FAILED,), way=Way.TASK,
          line=False, options=("--num-workers", "1")),
    Fault("shm-full", "has no room in /dev/shm for its loader processes", (End.TOLD, End.REFUSED),
          (FAILED, USAGE), guilty=(), single=False, line=False, needs=Needs.ROOT, way=Way.TASK, setup="small shm",
          options=("--num-workers", "1"), words=r"/dev/shm|shared memory"),
    Fault("disk-full", "has no room for a checkpoint", (End.TOLD,), (DONE, FAILED), guilty=(), single=False,
          line=False, needs=Needs.ROOT, way=Way.TASK, setup="small disk", options=CHECKPOINTS,
          words="could not be written|No space left"),
    Fault("checkpoint-truncated", "goes on from a checkpoint of which the half is missing", (End.TOLD,), (DONE,),
          guilty=(), single=False, line=False, way=Way.TASK, setup="truncated checkpoint", options=CHECKPOINTS,
          words=r"(?i)damaged|truncated|bytes"),
    Fault("checkpoint-flipped", "goes on from a checkpoint in which 4 bytes are wrong", (End.TOLD,), (DONE,),
          guilty=(), single=False, line=False, way=Way.TASK, setup="flipped checkpoint", options=CHECKPOINTS,
          words=r"(?i)damaged|sha256|digest"),
    Fault("port-in-use", "is to meet at a port that is taken", (End.REFUSED,), (FAILED, USAGE), guilty=(), single=False,
          line=False, setup="taken port", words=r"(?i)port:? \d+.*(in use|taken|pid)"),
)  # fmt: skip

QUIET = (
    Fault("slow-first-batch", "needs 8 s for its first batch", (End.QUIET,), (DONE,), way=Way.TASK, line=False,
          single=False, guilty=()),
    Fault("long-evaluation", "is 8 s late in an evaluation", (End.QUIET,), (DONE,), way=Way.TASK, line=False,
          single=False, guilty=()),
    Fault("short-stop", "is stopped for 3 s", (End.QUIET,), (DONE,), line=False, single=False, guilty=()),
    Fault("nothing", "does nothing wrong", (End.QUIET,), (DONE,), line=False, single=False, guilty=()),
)  # fmt: skip

CLUSTER = (
    Fault("node-powered-off", "its host is without power", (End.LOST,), (FAILED,), world=2, way=Way.HOSTS,
          needs=Needs.HOSTS, line=False),
    Fault("node-killed", "all processes of its host are killed", (End.LOST, End.DIED), (FAILED, KILLED), world=2,
          way=Way.HOSTS, needs=Needs.HOSTS, line=False),
    Fault("agent-killed", "the agent of its host is killed", (End.LOST,), (FAILED,), world=2, way=Way.HOSTS,
          needs=Needs.HOSTS, line=False),
    Fault("network-cut", "its host's cable is pulled", (End.LOST, End.NETWORK), (FAILED, STALLED), world=2,
          way=Way.HOSTS, needs=Needs.HOSTS, line=False),
    Fault("one-way-cut", "its host no longer hears rank 0's", (End.LOST, End.NETWORK), (FAILED, STALLED), world=2,
          way=Way.HOSTS, needs=Needs.HOSTS, line=False),
    Fault("head-lost", "its host, node 0, is without power", (End.LOST,), (FAILED,), guilty=(0,), world=2,
          way=Way.HOSTS, needs=Needs.HOSTS, line=False),
    Fault("wrong-address", "looks for node 0 where nobody listens", (End.TOLD,), (FAILED, USAGE), guilty=(), world=2,
          way=Way.HOSTS, needs=Needs.HOSTS, single=False, line=False, words="(?i)refused|nobody listens|no listener"),
    Fault("blackhole", "looks for node 0 where packets vanish", (End.TOLD,), (FAILED, USAGE), guilty=(), world=2,
          way=Way.HOSTS, needs=Needs.HOSTS, single=False, line=False, words="(?i)no answer|timed out|firewall|silent"),
    Fault("unknown-name", "looks for node 0 by a name that does not resolve", (End.TOLD, End.REFUSED), (FAILED, USAGE),
          guilty=(), world=2, way=Way.HOSTS, needs=Needs.HOSTS, single=False, line=False, words="(?i)name|resolve"),
    Fault("clock-behind", "its host's clock is a minute behind", (End.QUIET,), (DONE,), guilty=(), world=2,
          way=Way.HOSTS, needs=Needs.HOSTS, single=False, line=False),
)  # fmt: skip

LATE = (  # thought out after the judge was finished, by somebody who had not read it
    Fault("recursion", "calls a function that calls itself for ever", (End.DIED,), (FAILED,), guilty=(2,), step=4,
          fast=True, late=True),
    Fault("short-list", "gathers into a list that is too short", (End.DIED,), (FAILED,), guilty=(2,), step=8,
          fast=True, late=True),
    Fault("left-breakpoint", "comes to a forgotten breakpoint()", (End.DIED,), (FAILED,), step=3, fast=True, late=True),
    Fault("fork-outlives", "raises ValueError, and leaves a process that holds its connections", (End.DIED,), (FAILED,),
          guilty=(0,), fast=True, late=True),
    Fault("leaves-the-group", "destroys the process group and goes on alone", (End.LEFT, End.BEHIND, End.NOT_MET),
          ANY_FAILURE, guilty=(2,), step=9, late=True),
    Fault("lock-file", "waits for a lock on a file", (End.BEHIND,), (STALLED,), guilty=(2,), step=9, late=True),
    Fault("child-hangs", "waits for a program that does not end", (End.BEHIND,), (STALLED,), step=5, late=True),
    Fault("thread-deadlock", "has two threads that wait for each other's lock", (End.BEHIND,), (STALLED,), guilty=(0,),
          step=8, late=True),
    Fault("prefetcher-dies", "waits for a thread of its own that has ended", (End.BEHIND,), (STALLED,), guilty=(2,),
          late=True),
    Fault("connects", "connects to a server that accepts nobody", (End.BEHIND,), (STALLED,), step=7, late=True),
    Fault("waits-for-a-key", "waits for a key of the store that nobody sets", (End.BEHIND,), (STALLED,), world=2,
          step=11, late=True),
    Fault("metric-on-one", "computes for minutes, in native code", (End.BEHIND,), (STALLED,), guilty=(0,), late=True),
    Fault("hook-sleeps", "sleeps in a hook of the backward", (End.BEHIND,), (STALLED,), step=10, late=True),
    Fault("no-sync", "keeps the gradients of one step, which the others reduce", (End.MISMATCH,), (MISMATCH,), step=7,
          late=True),
    Fault("other-root", "broadcasts from itself where the others do from rank 0", (End.MISMATCH,), (MISMATCH,),
          late=True),
    Fault("group-not-made", "does not call new_group", (End.NOT_MET, End.BEHIND, End.MISMATCH), (STALLED, MISMATCH),
          late=True),
    Fault("all-rest", "rests for 8 s, as all others do", (End.QUIET,), (DONE,), guilty=(), single=False, line=False,
          late=True),
)  # fmt: skip

FAULTS = {
    fault.name: fault for fault in (*SUDDEN, *HANGS, *MISMATCHES, *SILENT, *SURROUNDINGS, *QUIET, *LATE, *CLUSTER)
}


def chosen(names: Sequence[str], faults: Iterable[str] = FAULTS) -> list[Fault]:
    """The faults with these names, all if there are none.

    Raises:
        UsageError: a name that does not exist, with the nearest ones that do.
    """
    for name in names:
        if name not in FAULTS:
            raise unknown("fault", name, faults)
    return [FAULTS[name] for name in dict.fromkeys(names)] or list(FAULTS.values())
