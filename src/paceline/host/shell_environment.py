"""The environment of workers after `module load`, an activate script and `--env`. Bash computes it once for each node.

The user's scripts run as in a shell: without `set -u` (activate scripts read unset variables) and without `set -e`.
Names and paths are arguments of the bash script, never part of its text.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import UsageError
from paceline.protocol.control import SECRET_NAME

BASH_SECONDS = 120.0  # module systems on a busy file server are slow
OUTPUT_CHARS = 1500

VARIABLE_NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/@:~=-]*")
_CONDA = re.compile(r"[A-Za-z0-9_./~][^\s\0]*")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SHELL_VARIABLES = ("_", "SHLVL", "PWD", "OLDPWD")  # an activate script does not change the folder of the worker
_RESERVED_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
_INSTEAD = {"OMP_NUM_THREADS": "--threads-per-rank", "MASTER_PORT": "--port"}

CODES = {  # error codes, by the word that the script passed to `stop`
    "no module": "module-command-missing", "module": "module-not-loaded",
    "no conda": "conda-not-found", "conda": "conda-not-activated",
}  # fmt: skip
# $1: the descriptor for the answer, $2: activate script, $3: conda environment, then modules. The answer: the word of
# the step that failed, or "done", a zero byte, then the environment from `env -0`.
SCRIPT = r"""
paceline_answer=$1 activate=$2 conda=$3; shift 3
stop() { printf '%s\0' "$@" >&"$paceline_answer"; exit 1; }
if [ $# -gt 0 ] && ! command -v module >/dev/null; then
  for init in "$MODULESHOME/init/bash" "$LMOD_PKG/init/bash" /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh \
      /etc/profile.d/modules.sh /usr/share/lmod/lmod/init/bash /usr/share/modules/init/bash; do
    if [ -r "$init" ]; then . "$init"; break; fi
  done
  command -v module >/dev/null || stop 'no module'
fi
for module_name in "$@"; do module load "$module_name" || stop module "$module_name"; done
set --
if [ -n "$conda" ]; then
  found=$(type -P conda)
  for root in "${CONDA_EXE%/*/*}" "${found%/*/*}" ~/miniforge3 ~/miniconda3 ~/anaconda3 ~/mambaforge /opt/conda; do
    if [ -n "$root" ] && [ -r "$root/etc/profile.d/conda.sh" ]; then init=$root/etc/profile.d/conda.sh; break; fi
    init=
  done
  [ -n "$init" ] || stop 'no conda'
  . "$init"
  conda activate "$conda" || stop conda
fi
status=0
if [ -n "$activate" ]; then . "$activate"; status=$?; set +eu; fi
printf 'done\0%s\0' "$status" >&"$paceline_answer"
command -p env -0 >&"$paceline_answer"
"""


def activate_environment(
    modules: Sequence[str], activate: str, env: Mapping[str, str], base: Mapping[str, str]
) -> dict[str, str]:
    """The environment `base` with `env` added, after loading `modules` and sourcing `activate`.

    `activate` is a script for bash, or conda:NAME; empty for none. `env` contains the user's variables. The scripts see
    them, and they override variables that the scripts set.
    """
    before = {**base, **env}
    if not modules and not activate:
        return before
    conda, script = _checked(modules, activate)
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as output:
        # files instead of pipes: a background process of a script (an ssh-agent) would keep a pipe open
        code = _bash([str(answer.fileno()), script, conda, *modules], before, answer.fileno(), output.fileno())
        answer.seek(0)
        output.seek(0)
        state, *rest = answer.read().decode(errors="surrogateescape").split("\0")
        text = output.read().decode(errors="replace").strip()[-OUTPUT_CHARS:]
    if state != "done":
        raise _failure(state, rest, activate, code, text)
    unknown_module = re.search("Unable to locate a modulefile for '?([^'\n]*)", text)
    if modules and unknown_module:  # old module systems print this and return 0
        raise _failure("module", [unknown_module[1]], activate, code, text)
    if rest[0] != "0":
        tail = f": {text}" if text else ""
        print(f"paceline: {activate} has ended with status {rest[0]}, the run continues{tail}", file=sys.stderr)
    after = dict(line.split("=", 1) for line in rest[1:] if "=" in line)
    kept = {name: base[name] for name in _SHELL_VARIABLES if name in base}
    return {name: value for name, value in after.items() if name not in _SHELL_VARIABLES} | kept | dict(env)


def parse_env_options(settings: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Parse `--env`: `NAME=VALUE` sets a variable, `NAME` alone passes the value in `environ`. The last one counts."""
    variables: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not VARIABLE_NAME_PATTERN.fullmatch(name):
            raise UsageError(code="env-name-invalid", value=name[:80])
        if name in _RESERVED_VARIABLES or name.startswith("PACELINE_") or name in _INSTEAD:
            instead = f". Use {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise UsageError(code="env-of-launcher", name=name, instead=instead)
        if not equals and name not in environ:
            raise UsageError(code="env-not-set", name=name)
        if equals and (SECRET_NAME.search(name) or _USERINFO.search(value)):
            print(
                f"paceline: --env {name}=...: every user of this machine can read a command line (ps). Set it in your "
                f"shell and pass the name alone: --env {name}",
                file=sys.stderr,
            )
        value = value if equals else environ[name]
        if "\0" in value:
            raise UsageError(code="env-zero-byte", name=name)
        variables[name] = value
    return variables


def _checked(modules: Sequence[str], activate: str) -> tuple[str, str]:
    for module in modules:
        if not _MODULE.fullmatch(module):
            raise UsageError(code="module-name-invalid", value=module[:80])
    prefix, colon, name = activate.partition(":")
    if prefix == "conda" and colon:
        if not _CONDA.fullmatch(name):
            raise UsageError(code="conda-name-invalid", value=name[:80])
        return name, ""
    if not activate:
        return "", ""
    path = Path(activate).expanduser().absolute()  # absolute: bash looks for a bare name in PATH
    if not path.is_file():
        raise UsageError(code="activate-not-found", activate=activate, host=os.uname().nodename, path=path)
    if not os.access(path, os.R_OK):
        raise UsageError(code="activate-not-readable", activate=activate, host=os.uname().nodename)
    return "", str(path)


def _bash(arguments: Sequence[str], env: Mapping[str, str], answer: int, output: int) -> int:
    try:
        process = subprocess.Popen(
            ["bash", "-c", SCRIPT, "bash", *arguments], env=dict(env), stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, pass_fds=[answer], start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(code="bash-not-started", strerror=error.strerror) from error
    try:
        return process.wait(BASH_SECONDS)
    except subprocess.TimeoutExpired:
        raise UsageError(code="bash-timed-out", seconds=BASH_SECONDS) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failure(state: str, rest: Sequence[str], activate: str, code: int, output: str) -> UsageError:
    quoted, module = f"\n{output}" if output else "", rest[0] if state == "module" else ""
    return UsageError(code=CODES.get(state, "activate-ended-bash"), activate=activate, module=module,
                      host=os.uname().nodename, status=code, said=quoted)  # fmt: skip
