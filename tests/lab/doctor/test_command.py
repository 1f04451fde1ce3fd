"""`paceline doctor` on this machine, and what it refuses."""

import json
import shlex
from pathlib import Path

import pytest

from paceline.cli.doctor import main
from paceline.errors import UsageError
from paceline.lab.doctor.survey import PROGRAM
from paceline.launch.ssh.plan import session_commands
from paceline.protocol.job import Host


def test_one_machine_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--quick", "--json", "--run-dir", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in report["checks"] if check["name"] != "gpus"] == [
        "hosts", "software", "resources", "run folder", "disk",
    ]  # fmt: skip
    assert code == (1 if report["errors"] else 0)


def test_a_line_for_each_check_and_a_remedy_for_each_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick", "--nproc", "999", "--run-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("warning resources"))
    assert "999 workers x 1 threads" in lines[at]
    assert lines[at + 1].strip().startswith("-> use --nproc")
    assert "0 errors" in lines[-1]


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", "--run-dir", "/proc/nowhere"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert [finding["severity"] for finding in checks["run folder"]["findings"]] == ["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--on", "ssh"], "needs --hosts"),
        (["--hosts", "n1"], "--hosts is for --on ssh"),
        (["--nodes", "2"], "--nodes is for --on slurm"),
        (["--nproc", "0"], "at least 1, got 0"),
        (["--on", "ssh", "--hosts", "n1", "--ssh", ""], "must be a command"),
        (["--on", "ssh", "--hosts", "n1", "--ssh", "/no/ssh -F x"], "no such program"),
        (["--on", "ssh", "--hosts", "n1", "--ssh", "ssh 'x"], "is not a valid shell command"),
        (["--on", "ssh", "--hosts", "n1,-oProxyCommand=id"], "-oProxyCommand"),
        (["mnist-cnn"], "mnist-cnn"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_started(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        main(arguments)


def test_within_an_allocation_of_another_shape_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    with pytest.raises(UsageError, match="Slurm job 7, which has 2 nodes"):
        main(["--on", "slurm", "--nodes", "3"])


def test_nothing_of_the_users_but_python_is_on_a_command_line() -> None:
    python = "/home/me/a b'; touch /tmp/x; '/python"
    (command,) = session_commands(("ssh", "-F", "c"), (Host("me@n1", 2222),), python, *PROGRAM)
    assert command.name == "n1"
    assert command.argv[:3] == ("ssh", "-F", "c")
    assert command.argv[-4:-1] == ("2222", "--", "me@n1")
    assert shlex.split(command.argv[-1]) == ["exec", python, *PROGRAM]
