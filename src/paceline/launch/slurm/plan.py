"""The plan for a Slurm cluster: a readable batch script, which queue.py submits.

The script starts one agent on each node with srun. Users can run it: with `sbatch` the run resumes, and with `bash`
inside an allocation (salloc) the run uses the allocation.
"""

import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from paceline.errors import UsageError, plural
from paceline.launch.plan import Command, Plan, as_file, node_plan
from paceline.protocol.job import JobSpec

SIGNAL_SECONDS = 60  # Slurm may send the signal before the time limit so much too early
LONGEST_WARNING_SECONDS = 65535  # of sbatch --signal

SCRIPT = "job.sbatch"
PLAN = "plan.json"
OUTPUT = "slurm-%j.out"
CONDA = "conda:"

OURS = {  # option of sbatch -> what to say instead
    "nodes": "use --nodes",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket"),
        "one agent runs on each node and starts the workers: use --nproc",
    ),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), "use --cpus-per-rank"),
    "time": "use --time",
    "partition": "use --partition",
    # gres with another value than GPUs is the user's
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres"), "use --gpus-per-node"),
    "job-name": "it is the run's name",
    "output": "it is in the run folder",
    "error": "it is in the run folder, with the output",
    "open-mode": "output is appended, or a requeued run would lose it",
    "signal": "use --save-before",
    "requeue": "it is set: a run goes on where it was",
    "no-requeue": "a requeued run goes on where it was; to end it: paceline cancel",
    "array": "it would start the same run several times; start one run for each setting",
    "chdir": "a run starts in the folder where it was submitted",
    "wait": "use --follow",
    "parsable": "it is set",
    "test-only": "use --dry-run",
    "wrap": "the batch script is paceline's",
    **dict.fromkeys(("help", "usage"), "see `sbatch --help`"),
    "version": "see `sbatch --version`",
}


def slurm(job: JobSpec) -> Plan:
    """The plan for a Slurm cluster: a batch script, and the agents' plan.

    Raises:
        UsageError: if the job's settings contradict each other, or cannot be written into a batch script.
    """
    _check(job)
    # the script loads and activates before it starts the agents; Slurm says which node an agent is on
    plan = node_plan(replace(job, modules=(), activate=""), node=-1)
    command = Command("sbatch", ("sbatch", "--parsable", f"{job.submit_dir}/{SCRIPT}"))
    return Plan(submit=command, files={SCRIPT: batch_script(job), PLAN: as_file(plan)})


def _check(job: JobSpec) -> None:
    asked = job.slurm
    if job.min_nodes < job.nodes:
        raise UsageError(code="slurm-nodes-fixed", least=job.min_nodes, nodes=job.nodes)
    if asked.gpus_per_node and asked.gpus_per_node != job.nproc:
        raise UsageError(code="gpus-and-workers-differ", value=asked.gpus_per_node, nproc=job.nproc)
    if asked.minutes is not None and asked.minutes < 1:
        raise UsageError(code="time-too-short", value=asked.minutes)
    if not 0 <= asked.save_seconds <= LONGEST_WARNING_SECONDS:
        raise UsageError(code="save-before-out-of-range", most=LONGEST_WARNING_SECONDS, value=asked.save_seconds)
    if asked.minutes and asked.save_seconds and asked.minutes * 60 <= asked.save_seconds + SIGNAL_SECONDS:
        raise UsageError(
            code="no-time-left", minutes=asked.minutes, seconds=asked.save_seconds, early=SIGNAL_SECONDS,
            total=asked.minutes * 60,
        )  # fmt: skip
    for option in asked.options:
        check_option(option)
    texts = {"working folder": job.cwd, "run folder": job.submit_dir, "--partition": asked.partition}
    texts |= {"--python": job.python, "--activate": job.activate, "--module": "".join(job.modules)}
    for name, text in texts.items():
        check_text(name, text)
    if re.search(r"[\s()]", Path(job.python).name):
        raise UsageError(code="python-with-spaces", value=job.python)
    if "\\" in job.submit_dir:
        raise UsageError(code="backslash-in-folder", submit_dir=job.submit_dir)


def check_option(option: str) -> None:
    """Refuse an option of sbatch that paceline sets, also abbreviated, as sbatch takes it."""
    key, _, value = option.partition("=")
    check_text("--sbatch", option)
    if not re.fullmatch(r"[a-z][a-z-]*", key):
        raise UsageError(code="sbatch-not-key-value", value=option)
    meant = [own for own in OURS if own == key] or [own for own in OURS if own.startswith(key)]
    if not meant or (meant == ["gres"] and not re.search(r"(?:^|,)(?:gres:)?gpu(?:$|[:,=])", value)):
        return
    raise UsageError(code="sbatch-option-is-ours", value=option, option=meant[0], reason=OURS[meant[0]])


def check_text(name: str, text: str) -> None:
    """Refuse what would end a line; all else can be quoted."""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise UsageError(code="control-characters", name=name, value=text)


