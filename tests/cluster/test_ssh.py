"""Runs on real hosts through the user's ssh: they start, end, are stopped and cut off, and leave nothing anywhere."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cluster.conftest import need
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts
from tests.errors import codes
from tests.launch.launch_harness import wait_until

from paceline.launch.by_hand import format_commands, plan_by_hand
from paceline.launch.plan import parse_hosts
from paceline.protocol.job import JobSpec

pytestmark = pytest.mark.sample(2)

LAUNCHER = """
import json, sys
from paceline.protocol.job import JobSpec
from paceline.errors import PacelineError
from paceline.launch.plan import parse_hosts
from paceline.launch.ssh.plan import plan_ssh
from paceline.launch.supervise import run
from paceline.launch.ssh.plan import rsync_commands, run_rsync
told = json.loads(sys.argv[1])
told |= {"ssh": tuple(told["ssh"]), "argv": tuple(told["argv"]), "hosts": parse_hosts(told["hosts"])}
copied = told.pop("sync", False)
job = JobSpec(run_id="5f", threads=1, secret="5ec4" * 16, python=sys.executable, **told)
try:
    if copied:
        run_rsync(rsync_commands(job))
    sys.exit(run(plan_ssh(job)))
except PacelineError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""

WORKER = """
import os, signal, sys, time
from pathlib import Path
rank, host, here = int(os.environ["RANK"]), os.uname().nodename, Path(sys.argv[1])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "on", host, flush=True)
def forever():
    (here / f"ready-{rank}").touch()
    while True:
        time.sleep(1)
"""


