import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.errors import raises

from paceline.cli.jobs import make_job_spec
from paceline.config.settings import ClusterConfig
from paceline.errors import UsageError
from paceline.launch.plan import format_plan, parse_hosts
from paceline.launch.ssh.plan import plan_ssh, rsync_commands, run_rsync
from paceline.launch.ssh.sessions import why_lost, why_no_agent
from paceline.protocol.job import Host, JobSpec, node0_ports

OPTIONS = (
    "-T -x -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 "
    "-o ControlMaster=no -o ClearAllForwardings=yes -o RemoteCommand=none"
)


def job_on(names: str, **settings: object) -> JobSpec:
    parsed = parse_hosts(names)
    told = {"argv": ("python", "train.py"), "nproc": 2, "run_id": "5f", "threads": 1, "python": "/env/bin/python"}
    return JobSpec(**{**told, "hosts": parsed, "nodes": len(parsed), "min_nodes": len(parsed), **settings})  # type: ignore[arg-type]


def test_the_command_lines_of_two_hosts() -> None:
    plan = plan_ssh(job_on("me@n1,n2:2222", ssh=("ssh", "-F", "my config")))
    remote = "exec /env/bin/python -P -m paceline.launch.agent --announce"
    assert [shlex.join(command.argv) for command in plan.agents] == [
        f"ssh -F 'my config' {OPTIONS} -- me@n1 '{remote}'",
        f"ssh -F 'my config' {OPTIONS} -p 2222 -- n2 '{remote}'",
    ]
    assert [command.name for command in plan.agents] == ["n1", "n2"]


def test_each_node_is_told_who_it_is_and_where_node_0_is() -> None:
    hosts = (Host("me@n1"), Host("n2", None, 5))
    plan = plan_ssh(job_on("n1,n2", hosts=hosts, run_dir="/runs/a", min_nodes=1, secret="ab" * 32))
    first, second = plan.nodes
    assert (first.node, first.nproc, second.node, second.nproc) == (0, 2, 1, 5)
    for node in plan.nodes:
        assert (node.nodes, node.min_nodes, node.node0, node.hosts) == (2, 1, ("n1",), hosts)
        assert (node.run_dir, node.attempt_dir, node.secret, node.silence_seconds) == ("/runs/a", "", "ab" * 32, 30.0)


def test_nothing_secret_is_on_a_command_line_or_in_the_description() -> None:
    job = job_on("n1,n2", secret="5ec4e7" * 8, env={"HF_TOKEN": 'hunter"2', "PLAIN": "seen"}, argv=("python", "hidden"))
    plan = plan_ssh(job)
    lines = " ".join(word for command in plan.agents for word in (*command.argv, *command.env.values()))
    assert not any(word in lines for word in ("5ec4e7", "hunter", "seen", "hidden"))
    text = format_plan(plan)
    assert "5ec4e7" not in text and "hunter" not in text and '"secret": "…"' in text and '"PLAIN": "seen"' in text


def test_ports_of_node_0_are_the_asked_one_or_eight_of_the_run() -> None:
    assert plan_ssh(job_on("n1,n2", port=29500)).nodes[0].node0_ports == (29500,)
    ports = plan_ssh(job_on("n1,n2")).nodes[1].node0_ports
    assert len(set(ports)) == 8 and all(20000 <= port <= 29999 for port in ports)
    assert (
        ports
        == plan_ssh(job_on("n3,n4")).nodes[0].node0_ports
        != plan_ssh(job_on("n1,n2", run_id="60")).nodes[0].node0_ports
    )


@given(st.text(max_size=30))
def test_ports_are_eight_for_every_run(run_id: str) -> None:
    ports = node0_ports(JobSpec(("x",), 1, run_id, 1))
    assert len(set(ports)) == 8 and all(20000 <= port <= 29999 for port in ports)


def test_hosts_and_nodes_that_contradict_are_refused() -> None:
    for cluster, code in (({}, "ssh-without-hosts"), ({"hosts": "n1,n2", "nodes": "3"}, "nodes-and-hosts-differ")):
        with raises(code):
            make_job_spec(ClusterConfig(on="ssh", **cluster), 2)  # type: ignore[arg-type]


HOSTILE = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)


@settings(max_examples=30, deadline=None)
@given(HOSTILE.filter(lambda text: "/" not in text and text not in (".", "..")))
def test_no_path_of_python_can_inject_a_command(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder, name)
        stub.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
        stub.chmod(0o755)
        line = plan_ssh(job_on("n1", python=str(stub))).agents[0].argv[-1]
        done = subprocess.run(["sh", "-c", line], capture_output=True, timeout=10, check=True)
        assert done.stdout.split(b"\0") == [b"-P", b"-m", b"paceline.launch.agent", b"--announce", b""]
        assert [path.name for path in Path(folder).iterdir()] == [name] and done.stderr == b""


@given(HOSTILE)
def test_the_host_is_one_word_after_the_options(name: str) -> None:
    argv = plan_ssh(job_on("n1", hosts=(Host(name),))).agents[0].argv
    assert argv[-3] == "--" and len(argv) == len(shlex.split(OPTIONS)) + 4


