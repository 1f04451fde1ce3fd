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
from paceline.launch.plan import Command, Plan, format_plan_file, node_plan
from paceline.protocol.job import JobSpec

SIGNAL_MARGIN_SECONDS = 60  # Slurm may send the signal before the time limit too early by this time
LONGEST_WARNING_SECONDS = 65535  # limit of sbatch --signal

SCRIPT_FILE = "job.sbatch"
PLAN_FILE = "plan.json"
OUTPUT_FILE_PATTERN = "slurm-%j.out"
CONDA_PREFIX = "conda:"

RESERVED_OPTIONS = {  # option of sbatch that paceline sets -> remedy or reason
    "nodes": "use --nodes",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket"),
        "one agent runs on each node and starts the workers: use --nproc",
    ),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), "use --cpus-per-rank"),
    "time": "use --time",
    "partition": "use --partition",
    # only for GPUs: the user may request other resources with gres
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres"), "use --gpus-per-node"),
    "job-name": "it is the name of the run",
    "output": "it is in the run folder",
    "error": "it is in the run folder, with the output",
    "open-mode": "output is appended, or a requeued run would lose it",
    "signal": "use --save-before",
    "requeue": "it is set: a requeued run resumes",
    "no-requeue": "a requeued run resumes; to end it, use `paceline cancel`",
    "array": "it would start the same run several times; start one run for each setting",
    "chdir": "a run starts in the folder where it was submitted",
    "wait": "use --follow",
    "parsable": "it is set",
    "test-only": "use --dry-run",
    "wrap": "the batch script is paceline's",
    **dict.fromkeys(("help", "usage"), "see `sbatch --help`"),
    "version": "see `sbatch --version`",
}


def plan_slurm(job: JobSpec) -> Plan:
    _check(job)
    # The script loads modules and activates the environment itself. Slurm tells each agent the number of its node
    plan = node_plan(replace(job, modules=(), activate="", queues_again=True), node=-1)
    command = Command("sbatch", ("sbatch", "--parsable", f"{job.submit_dir}/{SCRIPT_FILE}"))
    return Plan(submit_command=command, files={SCRIPT_FILE: batch_script(job), PLAN_FILE: format_plan_file(plan)})


def _check(job: JobSpec) -> None:
    alloc = job.slurm
    if job.min_nodes < job.nodes:
        raise UsageError(code="slurm-nodes-fixed", least=job.min_nodes, nodes=job.nodes)
    if alloc.gpus_per_node and alloc.gpus_per_node != job.nproc:
        raise UsageError(code="gpus-and-workers-differ", value=alloc.gpus_per_node, nproc=job.nproc)
    if alloc.minutes is not None and alloc.minutes < 1:
        raise UsageError(code="time-too-short", value=alloc.minutes)
    if not 0 <= alloc.save_seconds <= LONGEST_WARNING_SECONDS:
        raise UsageError(code="save-before-out-of-range", most=LONGEST_WARNING_SECONDS, value=alloc.save_seconds)
    if alloc.minutes and alloc.save_seconds and alloc.minutes * 60 <= alloc.save_seconds + SIGNAL_MARGIN_SECONDS:
        raise UsageError(
            code="no-time-left", minutes=alloc.minutes, seconds=alloc.save_seconds, early=SIGNAL_MARGIN_SECONDS,
            total=alloc.minutes * 60,
        )  # fmt: skip
    for option in alloc.options:
        check_option(option)
    texts = {"working folder": job.cwd, "run folder": job.submit_dir, "--partition": alloc.partition}
    texts |= {"--python": job.python, "--activate": job.activate, "--module": "".join(job.modules)}
    for name, text in texts.items():
        check_no_control_characters(name, text)
    if re.search(r"[\s()]", Path(job.python).name):
        raise UsageError(code="python-with-spaces", value=job.python)
    if "\\" in job.submit_dir:
        raise UsageError(code="backslash-in-folder", submit_dir=job.submit_dir)


def check_option(option: str) -> None:
    """Raise UsageError for an option of sbatch that paceline sets. sbatch accepts abbreviations, so they count."""
    key, _, value = option.partition("=")
    check_no_control_characters("--sbatch", option)
    if not re.fullmatch(r"[a-z][a-z-]*", key):
        raise UsageError(code="sbatch-not-key-value", value=option)
    matches = [key] if key in RESERVED_OPTIONS else [name for name in RESERVED_OPTIONS if name.startswith(key)]
    if not matches or (matches == ["gres"] and not re.search(r"(?:^|,)(?:gres:)?gpu(?:$|[:,=])", value)):
        return
    raise UsageError(code="sbatch-option-is-ours", value=option, option=matches[0], reason=RESERVED_OPTIONS[matches[0]])


def check_no_control_characters(name: str, text: str) -> None:
    """Raise UsageError for control characters, which could end a line. All other characters can be quoted."""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise UsageError(code="control-characters", name=name, value=text)