@pytest.fixture
def launch(lab: Lab, ssh_hosts: SshHosts, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a launcher on n1."""

    def begin(hosts: str, worker: str, **settings: object) -> subprocess.Popen[str]:
        (tmp_path / "run").mkdir(exist_ok=True)
        script = tmp_path / "worker.py"
        script.write_text(WORKER + worker)
        nodes = len(hosts.split(","))
        told = {"argv": [sys.executable, str(script), str(tmp_path)], "hosts": hosts, "run_dir": str(tmp_path / "run")}
        told |= {"nproc": 2, "nodes": nodes, "min_nodes": nodes, "ssh": shlex.split(ssh_hosts.command)}
        words = (sys.executable, "-P", "-c", LAUNCHER, json.dumps({**told, "cwd": str(tmp_path), **settings}))
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return lab.popen("n1", *words, **pipes)

    return begin


def wait_ready(folder: Path, ranks: int, seconds: float = 30.0) -> None:
    wait_until(lambda: len(list(folder.glob("ready-*"))) >= ranks, "the workers are ready", seconds)


def log(folder: Path, rank: int) -> str:
    (path,) = folder.glob(f"run/attempt-*/rank-{rank}.log")
    return path.read_text()


def nothing_left(lab: Lab, seconds: float, hosts: tuple[str, ...] = ("n1", "n2", "n3", "n4")) -> None:
    wait_until(lambda: not any(map(lab.processes, hosts)), "no process is left", seconds)


def test_workers_of_two_hosts_are_one_run(launch, tmp_path: Path) -> None:
    run = launch("n2,n3", "")
    out, err = run.communicate(timeout=150)
    assert run.returncode == 0, err
    assert out == "rank 0 of 4 on n2\n"
    logs = [log(tmp_path, rank) for rank in range(4)]
    assert logs == [f"rank {rank} of 4 on n{2 + rank // 2}\n" for rank in range(4)]


def test_slots_of_a_hosts_file_give_each_node_its_workers(lab: Lab, launch, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("n1 slots=1\nn2 slots=3\n")
    run = launch(str(tmp_path / "hosts.txt"), "", nodes=2, min_nodes=2)
    _, err = run.communicate(timeout=150)
    assert run.returncode == 0, err
    assert log(tmp_path, 1) == "rank 1 of 4 on n2\n"


def test_a_failed_rank_on_another_host_is_named_with_its_host_and_gives_its_code(lab: Lab, launch) -> None:
    run = launch("n1,n2", "if rank == 3: sys.exit('no x.bin')\nforever()")
    _, err = run.communicate(timeout=150)
    assert run.returncode == 1, err
    assert re.search(r"rank 3 .*n2.* failed: ", err) and "no x.bin" in err
    nothing_left(lab, 3)


def test_a_stop_signal_lets_every_host_save(lab: Lab, launch, tmp_path: Path) -> None:
    saves = "for s in (2, 15): signal.signal(s, lambda *_: sys.exit(75))\nforever()"
    run = launch("n1,n2", saves)
    wait_ready(tmp_path, 4)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=150)
    assert run.returncode == 75, err
    nothing_left(lab, 3)


@pytest.mark.slow
def test_ctrl_c_while_an_agent_does_not_answer_ends_all_in_good_order(lab: Lab, launch, tmp_path: Path) -> None:
    run = launch("n1,n2", "forever()")
    wait_ready(tmp_path, 2)
    agents = [pid for pid, command in lab.processes("n2").items() if "paceline.launch.agent" in command]
    assert agents
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)
    try:
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=150)
    finally:
        for pid in agents:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert run.returncode == 128 + signal.SIGINT, err
    assert "stopped by SIGINT" in err.splitlines() and "Traceback" not in err
    nothing_left(lab, 3)


def test_a_killed_launcher_leaves_nothing_on_any_host(lab: Lab, launch, tmp_path: Path) -> None:
    run = launch("n2,n3", "for s in (2, 15): signal.signal(s, signal.SIG_IGN)\nforever()")
    wait_ready(tmp_path, 4)
    run.kill()
    run.communicate(timeout=60)
    nothing_left(lab, 10)


def test_a_dropped_ssh_connection_ends_the_run_and_names_the_host(lab: Lab, launch, tmp_path: Path) -> None:
    run = launch("n1,n2", "forever()")
    wait_ready(tmp_path, 4)
    clients = {pid: words for pid, words in lab.processes("n1").items() if " -- n2 " in words}
    assert len(clients) == 1
    os.kill(*clients, signal.SIGKILL)
    _, err = run.communicate(timeout=150)
    assert run.returncode != 0
    assert "node 1 (n2) is lost" in err
    nothing_left(lab, 5)


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_and_nothing_is_left(lab: Lab, launch, tmp_path: Path) -> None:
    run = launch("n1,n2", "forever()")
    wait_ready(tmp_path, 4)
    lab.cut("n2")
    _, err = run.communicate(timeout=150)
    assert run.returncode != 0 and "n2" in err, err
    nothing_left(lab, 3, ("n1",))
    nothing_left(lab, 40, ("n2",))


@pytest.mark.slow
def test_all_hosts_that_cannot_be_used_are_named_at_once_with_their_reasons(
    lab: Lab, ssh_hosts: SshHosts, launch, tmp_path: Path
) -> None:
    lab.deny("n4", "n1")
    unknown = tmp_path / "known_hosts"
    lines = (ssh_hosts.folder / "known_hosts").read_text().splitlines(keepends=True)
    unknown.write_text("".join(line for line in lines if not line.startswith("n3")))
    config = tmp_path / "config"
    config.write_text(ssh_hosts.config.read_text().replace(str(ssh_hosts.folder / "known_hosts"), str(unknown)))
    run = launch("n1,n2:23,n3,n4,n9", "", ssh=["ssh", "-F", str(config)])
    out, err = run.communicate(timeout=150)
    assert run.returncode == 2 and out == ""
    first, *told = err.splitlines()
    assert first.startswith("4 of 5 hosts ")
    reasons = ("sshd runs", "host key is not known", "does not answer", "name cannot be resolved")
    for line, host, reason in zip(told, ("n2", "n3", "n4", "n9"), reasons, strict=True):
        assert line.startswith(f"  {host}: ") and reason in line, line
    assert not list((tmp_path / "run").iterdir())
    nothing_left(lab, 3)


def test_a_login_that_wants_a_password_is_told_and_not_waited_for(ssh_hosts: SshHosts, launch, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        ssh_hosts.config.read_text().replace(f"IdentityFile {ssh_hosts.folder / 'id'}", "IdentityFile none")
    )
    run = launch("n2", "", ssh=["ssh", "-F", str(config)])
    _, err = run.communicate(timeout=150)
    assert run.returncode == 2 and "ssh-copy-id" in err and "Permission denied (publickey" in err, err


def test_sync_brings_the_working_folder_to_a_host_that_has_none(lab: Lab, launch, tmp_path: Path) -> None:
    need("rsync")
    code = tmp_path / "code"
    code.mkdir()
    (code / "helper.py").write_text("WORD = 'brought'\n")
    lab.hide("n2", code)
    text = "import helper; (here / f'word-{rank}').write_text(helper.WORD)"
    run = launch("n1,n2", f"sys.path.insert(0, {str(code)!r}); {text}", cwd=str(code), sync=True)
    _, err = run.communicate(timeout=150)
    assert run.returncode == 0, err
    assert [path.read_text() for path in tmp_path.glob("word-*")] == ["brought"] * 4


def test_no_secret_is_in_any_list_of_processes(lab: Lab, launch, tmp_path: Path) -> None:
    run = launch("n1,n2", "forever()", env={"MY_TOKEN": "hunter2"})
    wait_ready(tmp_path, 4)
    words = " ".join(text for host in ("n2",) for text in lab.processes(host).values())
    assert "--announce" in words and "5ec4" not in words and "hunter2" not in words
    clients = " ".join(text for text in lab.processes("n1").values() if text.startswith("ssh"))
    assert clients.count("--announce") == 2 and "5ec4" not in clients and "hunter2" not in clients
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=150)


def test_our_agents_commands_typed_on_two_hosts_are_one_run(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    folders = {"submit_dir": str(tmp_path), "run_dir": str(tmp_path / "run")}
    argv = (sys.executable, str(script), str(tmp_path))
    told = {"nodes": 2, "min_nodes": 2, "hosts": parse_hosts("n1,n2"), "torchrun": False, "secret": "ab" * 32}
    plan = plan_by_hand(JobSpec(argv, 2, "5f", 1, **told, **folders))
    (tmp_path / "plan.json").write_text(plan.files["plan.json"])
    (tmp_path / "plan.json").chmod(0o600)
    lines = [line for line in format_commands(plan).splitlines() if line and not line.startswith("#")]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [lab.popen(host, "sh", "-c", line, **pipes) for host, line in zip(("n1", "n2"), lines, strict=True)]
    texts = [node.communicate(timeout=150)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    assert "rank 0 of 4 on n1\n" in texts[0] and log(tmp_path, 3) == "rank 3 of 4 on n2\n"


STEPS = """
from paceline.protocol.control import WorkerSpec
from paceline.protocol.status_page import StatusPage
spec = WorkerSpec.from_environment()
box = StatusPage.from_descriptor(spec.page)
(here / f"ready-{spec.generation}-{rank}-on-{host}").touch()
while not (here / "enough").exists():
    box.set_step(1)
    if rank == 0 and box.get_request("regroups"):
        (here / f"saved-{spec.generation}").touch()
    if (here / f"saved-{spec.generation}").exists():
        sys.exit(75)
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_host_that_was_lost_comes_back_and_another_one_joins(lab: Lab, launch, tmp_path: Path) -> None:
    run = launch("n2,n3", STEPS, nproc=1, nodes=3, min_nodes=1)
    wait_ready(tmp_path, 2)
    lab.kill("n3")
    wait_until((tmp_path / "ready-1-0-on-n2").exists, "ready-1-0-on-n2")
    lab.boot("n3")
    wait_until((tmp_path / "ready-2-1-on-n3").exists, "ready-2-1-on-n3")
    joins = [sys.executable, "-m", "paceline", "join", str(tmp_path / "run")]
    joined = lab.popen(
        "n4", *joins, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until((tmp_path / "ready-3-2-on-n4").exists, "ready-3-2-on-n4")
    refused = lab.run("n1", *joins)
    assert (refused.returncode, codes(refused.stderr)) == (2, ["no-free-node"])
    told = lab.run("n1", sys.executable, "-m", "paceline", "status", str(tmp_path / "run")).stdout
    assert "3 in (--nodes 1:3): n2, n3, n4" in told
    (tmp_path / "enough").touch()
    _, err = run.communicate(timeout=150)
    assert run.returncode == 0, err
    assert joined.communicate(timeout=60) and joined.returncode == 0
    assert "node 1 (n3) answers" in err and ": 3 ranks on 3 nodes " in err
    assert codes(lab.run("n4", *joins).stderr) == ["run-takes-no-hosts"]
    nothing_left(lab, 5)
