"""What bash makes of modules, activate scripts and conda, with real shells and what they really source."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.errors import raises

from paceline.errors import UsageError
from paceline.host import shell_environment
from paceline.host.shell_environment import activate_environment, parse_env_options

BASE = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PWD": "/somewhere", "KEPT": "line one\nline two"}

MODULE = """
module() {
  echo "loading $2"; echo "loading $2" >&2
  case $2 in
    gcc/*) export CC=gcc-${2#gcc/} LOADED="${LOADED:+$LOADED:}$2";;
    cuda) export CUDA_HOME=/opt/cuda LOADED="${LOADED:+$LOADED:}$2";;
    ancient) echo "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for 'ancient'" >&2;;
    *) echo "Lmod has detected the following error: unknown: $2" >&2; return 1;;
  esac
}
"""


@pytest.fixture
def with_modules(tmp_path: Path) -> dict[str, str]:
    init = tmp_path / "modules.sh"
    init.write_text(MODULE)
    return {**BASE, "BASH_ENV": str(init)}


def script(folder: Path, text: str, name: str = "activate.sh") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_modules_are_loaded_in_order_and_their_words_do_no_harm(with_modules: dict[str, str]) -> None:
    after = activate_environment(["gcc/12", "cuda"], "", {}, with_modules)
    assert after == {**with_modules, "CC": "gcc-12", "CUDA_HOME": "/opt/cuda", "LOADED": "gcc/12:cuda"}


def test_a_module_that_is_not_there_is_named_also_where_the_system_fails_with_status_0(
    with_modules: dict[str, str],
) -> None:
    with raises("module-not-loaded", module="nope") as caught:
        activate_environment(["cuda", "nope"], "", {}, with_modules)
    assert "unknown: nope" in str(caught.value)
    with raises("module-not-loaded", module="ancient"):
        activate_environment(["ancient"], "", {}, with_modules)


def test_no_module_command_is_said() -> None:
    with raises("module-command-missing"):
        activate_environment(["cuda"], "", {}, BASE)


def test_the_module_systems_own_init_is_found(tmp_path: Path) -> None:
    script(tmp_path, MODULE, "init/bash")
    after = activate_environment(["cuda"], "", {}, {**BASE, "MODULESHOME": str(tmp_path)})
    assert after["CUDA_HOME"] == "/opt/cuda"


def test_an_activate_script_may_read_unset_variables_talk_and_fail_in_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'echo noise; export SEEN="[$NEVER_SET]" ODD=$\'a\\nb=c\'; answer=7; cd /; [ -z "$SEEN" ]'
    after = activate_environment([], script(tmp_path, text), {}, BASE)
    assert after == {**BASE, "SEEN": "[]", "ODD": "a\nb=c"}
    assert re.search("status 1.*noise", capsys.readouterr().err)


def test_a_script_that_ends_the_shell_is_refused(tmp_path: Path) -> None:
    with raises("activate-ended-bash", status=3, said="\nlicence expired"):
        activate_environment([], script(tmp_path, "echo licence expired; exit 3"), {}, BASE)


def test_a_real_venv_is_activated(tmp_path: Path) -> None:
    venv = tmp_path / "a venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=150)
    after = activate_environment([], str(venv / "bin" / "activate"), {}, BASE)
    assert (after["VIRTUAL_ENV"], after["PATH"]) == (str(venv), f"{venv}/bin:{BASE['PATH']}")


CONDA = """
conda() {
  [ "$2" = good ] || { echo "EnvironmentNameNotFound: $2" >&2; return 1; }
  export CONDA_PREFIX="$CONDA_ROOT_SEEN/envs/$2$CONDA_NEVER_SET"
}
export CONDA_ROOT_SEEN=ok
"""


@pytest.fixture
def with_conda(tmp_path: Path) -> dict[str, str]:
    script(tmp_path, CONDA, "conda root/etc/profile.d/conda.sh")
    program = Path(script(tmp_path, "#!/bin/sh\n", "conda root/bin/conda"))
    program.chmod(0o755)
    return {**BASE, "PATH": f"{program.parent}:/usr/bin:/bin"}


def test_conda_is_sourced_where_its_program_lies(with_conda: dict[str, str]) -> None:
    assert activate_environment([], "conda:good", {}, with_conda)["CONDA_PREFIX"] == "ok/envs/good"
    by_variable = {**BASE, "CONDA_EXE": with_conda["PATH"].partition(":")[0] + "/conda"}
    assert activate_environment([], "conda:good", {}, by_variable)["CONDA_PREFIX"] == "ok/envs/good"


def test_an_unknown_conda_environment_and_a_missing_conda_are_named(with_conda: dict[str, str]) -> None:
    with raises("conda-not-activated", activate="conda:bad") as caught:
        activate_environment([], "conda:bad", {}, with_conda)
    assert "NameNotFound: bad" in str(caught.value)
    with raises("conda-not-found"):
        activate_environment([], "conda:good", {}, BASE)


def test_env_is_seen_by_the_scripts_and_wins_over_them(tmp_path: Path) -> None:
    path = script(tmp_path, 'export SAW="$MINE" MINE=theirs')
    after = activate_environment([], path, {"MINE": "mine"}, BASE)
    assert (after["SAW"], after["MINE"]) == ("mine", "mine")
    assert activate_environment([], "", {"MINE": "mine"}, BASE) == {**BASE, "MINE": "mine"}


def test_what_a_script_leaves_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    path = script(tmp_path, f"sleep 30 & export LEFT=$!; echo $! > {tmp_path}/pid")
    start = time.monotonic()
    left = int(activate_environment([], path, {}, BASE)["LEFT"])
    os.kill(left, 9)
    assert time.monotonic() - start < 10


def test_a_script_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_environment, "BASH_SECONDS", 0.5)
    with raises("bash-timed-out", seconds=0.5):
        activate_environment([], script(tmp_path, "sleep 30"), {}, BASE)


HOSTILE = ["$(touch HIT)", "`touch HIT`", "x; touch HIT", "-x", "", "a b", "x\ntouch HIT", "'$(touch HIT)'", "\0"]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_is_run_as_a_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_modules: dict[str, str], with_conda: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for modules, activate in (([name], ""), ([], f"conda:{name}"), ([], name or "missing")):
        with pytest.raises(UsageError):
            activate_environment(modules, activate, {}, {**with_modules, **with_conda})
    assert not (tmp_path / "HIT").exists()


def test_a_script_in_a_folder_with_a_hostile_name_is_sourced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = script(tmp_path, "export FOUND=1", "$(touch HIT) ';x/-e")
    assert activate_environment([], path, {}, BASE)["FOUND"] == "1" and not (tmp_path / "HIT").exists()
    script(tmp_path, "export FOUND=here", "ls")  # a bare name is a file of this folder, nothing in PATH
    assert activate_environment([], "ls", {}, BASE)["FOUND"] == "here"


def test_env_settings() -> None:
    environ = {"HF_HOME": "/data", "EMPTY": ""}
    assert parse_env_options(["A=1", "B=x=y", "HF_HOME", "EMPTY", "A=2", "C="], environ) == {
        "A": "2", "B": "x=y", "HF_HOME": "/data", "EMPTY": "", "C": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("1A=2", "env-name-invalid"), ("=2", "env-name-invalid"), ("A B=2", "env-name-invalid"),
        ("A\n=2", "env-name-invalid"), ("NOT_SET", "env-not-set"), ("RANK=1", "env-of-launcher"),
        ("PACELINE_RUN_ID=x", "env-of-launcher"), ("OMP_NUM_THREADS=4", "env-of-launcher"), ("A=\0", "env-zero-byte"),
    ],
)  # fmt: skip
def test_env_settings_that_cannot_be(setting: str, code: str) -> None:
    with raises(code) as caught:
        parse_env_options([setting], {})
    assert ("--threads-per-rank" in str(caught.value)) is setting.startswith("OMP")
