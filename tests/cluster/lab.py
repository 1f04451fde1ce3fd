"""What is a cluster of hosts on one machine? `Lab`: namespaces joined by a switch, with faults to inject.

Each host (n1, n2, ...) has its own network, name, process tree, cgroups and mounts (/etc/hosts, /run, /dev/shm, /sys).
Other files are shared with the machine, as a cluster's home folders are; `hide` unshares one. All hosts live in a
*room*: a pid namespace whose init dies with this process (also by SIGKILL), and with it everything in every host; the
room's network namespace is the switch. Nothing has a name on the machine (no /run/netns, no interface, no subnet), so
any number of labs run side by side with the same host names and addresses.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster import cgroups, machines, namespaces

SUBNET = "10.77.0"
# Not a test's doing: what the fixtures start, and what that starts for itself.
DAEMONS = ("sshd", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd", "munged")


class Lab:
    """N running hosts. More methods than the house likes: each is one thing that an administrator or a fault does.

    `restore` undoes whatever was done to a host; `boot_hooks` start the daemons of a host that boots.
    """

    def __init__(self, folder: Path, count: int = 4) -> None:
        self.hosts = [f"n{number}" for number in range(1, count + 1)]
        self.folder = folder
        self.boot_hooks: list[Callable[[str], None]] = []
        self._inits: dict[str, int] = {}  # pids as the machine knows them
        self._ports: dict[tuple[str, str], str] = {}  # (host, interface) -> the switch's end of the cable
        self._bridges: set[str] = set()  # one for each name of an interface
        self._cables = 0
        self._undo = {host: contextlib.ExitStack() for host in self.hosts}
        cgroups.sweep()
        self._room = machines.start_room()
        try:
            self._switch("ip", "link", "set", "lo", "up")
            for host in self.hosts:
                self.boot(host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every host at once, and leave nothing."""
        self._room.process.kill()
        self._room.process.wait()
        deadline = time.monotonic() + 10
        while any(namespaces.is_alive(pid) for pid in self._inits.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        while not cgroups.remove() and time.monotonic() < deadline:
            time.sleep(0.01)  # who was started from outside a host ends with it, but may hold its folder for longer

    # ---- use ----

    def address(self, host: str) -> str:
        """The host's address on eth0."""
        return f"{SUBNET}.{host.removeprefix('n')}"

    def run(
        self, host: str, *argv: object, env: Mapping[str, str] | None = None, timeout: float = 180, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host; its output is captured as text. `env` is added to this process's variables."""
        words, variables = [str(word) for word in argv], {**os.environ, **(env or {})}
        return namespaces.run(self._init(host), *words, env=variables, timeout=timeout, **options)

    def popen(
        self, host: str, *argv: object, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host, in a session of its own: pid, signals and returncode are the command's own."""
        variables = {**os.environ, **(env or {})}
        return namespaces.popen(self._init(host), *(str(word) for word in argv), env=variables, **options)

    def start_daemon(self, host: str, *argv: object, env: Mapping[str, str] | None = None) -> None:
        """Run a command that goes into the background by itself, in the host's own cgroups; it must succeed."""
        words = machines.in_cgroups([str(word) for word in argv])
        variables = {**machines.ENVIRONMENT, **(env or {})}
        # Into a file: a daemon that keeps its output open would keep a pipe from ending.
        log = self.folder / f"{host}-daemons.log"
        with log.open("ab") as output:
            done = namespaces.run(self._init(host), *words, env=variables, stdout=output, stderr=output)
        if done.returncode:
            raise RuntimeError(f"{argv} on {host}: exit code {done.returncode}\n{log.read_text()[-2000:]}")

    def processes(self, host: str) -> dict[int, str]:
        """What runs on a host besides its init and the fixtures' daemons: {pid on the machine: command line}."""
        init, found = self._inits.get(host, 0), dict[int, str]()
        for pid in namespaces.members(init):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if pid != init and words and name not in DAEMONS:  # a zombie has no words
                    found[pid] = words
        return found

    def _init(self, host: str) -> int:
        if host not in self._inits:
            raise RuntimeError(f"{host} is not running; booted: {', '.join(self._inits)}")
        return self._inits[host]

    # ---- power ----

    def boot(self, host: str) -> None:
        """Start a host that is down, with its cable plugged in and its daemons running."""
        self._undo[host] = contextlib.ExitStack()
        self.names(host)
        self._inits[host] = machines.start_host(self._room, host, self.folder)
        self.add_nic(host, "eth0", self.address(host))
        self._inside(host, "ip", "link", "set", "lo", "up")
        for hook in self.boot_hooks:
            hook(host)

    def kill(self, host: str) -> None:
        """End all processes of a host at once; peers see their connections closed."""
        os.kill(init := self._inits.pop(host), signal.SIGKILL)
        while namespaces.is_alive(init):  # which waits for all others
            time.sleep(0.005)
        # The kernel takes its time to remove a network namespace, and answers pings meanwhile.
        for nic in [nic for name, nic in self._ports if name == host]:
            with contextlib.suppress(RuntimeError):  # unless it was quicker this time
                self._switch("ip", "link", "del", self._ports.pop((host, nic)))

    def power_off(self, host: str) -> None:
        """Cut, then kill: peers see silence."""
        self.cut(host)
        self.kill(host)

    def restore(self) -> None:
        """Undo what was done to the hosts: all run, all cables carry, all names and folders are as at first."""
        for host in self.hosts:
            if host in self._inits:
                self._undo[host].close()
            else:
                self.boot(host)

    # ---- network ----

    def cut(self, host: str, nic: str = "eth0") -> None:
        """Pull a cable: silence in both directions."""
        self._switch("ip", "link", "set", self._ports[host, nic], "down")
        self._undo[host].callback(self.heal, host, nic)

    def heal(self, host: str, nic: str = "eth0") -> None:
        """Plug the cable in again; returns when it carries."""
        self._switch("ip", "link", "set", self._ports[host, nic], "up")
        self._await_carrier(host, nic)

    def deny(self, host: str, from_: str, ports: str | None = None) -> None:
        """Drop silently what arrives at `host` from another host; only on these TCP `ports` ("22", "1024-65535")."""
        match = f"ip saddr {self.address(from_)}" + (f" tcp dport {ports}" if ports else "")
        chain = "add table ip lab; add chain ip lab in { type filter hook input priority 0 ; }; add rule ip lab in "
        self._inside(host, "nft", chain + match + " drop")
        self._undo[host].callback(self.clear, host)

    def clear(self, host: str) -> None:
        """Take all `deny` rules of a host away."""
        self._inside(host, "nft", "add table ip lab; delete table ip lab")

    def rate(self, host: str, rate: str | None, nic: str = "eth0") -> None:
        """Limit a cable in both directions ("100mbit"); None takes the limit away."""
        ends: list[tuple[Callable[..., object], str]] = [
            (self._switch, self._ports[host, nic]),
            (partial(self._inside, host), nic),
        ]
        for side, device in ends:
            side("tc", "qdisc", "replace", "dev", device, "root", "pfifo")  # so that there is one to delete
            if rate is None:
                side("tc", "qdisc", "del", "dev", device, "root")
            else:
                limit = ("rate", rate, "burst", "64kb", "latency", "400ms")
                side("tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit)
        if rate is not None:
            self._undo[host].callback(self.rate, host, None, nic)

    def add_nic(self, host: str, nic: str, address: str) -> None:
        """Give a host one more interface. `nic` is eth1 to eth9; the same name on several hosts is one network."""
        self._cables += 1
        port, bridge = f"p{self._cables}", f"br-{nic}"
        commands = [] if nic in self._bridges else [f"link add {bridge} type bridge"]
        self._bridges.add(nic)
        commands += [
            f"link set {bridge} up",
            f"link add {port} type veth peer name {nic} address {_mac(host, nic)} netns {self._init(host)}",
            f"link set {port} master {bridge} up",
        ]
        self._switch("ip", "-batch", "-", input="\n".join(commands))
        prefix = address if "/" in address else f"{address}/24"
        self._inside(host, "ip", "-batch", "-", input=f"addr add {prefix} dev {nic}\nlink set {nic} up")
        self._ports[host, nic] = port
        self._await_carrier(host, nic)
        if nic != "eth0":
            self._undo[host].callback(self._remove_nic, host, nic)

    def _remove_nic(self, host: str, nic: str) -> None:
        self._inside(host, "ip", "link", "del", nic)
        del self._ports[host, nic]

    def names(self, host: str, *lines: str) -> None:
        """Write the host's /etc/hosts: `lines` ("127.0.1.1 n2") stand instead of the right ones of their names."""
        taken = {name for line in lines for name in line.split()[1:]}
        right = [f"{self.address(name)} {name}" for name in self.hosts if name not in taken]
        machines.write_names(self.folder, host, ["127.0.0.1 localhost", *lines, *right])
        if lines:
            self._undo[host].callback(self.names, host)

    # ---- files ----

    def hide(self, host: str, path: str | Path) -> None:
        """Mount an empty folder over `path` on this host alone: a folder that is not shared."""
        self.small(host, path, "1g")

    def small(self, host: str, path: str | Path, size: str) -> None:
        """Mount an empty file system of this size ("1m") over `path` on this host alone."""
        self._inside(host, "mount", "-t", "tmpfs", "-o", f"mode=1777,size={size}", "tmpfs", str(path))
        self._undo[host].callback(self._inside, host, "umount", "--lazy", str(path))

    # ---- how ----

    def _await_carrier(self, host: str, nic: str) -> None:
        # The kernel tells of a link's changes at most once a second: until then packets are dropped.
        deadline = time.monotonic() + 5
        while "state UP" not in self._switch("ip", "link", "show", self._ports[host, nic]) or (
            "state UP" not in self._inside(host, "ip", "link", "show", nic)
        ):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{nic} of {host} does not come up")
            time.sleep(0.02)

    def _switch(self, *argv: str, input: str | None = None) -> str:
        # Without the room's pid namespace: `netns PID` means the machine's pids then.
        words = ("nsenter", "--target", str(self._room.pid), "--net", "--", *argv)
        return namespaces.checked(subprocess.run(words, input=input, capture_output=True, text=True, timeout=90))

    def _inside(self, host: str, *argv: str, input: str | None = None) -> str:
        return namespaces.checked(namespaces.run(self._init(host), *argv, input=input, timeout=90))


def _mac(host: str, nic: str) -> str:
    """The same at every boot, as a real card's is: the others still have it in their tables."""
    return f"02:00:00:00:{int(nic[-1]):02x}:{int(host.removeprefix('n')):02x}"