def test_ipv6_goes_to_ssh_without_brackets() -> None:
    assert plan_ssh(job_on("me@[fe80::1]:22")).agents[0].argv[-2] == "me@fe80::1"


# ---- --sync ------------------------------------------------------------------------------------------------------

STUB_SSH = """#!{python}
import os, sys
host = sys.argv[sys.argv.index("n1")] if "n1" in sys.argv else sys.argv[-2]
words = sys.argv[sys.argv.index(host) + 1:]
print(sys.argv[1:], file=open({log!r}, "a"))
os.execvp("sh", ["sh", "-c", " ".join(words)])
"""


@pytest.mark.needs("rsync")
def test_the_working_folder_reaches_the_host_and_nothing_there_is_deleted(tmp_path: Path) -> None:
    here, there = tmp_path / "it's $(touch bad)", tmp_path / "there"
    for name in ("train.py", ".git/HEAD", ".venv/x", "runs/r/log", "sub/runs/kept", "sub/__pycache__/x"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    there.mkdir()
    (there / "theirs").touch()
    log = tmp_path / "log"
    (tmp_path / "a 'stub' ssh").write_text(STUB_SSH.format(python=sys.executable, log=str(log)))
    (tmp_path / "a 'stub' ssh").chmod(0o755)
    (command,) = rsync_commands(
        job_on("n1:2222", cwd=str(here), ssh=(str(tmp_path / "a 'stub' ssh"), "-F", 'my "config'))
    )
    assert command.argv[-1] == f"n1:{here}/" and "--delete" not in command.argv
    redirected = (*command.argv[:-1], f"n1:{there}/")  # both ends are on this machine
    run_rsync([type(command)(command.name, redirected)])
    found = sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file())
    assert found == ["sub/runs/kept", "theirs", "train.py"]
    told = eval(log.read_text().splitlines()[0])
    assert told[:2] == ["-F", 'my "config'] and "BatchMode=yes" in told and told[told.index("-p") + 1] == "2222"


def test_every_host_that_cannot_be_copied_to_is_named() -> None:
    commands = rsync_commands(job_on("n1,n2", cwd="/work"))
    wrong = [type(c)(c.name, ("sh", "-c", f"echo no space on {c.name} >&2; exit 11")) for c in commands]
    with pytest.raises(UsageError) as caught:
        run_rsync(wrong)
    assert "n1: no space on n1" in str(caught.value) and "n2: no space on n2" in str(caught.value)
    with raises("no-rsync"):
        run_rsync([type(commands[0])("n1", ("/no/such/rsync",))])
    with raises("sync-relative-folder"):
        rsync_commands(job_on("n1", cwd=""))


# ---- why a host has no agent ----

ARGV = ("ssh", "-F", "mine", "-T", "-x", "-p", "2222", "--", "me@n2", "exec /env/python -P -m paceline.launch.agent")


@pytest.mark.parametrize(
    ("code", "words", "told"),
    [
        (255, "me@n2: Permission denied (publickey,password).", "ssh-copy-id"),
        (255, "No ED25519 host key is known for n2 and you have requested strict checking.", "ssh-keyscan"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R"),
        (255, "ssh: Could not resolve hostname n2: Name or service not known", "cannot be resolved"),
        (255, "ssh: connect to host n2 port 22: Connection refused", "sshd runs"),
        (255, "ssh: connect to host n2 port 22: No route to host", "no route to it"),
        (255, "ssh: connect to host n2 port 22: Connection timed out", "does not answer"),
        (255, "kex_exchange_identification: Connection closed by remote host", "MaxStartups"),
        (255, "", "ssh -F mine -p 2222 me@n2 true"),
        (127, "sh: 1: exec: /env/python: not found", "no Python at /env/python"),
        (126, "sh: /env/python: Permission denied", "no Python at /env/python"),
        (1, "/env/python: Error while finding module specification for 'paceline.launch.agent' (ModuleNotFoundError: "
            "No module named 'paceline')", "paceline is not installed for /env/python"),
        (1, "This account is currently not available.", "exit code 1"),
        (None, "", "no agent has answered in time"),
    ],
)  # fmt: skip
def test_each_refusal_has_its_remedy(code: int | None, words: str, told: str) -> None:
    text = why_no_agent(ARGV, code, words.encode())
    assert told in text
    if words:
        assert words.splitlines()[0][:40] in text or words.splitlines()[-1][:40] in text


def test_hostile_words_of_a_host_are_cleaned_and_bounded() -> None:
    text = why_no_agent(ARGV, 3, b"\x1b[2J\x07" + b"z" * 5000)
    assert "\x1b" not in text and "\x07" not in text and len(text) < 500


def test_why_a_session_was_lost() -> None:
    cause = "Timeout, server n2 not responding."
    assert why_lost(255, f"step 7\n{cause}\r\n".encode()) == f"ssh: {cause}"
    assert "step 7" not in why_lost(255, b"step 7\n") and "signal 9" in why_lost(-9, b"")