def batch_script(job: JobSpec) -> str:
    """The text of the script."""
    q, folder = shlex.quote, job.submit_dir
    setup = "\n".join(_environment(job))
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH --{option}" for option in _options(job)),
        shape=f"{plural(job.nodes, 'node')}, {plural(job.nproc, 'worker')} on each",
        setup=f"\n{setup}\n" if setup else "",
        nodes=job.nodes,
        cpus=job.nproc * job.slurm.cpus_per_rank,
        python=q(job.python),
        plan=q(f"{folder}/{PLAN}"),
        requeue=_REQUEUE,
    )


def _options(job: JobSpec) -> Iterator[str]:
    asked = job.slurm
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", job.name).strip("-.") or "run"
    yield f"job-name={name}"
    yield f"nodes={job.nodes}"
    yield "ntasks-per-node=1"
    yield f"cpus-per-task={job.nproc * asked.cpus_per_rank}"
    if asked.gpus_per_node:
        yield f"gpus-per-node={asked.gpus_per_node}"
    if asked.minutes:
        yield f"time={asked.minutes}"
    if asked.partition:
        yield f"partition={_sbatch_quote(asked.partition)}"
    yield f"output={_sbatch_quote(job.submit_dir.replace('%', '%%') + '/' + OUTPUT)}"
    yield "open-mode=append"
    yield "requeue"
    if asked.save_seconds:
        yield f"signal=B:USR1@{asked.save_seconds}"
    for option in asked.options:
        key, equals, value = option.partition("=")
        yield f"{key}{equals}{_sbatch_quote(value) if value else ''}"


def _sbatch_quote(text: str) -> str:
    """For a line of #SBATCH, in which quotes, backslashes and # are special as in a shell; $ and ` are not."""
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _environment(job: JobSpec) -> Iterator[str]:
    q = shlex.quote
    if job.cwd:
        yield f"cd -- {q(job.cwd)} || exit 2"
    if job.modules:
        yield _FIND_MODULE
        yield from (f"module load {q(name)} || exit 2" for name in job.modules)
    if job.activate.startswith(CONDA):
        yield _CONDA
        yield f"conda activate {q(job.activate.removeprefix(CONDA))} || exit 2"
    elif job.activate:
        path = job.activate if "/" in job.activate else f"./{job.activate}"  # or bash looks for it on PATH
        yield f"[ -r {q(path)} ] || {{ echo {q(f'--activate {path}: there is no such file')} >&2; exit 2; }}"
        yield f"source {q(path)}"


_FIND_MODULE = """\
# In a shell without a login the command `module` may be missing.
for file in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do
    command -v module >/dev/null || [ ! -r "$file" ] || source "$file"
done"""

_CONDA = """\
# Interactive shells know conda as a function, batch scripts do not; CONDA_EXE names the program that is behind it.
source "$("${CONDA_EXE:-conda}" info --base)/etc/profile.d/conda.sh" || exit 2"""

_SCRIPT = """\
#!/bin/bash
# A run of paceline: {shape}. Submit this file again with `sbatch`, and the run goes on from its
# newest checkpoint; inside an allocation of salloc, start it with `bash`.
{options}

# Signals first: one that comes while the environment is set up must not end this script.
#   USR1  from Slurm, when the time is nearly over: the run saves its state and waits for its next turn
#   USR2  the same without another turn
#   TERM  from scancel or preemption: Slurm signals the agents as well; this script only has to wait for them
turn='' step=''
forward() {{ [ -z "$step" ] || kill -"$1" "$step" 2>/dev/null || true; }}
trap 'turn=over; forward USR1' USR1
trap 'turn=last; forward USR2' USR2
trap 'turn=last' TERM
{setup}
set -euo pipefail  # not earlier: activate scripts read variables that are not set

# The agents meet at node 0, by its name or by one of its addresses. The batch script runs on node 0; a shell of
# salloc may run elsewhere, and that machine's addresses would be wrong.
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${{names%%$'\\n'*}}
heads=(--head "$head")
if [ "${{SLURMD_NODENAME:-}}" = "$head" ]; then
    for address in $(hostname -I || true); do heads+=(--head "$address"); done
fi

# One agent on each node. srun does not take the number of CPUs from the job, one agent's failure ends all, and what
# was loaded and activated above reaches every node.
if [ -z "$turn" ]; then
    srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task="${{SLURM_CPUS_PER_TASK:-{cpus}}}" \\
        --kill-on-bad-exit=1 --export=ALL \\
        {python} -P -m paceline.launch.agent --plan {plan} "${{heads[@]}}" &
    step=$!
    [ "$turn" != over ] || forward USR1  # it came a moment ago
fi

# A signal ends `wait` early, so it is repeated; the first agent's exit code is srun's and everybody's.
code=75
if [ -n "$step" ]; then
    while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
    code=0
    wait "$step" || code=$?
fi
{requeue}exit "$code"
"""

_REQUEUE = """
# 75: every worker has saved its state. This same script runs again when the job gets its next turn. A preemption that
# leaves the job time signals the agents, and not this script.
preempted() { [[ $(scontrol --oneliner show job "$SLURM_JOB_ID") == *' PreemptTime='[0-9]* ]]; }
if [ "$code" = 75 ] && { [ "$turn" = over ] || { [ -z "$turn" ] && preempted; }; }; then
    scontrol requeue "$SLURM_JOB_ID" || echo "not put into the queue again: to go on, sbatch this script" >&2
fi
"""