def batch_script(job: JobSpec) -> str:
    q, folder = shlex.quote, job.submit_dir
    setup = "\n".join(_environment(job))
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH --{option}" for option in _options(job)),
        shape=f"{plural(job.nodes, 'node')}, {plural(job.nproc, 'worker')} on each",
        setup=f"\n{setup}\n" if setup else "",
        nodes=job.nodes,
        cpus=job.nproc * job.slurm.cpus_per_rank,
        python=q(job.python),
        plan=q(f"{folder}/{PLAN_FILE}"),
        requeue=_REQUEUE,
    )


def _options(job: JobSpec) -> Iterator[str]:
    alloc = job.slurm
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", job.name).strip("-.") or "run"
    yield f"job-name={name}"
    yield f"nodes={job.nodes}"
    yield "ntasks-per-node=1"
    yield f"cpus-per-task={job.nproc * alloc.cpus_per_rank}"
    if alloc.gpus_per_node:
        yield f"gpus-per-node={alloc.gpus_per_node}"
    if alloc.minutes:
        yield f"time={alloc.minutes}"
    if alloc.partition:
        yield f"partition={_sbatch_quote(alloc.partition)}"
    yield f"output={_sbatch_quote(job.submit_dir.replace('%', '%%') + '/' + OUTPUT_FILE_PATTERN)}"
    yield "open-mode=append"
    yield "requeue"
    if alloc.save_seconds:
        yield f"signal=B:USR1@{alloc.save_seconds}"
    for option in alloc.options:
        key, equals, value = option.partition("=")
        yield f"{key}{equals}{_sbatch_quote(value) if value else ''}"


def _sbatch_quote(text: str) -> str:
    """Quote a value for an #SBATCH line: quotes, backslashes and # are special as in a shell, $ and ` are not."""
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
    if job.activate.startswith(CONDA_PREFIX):
        yield _CONDA
        yield f"conda activate {q(job.activate.removeprefix(CONDA_PREFIX))} || exit 2"
    elif job.activate:
        path = job.activate if "/" in job.activate else f"./{job.activate}"  # without a slash, bash searches PATH
        yield f"[ -r {q(path)} ] || {{ echo {q(f'--activate {path}: no such file')} >&2; exit 2; }}"
        yield f"source {q(path)}"


_FIND_MODULE = """\
# A non-login shell may not have the command `module`.
for file in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do
    command -v module >/dev/null || [ ! -r "$file" ] || source "$file"
done"""

_CONDA = """\
# Interactive shells have a function `conda`, batch scripts do not. CONDA_EXE is the path of its program.
source "$("${CONDA_EXE:-conda}" info --base)/etc/profile.d/conda.sh" || exit 2"""

_SCRIPT = """\
#!/bin/bash
# A run of paceline: {shape}. Submit this file again with `sbatch` to resume the run from its
# newest checkpoint. Inside an allocation of salloc, start it with `bash`.
{options}

# Set up signal handlers first: a signal during the setup of the environment must not end this script.
#   USR1  from Slurm, shortly before the time limit: the run saves its state and is queued again
#   USR2  the same without queuing again
#   TERM  from scancel or preemption: Slurm also signals the agents, and this script waits for them
turn='' step=''
forward() {{ [ -z "$step" ] || kill -"$1" "$step" 2>/dev/null || true; }}
trap 'turn=over; forward USR1' USR1
trap 'turn=last; forward USR2' USR2
trap 'turn=last' TERM
{setup}
set -euo pipefail  # not earlier: activate scripts may read unset variables

# The agents connect to node 0 by its name or by one of its addresses. The batch script runs on node 0. A shell of
# salloc may run on a different machine, whose addresses would be wrong.
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
node0=${{names%%$'\\n'*}}
options=(--node0 "$node0")
if [ "${{SLURMD_NODENAME:-}}" = "$node0" ]; then
    for address in $(hostname -I || true); do options+=(--node0 "$address"); done
fi

# One agent on each node. srun does not read the number of CPUs from the job, so it is passed. The failure of an agent
# ends all agents. The environment of this script reaches every node.
if [ -z "$turn" ]; then
    srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task="${{SLURM_CPUS_PER_TASK:-{cpus}}}" \\
        --kill-on-bad-exit=1 --export=ALL \\
        {python} -P -m paceline.launch.agent --plan {plan} "${{options[@]}}" &
    step=$!
    [ "$turn" != over ] || forward USR1  # the signal came before srun started
fi

# A signal ends `wait` early, so it is repeated. srun ends with the exit code of the first agent.
code=75
if [ -n "$step" ]; then
    while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
    code=0
    wait "$step" || code=$?
fi
{requeue}exit "$code"
"""

_REQUEUE = """
# 75: every worker has saved its state. Slurm runs this script again when the requeued job starts. A preemption with a
# grace time signals the agents, and not this script.
preempted() { [[ $(scontrol --oneliner show job "$SLURM_JOB_ID") == *' PreemptTime='[0-9]* ]]; }
if [ "$code" = 75 ] && { [ "$turn" = over ] || { [ -z "$turn" ] && preempted; }; }; then
    scontrol requeue "$SLURM_JOB_ID" || echo "the job was not requeued. To resume, run sbatch with this script" >&2
fi
"""
