"""How do hosts get an sshd, and a client that logs in without a question? Keys and settings of their own."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.lab import Lab

# AcceptEnv as Debian has it: variables do not travel, which a launcher must cope with. SHLVL: bash reads no .bashrc of
# this machine then; what that starts (pyenv's rehash) holds a lock for a minute when a host is killed meanwhile.
# PYTHONPATH: hosts run the same code as the test.
SSHD = """
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/authorized_keys
PidFile /run/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
AllowUsers root
UseDNS no
AcceptEnv LANG LC_*
SetEnv SHLVL=1 PYTHONPATH={pythonpath}
Subsystem sftp internal-sftp
MaxStartups 100
"""

CLIENT = """
Host *
  User root
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
  ServerAliveInterval 2
  ServerAliveCountMax 3
"""


@dataclass(frozen=True)
class SshHosts:
    """An sshd on port 22 of every host. The client's `config` is for use on the hosts: nothing else reaches them."""

    folder: Path
    config: Path

    @property
    def command(self) -> str:
        """What a user gives to --ssh."""
        return f"ssh -F {self.config}"

    @classmethod
    def start(cls, lab: Lab, folder: Path) -> SshHosts:
        """Make keys, and start an sshd on every host, now and whenever it boots."""
        for name in ("id", "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=90)
        (folder / "authorized_keys").write_text((folder / "id.pub").read_text())
        key = " ".join((folder / "hostkey.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text("".join(f"{host} {key}\n" for host in lab.hosts))
        (folder / "sshd_config").write_text(SSHD.format(folder=folder, pythonpath=os.environ.get("PYTHONPATH", "")))
        config = folder / "config"
        config.write_text(CLIENT.format(folder=folder))

        def start_sshd(host: str) -> None:
            lab.start_daemon(host, "/usr/sbin/sshd", "-f", folder / "sshd_config", "-E", folder / f"{host}.log")

        for host in lab.hosts:
            start_sshd(host)
        lab.boot_hooks.append(start_sshd)
        return cls(folder, config)
