"""From the variables of srun and mpirun to torchrun's: recorded environments, and every contradiction."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises

from paceline.errors import UsageError
from paceline.rank.environment import (
    check_rank_counts,
    expand_nodes,
    has_launcher_variables,
    launcher_job_id,
    tasks_of_node,
    translate_slurm_mpi_variables,
)

STEP = {  # task 3 of `srun -N 2 -n 4` in Slurm 22.05, with what surrounds it in the job
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_STEPID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[2-3]", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99", "PATH": "/bin",
}  # fmt: skip
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {  # Open MPI 4.1
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_ess_base_jobid": "400752641",
}  # fmt: skip
MPICH = {
    "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "29500",
}  # fmt: skip


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_a_slurm_step_is_understood_by_its_own_variables_not_the_jobs() -> None:
    assert translate_slurm_mpi_variables(STEP) == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n2",
        "MASTER_PORT": str(20000 + (4711 * 101 + 2) % 10000),
    }  # fmt: skip
    assert has_launcher_variables(STEP)


def test_all_ranks_of_a_step_meet_at_one_place_and_other_steps_elsewhere() -> None:
    ranks = [{**STEP, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2)} for rank in range(4)]
    places = {(world["MASTER_ADDR"], world["MASTER_PORT"]) for world in map(translate_slurm_mpi_variables, ranks)}
    assert len(places) == 1
    ports = {translate_slurm_mpi_variables({**STEP, "SLURM_STEP_ID": str(step)})["MASTER_PORT"] for step in range(50)}
    assert len(ports) == 50 and all(20000 <= int(port) < 30000 for port in ports)


def test_a_step_on_one_node_stays_on_the_loopback() -> None:
    one = {**STEP, "SLURM_STEP_NODELIST": "n2", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    assert translate_slurm_mpi_variables(one)["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "env",
    [
        {},
        without(STEP, "SLURM_STEP_ID", "SLURM_STEPID"),  # the shell of sbatch: SLURM_PROCID=0, and no srun
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # salloc's shell
        {**STEP, "SLURM_STEP_ID": "4294967290"},  # salloc's shell, where it is an "interactive step"
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_world_of_one_is_not_launched(env: dict[str, str]) -> None:
    assert translate_slurm_mpi_variables(env) == {} and not has_launcher_variables(env)


def test_the_users_meeting_place_stays() -> None:
    world = translate_slurm_mpi_variables({**STEP, "MASTER_ADDR": "ib2", "MASTER_PORT": "29500"})
    assert (world["MASTER_ADDR"], world["MASTER_PORT"], world["RANK"]) == ("ib2", "29500", "3")


def test_torchruns_variables_win_inside_a_task() -> None:
    assert translate_slurm_mpi_variables({**STEP, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}) == {}
    assert has_launcher_variables({**STEP, **TORCHRUN})
    # another launcher has started one task on each node
    assert translate_slurm_mpi_variables({**STEP, **TORCHRUN, "WORLD_SIZE": "8"}) == {}


@pytest.mark.parametrize("names", [["RANK"], ["WORLD_SIZE"], ["RANK", "WORLD_SIZE"], ["LOCAL_RANK"]])
@pytest.mark.parametrize("env", [STEP, OPEN_MPI, MPICH])
def test_torchruns_variables_in_part_beside_a_launchers_are_refused(env: dict[str, str], names: list[str]) -> None:
    with raises("variables-beside-launcher", present=names):
        translate_slurm_mpi_variables({**env, **dict.fromkeys(names, "0")})


def test_a_rank_exported_once_for_all_tasks_is_refused() -> None:
    with raises("rank-exported", value="1", task="3", size="4"):
        translate_slurm_mpi_variables({**STEP, **TORCHRUN})
    assert (
        translate_slurm_mpi_variables({**STEP, **translate_slurm_mpi_variables(STEP)}) == {}
    )  # its result in the environment


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_a_step_of_several_tasks_without_a_place_is_refused(missing: str) -> None:
    with raises("slurm-variables-missing", tasks=4):
        translate_slurm_mpi_variables(without(STEP, missing))


@pytest.mark.parametrize("wrong", [{"SLURM_PROCID": "x"}, {"SLURM_STEP_TASKS_PER_NODE": "2("}, {"SLURM_NODEID": "5"},
                                   {"SLURM_STEP_NODELIST": "n[2-"}, {"SLURM_PROCID": "-1"}])  # fmt: skip
def test_nonsense_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        translate_slurm_mpi_variables({**STEP, **wrong})


def test_open_mpi_on_one_host() -> None:
    world = translate_slurm_mpi_variables(OPEN_MPI)
    assert [world[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["1", "2", "1", "2"]
    assert world["MASTER_ADDR"] == "127.0.0.1" and 20000 <= int(world["MASTER_PORT"]) < 30000
    other = translate_slurm_mpi_variables({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "400752642"})
    assert other["MASTER_PORT"] != world["MASTER_PORT"]


def test_mpirun_inside_a_slurm_job_is_mpiruns_world() -> None:
    daemon = {**STEP, "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    assert translate_slurm_mpi_variables({**daemon, **OPEN_MPI})["RANK"] == "1"


def test_mpirun_on_several_hosts_needs_an_address() -> None:
    with raises("mpi-address-missing", size=4, here=2, option="-x MASTER_ADDR=<name or address of rank 0's node>"):
        translate_slurm_mpi_variables({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"})
    with raises("mpi-address-missing", option="-genv MASTER_ADDR <name or address of rank 0's node>"):
        translate_slurm_mpi_variables({**MPICH, "PMI_SIZE": "4"})
    there = translate_slurm_mpi_variables({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "n1"})
    assert (
        there["MASTER_ADDR"] == "n1" and there["MASTER_PORT"] == translate_slurm_mpi_variables(OPEN_MPI)["MASTER_PORT"]
    )


def test_mpich() -> None:
    assert translate_slurm_mpi_variables(MPICH)["LOCAL_WORLD_SIZE"] == "2"
    with raises("mpi-port-missing", option="-genv MASTER_PORT 29500"):
        translate_slurm_mpi_variables(without(MPICH, "MASTER_PORT"))
    with raises("mpi-variables-missing", missing=["MPI_LOCALRANKID"]):
        translate_slurm_mpi_variables(without(MPICH, "MPI_LOCALRANKID"))


def test_a_token_is_the_jobs_and_nobody_elses() -> None:
    assert launcher_job_id({}) == "" == launcher_job_id(TORCHRUN)
    assert launcher_job_id({"PACELINE_RUN_ID": "p", "TORCHELASTIC_RUN_ID": "t", **STEP}) == "p"
    assert launcher_job_id({"TORCHELASTIC_RUN_ID": "t", **STEP}) == "t"
    assert launcher_job_id({**STEP, **translate_slurm_mpi_variables(STEP)}) == "4711.2"
    assert launcher_job_id({**STEP, **TORCHRUN}) == ""  # by hand in two steps of one job: no step in common
    assert launcher_job_id(OPEN_MPI) == "400752641"


def test_half_a_job_does_not_run_as_a_whole_one() -> None:
    check_rank_counts(TORCHRUN, 2, 2)
    with raises("world-not-as-asked", wrong="WORLD_SIZE is 4, not 8 and LOCAL_WORLD_SIZE is 2, not 4"):
        check_rank_counts(TORCHRUN, 2, 4)
    with raises("world-not-as-asked", wrong="LOCAL_WORLD_SIZE is not set, not 2"):
        check_rank_counts({"WORLD_SIZE": "4"}, 2, 2)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3,7],gpu-[01-02]", "n1 n2 n3 n7 gpu-01 gpu-02"),
        ("r[1-2]n[08-10]-ib", "r1n08-ib r1n09-ib r1n10-ib r2n08-ib r2n09-ib r2n10-ib"),
        ("a.b,c[5]", "a.b c5"),
    ],
)
def test_node_lists(text: str, names: str) -> None:
    assert expand_nodes(text) == names.split()


@pytest.mark.parametrize("text", ["", "n[1-", "n]1[", "n[3-1]", "n[a-b]", "n[1-999999999]", "n[1-9999][1-9999]", "a,,b",
                                  "n[]", "a b", "n[1,]", "n[[1]]"])  # fmt: skip
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        expand_nodes(text)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6))
def test_tasks_of_each_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}" for tasks, nodes in runs)
    counts = [tasks for tasks, nodes in runs for _ in range(nodes)]
    assert [tasks_of_node(text, node) for node in range(len(counts))] == counts
    with pytest.raises(UsageError):
        tasks_of_node(text, len(counts))


@given(st.text(alphabet="n[]-,0123456789 x()", max_size=20))
def test_no_text_does_worse_than_a_refusal(text: str) -> None:
    for read in (expand_nodes, lambda text: tasks_of_node(text, 3)):
        with contextlib.suppress(UsageError):
            read(text)
