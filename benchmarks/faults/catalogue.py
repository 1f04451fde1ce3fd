"""The faults, and the truth about each: every row of the design's fault tables that can be made.

Not made: a rank in a network file system that does not answer (`uninterruptible` is the same state of the process, made
with a fork that the kernel waits for), a slow network (kernels often lack netem), a damaged GPU.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from benchmarks.faults.fault import DIVERGED, DONE, FAILED, MISMATCH, STALLED, USAGE, Fate, Fault, Needs, Way

from paceline.errors import unknown_name_error

KILLED, SEGFAULT, ABORTED = 137, 139, 134
ANY_FAILURE = (FAILED, STALLED, ABORTED)  # a rank that leaves takes others with it, in ways that luck decides
CHECKPOINTS = ("--checkpoint-every", "5")

SUDDEN = (
    Fault("killed", "is killed by SIGKILL", (Fate.DIED,), (KILLED,), line=False, fast=True),
    Fault("segfault", "reads address 0", (Fate.DIED,), (SEGFAULT,), line=False, fast=True),
    Fault("raises", "raises ValueError", (Fate.DIED,), fast=True),
    Fault("raises-and-cleans-up", "raises ValueError, leaves the group and tidies up for 3 s", (Fate.DIED,)),
    Fault("out-of-memory", "asks for more memory than there is", (Fate.DIED,), fast=True),
    Fault("oom-killed", "uses memory until the kernel kills it", (Fate.DIED,), (KILLED,), line=False, needs=Needs.ROOT,
          setup="cgroup"),
    Fault("too-many-files", "opens files until it may not", (Fate.DIED,), fast=True),
    Fault("exits-early", "ends with exit code 0", (Fate.LEFT,), ANY_FAILURE, line=False),
    Fault("fewer-batches", "has fewer batches than the others, and is done", (Fate.LEFT,), ANY_FAILURE, line=False),
    Fault("unused-parameters", "leaves out a layer", (Fate.DIED,), step=7, line=False),
    Fault("model-shape-differs", "makes a wider layer", (Fate.DIED,), line=False),
    Fault("extra-parameters", "makes one more layer", (Fate.DIED, Fate.MISMATCH), (FAILED, MISMATCH), line=False),
    Fault("launcher-killed", "kills its agent", (Fate.ENDED,), (KILLED,), causes=(), line=False, fast=True),
)  # fmt: skip

HANGS = (
    Fault("frozen", "is stopped by SIGSTOP", (Fate.STOPPED,), line=False),
    Fault("uninterruptible", "waits in the kernel, where signals do not reach it", (Fate.UNINTERRUPTIBLE,)),
    Fault("sleeps", "sleeps", (Fate.BEHIND,)),
    Fault("reads-for-ever", "reads from a pipe that nobody writes to", (Fate.BEHIND,)),
    Fault("spins", "is caught in a loop of Python", (Fate.BEHIND,)),
    Fault("holds-the-gil", "is caught in C code that holds the interpreter's lock", (Fate.BEHIND,)),
    Fault("never-reaches-init", "does not come to init_process_group", (Fate.NOT_MET,)),
    Fault("two-ranks-sleep", "sleep", (Fate.BEHIND,), causes=(1, 2), world=4),
    Fault("recv-without-send", "waits for a message that the other does not send, which may have forgotten it",
          (Fate.DEADLOCK, Fate.MISMATCH, Fate.BEHIND), (STALLED, MISMATCH), world=2, tie=True),
    Fault("swapped-groups", "enters two groups in the other order", (Fate.DEADLOCK,), (STALLED, MISMATCH)),
    Fault("loader-hangs", "waits for a loader process that hangs", (Fate.LOADER,), way=Way.TASK,
          options=("--num-workers", "1"), line=False),
)  # fmt: skip

MISMATCHES = (
    Fault("fewer-batches-then-barrier", "is at the last barrier already", (Fate.MISMATCH,)),
    Fault("other-collective", "calls broadcast where the others call all_reduce", (Fate.MISMATCH,)),
    Fault("extra-collective", "calls one all_reduce more", (Fate.MISMATCH,)),
    Fault("other-shape", "reduces 7 numbers where the others reduce 5", (Fate.MISMATCH,)),
    Fault("other-dtype", "reduces float64 where the others reduce float32", (Fate.MISMATCH,)),
    Fault("other-shape-of-two", "reduces 7 numbers where the one other reduces 5", (Fate.MISMATCH,), world=2, tie=True),
)  # fmt: skip

SILENT = (
    Fault("nan", "has a sample that is not finite", (Fate.NOT_FINITE,), way=Way.TASK, line=False),
    Fault("swapped-collectives", "calls two all_reduces of one shape in the other order", (Fate.MISMATCH,),
          way=Way.TASK),
    Fault("straggler", "needs 0.3 s more for each step", (Fate.SLOW,), way=Way.TASK, line=False),
    Fault("replica-flip", "has a bit flipped in a weight", (Fate.DIVERGED,), way=Way.TASK, line=False,
          options=("--check-replicas-every", "5")),
    Fault("data-differs", "has other data", (Fate.REFUSED,), way=Way.TASK, line=False),
    Fault("settings-differ", "was given another learning rate", (Fate.REFUSED,), way=Way.EACH, line=False),
    Fault("code-differs", "has another version of a module", (Fate.REFUSED,), way=Way.TASK, line=False,
          setup="two versions", beside=False),
)  # fmt: skip

# of ranks that share a model: the task on a mesh
SHARED = tuple(replace(fault, way=Way.TASK, beside=False) for fault in (
    Fault("tensor-sleeps", "sleeps in a layer that two ranks share", (Fate.BEHIND,), world=2,
          options=("--mesh", "tensor=2")),
    Fault("stage-sleeps", "sleeps in its stage of a pipeline", (Fate.BEHIND,), world=2,
          options=("--mesh", "pipeline=2", "--accumulation", "4")),
    Fault("stage-raises", "raises ValueError in its stage", (Fate.DIED,), world=2, line=False, fast=True,
          options=("--mesh", "pipeline=2", "--accumulation", "4")),
    Fault("stage-killed", "is killed by SIGKILL in its stage", (Fate.DIED,), (KILLED,), world=2, line=False, fast=True,
          options=("--mesh", "pipeline=2", "--accumulation", "4")),
    Fault("slow-stage", "needs 0.3 s more for each micro-batch of its stage", (Fate.SLOW,), world=2, line=False,
          options=("--mesh", "pipeline=2")),
    Fault("part-flip", "has a bit flipped in its part of a weight", (Fate.TOLD,), (DIVERGED,), causes=(), world=4,
          line=False, options=("--mesh", "data=2,tensor=2", "--check-replicas-every", "5"),
          words="differs between ranks 1 and 3, and two cannot tell which"),
))  # fmt: skip

SURROUNDINGS = (
    Fault("loader-killed", "loses a loader process to SIGKILL", (Fate.DIED, Fate.LOADER), way=Way.TASK, line=False,
          options=("--num-workers", "1")),
    Fault("shm-full", "has no room in /dev/shm for its loader processes", (Fate.TOLD, Fate.REFUSED), (FAILED, USAGE),
          causes=(), line=False, needs=Needs.ROOT, way=Way.TASK, setup="small shm", options=("--num-workers", "1"),
          words=r"/dev/shm|shared memory"),
    Fault("disk-full", "has no room for a checkpoint", (Fate.TOLD,), (DONE, FAILED), causes=(), line=False,
          needs=Needs.ROOT, way=Way.TASK, setup="small disk", options=CHECKPOINTS,
          words="could not be written|No space left"),
    Fault("checkpoint-truncated", "goes on from a checkpoint of which the half is missing", (Fate.TOLD,), (DONE,),
          causes=(), line=False, way=Way.TASK, setup="truncated checkpoint", options=CHECKPOINTS,
          words=r"(?i)damaged|truncated|bytes"),
    Fault("checkpoint-flipped", "goes on from a checkpoint in which 4 bytes are wrong", (Fate.TOLD,), (DONE,),
          causes=(), line=False, way=Way.TASK, setup="flipped checkpoint", options=CHECKPOINTS,
          words=r"(?i)damaged|sha256|digest"),
    Fault("port-in-use", "is to meet at a port that is taken", (Fate.REFUSED,), (FAILED, USAGE), causes=(), line=False,
          setup="taken port", words=r"(?i)port:? \d+.*(in use|taken|pid)"),
)  # fmt: skip

QUIET = tuple(replace(fault, causes=(), line=False) for fault in (
    Fault("slow-first-batch", "needs 8 s for its first batch", (Fate.QUIET,), way=Way.TASK),
    Fault("long-evaluation", "is 8 s late in an evaluation", (Fate.QUIET,), way=Way.TASK),
    Fault("short-stop", "is stopped for 3 s", (Fate.QUIET,)),
    Fault("nothing", "does nothing wrong", (Fate.QUIET,)),
))  # fmt: skip

CLUSTER = tuple(replace(fault, world=2, way=Way.HOSTS, needs=Needs.HOSTS, line=False) for fault in (
    Fault("node-powered-off", "its host is without power", (Fate.LOST,)),
    Fault("node-killed", "all processes of its host are killed", (Fate.LOST, Fate.DIED), (FAILED, KILLED)),
    Fault("agent-killed", "the agent of its host is killed", (Fate.LOST,)),
    Fault("network-cut", "its host's cable is pulled", (Fate.LOST, Fate.NETWORK), (FAILED, STALLED)),
    Fault("one-way-cut", "its host no longer hears rank 0's", (Fate.LOST, Fate.NETWORK), (FAILED, STALLED)),
    Fault("head-lost", "its host, node 0, is without power", (Fate.LOST,), causes=(0,)),
    Fault("wrong-address", "looks for node 0 where nobody listens", (Fate.TOLD,), (FAILED, USAGE), causes=(),
          words="(?i)refused|nobody listens|no listener"),
    Fault("blackhole", "looks for node 0 where packets vanish", (Fate.TOLD,), (FAILED, USAGE), causes=(),
          words="(?i)no answer|timed out|firewall|silent"),
    Fault("unknown-name", "looks for node 0 by a name that does not resolve", (Fate.TOLD, Fate.REFUSED),
          (FAILED, USAGE), causes=(), words="(?i)name|resolve"),
    Fault("clock-behind", "its host's clock is a minute behind", (Fate.QUIET,), causes=()),
))  # fmt: skip

# thought out after the judge was finished, by somebody who had not read it
LATE = tuple(replace(fault, late=True) for fault in (
    Fault("recursion", "calls a function that calls itself for ever", (Fate.DIED,), causes=(2,), step=4, fast=True),
    Fault("short-list", "gathers into a list that is too short", (Fate.DIED,), causes=(2,), step=8, fast=True),
    Fault("left-breakpoint", "comes to a forgotten breakpoint()", (Fate.DIED,), step=3, fast=True),
    Fault("fork-outlives", "raises ValueError, and leaves a process that holds its connections", (Fate.DIED,),
          causes=(0,), fast=True),
    Fault("leaves-the-group", "destroys the process group and goes on alone", (Fate.LEFT, Fate.BEHIND, Fate.NOT_MET),
          ANY_FAILURE, causes=(2,), step=9),
    Fault("lock-file", "waits for a lock on a file", (Fate.BEHIND,), causes=(2,), step=9),
    Fault("child-hangs", "waits for a program that does not end", (Fate.BEHIND,), step=5),
    Fault("thread-deadlock", "has two threads that wait for each other's lock", (Fate.BEHIND,), causes=(0,), step=8),
    Fault("prefetcher-dies", "waits for a thread of its own that has ended", (Fate.BEHIND,), causes=(2,)),
    Fault("connects", "connects to a server that accepts nobody", (Fate.BEHIND,), step=7),
    Fault("waits-for-a-key", "waits for a key of the store that nobody sets", (Fate.BEHIND,), world=2, step=11),
    Fault("metric-on-one", "computes for minutes, in native code", (Fate.BEHIND,), causes=(0,)),
    Fault("hook-sleeps", "sleeps in a hook of the backward", (Fate.BEHIND,), step=10),
    Fault("no-sync", "keeps the gradients of one step, which the others reduce", (Fate.MISMATCH,), step=7),
    Fault("other-root", "broadcasts from itself where the others do from rank 0", (Fate.MISMATCH,)),
    # of others alone; it harms nobody over gloo, and an alarm would be false
    Fault("group-not-made", "does not call new_group", (Fate.QUIET,), causes=(), line=False),
    Fault("all-rest", "rests for 8 s, as all others do", (Fate.QUIET,), causes=(), line=False),
))  # fmt: skip

FAULTS = {
    fault.name: fault
    for fault in (*SUDDEN, *HANGS, *MISMATCHES, *SILENT, *SHARED, *SURROUNDINGS, *QUIET, *LATE, *CLUSTER)
}


def chosen(names: Sequence[str], faults: Iterable[str] = FAULTS) -> list[Fault]:
    """The faults with these names, all if there are none.

    Raises:
        UsageError: a name that does not exist, with the nearest ones that do.
    """
    for name in names:
        if name not in FAULTS:
            raise unknown_name_error("fault", name, faults)
    return [FAULTS[name] for name in dict.fromkeys(names)] or list(FAULTS.values())
