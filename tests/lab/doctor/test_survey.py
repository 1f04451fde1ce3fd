"""A host that is slow, noisy, dying or not there ends its session alone, in bounded time, with words that say why."""

import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.lab.doctor import host as m
from paceline.lab.doctor.survey import PROGRAM, open_host_programs
from paceline.launch.plan import Command

HEALTHY = Command("n1", (sys.executable, *PROGRAM))


def stub(name: str, script: str) -> Command:
    return Command(name, ("sh", "-c", script))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo its end >&2; exit 3", "exit code 3: its end"),
        ("exec sleep 60", "did not answer in time"),
        ('read line; echo \'{"refused": "never heard of it"}\'; exec cat', "never heard of it"),
        ("yes noise", "not an answer: 'noise'"),
        ("tr '\\0' x < /dev/zero", "did not answer in time|exit code"),
    ],
)
def test_a_bad_session_is_lost_alone_and_says_why(script: str, words: str) -> None:
    with open_host_programs([stub("n2", script), HEALTHY]) as programs:
        answers = programs.ask(dict.fromkeys(("n1", "n2"), m.TimeRequest()), m.TimeAnswer, 2.0)
        assert list(answers) == ["n1"]
        assert any(part in programs.lost["n2"] for part in words.split("|")), programs.lost["n2"]
        assert programs.ask(dict.fromkeys(("n1", "n2"), m.TimeRequest()), m.TimeAnswer, 2.0).keys() == {"n1"}


def test_noise_of_a_login_shell_is_skipped() -> None:
    script = f"echo Welcome; echo; exec {shlex.join(HEALTHY.argv)}"
    with open_host_programs([stub("n2", script)]) as programs:
        assert programs.ask({"n2": m.TimeRequest()}, m.TimeAnswer, 10.0)
        assert programs.lost == {}


def test_a_program_that_is_not_there_is_told() -> None:
    with open_host_programs([Command("n2", ("/no/such/ssh", "n2"))]) as programs:
        assert programs.ask({"n2": m.TimeRequest()}, m.TimeAnswer, 1.0) == {}
        assert "/no/such/ssh" in programs.lost["n2"] and os.strerror(errno.ENOENT) in programs.lost["n2"]


def test_all_hosts_are_asked_at_the_same_time(tmp_path: Path) -> None:
    """Each answers when all have been asked."""
    all_asked = f"while [ $(ls {tmp_path} | wc -l) -lt 5 ]; do sleep 0.05; done"
    slow = f"read line; touch {tmp_path}/$$; {all_asked}; echo '{{\"wall_seconds\": 1}}'; exec cat"
    with open_host_programs([stub(f"n{i}", slow) for i in range(5)]) as programs:
        answers = programs.ask(
            {session.name: m.TimeRequest() for session in programs._sessions.all}, m.TimeAnswer, 15.0
        )
        assert len(answers) == 5


DYING = """
import os, sys, time
from paceline.lab.doctor.survey import PROGRAM, open_host_programs
from paceline.launch.plan import Command
with open_host_programs([Command("n1", (sys.executable, *PROGRAM))]) as programs:
    print(programs._sessions.all[0].process.pid, flush=True)
    time.sleep(60)
"""


def test_a_host_program_ends_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", DYING], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        pid = int(launcher.stdout.readline())
        os.kill(launcher.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
