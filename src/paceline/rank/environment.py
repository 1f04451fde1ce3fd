"""Translates the variables of srun and mpirun to those of torchrun, and expands Slurm's short forms. Without I/O.

Each launcher sets different variables for the rank of a process. Training reads only torchrun's:

    srun -n 4 python -m paceline train ...       SLURM_PROCID, SLURM_NTASKS, ... of the step
    mpirun -n 4 python -m paceline train ...     OMPI_COMM_WORLD_RANK, ... (Open MPI), PMI_RANK, ... (MPICH, Intel)
"""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product

from paceline.errors import UsageError
from paceline.protocol.control import FIRST_PORT, PORTS, RUN_ID

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NEEDED = [*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT"]
MPI_NAMESPACES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
FIRST_NON_SRUN_STEP_ID = 0xFFFFFFF0  # step ids from here on denote batch scripts and shells, which srun has not started
LOOPBACK = "127.0.0.1"
MAX_NODES = 100_000  # a longer list is an error and would exhaust memory
_PART = re.compile(r"[^,\[\]\s]|\[[0-9,-]+\]")
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def has_launcher_variables(env: Mapping[str, str]) -> bool:
    return any(name in env for name in RANK_VARIABLES) or bool(translate_slurm_mpi_variables(env))


def translate_slurm_mpi_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Torchrun's variables, if srun's or mpirun's variables in `env` describe several ranks; else an empty dictionary.

    Torchrun's variables take precedence. MASTER_ADDR and MASTER_PORT keep the user's values. A single process needs no
    variables: a batch script, the shell of an salloc, `srun --pty bash`, `mpirun -n 1`.
    """
    set_already = [name for name in RANK_VARIABLES if name in env]
    if len(set_already) == len(RANK_VARIABLES):
        _check_not_exported(env)
        return {}
    for launcher, read in _ENV_READERS.items():
        if variables := read(env):
            if set_already:
                size = variables["WORLD_SIZE"]
                raise UsageError(
                    code="variables-beside-launcher", present=set_already, launcher=launcher, size=size, needed=NEEDED
                )
            return variables
    return {}


def launcher_job_id(env: Mapping[str, str]) -> str:
    """A name that is equal for all ranks of a job and unique to the job; empty if there is none."""
    if given := _first_set(env, RUN_ID, "TORCHELASTIC_RUN_ID"):
        return given
    if "OMPI_COMM_WORLD_RANK" in env:
        return _first_set(env, *MPI_NAMESPACES)
    same_place = env.get("SLURM_NTASKS") == env.get("WORLD_SIZE") and env.get("SLURM_PROCID") == env.get("RANK")
    if _is_srun_step(env) and same_place:  # ranks that a user started in several steps have no common step
        return f"{env.get('SLURM_JOB_ID', '')}.{_step_id(env)}"
    return ""


def check_rank_counts(env: Mapping[str, str], nodes: int, nproc: int) -> None:
    """Check that there are `nproc` ranks on each of `nodes` nodes: a part of a job must not run as a complete job."""
    expected = {"WORLD_SIZE": nodes * nproc, "LOCAL_WORLD_SIZE": nproc}
    wrong = [f"{name} is {env.get(name, 'not set')}, not {value}" for name, value in expected.items()
             if env.get(name) != str(value)]  # fmt: skip
    if wrong:
        raise UsageError(code="world-not-as-asked", nodes=nodes, nproc=nproc, wrong=" and ".join(wrong))


def read_rank_variables(env: Mapping[str, str]) -> tuple[int, int, int, int]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE from the variables of torchrun, srun or mpirun.

    If no variable is set, the values are those of a single process: 0, 1, 0, 1.
    """
    env = {**env, **translate_slurm_mpi_variables(env)}
    present = [name for name in RANK_VARIABLES if name in env]
    if not present:
        return 0, 1, 0, 1
    if missing := [name for name in NEEDED if name not in env]:
        raise UsageError(code="variables-missing", present=present, missing=missing, needed=NEEDED)
    rank, size, local_rank, local_size = (read_int_variable(env, name) or 0 for name in RANK_VARIABLES)
    if not (rank < size and local_rank < local_size <= size):
        raise UsageError(
            code="variables-contradict", rank=rank, size=size, local_rank=local_rank, local_size=local_size
        )
    return rank, size, local_rank, local_size


def _check_not_exported(env: Mapping[str, str]) -> None:
    """Check that a batch script has not exported the variables for all tasks: RANK=$SLURM_PROCID is 0 there."""
    has_agent = any(name in env for name in ("TORCHELASTIC_RUN_ID", RUN_ID))
    if has_agent or not _is_srun_step(env) or env["WORLD_SIZE"] != env.get("SLURM_NTASKS") or env["WORLD_SIZE"] == "1":
        return
    if env["RANK"] != env.get("SLURM_PROCID"):
        task, size = env.get("SLURM_PROCID"), env["WORLD_SIZE"]
        raise UsageError(code="rank-exported", value=env["RANK"], task=task, size=size)


def _from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    if not _is_srun_step(env):
        return {}
    size = read_int_variable(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if size is None or size == 1:
        return {}
    names = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"
    rank, local_rank, node = (read_int_variable(env, name) for name in names)
    tasks = _first_set(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    node_list = _first_set(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if rank is None or local_rank is None or node is None or not tasks or not node_list:
        raise UsageError(code="slurm-variables-missing", tasks=size)
    nodes = expand_nodes(node_list)
    job, step = read_int_variable(env, "SLURM_JOB_ID", "SLURM_JOBID") or 0, _step_id(env)
    # not SLURM_LAUNCH_NODE_IPADDR: srun often runs on a login node
    address = LOOPBACK if len(nodes) == 1 else nodes[0]
    counts = rank, size, local_rank, tasks_of_node(tasks, node)
    return _torchrun_variables(env, counts, address, FIRST_PORT + (job * 101 + step) % PORTS)


def _from_mpi(env: Mapping[str, str], starter: str, names: Sequence[str], to_set: str) -> dict[str, str]:
    """`names` are the variables in the order of COUNTS; `to_set` is the launcher's option that sets a variable."""
    present = [name for name in names if name in env]
    if not present or read_int_variable(env, names[1]) == 1:
        return {}
    rank, size, local_rank, local_size = (read_int_variable(env, name) for name in names)
    if rank is None or size is None or local_rank is None or local_size is None:
        missing = [name for name in names if name not in env]
        raise UsageError(
            code="mpi-variables-missing", present=present, missing=missing, launcher=starter, needed=NEEDED
        )
    if local_size < size and "MASTER_ADDR" not in env:
        option = to_set.format("MASTER_ADDR", "<name or address of rank 0's node>")
        raise UsageError(code="mpi-address-missing", launcher=starter, size=size, here=local_size, option=option)
    namespace = _first_set(env, *MPI_NAMESPACES)
    if not namespace and "MASTER_PORT" not in env:
        raise UsageError(code="mpi-port-missing", launcher=starter, option=to_set.format("MASTER_PORT", 29500))
    port = FIRST_PORT + zlib.crc32(namespace.encode()) % PORTS  # hash() differs between processes
    return _torchrun_variables(env, (rank, size, local_rank, local_size), LOOPBACK, port)


def _torchrun_variables(env: Mapping[str, str], counts: Sequence[int], address: str, port: int) -> dict[str, str]:
    return {name: str(value) for name, value in zip(RANK_VARIABLES, counts, strict=True)} | {
        "MASTER_ADDR": env.get("MASTER_ADDR") or address,
        "MASTER_PORT": env.get("MASTER_PORT") or str(port),
    }


def _first_set(env: Mapping[str, str], *names: str) -> str:
    return next((env[name] for name in names if env.get(name)), "")


def _is_srun_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process. The shells of sbatch and salloc have the job's variables, but no step."""
    return 0 <= _step_id(env) < FIRST_NON_SRUN_STEP_ID


def _step_id(env: Mapping[str, str]) -> int:
    step = read_int_variable(env, "SLURM_STEP_ID", "SLURM_STEPID")
    return -1 if step is None else step


def read_int_variable(env: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if name not in env:
            continue
        if not re.fullmatch(r"[0-9]{1,18}", env[name]):
            raise UsageError(code="variable-not-a-number", name=name, value=env[name])
        return int(env[name])
    return None


_OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
_PMI = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
_ENV_READERS: Mapping[str, Callable[[Mapping[str, str]], dict[str, str]]] = {
    "mpirun (Open MPI)": partial(_from_mpi, starter="mpirun", names=_OPEN_MPI, to_set="-x {}={}"),
    "srun": _from_slurm,
    "mpiexec (PMI)": partial(_from_mpi, starter="mpiexec", names=_PMI, to_set="-genv {} {}"),
}


def expand_nodes(text: str) -> list[str]:
    """Expand a node list of Slurm, in its order: `n[1-3,7],gpu-[01-02]` -> n1 n2 n3 n7 gpu-01 gpu-02."""
    names: list[str] = []
    for entry in re.split(r",(?![^\[]*\])", text):
        parts = _PART.findall(entry)
        if not entry or "".join(parts) != entry:
            raise UsageError(code="node-list-invalid", value=text)
        choices = [list(_expand_ranges(part[1:-1], text)) if part[0] == "[" else [part] for part in parts]
        for combination in product(*choices):
            names.append("".join(combination))
            if len(names) > MAX_NODES:
                raise UsageError(code="node-list-too-long", value=text, most=MAX_NODES)
    return names


def _expand_ranges(text: str, node_list: str) -> Iterator[str]:
    for entry in text.split(","):
        match = _RANGE.fullmatch(entry)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, -1)
        if match is None or not 0 <= last - first < MAX_NODES:
            raise UsageError(code="node-range-invalid", value=node_list, range=entry)
        yield from (str(number).zfill(len(match[1])) for number in range(first, last + 1))


def tasks_of_node(text: str, node: int) -> int:
    """The number of tasks on node `node` (from 0). `2(x3),1` means 2 on each of three nodes, and 1 on the fourth."""
    nodes_left = node
    for entry in text.split(","):
        match = _TASKS.fullmatch(entry)
        if match is None:
            raise UsageError(code="tasks-per-node-invalid", value=text)
        nodes_left -= int(match[2] or 1)
        if nodes_left < 0:
            return int(match[1])
    raise UsageError(code="tasks-per-node-too-short", value=text, node=node)
